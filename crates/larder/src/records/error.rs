//! Errors of the pull records.

use std::error::Error;
use std::io;
use std::sync::Arc;

use super::record_dir::RecordReadError;
use crate::credentials::CredentialsError;
use crate::files;
use crate::hint::Hint;

/// An error of the pull records. Its text appears in the pod's status.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum RecordsError {
    /// An I/O error.
    #[error(transparent)]
    Disk(#[from] Arc<io::Error>),
    /// The intent to pull could not be written, and so the pull must not start.
    #[error("failed to record image pull intent: {0}")]
    Intent(#[source] Box<RecordsError>),
    /// The credentials of the pod could not be looked up.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// The records were closed, or the writer stopped.
    #[error("pull record writer stopped")]
    Closed,
    /// The error of another implementation.
    #[error(transparent)]
    Other(Arc<dyn Error + Send + Sync>),
}

impl RecordsError {
    /// The error of another implementation.
    pub fn other(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        RecordsError::Other(error.into().into())
    }

    /// Returns the next step, if there is one.
    pub(crate) fn hint(&self) -> Option<Hint> {
        match self {
            RecordsError::Disk(error) => files::hint_of_full_disk(error.kind()),
            RecordsError::Intent(cause) => cause.hint(),
            RecordsError::Credentials(_) | RecordsError::Closed | RecordsError::Other(_) => None,
        }
    }

    /// Whether no space is left on the disk.
    pub(crate) fn is_no_space(&self) -> bool {
        match self {
            RecordsError::Disk(error) => error.kind() == io::ErrorKind::StorageFull,
            RecordsError::Intent(cause) => cause.is_no_space(),
            RecordsError::Credentials(_) | RecordsError::Closed | RecordsError::Other(_) => false,
        }
    }
}

impl From<io::Error> for RecordsError {
    fn from(error: io::Error) -> Self {
        RecordsError::Disk(Arc::new(error))
    }
}

impl From<RecordReadError> for RecordsError {
    fn from(error: RecordReadError) -> Self {
        RecordsError::other(error)
    }
}
