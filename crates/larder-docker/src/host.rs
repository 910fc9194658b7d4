//! The address of an engine: parsed from user input, from Docker's environment variables, or discovered.

use std::path::{Path, PathBuf};
use std::{fmt, io};

use larder::hint::Hint;

use crate::context;

/// An example of an address, for hints.
pub(crate) const SOCKET: &str = "docker:///path/to.sock";
/// The default socket of an engine.
const DEFAULT_SOCKET: &str = "/var/run/docker.sock";

/// The default ports of an engine without and with TLS.
const PORTS: [u16; 2] = [2375, 2376];

/// An engine's address. It prints as `unix:///path` or `tcp://host:port`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum EngineHost {
    /// A Unix socket: the engine is on this machine.
    Unix(PathBuf),
    /// A TCP port, with or without TLS: the engine may be anywhere.
    Tcp {
        /// `host:port`.
        address: String,
        /// Whether the connection is encrypted.
        tls: bool,
    },
}

/// The environment that the Docker CLI uses.
pub struct DockerCliEnvironment<'a> {
    /// An environment variable.
    pub variable: &'a dyn Fn(&str) -> Option<String>,
    /// Whether a path exists and this process may read and write it.
    pub is_usable: &'a dyn Fn(&Path) -> bool,
    /// The content of a file, if there is one.
    pub read: &'a dyn Fn(&Path) -> io::Result<Option<Vec<u8>>>,
}

impl DockerCliEnvironment<'_> {
    /// A variable that is not empty.
    pub(crate) fn set(&self, name: &str) -> Option<String> {
        (self.variable)(name).filter(|value| !value.is_empty())
    }
}

impl EngineHost {
    /// Parses an address in the format of `DOCKER_HOST` (`unix:///path`, `tcp://host:port`), or in larder's
    /// (`docker:///path`, `docker://host:port`). `tls` says whether TCP is encrypted, as `DOCKER_TLS_VERIFY` does.
    pub fn parse(text: &str, tls: bool) -> Result<EngineHost, HostError> {
        let shown = without_password(text);
        let Some((scheme, rest)) = text.split_once("://") else { return Err(HostError::NoAddress(shown)) };
        match scheme {
            "unix" | "docker" if rest.starts_with('/') && rest.len() > 1 => Ok(EngineHost::Unix(rest.into())),
            "tcp" | "http" | "https" | "docker" => {
                let tls = tls || scheme == "https";
                let address = rest.trim_end_matches('/');
                if address.is_empty() || address.contains(['/', '@', '?', '#', ' ']) {
                    return Err(HostError::NoAddress(shown));
                }
                let has_port = address
                    .rsplit_once(':')
                    .is_some_and(|(_, port)| !port.is_empty() && port.chars().all(|c| c.is_ascii_digit()));
                let address = if has_port {
                    address.to_owned()
                } else {
                    format!("{address}:{}", PORTS[usize::from(tls)])
                };
                Ok(EngineHost::Tcp { address, tls })
            }
            "unix" => Err(HostError::NoAddress(shown)),
            "ssh" => Err(HostError::Ssh(shown)),
            _ => Err(HostError::Scheme { address: shown, scheme: scheme.to_owned() }),
        }
    }

    /// The engine of `docker` without an address: `DOCKER_HOST`, else the selected context, else the default socket,
    /// else that of a rootless engine.
    pub fn from_environment(around: &DockerCliEnvironment<'_>) -> Result<EngineHost, HostError> {
        if let Some(text) = around.set("DOCKER_HOST") {
            let host = EngineHost::parse(&text, around.set("DOCKER_TLS_VERIFY").is_some());
            return host.map_err(|error| match error {
                HostError::NoAddress(text) => HostError::NoHost(text),
                other => other,
            });
        }
        match context::chosen(around)? {
            Some(host) => Ok(host),
            None => Ok(EngineHost::default_socket(around)),
        }
    }

