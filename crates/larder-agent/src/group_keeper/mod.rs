//! Who keeps the group of a store's partial layers open while no larder runs: systemd, else a process of its own.

mod holder;
mod systemd;

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use larder_store::lazy::GroupKeeper;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

use holder::HolderProcess;
pub use holder::hold_if_asked;
use systemd::SystemdStore;
pub(crate) use systemd::is_stored;

/// Namespaces of the host in `/proc/self/ns`: their numbers are fixed in Linux.
const HOST_PID_NAMESPACE: &str = "pid:[4026531836]";
const HOST_CGROUP_NAMESPACE: &str = "cgroup:[4026531835]";

/// The keeper of a process that starts, for the store at `root`. `program` is larder: it calls [`hold_if_asked`].
pub fn choose(program: &Path, root: &Path) -> io::Result<Box<dyn GroupKeeper>> {
    if let Some(store) = SystemdStore::from_environment()? {
        return Ok(Box::new(store));
    }
    let [pid_namespace, cgroup_namespace] = ["pid", "cgroup"]
        .map(|kind| fs_err::read_link(Path::new("/proc/self/ns").join(kind)).unwrap_or_default());
    if ends_with_container(std::process::id(), &pid_namespace, &cgroup_namespace) {
        let reason = "the process that keeps reads waiting while no larder runs would end with this container; \
                      run larder on the node, with its unit";
        return Err(io::Error::new(io::ErrorKind::Unsupported, reason));
    }
    Ok(Box::new(HolderProcess::new(program, root)))
}

/// Whether the runtime of a container ends all processes that this one has started when this one ends: in a namespace
/// of processes of its own, or else by its control group, which a process cannot leave in a namespace of those.
fn ends_with_container(process: u32, pid_namespace: &Path, cgroup_namespace: &Path) -> bool {
    let is_first = process == 1;
    let shares_processes = pid_namespace == Path::new(HOST_PID_NAMESPACE);
    is_first || (shares_processes && cgroup_namespace != Path::new(HOST_CGROUP_NAMESPACE))
}

/// Sends bytes, and descriptors with the first of them.
fn send(socket: impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Receives bytes, and the descriptors that come with them. No bytes: the other end is closed.
fn receive(socket: impl AsFd, bytes: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let descriptors = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    Ok((received.bytes, descriptors.flatten().collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_started_in_a_pod_ends_with_its_container() {
        let [host, own] = [HOST_PID_NAMESPACE, "pid:[4026532201]"].map(Path::new);
        let [cgroups_of_host, own_cgroups] = [HOST_CGROUP_NAMESPACE, "cgroup:[4026532202]"].map(Path::new);
        assert!(!ends_with_container(812, host, cgroups_of_host), "on a node");
        assert!(ends_with_container(1, own, own_cgroups), "a pod");
        assert!(ends_with_container(812, host, own_cgroups), "a pod with hostPID");
        assert!(!ends_with_container(812, own, own_cgroups), "a node that is a container itself");
    }
}
