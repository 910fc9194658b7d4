//! Failures to read, change or check containerd's configuration.

use larder::hint::Hint;

/// The kind of a [`ConfigurationError`]. Callers derive exit codes from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConfigurationErrorKind {
    /// The change or check is not possible.
    Failed,
    /// A file or an address is not valid.
    InvalidInput,
    /// containerd cannot be reached.
    Unreachable,
}

/// Why containerd's configuration was not read, changed or checked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ConfigurationError {
    /// The kind.
    pub kind: ConfigurationErrorKind,
    /// The state and its cause.
    pub message: String,
    /// The next step.
    pub hint: Option<Hint>,
}

impl ConfigurationError {
    pub(super) fn failed(message: impl Into<String>) -> ConfigurationError {
        let kind = ConfigurationErrorKind::Failed;
        ConfigurationError { kind, message: message.into(), hint: None }
    }

    pub(super) fn bad_input(message: impl Into<String>) -> ConfigurationError {
        let kind = ConfigurationErrorKind::InvalidInput;
        ConfigurationError { kind, ..ConfigurationError::failed(message) }
    }

    pub(super) fn unreachable(message: impl Into<String>) -> ConfigurationError {
        let kind = ConfigurationErrorKind::Unreachable;
        ConfigurationError { kind, ..ConfigurationError::failed(message) }
    }

    pub(super) fn hint(self, hint: impl Into<Hint>) -> ConfigurationError {
        ConfigurationError { hint: Some(hint.into()), ..self }
    }
}
