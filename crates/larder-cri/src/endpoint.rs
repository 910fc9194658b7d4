//! The endpoint of a runtime: parsed from user input, or discovered.

use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::{fmt, io};

use larder::hint::Hint;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// The paths that [`discover`] tries, in this order.
pub const WELL_KNOWN_SOCKETS: [&str; 5] = [
    "/run/containerd/containerd.sock",
    "/run/crio/crio.sock",
    "/var/run/crio/crio.sock",
    "/var/run/cri-dockerd.sock",
    "/run/k3s/containerd/containerd.sock",
];

/// The longest path in the address of a Unix socket, in bytes.
const MAX_ADDRESS: usize = 107;

/// The path, or a shorter one through its open directory where it has more than `max` bytes. The shorter one is valid
/// in this process, while the directory is open.
pub fn short_path(path: &Path, max: usize) -> io::Result<(PathBuf, Option<fs_err::File>)> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Ok((path.to_owned(), None));
    };
    if path.as_os_str().len() <= max {
        return Ok((path.to_owned(), None));
    }
    let directory = fs_err::File::open(parent)?;
    let short = Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()).join(name);
    Ok((short, Some(directory)))
}

/// A Unix socket. It prints as `unix:///path`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Endpoint {
    path: PathBuf,
}

impl Endpoint {
    /// Parses `unix:///path` or a bare path. A bare relative path starts at the current directory. Nothing is
    /// decoded: `%20` and `?` are part of the path.
    pub fn parse(text: &str) -> Result<Endpoint, EndpointError> {
        match scheme(text) {
            Some(("unix", rest)) => {
                let path = rest.strip_prefix("//").unwrap_or(rest);
                if path.starts_with('/') {
                    Ok(Endpoint::at(path))
                } else {
                    Err(EndpointError::NoPath { endpoint: text.to_owned() })
                }
            }
            Some(("tcp", _)) => Err(EndpointError::Tcp),
            Some((scheme, _)) => Err(EndpointError::Protocol { scheme: scheme.to_owned() }),
            None if text.is_empty() => Err(EndpointError::NoPath { endpoint: String::new() }),
            None => Ok(Endpoint::at(text)),
        }
    }

    /// The socket at this path.
    pub fn at(path: impl Into<PathBuf>) -> Endpoint {
        Endpoint { path: path.into() }
    }

    /// Path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Fails unless a connection is accepted, or would be but for a full queue. Never blocks.
    pub fn probe(&self) -> io::Result<()> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (path, _directory) = self.address()?;
        let connected = SocketAddrUnix::new(&path).and_then(|address| {
            let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            rustix::net::connect(&socket, &address)
        });
        match connected {
            Ok(()) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// A path to connect to, valid while the directory is open.
    pub(crate) fn address(&self) -> io::Result<(PathBuf, Option<fs_err::File>)> {
        short_path(&self.path, MAX_ADDRESS)
    }

    /// Whether the path, or the target of a link, is a socket.
    pub(crate) fn is_socket(&self) -> bool {
        is_socket(&self.path)
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unix://{}", self.path.display())
    }
}

impl std::str::FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Endpoint, EndpointError> {
        Endpoint::parse(text)
    }
}

/// The scheme of a URL and what follows the colon, if the text begins with a scheme.
fn scheme(text: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = text.split_once(':')?;
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.');
    (scheme.starts_with(|c: char| c.is_ascii_alphabetic()) && scheme.chars().all(fits))
        .then_some((scheme, rest))
}

/// Why a text is not an endpoint. The first two texts are kubelet's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// `tcp://`, which no runtime offers on a node.
    #[error("only support unix socket endpoint")]
    Tcp,
    /// Any other scheme.
    #[error("protocol \"{scheme}\" not supported")]
    Protocol {
        /// The scheme as written.
        scheme: String,
    },
    /// No absolute path follows `unix://`, or the text is empty.
    #[error("endpoint \"{endpoint}\" has no socket path: use unix:///path/to.sock")]
    NoPath {
        /// The endpoint as written.
        endpoint: String,
    },
}

/// No runtime listens on a well-known socket.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no container runtime found; tried {}", list(.tried))]
pub struct NoRuntimeFound {
    /// The paths that were tried, in order.
    pub tried: Vec<PathBuf>,
}

impl NoRuntimeFound {
    /// The next step for the user.
    pub fn hint(&self) -> Hint {
        Hint::from("start containerd or CRI-O, or set its socket with ")
            .setting("backend", "unix:///path/to.sock")
    }
}

fn list(paths: &[PathBuf]) -> String {
    let paths: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
    paths.join(", ")
}

/// Searches for a runtime at the [well-known sockets](WELL_KNOWN_SOCKETS). The first socket with a listener wins;
/// failing that, the first that exists or is hidden from this user, so that the error of the first call names the
/// cause. Never blocks.
pub fn discover() -> Result<Endpoint, NoRuntimeFound> {
    discover_among(WELL_KNOWN_SOCKETS.map(PathBuf::from), probe_path)
}

/// The state of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SocketProbe {
    Nothing,
    /// A socket without a listener, or a directory that this user cannot read.
    Candidate,
    Listener,
}

