//! The descriptor store of systemd: it passes what it keeps to each process of the service.

#![allow(unsafe_code, reason = "descriptors that systemd passes come as numbers")]

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::time::Duration;

use larder_store::lazy::{GroupKeeper, KeptGroup};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pipe::{PipeFlags, pipe_with};

use super::send;
use crate::environment::variable;

const GROUP: &str = "larder-group";
const JOURNAL: &str = "larder-journal";

/// How long systemd may take to read what it is sent.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Returns true for the name of a descriptor that is kept here, among those that systemd passes.
pub(crate) fn is_stored(name: &str) -> bool {
    [GROUP, JOURNAL].contains(&name)
}

/// The descriptor store of this service.
#[derive(Debug)]
pub(super) struct SystemdStore {
    socket: PathBuf,
    kept: Mutex<Option<KeptGroup>>,
}

impl SystemdStore {
    /// `None` if no service manager has such a store for this process. systemd says so from 254 on; before, it closed
    /// what it kept when the service was stopped.
    pub(super) fn from_environment() -> io::Result<Option<SystemdStore>> {
        let limit = variable("FDSTORE").and_then(|limit| limit.parse::<u32>().ok());
        let (Some(socket), Some(2..)) = (variable("NOTIFY_SOCKET"), limit) else { return Ok(None) };
        let mut passed = listenfd::ListenFd::from_env();
        let names = variable("LISTEN_FDNAMES").unwrap_or_default();
        let mut find = |name| -> io::Result<Option<OwnedFd>> {
            let Some(index) = names.split(':').position(|passed| passed == name) else { return Ok(None) };
            let Some(number) = passed.take_raw_fd(index)? else { return Ok(None) };
            // SAFETY: systemd has passed it, and nothing else takes a descriptor of this name.
            let inherited = unsafe { OwnedFd::from_raw_fd(number) };
            inherited.try_clone().map(Some) // no child inherits the copy
        };
        let kept = match (find(GROUP)?, find(JOURNAL)?) {
            (Some(group), Some(journal)) => Some(KeptGroup { group, journal }),
            _ => None,
        };
        Ok(Some(SystemdStore { socket: socket.into(), kept: Mutex::new(kept) }))
    }

    /// Sends a message, and returns once systemd has read it: a message of a process that has ended is ignored.
    fn notify(&self, message: &str, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let socket = UnixDatagram::unbound()?;
        socket.connect(&self.socket)?;
        send(&socket, message.as_bytes(), descriptors)?;
        let (barrier, theirs) = pipe_with(PipeFlags::CLOEXEC)?;
        send(&socket, b"BARRIER=1", &[theirs.as_fd()])?;
        drop(theirs);
        let timeout = Timespec::try_from(TIMEOUT).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&barrier, PollFlags::HUP)], Some(&timeout))? {
            0 => Err(io::Error::new(io::ErrorKind::TimedOut, "systemd does not read notifications")),
            _ => Ok(()),
        }
    }
}

impl GroupKeeper for SystemdStore {
    fn take(&self) -> io::Result<Option<KeptGroup>> {
        self.kept.lock().as_ref().map(KeptGroup::try_clone).transpose()
    }

    fn keep(&self, kept: &KeptGroup) -> io::Result<()> {
        let mut own = self.kept.lock();
        if own.is_none() {
            // A group that hangs up is none: systemd need not watch it.
            for (name, descriptor) in [(GROUP, &kept.group), (JOURNAL, &kept.journal)] {
                self.notify(&format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0"), &[descriptor.as_fd()])?;
            }
            *own = Some(kept.try_clone()?);
        }
        Ok(())
    }

    fn release(&self) -> io::Result<()> {
        for name in [GROUP, JOURNAL] {
            self.notify(&format!("FDSTOREREMOVE=1\nFDNAME={name}"), &[])?;
        }
        *self.kept.lock() = None;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::super::receive;
    use super::*;

    /// Reads so many messages, each with a barrier behind it, as systemd does.
    fn read(socket: &UnixDatagram, messages: usize) -> Vec<(String, usize)> {
        let mut read = Vec::new();
        while read.len() < messages {
            let mut bytes = [0; 512];
            let (length, descriptors) = receive(socket, &mut bytes).unwrap();
            let text = String::from_utf8_lossy(&bytes[..length]).into_owned();
            if text != "BARRIER=1" {
                read.push((text, descriptors.len()));
            }
        }
        let mut barrier = [0; 512];
        receive(socket, &mut barrier).unwrap();
        read
    }

    #[test]
    fn a_group_is_stored_once_and_removed_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let systemd = UnixDatagram::bind(&path).unwrap();
        let store = SystemdStore { socket: path, kept: Mutex::new(None) };
        assert!(store.take().unwrap().is_none());
        let file = || rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let group = KeptGroup { group: file(), journal: file() };
        let read = thread::scope(|scope| {
            let reading = scope.spawn(|| read(&systemd, 4));
            store.keep(&group).unwrap();
            store.keep(&group).unwrap();
            assert!(store.take().unwrap().is_some());
            store.release().unwrap();
            reading.join().unwrap()
        });
        assert!(store.take().unwrap().is_none());
        let expected = [
            ("FDSTORE=1\nFDNAME=larder-group\nFDPOLL=0", 1),
            ("FDSTORE=1\nFDNAME=larder-journal\nFDPOLL=0", 1),
            ("FDSTOREREMOVE=1\nFDNAME=larder-group", 0),
            ("FDSTOREREMOVE=1\nFDNAME=larder-journal", 0),
        ];
        assert_eq!(read, expected.map(|(text, descriptors)| (text.to_owned(), descriptors)));
    }
}
