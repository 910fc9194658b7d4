//! Which daemon a command asks, if any: the one that is named, else the one that has what the command is about.
//!
//! A daemon that runs leaves a small file with the path of its socket beside what it works on. One that died may have
//! left it, too; then nobody listens there any more.

use std::io;
use std::path::{Path, PathBuf};

use larder_cri::Endpoint;

use crate::args::Connection;
use crate::collect::Place;
use crate::connect::{self, Target};
use crate::failure::Failure;
use crate::serve;

/// Names the socket of a daemon, as `--daemon` does.
const VARIABLE: &str = "LARDER_DAEMON";
/// No daemon is asked.
const NONE: &str = "none";
/// The longest path in a file with one, in bytes.
const MAX_PATH: u64 = 4096;

/// The socket of the daemon that this command asks; `None` if it works on images itself.
pub(super) fn find(connection: &Connection) -> Result<Option<PathBuf>, Failure> {
    match named(connection)? {
        Named::Never => return Ok(None),
        Named::At(socket) => return agreed(connection, socket).map(Some),
        Named::Nothing => {}
    }
    // What cannot be found out here is told by who then looks for the images themselves.
    if let Ok(target) = connect::target(connection)
        && let Some(socket) = holder(connection, &target)?
    {
        return Ok(Some(socket));
    }
    if connect::is_named(connection) {
        return Ok(None);
    }
    let Some(usual) = serve::default_socket() else { return Ok(None) };
    listening(&usual).map(|listening| listening.then_some(usual))
}

/// The daemon that was named, unless a flag names a place that is not its: neither is guessed to be the one that is meant.
fn agreed(connection: &Connection, socket: PathBuf) -> Result<PathBuf, Failure> {
    let place = match (&connection.root, &connection.backend) {
        (Some(root), _) => format!("--root {}", root.display()),
        (None, Some(backend)) => format!("--backend {backend}"),
        (None, None) => return Ok(socket),
    };
    // Who asks is told that nobody answers.
    if !listening(&socket).unwrap_or(false) {
        return Ok(socket);
    }
    let same = |a: &Path, b: &Path| {
        a == b || matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
    };
    let theirs =
        connect::target(connection).ok().and_then(|target| holder(connection, &target).ok().flatten());
    if theirs.is_some_and(|theirs| same(&theirs, &socket)) {
        return Ok(socket);
    }
    Err(Failure::bad_input(format!("{place}: this is not what the daemon at {} keeps", socket.display()))
        .hint("name the one or the other: a daemon has the place that it was started with; --daemon none asks none"))
}

/// The same for commands that work on nothing but larder's own store.
pub(super) fn find_of_store(connection: &Connection) -> Result<Option<PathBuf>, Failure> {
    match named(connection)? {
        Named::At(socket) => agreed(connection, socket).map(Some),
        Named::Never | Named::Nothing => holder_of_store(connection),
    }
}

/// The same, if somebody listens there.
pub(super) fn listening_of_store(connection: &Connection) -> Result<Option<PathBuf>, Failure> {
    let Some(socket) = find_of_store(connection)? else { return Ok(None) };
    listening(&socket).map(|listening| listening.then_some(socket))
}

/// The socket of the daemon that has larder's own store which this command would work on.
fn holder_of_store(connection: &Connection) -> Result<Option<PathBuf>, Failure> {
    if matches!(named(connection)?, Named::Never) {
        return Ok(None);
    }
    holder(connection, &Target::Store(connect::store_root(connection)?))
}

/// The socket of the daemon that has this.
fn holder(connection: &Connection, target: &Target) -> Result<Option<PathBuf>, Failure> {
    for note in notes(connection, target)? {
        if let Some(socket) = read(&note)
            && listening(&socket)?
        {
            return Ok(Some(socket));
        }
    }
    Ok(None)
}

/// Where the daemon that works on larder's own store in this folder leaves the path of its socket.
pub(crate) fn note_of_store(root: &Path) -> PathBuf {
    root.join("daemon")
}

/// Where the daemon that works on this leaves the path of its socket: this user's, else root's.
fn notes(connection: &Connection, target: &Target) -> Result<Vec<PathBuf>, Failure> {
    Ok(match target {
        Target::Store(root) => vec![note_of_store(root)],
        Target::Runtime(_) => {
            let place = Place::of_target(connection.state.as_deref(), target)?;
            [Some(place.daemon()), place.of_root().map(|place| place.daemon())]
                .into_iter()
                .flatten()
                .collect()
        }
    })
}

