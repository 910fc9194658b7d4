//! The daemon's Unix socket: one that systemd hands over, or one of its own.
//!
//! Promises: the socket is there only with its final mode and group; one that a dead daemon left is replaced, one that
//! anything still answers on is not; two daemons never share a path, since each holds the lock beside it.

use fs_err::os::unix::fs::OpenOptionsExt as _;
use larder::hint::Hint;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Gid, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::Error;
use crate::environment::variable;
use crate::group_keeper::is_stored;

/// Longest path of a socket that the system accepts, in bytes.
const MAX_PATH: usize = 107;
/// How many connections may wait to be accepted, as in the standard library.
const BACKLOG: i32 = 128;

/// Where to listen, and who may come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SocketOptions {
    /// The path of the socket.
    pub(super) socket: PathBuf,
    /// Its mode, such as `0o660`.
    pub(super) mode: u32,
    /// The group that it belongs to, by name or number; that of the process without.
    pub(super) group: Option<String>,
}

/// A socket that is bound.
pub(super) struct BoundSocket {
    pub(super) listener: UnixListener,
    /// Where people find it; a socket of systemd may have no path.
    pub(super) path: Option<PathBuf>,
    /// Removes the socket with the daemon; `None` for a socket of systemd, which keeps it.
    pub(super) own: Option<SocketCleanup>,
}

/// Cleanup of a socket that this process made.
pub(super) struct SocketCleanup {
    path: PathBuf,
    _lock: fs_err::File,
}

impl Drop for SocketCleanup {
    fn drop(&mut self) {
        let _ = fs_err::remove_file(&self.path);
    }
}

impl BoundSocket {
    /// The socket that systemd hands over, else one at the path.
    pub(super) fn open(listen: &SocketOptions) -> Result<BoundSocket, Error> {
        if let Some(socket) = BoundSocket::activated()? {
            return Ok(socket);
        }
        BoundSocket::bind(listen)
    }

    /// The first socket handed over with `LISTEN_FDS`: descriptors from the descriptor store come beside it.
    fn activated() -> Result<Option<BoundSocket>, Error> {
        let mut handed = listenfd::ListenFd::from_env();
        let names = variable("LISTEN_FDNAMES").unwrap_or_default();
        let Some(index) = first_socket(handed.len(), &names) else { return Ok(None) };
        let wrong = |why: String| {
            Error::bad_input(format!("LISTEN_FDS: cannot use the passed socket: {why}"))
                .hint("larder's socket unit needs exactly one ListenStream= with a path")
        };
        let listener = handed.take_unix_listener(index).map_err(|error| wrong(error.to_string()))?;
        let listener = listener.ok_or_else(|| wrong("there is no socket at the first descriptor".into()))?;
        let address = listener.local_addr().map_err(|error| wrong(error.to_string()))?;
        let path = address.as_pathname().map(Path::to_owned);
        prepare(&listener).map_err(|error| wrong(error.to_string()))?;
        Ok(Some(BoundSocket { listener, path, own: None }))
    }

    /// A socket at the path.
    pub(super) fn bind(listen: &SocketOptions) -> Result<BoundSocket, Error> {
        let path = &listen.socket;
        check_path(path)?;
        let listen_error = |error: io::Error| {
            Error::failed(format!("cannot listen on {}: {error}", path.display()))
                .hint(named("run as the owner of the directory, or name another path: "))
        };
        let group = listen.group.as_deref().map(group_id).transpose()?;
        if let Some(dir) = path.parent() {
            std::fs::DirBuilder::new().recursive(true).mode(0o755).create(dir).map_err(listen_error)?;
        }
        let lock = lock(path, listen_error)?;
        clear(path)?;
        // Under another name first: who finds the final one finds its final mode, too.
        let new = path.with_file_name(passing_name());
        clear(&new)?;
        let made = (|| {
            let listener = bind_private(&new)?;
            if let Some(group) = group {
                rustix::fs::chown(&new, None, Some(group))?;
            }
            fs_err::set_permissions(&new, std::fs::Permissions::from_mode(listen.mode))?;
            prepare(&listener)?;
            fs_err::rename(&new, path)?;
            Ok(listener)
        })();
        let listener = made.map_err(|error| {
            let _ = fs_err::remove_file(&new);
            listen_error(error)
        })?;
        let own = Some(SocketCleanup { path: path.clone(), _lock: lock });
        Ok(BoundSocket { listener, path: Some(path.clone()), own })
    }
}

/// Index of the first of so many descriptors whose name is not that of a stored one.
fn first_socket(descriptors: usize, names: &str) -> Option<usize> {
    let mut names = names.split(':');
    (0..descriptors).find(|_| !names.next().is_some_and(is_stored))
}

/// A listener at this path that only its owner can connect to, from the moment that the path exists.
fn bind_private(path: &Path) -> io::Result<UnixListener> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?;
    // Linux gives the path the mode of the socket. A umask would hold for all threads.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(UnixListener::from(socket))
}

fn prepare(listener: &UnixListener) -> io::Result<()> {
    listener.set_nonblocking(true)
}

