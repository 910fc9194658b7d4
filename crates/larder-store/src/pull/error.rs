//! Why a pull into the store failed.

use larder::reference::Digest;

use crate::registry::{BlobError, FetchError};
use crate::store::StoreError;
use crate::store::admission::NoRoom;
use crate::store::import::ImportError;
use crate::unpack::UnpackError;

/// Why an image could not be pulled. What was there before is untouched; what was fetched is kept for the next try.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PullError {
    /// The registry did not give the image's documents.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// A layer's bytes could not be had, or not be kept.
    #[error(transparent)]
    Blob(#[from] BlobError),
    /// A layer could not be unpacked.
    #[error("could not unpack layer {digest}")]
    Unpack {
        /// The layer, as the manifest names it.
        digest: Digest,
        /// Why not.
        #[source]
        cause: UnpackError,
    },
    /// What was to be loaded cannot be read.
    #[error(transparent)]
    Import(#[from] ImportError),
    /// The disk is too full for this image.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    /// The store could not do its part.
    #[error(transparent)]
    Store(StoreError),
    /// The program is about to end.
    #[error("the pull was abandoned")]
    Abandoned,
}

impl PullError {
    /// What the reader could try next.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            PullError::Fetch(error) => error.hint(),
            PullError::Blob(error) => error.hint(),
            PullError::Unpack { cause, .. } => cause.hint(),
            PullError::Import(error) => error.hint(),
            PullError::NoRoom(error) => Some(error.hint()),
            PullError::Store(_) | PullError::Abandoned => None,
        }
    }
}