    pub(crate) fn default_socket(around: &DockerCliEnvironment<'_>) -> EngineHost {
        let rootless = around.set("XDG_RUNTIME_DIR").map(|dir| Path::new(&dir).join("docker.sock"));
        let default = PathBuf::from(DEFAULT_SOCKET);
        let usable = |path: &Path| (around.is_usable)(path);
        EngineHost::Unix(match rootless {
            Some(rootless) if !usable(&default) && usable(&rootless) => rootless,
            _ => default,
        })
    }

    /// The socket, if it is one: then the engine's files are on this machine, unless it runs in a virtual machine.
    pub fn socket(&self) -> Option<&Path> {
        match self {
            EngineHost::Unix(path) => Some(path),
            EngineHost::Tcp { .. } => None,
        }
    }
}

impl fmt::Display for EngineHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EngineHost::Unix(path) => write!(f, "unix://{}", path.display()),
            EngineHost::Tcp { address, .. } => write!(f, "tcp://{address}"),
        }
    }
}

/// An address for messages: the password before an `@` is hidden, whatever characters it has.
fn without_password(text: &str) -> String {
    let (scheme, rest) = text.split_once("://").map_or(("", text), |(scheme, rest)| (scheme, rest));
    let separator = if rest.len() == text.len() { "" } else { "://" };
    match rest.rsplit_once('@').and_then(|(user, host)| Some((user.split_once(':')?.0, host))) {
        Some((user, host)) => format!("{scheme}{separator}{user}:****@{host}"),
        None => text.to_owned(),
    }
}

/// Why a text is not the address of an engine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// No path and no host.
    #[error("\"{0}\" is not an engine address: use docker, docker:///path/to.sock or docker://host:port")]
    NoAddress(String),
    /// No path and no host, in `DOCKER_HOST` or a context.
    #[error("\"{0}\" is not an engine address: use unix:///path/to.sock or tcp://host:port")]
    NoHost(String),
    /// `ssh://`: the Docker CLI starts a program for it.
    #[error("\"{0}\": ssh is not supported")]
    Ssh(String),
    /// The Docker context does not exist.
    #[error("unknown Docker context \"{name}\": {problem}; list contexts with docker context ls")]
    Context {
        /// Its name.
        name: String,
        /// Why it is unknown.
        problem: String,
    },
    /// A context with TLS files of its own.
    #[error(
        "TLS files of Docker context \"{name}\" are not supported: set DOCKER_HOST={address} DOCKER_TLS_VERIFY=1 DOCKER_CERT_PATH={}", certificates.display()
    )]
    ContextTls {
        /// Its name.
        name: String,
        /// The engine's address.
        address: String,
        /// The directory of the files.
        certificates: PathBuf,
    },
    /// An unreadable file of the Docker CLI: the selected engine is unknown.
    #[error("{}: {problem}", path.display())]
    ClientFile {
        /// The file.
        path: PathBuf,
        /// Reason why the address is invalid.
        problem: String,
    },
    /// Any other scheme.
    #[error("\"{address}\": protocol {scheme} is not supported: use unix:///path/to.sock or tcp://host:port")]
    Scheme {
        /// The address as written.
        address: String,
        /// Its scheme.
        scheme: String,
    },
}

