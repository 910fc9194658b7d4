//! Which process serves the images of a target: a daemon, or a command that has them open.
//!
//! A daemon leaves a file with the path of its socket beside the images, a command its socket itself. A process that
//! died may have left either; then nothing listens there.

use std::io;
use std::path::{Path, PathBuf};

use larder::trusted_path;
use larder_cri::Endpoint;

use crate::backend::BackendTarget;
use crate::error::Error;
use crate::state::StateDir;

/// The longest path in a file with one, in bytes.
const MAX_PATH: u64 = 4096;

/// A process that serves the images of a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ControlServerAddress {
    /// A daemon, at this socket. Its settings apply.
    Daemon(PathBuf),
    /// A command, at this socket, for as long as it runs.
    Command(PathBuf),
}

impl ControlServerAddress {
    /// Where it listens.
    pub fn socket(&self) -> &Path {
        match self {
            ControlServerAddress::Daemon(socket) | ControlServerAddress::Command(socket) => socket,
        }
    }
}

/// The path that a socket is named by, such as `unix:///run/larder/larder.sock`.
pub fn socket_path(text: &str) -> Result<PathBuf, String> {
    Endpoint::parse(text).map(|endpoint| endpoint.path().to_owned()).map_err(|error| error.to_string())
}

/// The process that serves these images, if one listens: credentials are sent to it, so the file or socket that leads
/// to it must be this user's or root's. `state` is the state directory where that is not the usual one.
pub fn find_server(
    target: &BackendTarget,
    state: Option<&Path>,
) -> Result<Option<ControlServerAddress>, Error> {
    let dir = StateDir::of(state, target)?;
    let files = match target {
        BackendTarget::Store(root) => vec![daemon_file(root)],
        BackendTarget::Runtime(_) => {
            [Some(dir.daemon()), dir.of_root().map(|dir| dir.daemon())].into_iter().flatten().collect()
        }
    };
    for file in files {
        if trusted_path::is_trusted_entry(&file)
            && let Some(socket) = read(&file)
            && is_listening(&socket)?
        {
            return Ok(Some(ControlServerAddress::Daemon(socket)));
        }
    }
    let socket = command_socket(target, &dir);
    // Permission denied means another user's command: opening the images says more.
    Ok((trusted_path::is_trusted_entry(&socket) && is_listening(&socket).unwrap_or(false))
        .then_some(ControlServerAddress::Command(socket)))
}

/// Where a daemon on larder's own store in this directory leaves the path of its socket.
pub(crate) fn daemon_file(root: &Path) -> PathBuf {
    root.join("daemon")
}

/// Where a command that has these images open serves them.
pub(crate) fn command_socket(target: &BackendTarget, dir: &StateDir) -> PathBuf {
    match target {
        BackendTarget::Store(root) => root.join("control.sock"),
        BackendTarget::Runtime(_) => dir.path().join("control.sock"),
    }
}

/// The path in a file. One that cannot be read names no daemon.
fn read(file: &Path) -> Option<PathBuf> {
    let length = fs_err::metadata(file).ok()?.len();
    let text = fs_err::read_to_string(file).ok().filter(|_| length <= MAX_PATH)?;
    Some(PathBuf::from(text.trim_end_matches('\n'))).filter(|path| path.is_absolute())
}

/// Whether a process listens on the socket; an error where this user may not know.
pub fn is_listening(socket: &Path) -> Result<bool, Error> {
    match Endpoint::at(socket).probe() {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(denied(socket, "the daemon's")),
        Err(_) => Ok(false),
    }
}

/// This user may not connect to the socket, which is `owner`'s: with the `'s`.
pub(super) fn denied(socket: &Path, owner: &str) -> Error {
    use std::os::unix::fs::MetadataExt as _;

    let shown = socket.display();
    let failure = Error::unreachable(format!("{shown}: permission denied: this is {owner} socket"));
    match fs_err::metadata(socket) {
        Ok(found) if found.gid() != 0 => {
            let group = group_name(found.gid());
            failure.hint(format!("join the group {group}, or run as root"))
        }
        _ => failure.hint("run as root, or as the owner of the socket"),
    }
}

/// The name of a group as `/etc/group` has it, else its number.
fn group_name(id: u32) -> String {
    let groups = fs_err::read_to_string("/etc/group").unwrap_or_default();
    let named = groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(id)).then(|| name.to_owned())
    });
    named.unwrap_or_else(|| id.to_string())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_socket_or_file_of_another_user_leads_to_no_process() {
        let dir = tempfile::tempdir().unwrap();
        let target = BackendTarget::Store(dir.path().to_owned());
        let socket = dir.path().join("control.sock");
        let _listener = UnixListener::bind(&socket).unwrap();
        let found = || find_server(&target, None).unwrap();
        assert_eq!(found(), Some(ControlServerAddress::Command(socket.clone())));
        // Only root can give a file away.
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(&socket, Some(7), None).unwrap();
            assert_eq!(found(), None);
        }
        let file = daemon_file(dir.path());
        fs_err::write(&file, socket.to_str().unwrap()).unwrap();
        assert_eq!(found(), Some(ControlServerAddress::Daemon(socket.clone())));
        fs_err::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
        fs_err::set_permissions(&socket, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        assert_ne!(
            found(),
            Some(ControlServerAddress::Daemon(socket.clone())),
            "others could have written it"
        );
        fs_err::rename(&file, dir.path().join("elsewhere")).unwrap();
        std::os::unix::fs::symlink("elsewhere", &file).unwrap();
        assert_ne!(found(), Some(ControlServerAddress::Daemon(socket)), "a link");
    }
}
