//! Why a document does not describe an image that larder can run.

use larder::reference::Digest;

use super::limits::{MAX_BYTES, MAX_DEPTH};

/// What is wrong with a manifest, an index or a config. The text names the cause; whoever fetched the document adds its
/// name.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// Docker's format of before 2016.
    #[error("Docker schema 1 manifests are not supported")]
    SchemaOne,
    /// It is longer than [`MAX_BYTES`].
    #[error("too large: {size} bytes, the limit is {MAX_BYTES} bytes")]
    TooLarge {
        /// Its size in bytes, or how much of it was seen.
        size: u64,
    },
    /// It is no JSON, or lacks what it must have, or has too much of something.
    #[error("malformed document")]
    Malformed(#[source] serde_json::Error),
    /// Neither its media type nor its content says that it is a manifest or an index.
    #[error("neither a manifest nor an index: media type {0:?}")]
    UnknownType(String),
    /// It has the fields of a manifest and of an index, and could be taken for either.
    #[error("ambiguous: fields of both a manifest and an index")]
    Ambiguous,
    /// The config is something else than the config of a container image.
    #[error("not a container image: config media type {0:?}")]
    NotAnImage(String),
    /// A layer of a type that cannot be unpacked.
    #[error("layer {digest}: unsupported media type {media_type:?}")]
    UnknownLayer {
        /// Digest of the layer.
        digest: Digest,
        /// Its media type as written.
        media_type: String,
    },
    /// A layer that registries do not serve.
    #[error("layer {digest}: foreign layers are not served by registries")]
    ForeignLayer {
        /// Digest of the layer.
        digest: Digest,
    },
    /// Manifest and config disagree.
    #[error("layer count mismatch: {layers} in the manifest, {diff_ids} diff IDs in the config")]
    LayerCount {
        /// Layers in the manifest.
        layers: usize,
        /// Diff ids in the config.
        diff_ids: usize,
    },
    /// The index has nothing for the platform that was asked for.
    #[error("no match for platform in manifest: wanted {wanted}, offered {}", list(.offered))]
    NoPlatform {
        /// What was asked for, such as `linux/arm64/v8`.
        wanted: String,
        /// What the index has.
        offered: Vec<String>,
    },
    /// Indexes within indexes within indexes.
    #[error("indexes are nested more than {MAX_DEPTH} levels deep")]
    TooDeep,
}

impl ManifestError {
    /// What the reader could try next.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            ManifestError::SchemaOne => Some("push the image again with a builder or tool newer than 2017"),
            ManifestError::NotAnImage(_) => {
                Some("this is an artifact (a chart, a signature, a module), not an image")
            }
            ManifestError::ForeignLayer { .. } => Some(
                "push the image again with its base layers, as `--allow-nondistributable-artifacts` does",
            ),
            ManifestError::NoPlatform { .. } => {
                Some("build the image for this platform, or request another platform")
            }
            ManifestError::TooLarge { .. }
            | ManifestError::Malformed(_)
            | ManifestError::UnknownType(_)
            | ManifestError::Ambiguous
            | ManifestError::UnknownLayer { .. }
            | ManifestError::LayerCount { .. }
            | ManifestError::TooDeep => None,
        }
    }
}

fn list(offered: &[String]) -> String {
    match offered {
        [] => "nothing".to_owned(),
        few if few.len() <= 20 => few.join(", "),
        many => format!("{}, and {} more", many[..20].join(", "), many.len() - 20),
    }
}
