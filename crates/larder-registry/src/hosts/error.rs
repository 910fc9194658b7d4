//! What is wrong with the configuration of a registry's hosts.

use std::io;
use std::path::PathBuf;

use crate::tls::TlsSettingsError;

/// The text names the file and the key.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostsError {
    /// A file cannot be read. The error names it.
    #[error("cannot read the registry host configuration")]
    Read(#[source] io::Error),
    /// A file is not TOML.
    #[error("{}: line {line}: {problem}", file.display())]
    Syntax {
        /// The file.
        file: PathBuf,
        /// Line, counted from 1.
        line: usize,
        /// What the parser said.
        problem: String,
    },
    /// A key has a value that makes no sense.
    #[error("{}: line {line}: {key}: {problem}", file.display())]
    Key {
        /// The file.
        file: PathBuf,
        /// Line, counted from 1.
        line: usize,
        /// The key with its tables: `host."https://mirror.example".capabilities`.
        key: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A certificate or key that a key or Docker's naming refers to cannot be used.
    #[error("{}: {key}", file.display())]
    Certificate {
        /// The certificate's file.
        file: PathBuf,
        /// What refers to it: a key of `hosts.toml` with its file, or the kind of file in Docker's naming.
        key: String,
        /// What is wrong with it.
        #[source]
        cause: TlsSettingsError,
    },
    /// The registry's name makes no URL.
    #[error("invalid registry host {registry:?}: {cause}")]
    Name {
        /// The name.
        registry: String,
        /// What is wrong with it.
        cause: String,
    },
}

impl HostsError {
    /// What the reader could try next.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            HostsError::Syntax { .. } | HostsError::Key { .. } => Some(
                "the format is containerd's hosts.toml; pulls from this registry fail until the file is corrected",
            ),
            HostsError::Certificate { .. } => Some("certificates and keys are PEM files"),
            HostsError::Read(_) => Some("make it readable for the user that larder runs as, or remove it"),
            HostsError::Name { .. } => None,
        }
    }
}
