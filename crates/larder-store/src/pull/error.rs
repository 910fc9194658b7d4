//! Why a pull into the store failed.

use std::error::Error as _;
use std::io;
use std::time::Duration;

use larder::backend::ReclaimBytes;
use larder::go_format;
use larder::hint::Hint;
use larder::reference::{Digest, Platform};

use crate::disk::ReserveReached;
use crate::store::StoreError;
use crate::store::admission::{InsufficientSpace, SpaceEstimate};
use crate::store::error::{hint_of_io, is_no_space};
use crate::store::import::ImportError;
use crate::unpack::UnpackError;
use larder_registry::manifest::ManifestError;
use larder_registry::{BlobError, FetchError, FetchErrorKind};

/// Why an image could not be pulled. Existing images are not changed; fetched bytes are retained for a retry.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PullError {
    /// The image's manifest or config could not be fetched.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// A layer could not be fetched or written.
    #[error(transparent)]
    Blob(#[from] BlobError),
    /// A layer could not be unpacked.
    #[error("cannot unpack layer {digest}")]
    Unpack {
        /// Digest of the layer in the manifest.
        digest: Digest,
        /// Why not.
        #[source]
        cause: UnpackError,
    },
    /// The archive or layout to load cannot be read.
    #[error(transparent)]
    Import(#[from] ImportError),
    /// The disk has not enough space for this image.
    #[error(transparent)]
    InsufficientSpace(#[from] InsufficientSpace),
    /// The pull was admitted, and the disk was full before its end.
    #[error("needs more disk space than the estimated {}", go_format::bytes(estimated.likely.bytes))]
    OutOfSpace {
        /// Disk usage for which it was admitted.
        estimated: SpaceEstimate,
        /// The error of the write.
        #[source]
        cause: Box<PullError>,
    },
    /// The store failed.
    #[error(transparent)]
    Store(StoreError),
    /// A layer of the image that was there in part could not be completed.
    #[error("cannot complete layer {digest}: {reason}")]
    Incomplete {
        /// Digest of the layer in the manifest.
        digest: Digest,
        /// Why not, in words.
        reason: String,
    },
    /// Nothing has come of a layer that is being filled for a while. What is here is kept, and the fill goes on.
    #[error("{} of layer {digest} missing: {reason}", go_format::bytes(*missing_bytes))]
    Unfilled {
        /// Digest of the layer in the manifest.
        digest: Digest,
        /// Bytes that are missing.
        missing_bytes: u64,
        /// Why they do not come.
        reason: String,
    },
    /// Data of a layer cannot come later: another layer copies its files, or another pull has fetched it. The image is
    /// pulled in full instead.
    #[error("the image must be pulled in full")]
    NotLazily,
    /// Nothing was received for this time.
    #[error("received nothing for {}s", .0.as_secs())]
    Stalled(Duration),
    /// The process is shutting down.
    #[error("pull canceled: the process is shutting down")]
    Abandoned,
}

impl PullError {
    /// Why a request to the registry failed, if that is the reason.
    pub(crate) fn fetch_kind(&self) -> Option<&FetchErrorKind> {
        match self {
            PullError::Fetch(fetch) => Some(&fetch.kind),
            PullError::Blob(blob) => blob.fetch_kind(),
            _ => None,
        }
    }

    /// The platform of the image, if the registry has it for one other than was requested, and no more.
    pub(super) fn only_platform(&self) -> Option<Platform> {
        match self.fetch_kind()? {
            FetchErrorKind::Manifest(ManifestError::NoPlatform { offered, .. }) => {
                let mut offered: Vec<_> =
                    offered.iter().flat_map(|offer| offer.parse::<Platform>()).collect();
                offered.dedup_by_key(|platform| platform.canonical());
                offered.pop().filter(|_| offered.is_empty())
            }
            _ => None,
        }
    }

    /// Returns true if the registry rejected the credential, or requires one.
    pub fn is_denied(&self) -> bool {
        let kind = self.fetch_kind();
        matches!(kind, Some(FetchErrorKind::Denied(_) | FetchErrorKind::CredentialRejected(_)))
    }

    /// Returns true if the fetched bytes of a layer are not those of its digest.
    pub(super) fn is_wrong_bytes(&self) -> bool {
        matches!(self, PullError::Unpack { cause, .. } if cause.is_wrong_bytes())
    }

    /// The next step for the user.
    pub fn hint(&self) -> Option<Hint> {
        // Files that configure the registry are not the store's.
        if let Some(FetchErrorKind::Hosts(_)) = self.fetch_kind() {
            return self.hint_of_kind();
        }
        self.of_disk(hint_of_io).or_else(|| self.hint_of_kind())
    }

    /// Returns true if the disk, or this user's part of it, is full.
    pub fn is_no_space(&self) -> bool {
        match self {
            PullError::InsufficientSpace(_) | PullError::OutOfSpace { .. } => true,
            PullError::Store(error) if error.is_no_space() => true,
            _ => self.of_disk(|error| is_no_space(error).then_some(())).is_some(),
        }
    }

    /// Returns the bytes that garbage collection has to free for the pull to succeed; `None` if that is unknown or
    /// does not help.
    pub(crate) fn reclaim_bytes(&self) -> Option<ReclaimBytes> {
        match self {
            PullError::InsufficientSpace(error) => error.reclaim_bytes(),
            // How much more it takes is unknown: a part of the estimate, or as much again.
            PullError::OutOfSpace { estimated, .. } if !self.lacks_inodes() => {
                Some(ReclaimBytes { least: estimated.least.bytes / 4, likely: estimated.likely.bytes })
            }
            _ => None,
        }
    }

    /// Adds what was estimated to the error of an admitted pull that filled the disk.
    pub(super) fn after_admission(self, estimated: SpaceEstimate) -> PullError {
        if self.is_no_space() { PullError::OutOfSpace { estimated, cause: Box::new(self) } } else { self }
    }

    /// Returns true if the reserve of inodes was reached, and not that of bytes.
    fn lacks_inodes(&self) -> bool {
        let reached = |error: &io::Error| error.get_ref()?.downcast_ref::<ReserveReached>().copied();
        self.of_disk(reached).is_some_and(ReserveReached::lacks_inodes)
    }

    /// The first I/O error in the chain of causes, mapped by `what`.
    fn of_disk<T>(&self, what: impl Fn(&io::Error) -> Option<T>) -> Option<T> {
        let mut cause = self.source();
        while let Some(error) = cause {
            if let Some(found) = error.downcast_ref::<io::Error>().and_then(&what) {
                return Some(found);
            }
            cause = error.source();
        }
        None
    }

    fn hint_of_kind(&self) -> Option<Hint> {
        match self {
            PullError::Fetch(error) => error.hint(),
            PullError::Blob(error) => error.hint(),
            PullError::Unpack { cause, .. } => cause.hint(),
            PullError::Import(error) => error.hint(),
            PullError::InsufficientSpace(error) => Some(error.hint()),
            PullError::OutOfSpace { cause, .. } => cause.hint(),
            PullError::Store(error) => error.hint(),
            PullError::Incomplete { .. } => Some("pull again: the layer is fetched in full then".into()),
            PullError::Unfilled { .. } => {
                Some("what is here is kept: complete the image when the registry answers".into())
            }
            PullError::Stalled(_) | PullError::Abandoned | PullError::NotLazily => None,
        }
    }
}