fn discover_among(
    paths: impl IntoIterator<Item = PathBuf>,
    look: impl Fn(&Path) -> SocketProbe,
) -> Result<Endpoint, NoRuntimeFound> {
    let tried: Vec<PathBuf> = paths.into_iter().collect();
    let probes: Vec<_> = tried.iter().map(|path| look(path)).collect();
    let best = [SocketProbe::Listener, SocketProbe::Candidate]
        .into_iter()
        .find_map(|wanted| probes.iter().position(|probe| *probe == wanted));
    match best {
        Some(index) => Ok(Endpoint::at(&tried[index])),
        None => Err(NoRuntimeFound { tried }),
    }
}

fn probe_path(path: &Path) -> SocketProbe {
    probe_outcome(fs_err::metadata(path).map(|found| found.file_type().is_socket()), || has_listener(path))
}

/// Returns the outcome for a path from its type and whether a process listens.
fn probe_outcome(is_socket: io::Result<bool>, listens: impl FnOnce() -> bool) -> SocketProbe {
    match is_socket {
        Ok(true) if listens() => SocketProbe::Listener,
        Ok(true) => SocketProbe::Candidate,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => SocketProbe::Candidate,
        _ => SocketProbe::Nothing,
    }
}

fn is_socket(path: &Path) -> bool {
    fs_err::metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

/// Whether a connection is accepted, or would be but for a full queue.
fn has_listener(path: &Path) -> bool {
    Endpoint::at(path).probe().is_ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn unix_urls_and_bare_paths_are_sockets() {
        for text in ["unix:///run/a.sock", "unix:/run/a.sock", "/run/a.sock"] {
            let endpoint = Endpoint::parse(text).unwrap();
            assert_eq!(endpoint.path(), Path::new("/run/a.sock"), "{text}");
            assert_eq!(endpoint.to_string(), "unix:///run/a.sock");
        }
        assert_eq!(Endpoint::parse("a/b:c.sock").unwrap().path(), Path::new("a/b:c.sock"));
    }

    #[test]
    fn everything_else_is_refused_with_a_reason() {
        for (text, error) in [
            ("tcp://localhost:1", "only support unix socket endpoint"),
            ("http://localhost/x", "protocol \"http\" not supported"),
            ("npipe:////./pipe/x", "protocol \"npipe\" not supported"),
            ("localhost:1234", "protocol \"localhost\" not supported"),
            (
                "unix://run/a.sock",
                "endpoint \"unix://run/a.sock\" has no socket path: use unix:///path/to.sock",
            ),
            ("unix://", "endpoint \"unix://\" has no socket path: use unix:///path/to.sock"),
            ("", "endpoint \"\" has no socket path: use unix:///path/to.sock"),
        ] {
            assert_eq!(Endpoint::parse(text).unwrap_err().to_string(), error, "{text}");
        }
    }

    #[test]
    fn a_socket_with_a_path_that_no_address_takes_is_connected_to() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("d".repeat(100)).join("e".repeat(100));
        fs_err::create_dir_all(&deep).unwrap();
        let path = deep.join("control.sock");
        assert_eq!(Endpoint::at(&path).probe().unwrap_err().kind(), io::ErrorKind::NotFound);
        let (short, _directory) = short_path(&path, MAX_ADDRESS).unwrap();
        let listener = UnixListener::bind(short).unwrap();
        Endpoint::at(&path).probe().unwrap();
        drop(listener);
        assert_eq!(Endpoint::at(&path).probe().unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn discovery_prefers_a_socket_with_a_listener() {
        let dir = tempfile::tempdir().unwrap();
        let [missing, file, stale, live] =
            ["missing", "file", "stale", "live"].map(|name| dir.path().join(name));
        fs_err::write(&file, "").unwrap();
        drop(UnixListener::bind(&stale).unwrap());
        let listener = UnixListener::bind(&live).unwrap();
        let all = [&missing, &file, &stale, &live].map(Clone::clone);
        assert_eq!(discover_among(all.clone(), probe_path), Ok(Endpoint::at(&live)));
        drop(listener);
        assert_eq!(discover_among(all, probe_path), Ok(Endpoint::at(&stale)));
    }

    #[test]
    fn an_inaccessible_directory_is_a_candidate() {
        let denied = || Err(io::ErrorKind::PermissionDenied.into());
        assert_eq!(probe_outcome(denied(), || true), SocketProbe::Candidate);
        assert_eq!(probe_outcome(Err(io::ErrorKind::NotFound.into()), || true), SocketProbe::Nothing);
        assert_eq!(probe_outcome(Ok(false), || true), SocketProbe::Nothing);
        let paths = ["/missing", "/hidden/a.sock", "/stale"].map(PathBuf::from);
        let found = discover_among(paths, |path| match path.to_str() {
            Some("/missing") => SocketProbe::Nothing,
            _ => SocketProbe::Candidate,
        });
        assert_eq!(found, Ok(Endpoint::at("/hidden/a.sock")));
    }

    #[test]
    fn failed_discovery_names_the_sockets_that_were_checked() {
        let tried = ["/nowhere/a.sock", "/nowhere/b.sock"].map(PathBuf::from);
        let error = discover_among(tried, probe_path).unwrap_err();
        assert_eq!(error.to_string(), "no container runtime found; tried /nowhere/a.sock, /nowhere/b.sock");
    }
}