fn check_path(path: &Path) -> Result<(), Error> {
    let shown = path.display();
    let dir = path.parent().map_or(0, |dir| dir.as_os_str().len() + 1);
    let longest = path.as_os_str().len().max(dir + passing_name().len());
    match longest {
        _ if path.as_os_str().is_empty() => {
            Err(Error::bad_input("the path of the socket is empty").hint(named("name one: ")))
        }
        length if length > MAX_PATH => Err(Error::bad_input(format!(
            "{shown}: path too long for a socket: {length} bytes, the limit is {MAX_PATH}"
        ))
        .hint(named("name a shorter path: "))),
        _ if path.file_name().is_none() => Err(Error::bad_input(format!("{shown}: not a socket path"))
            .hint("name a file, such as /run/larder/larder.sock")),
        _ => Ok(()),
    }
}

/// The name that a socket has until it is ready.
fn passing_name() -> String {
    format!(".larder.{}", std::process::id())
}

/// The lock beside the socket, held for as long as the daemon lives.
fn lock(path: &Path, to_error: impl Fn(io::Error) -> Error) -> Result<fs_err::File, Error> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let open = fs_err::OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
        .open(PathBuf::from(name));
    let lock = open.map_err(&to_error)?;
    match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(lock),
        Err(Errno::WOULDBLOCK) => Err(taken(path)),
        Err(error) => Err(to_error(error.into())),
    }
}

fn taken(path: &Path) -> Error {
    let status = ["status".to_owned(), "--daemon".to_owned(), path.display().to_string()];
    Error::failed(format!("{}: another larder daemon listens on this socket", path.display()))
        .hint(Hint::new().command(status).text(" shows its state; stop it first"))
        .hint(named("or name another path: "))
}

/// A hint that ends in the setting of the socket.
fn named(text: &'static str) -> Hint {
    Hint::from(text).setting("socket", "PATH")
}

/// Removes what a dead process left at the path, and nothing else.
fn clear(path: &Path) -> Result<(), Error> {
    let shown = path.display();
    let inspect_error = |error: io::Error| Error::failed(format!("cannot inspect {shown}: {error}"));
    match fs_err::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(inspect_error(error)),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(Error::failed(format!("{shown} exists, and is not a socket"))
                .hint(named("name another path: ")));
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs_err::remove_file(path).map_err(inspect_error)
        }
        Ok(_) => Err(taken(path)),
        Err(error) => Err(inspect_error(error)),
    }
}

/// A group by number or name, as `/etc/group` has it.
pub fn group_id(group: &str) -> Result<Gid, Error> {
    if let Ok(number) = group.parse() {
        return Ok(Gid::from_raw(number));
    }
    let groups = fs_err::read_to_string("/etc/group").unwrap_or_default();
    let found = groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(group)).then(|| fields.nth(1)?.parse().ok()).flatten()
    });
    found.map(Gid::from_raw).ok_or_else(|| {
        Error::bad_input(format!("group not found: {group}"))
            .hint("create it with groupadd, or use its number")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(path: PathBuf) -> SocketOptions {
        SocketOptions { socket: path, mode: 0o660, group: None }
    }

    #[test]
    fn a_stored_descriptor_is_no_socket() {
        let cases = [
            (0, "", None),
            (1, "", Some(0)),
            (1, "larder.socket", Some(0)),
            (3, "larder.socket:larder-group:larder-journal", Some(0)),
            (3, "larder-journal:larder-group:larder.socket", Some(2)),
            (2, "larder-group:larder-journal", None),
        ];
        for (descriptors, names, expected) in cases {
            assert_eq!(first_socket(descriptors, names), expected, "{names}");
        }
    }

    #[test]
    fn only_the_owner_can_connect_to_a_socket_that_is_being_made() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let _listener = bind_private(&path).unwrap();
        assert_eq!(fs_err::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_socket_has_its_mode_and_is_removed_with_the_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/larder.sock");
        let socket = BoundSocket::bind(&at(path.clone())).ok().unwrap();
        assert_eq!(fs_err::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
        assert!(UnixStream::connect(&path).is_ok());
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn the_socket_of_a_dead_daemon_is_replaced_and_that_of_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("larder.sock");
        drop(UnixListener::bind(&path).unwrap());
        let living = BoundSocket::bind(&at(path.clone())).ok().unwrap();
        let refused = BoundSocket::bind(&at(path.clone())).err().unwrap();
        assert!(refused.message().contains("another larder daemon listens"), "{}", refused.message());
        drop(living);
        let _foreign = UnixListener::bind(&path).unwrap();
        assert!(BoundSocket::bind(&at(path)).is_err());
    }

    #[test]
    fn an_unusable_socket_path_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs_err::write(&file, "").unwrap();
        let cases = [
            (at(file), "is not a socket"),
            (at(dir.path().join("x".repeat(108))), "path too long for a socket"),
            (at("/".into()), "not a socket path"),
            (SocketOptions { group: Some("no such".into()), ..at(dir.path().join("s")) }, "not found"),
        ];
        for (listen, text) in cases {
            let refused = BoundSocket::bind(&listen).err().expect("refused");
            assert!(refused.message().contains(text), "{}", refused.message());
        }
    }
}
