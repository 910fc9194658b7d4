//! Why images could not be exported.

use std::io;

use larder::hint::Hint;
use larder::reference::Digest;

use crate::store::{StoreError, damage_hint};
use crate::unpack::{MergeError, RebuildError};

/// Why images could not be exported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The store failed, or does not have the image.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A config is missing.
    #[error("{digest} is missing in the store")]
    Blob {
        /// Its digest.
        digest: Digest,
    },
    /// A layer is damaged, and recorded as that.
    #[error("{image} is damaged: layer {layer}")]
    Damaged {
        /// A name of the image, or its ID.
        image: String,
        /// Its diff ID.
        layer: Digest,
    },
    /// Data of a layer is missing: containers may start before it comes.
    #[error("{image} is incomplete: data of layer {layer} is missing")]
    Incomplete {
        /// A name of the image, or its ID.
        image: String,
        /// Its diff ID.
        layer: Digest,
    },
    /// The archive of a layer cannot be written as it was.
    #[error("cannot write layer {layer} as it was pulled")]
    Layer {
        /// Its diff ID.
        layer: Digest,
        /// Why.
        #[source]
        cause: RebuildError,
    },
    /// The archive of a layer has another size than its record says, as after a rebuild of the index.
    #[error("layer {layer} has {written} bytes, and {recorded} were recorded")]
    LayerSize {
        /// Its diff ID.
        layer: Digest,
        /// Bytes that the record says.
        recorded: u64,
        /// Bytes that its archive has.
        written: u64,
    },
    /// The manifest of an artifact names compressed bytes, which are not kept.
    #[error("layer {layer} ({media_type}) is not kept as it was pulled: compressed")]
    Compressed {
        /// Its digest.
        layer: Digest,
        /// Its media type.
        media_type: String,
    },
    /// The files of an image cannot be read.
    #[error(transparent)]
    Files(MergeError),
    /// The receiver takes no more.
    #[error("cannot write the archive")]
    Output(#[source] io::Error),
}

impl From<MergeError> for ExportError {
    fn from(error: MergeError) -> Self {
        match error {
            MergeError::Output(cause) => ExportError::Output(cause),
            other => ExportError::Files(other),
        }
    }
}

impl ExportError {
    pub(super) fn layer(layer: &Digest, cause: RebuildError) -> ExportError {
        match cause {
            RebuildError::Output(cause) => ExportError::Output(cause),
            cause => ExportError::Layer { layer: layer.clone(), cause },
        }
    }

    /// Returns true if damage of a layer may be the reason.
    pub(super) fn may_be_damage(&self) -> bool {
        match self {
            ExportError::Layer { cause, .. } => {
                !matches!(cause, RebuildError::Replaced(_) | RebuildError::Output(_))
            }
            ExportError::LayerSize { .. } => true,
            ExportError::Files(cause) => !matches!(cause, MergeError::TooManyLinks),
            ExportError::Store(_)
            | ExportError::Blob { .. }
            | ExportError::Damaged { .. }
            | ExportError::Incomplete { .. }
            | ExportError::Compressed { .. }
            | ExportError::Output(_) => false,
        }
    }

    /// The next step.
    pub fn hint(&self) -> Option<Hint> {
        let repair = || Hint::new().command(["fsck", "--repair"]).text(" fetches damaged layers again");
        Some(match self {
            ExportError::Store(error) => return error.hint(),
            ExportError::Layer { cause: RebuildError::Record(_), .. } | ExportError::LayerSize { .. } => {
                Hint::from("remove every image with this layer, pull again, then export")
            }
            ExportError::Layer { cause: RebuildError::NoRecord | RebuildError::Replaced(_), .. } => {
                Hint::from(
                    "copy the image from its registry instead: skopeo copy docker://NAME oci-archive:FILE",
                )
            }
            ExportError::Incomplete { image, .. } => {
                Hint::new().command(["complete".to_owned(), image.clone()]).text(" fetches the rest")
            }
            ExportError::Files(MergeError::TooManyLinks) => {
                Hint::new().command(["mount", "IMAGE", "DIR"]).text(" shows the files")
            }
            ExportError::Compressed { .. } => {
                Hint::from("copy it from its registry: oras copy, or write its files: ")
                    .command(["export", "ARTIFACT", "DIR"])
            }
            ExportError::Damaged { image, .. } => damage_hint(image),
            ExportError::Blob { .. } | ExportError::Layer { .. } | ExportError::Files(_) => repair(),
            ExportError::Output(_) => return None,
        })
    }
}
