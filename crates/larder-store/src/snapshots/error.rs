//! Why a call of containerd's snapshot service failed.

use crate::mounts::MountError;
use crate::store::StoreError;

/// Why a call failed. Each kind is one of containerd's error classes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// There is no such snapshot.
    #[error("snapshot {key:?} not found")]
    NotFound {
        /// As asked.
        key: String,
    },
    /// There is one of this key, or the layer that was asked for.
    #[error("snapshot {key:?} already exists")]
    AlreadyExists {
        /// As asked.
        key: String,
    },
    /// The state of the snapshot forbids the call.
    #[error("snapshot {key:?}: {reason}")]
    Precondition {
        /// As asked.
        key: String,
        /// Reason of the refusal.
        reason: &'static str,
    },
    /// The request is wrong.
    #[error("snapshot {key:?}: {reason}")]
    Invalid {
        /// As asked.
        key: String,
        /// Reason why it is invalid.
        reason: &'static str,
    },
    /// The kernel refused a mount.
    #[error(transparent)]
    Mount(#[from] MountError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl SnapshotError {
    pub(super) fn not_found(key: &str) -> SnapshotError {
        SnapshotError::NotFound { key: key.to_owned() }
    }

    pub(super) fn exists(key: &str) -> SnapshotError {
        SnapshotError::AlreadyExists { key: key.to_owned() }
    }

    pub(super) fn precondition(key: &str, reason: &'static str) -> SnapshotError {
        SnapshotError::Precondition { key: key.to_owned(), reason }
    }

    pub(super) fn invalid(key: &str, reason: &'static str) -> SnapshotError {
        SnapshotError::Invalid { key: key.to_owned(), reason }
    }
}