enum Named {
    Nothing,
    Never,
    At(PathBuf),
}

fn named(connection: &Connection) -> Result<Named, Failure> {
    let variable = || std::env::var(VARIABLE).ok().filter(|text| !text.is_empty());
    let (text, by) = match (&connection.daemon, variable()) {
        (Some(text), _) => (text.clone(), "--daemon"),
        (None, Some(text)) => (text, VARIABLE),
        (None, None) => return Ok(Named::Nothing),
    };
    if text == NONE {
        return Ok(Named::Never);
    }
    let endpoint = Endpoint::parse(&text).map_err(|error| {
        Failure::bad_input(format!("{by} {text}: {error}"))
            .hint("write it as unix:///path/to.sock, or none for no daemon")
    })?;
    Ok(Named::At(endpoint.path().to_owned()))
}

/// The path in a file. One that cannot be read names no daemon.
fn read(file: &Path) -> Option<PathBuf> {
    let length = fs_err::metadata(file).ok()?.len();
    let text = fs_err::read_to_string(file).ok().filter(|_| length <= MAX_PATH)?;
    Some(PathBuf::from(text.trim_end_matches('\n'))).filter(|path| path.is_absolute())
}

/// Whether somebody listens; who may not know is told so.
fn listening(socket: &Path) -> Result<bool, Failure> {
    match Endpoint::at(socket).knock() {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(denied(socket)),
        Err(_) => Ok(false),
    }
}

/// This user may not speak to the daemon.
pub(super) fn denied(socket: &Path) -> Failure {
    use std::os::unix::fs::MetadataExt as _;

    let shown = socket.display();
    let failure = Failure::unreachable(format!("{shown}: permission denied: this is the daemon's socket"));
    match fs_err::metadata(socket) {
        Ok(found) if found.gid() != 0 => {
            let group = group_name(found.gid());
            failure.hint(format!("you are not in the group {group}: become a member of it, or run as root"))
        }
        _ => failure.hint("run as root, or as the user that the daemon runs as"),
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

    fn connection(root: &Path, daemon: Option<&str>) -> Connection {
        Connection { root: Some(root.to_owned()), daemon: daemon.map(str::to_owned), ..Connection::default() }
    }

    #[test]
    fn the_daemon_of_a_folder_is_found_and_a_dead_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let (root, socket) = (folder.path(), folder.path().join("s.sock"));
        let found = |daemon: Option<&str>| find(&connection(root, daemon)).unwrap();
        assert_eq!(found(None), None);
        fs_err::write(root.join("daemon"), format!("{}\n", socket.display())).unwrap();
        assert_eq!(found(None), None, "nothing is there");
        let listener = UnixListener::bind(&socket).unwrap();
        assert_eq!(found(None), Some(socket.clone()));
        assert_eq!(found(Some("none")), None);
        assert_eq!(found(Some("unix:///other.sock")), Some("/other.sock".into()), "nobody is there to ask");
        let listening = |daemon: &str| listening_of_store(&connection(root, Some(daemon))).unwrap();
        assert_eq!(listening("unix:///other.sock"), None);
        assert_eq!(listening(&socket.display().to_string()), Some(socket.clone()), "named, and there");
        let other = folder.path().join("other.sock");
        let (own, foreign) = (socket.display().to_string(), other.display().to_string());
        assert_eq!(found(Some(&own)), Some(socket.clone()));
        let _others = UnixListener::bind(&other).unwrap();
        let refused = find(&connection(root, Some(&foreign))).unwrap_err();
        assert!(refused.message().contains("this is not what the daemon at"), "{}", refused.message());
        drop(listener);
        assert_eq!(found(None), None, "it died");
        for junk in ["", "relative.sock", "\0", &"/x".repeat(5000)] {
            fs_err::write(root.join("daemon"), junk).unwrap();
            assert_eq!(found(None), None, "{junk:?}");
        }
    }

    #[test]
    fn a_bad_name_says_where_it_came_from() {
        let refused = find(&connection(Path::new("/images"), Some("tcp://1.2.3.4:5"))).unwrap_err();
        assert!(refused.message().starts_with("--daemon tcp://1.2.3.4:5: "), "{}", refused.message());
    }
}