impl HostError {
    /// The next step for the user.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            HostError::Ssh(_) => Some(
                Hint::from(
                    "run larder on that host; commands that measure no disk usage also work through a forwarded socket (ssh -L ./docker.sock:/var/run/docker.sock HOST, and ",
                )
                .setting("backend", SOCKET)
                .text(")"),
            ),
            HostError::ClientFile { .. } => {
                Some(Hint::from("repair the file, or set the engine with ").setting("backend", SOCKET))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_in_an_address_is_not_printed() {
        for (text, shown) in [
            ("tcp://bob:hunter2@h:2375", "\"tcp://bob:****@h:2375\""),
            ("tcp://bob:hun/t@er2@h:2375", "\"tcp://bob:****@h:2375\""),
            ("ssh://bob:hunter2@h", "\"ssh://bob:****@h\""),
            ("ftp://bob:hunter2@h", "\"ftp://bob:****@h\""),
            ("bob:hunter2@h:2375", "\"bob:****@h:2375\""),
            ("ssh://bob@h", "\"ssh://bob@h\""),
        ] {
            let error = EngineHost::parse(text, false).unwrap_err().to_string();
            assert!(error.starts_with(shown), "{error}");
        }
    }

    fn parsed(text: &str) -> String {
        EngineHost::parse(text, false).unwrap().to_string()
    }

    #[test]
    fn addresses_are_read_in_docker_s_words_and_in_larder_s() {
        for (text, address) in [
            ("unix:///run/d.sock", "unix:///run/d.sock"),
            ("docker:///run/d.sock", "unix:///run/d.sock"),
            ("tcp://10.0.0.1", "tcp://10.0.0.1:2375"),
            ("tcp://10.0.0.1:99/", "tcp://10.0.0.1:99"),
            ("docker://build.example:2375", "tcp://build.example:2375"),
            ("tcp://[::1]:2375", "tcp://[::1]:2375"),
        ] {
            assert_eq!(parsed(text), address, "{text}");
        }
        assert_eq!(EngineHost::parse("tcp://h", true).unwrap().to_string(), "tcp://h:2376");
    }

    #[test]
    fn an_invalid_engine_url_is_an_error_with_an_example() {
        for text in ["unix://", "docker://", "unix://run/d.sock", "/run/d.sock", "tcp://a/b", "tcp://u:p@h:1"]
        {
            let error = EngineHost::parse(text, false).unwrap_err();
            assert!(error.to_string().contains("docker:///path/to.sock"), "{error}");
        }
        let hint = EngineHost::parse("ssh://u@h", false).unwrap_err().hint().unwrap();
        assert!(hint.to_string().contains("ssh -L"));
        assert!(EngineHost::parse("npipe://x", false).unwrap_err().to_string().contains("npipe"));
    }

    #[test]
    fn docker_s_variable_is_first_and_an_engine_without_root_last() {
        let resolved = |set: &[(&str, &str)], there: &[&str]| {
            let variable = |name: &str| {
                set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
            };
            let is_usable = |path: &Path| there.iter().any(|known| Path::new(known) == path);
            let around =
                DockerCliEnvironment { variable: &variable, is_usable: &is_usable, read: &|_| Ok(None) };
            EngineHost::from_environment(&around).unwrap()
        };
        let unix = |path: &str| EngineHost::Unix(path.into());
        let runtime_dir = ("XDG_RUNTIME_DIR", "/run/user/1");
        assert_eq!(resolved(&[], &[]), unix(DEFAULT_SOCKET));
        assert_eq!(resolved(&[runtime_dir], &["/run/user/1/docker.sock"]), unix("/run/user/1/docker.sock"));
        assert_eq!(
            resolved(&[runtime_dir], &[DEFAULT_SOCKET, "/run/user/1/docker.sock"]),
            unix(DEFAULT_SOCKET)
        );
        assert_eq!(resolved(&[("DOCKER_HOST", "unix:///a.sock"), runtime_dir], &[]), unix("/a.sock"));
        let variable = |name: &str| (name == "DOCKER_HOST").then(|| "foo".to_owned());
        let around = DockerCliEnvironment { variable: &variable, is_usable: &|_| true, read: &|_| Ok(None) };
        let foo = EngineHost::from_environment(&around).unwrap_err();
        assert_eq!(
            foo.to_string(),
            "\"foo\" is not an engine address: use unix:///path/to.sock or tcp://host:port"
        );
        let tls = [("DOCKER_HOST", "tcp://h:1"), ("DOCKER_TLS_VERIFY", "1")];
        assert_eq!(resolved(&tls, &[]), EngineHost::Tcp { address: "h:1".into(), tls: true });
        assert_eq!(resolved(&tls[..1], &[]), EngineHost::Tcp { address: "h:1".into(), tls: false });
    }
}
