//! Errors in the host configuration of a registry.

use std::io;
use std::path::PathBuf;

use crate::tls::TlsSettingsError;

/// The text names the file and the key.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostsError {
    /// A file cannot be read. The source names it.
    #[error("cannot read the registry host configuration")]
    Read(#[source] io::Error),
    /// A file is not TOML.
    #[error("{}: line {line}: {problem}", file.display())]
    Syntax {
        /// The file.
        file: PathBuf,
        /// Line, counted from 1.
        line: usize,
        /// The parser's message.
        problem: String,
    },
    /// A key has an invalid value.
    #[error("{}: line {line}: {key}: {problem}", file.display())]
    Key {
        /// The file.
        file: PathBuf,
        /// Line, counted from 1.
        line: usize,
        /// The key with its tables: `host."https://mirror.example".capabilities`.
        key: String,
        /// Reason why the value is invalid.
        problem: String,
    },
    /// An unusable certificate or key, referenced by a key of `hosts.toml` or found by Docker's naming.
    #[error("{}: {key}", file.display())]
    Certificate {
        /// The certificate's file.
        file: PathBuf,
        /// The reference: a key of `hosts.toml` with its file, or the kind of file in Docker's naming.
        key: String,
        /// Reason why the TLS settings are invalid.
        #[source]
        cause: TlsSettingsError,
    },
    /// The registry's name cannot be a URL's host.
    #[error("invalid registry host {registry:?}: {cause}")]
    Name {
        /// The name.
        registry: String,
        /// Reason why the file is invalid.
        cause: String,
    },
}

impl HostsError {
    /// The next step for the user.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            HostsError::Syntax { .. } | HostsError::Key { .. } => Some(
                "the format is containerd's hosts.toml; pulls from this registry fail until the file is corrected",
            ),
            HostsError::Certificate { cause, .. } => Some(match cause {
                TlsSettingsError::Empty => "put a PEM file there; pulls from this registry fail until then",
                TlsSettingsError::Damaged => {
                    "it may be truncated: copy the certificate again; pulls from this registry fail until then"
                }
                TlsSettingsError::OnlyKey | TlsSettingsError::Der | TlsSettingsError::NoCertificate => {
                    "put the certificate there, in PEM (BEGIN CERTIFICATE); pulls from this registry fail until then"
                }
                TlsSettingsError::NoKey
                | TlsSettingsError::EncryptedKey
                | TlsSettingsError::UnsupportedKey
                | TlsSettingsError::OtherKey => {
                    "put the key of the client certificate there, in PEM (BEGIN PRIVATE KEY); pulls from this registry \
                     fail until then"
                }
                TlsSettingsError::Unavailable => return None,
            }),
            HostsError::Read(error) => Some(match error.kind() {
                io::ErrorKind::NotFound => {
                    "put the file there, or correct its path in hosts.toml; pulls from this registry fail until then"
                }
                io::ErrorKind::IsADirectory => {
                    "replace the directory by a file; pulls from this registry fail until then"
                }
                io::ErrorKind::PermissionDenied => "make it readable for the user that larder runs as",
                _ => "make it readable, or remove it; pulls from this registry fail until then",
            }),
            HostsError::Name { .. } => None,
        }
    }
}
