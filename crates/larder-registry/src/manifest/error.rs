//! Errors in documents of an image.

use larder::reference::Digest;

use super::limits::{MAX_BYTES, MAX_DEPTH, MAX_DOCUMENTS, MAX_LISTED_TEXT};

/// Why a manifest, index or config cannot be used. The text names the cause; the caller that fetched the document adds
/// its name.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// Docker's format before 2016.
    #[error("Docker schema 1 manifests are not supported")]
    SchemaOne,
    /// The document exceeds [`MAX_BYTES`].
    #[error("too large: {size} bytes, the limit is {MAX_BYTES} bytes")]
    TooLarge {
        /// Its size in bytes, or the bytes read so far.
        size: u64,
    },
    /// Invalid JSON, a missing field, or a list beyond its bound.
    #[error("malformed document")]
    Malformed(#[source] serde_json::Error),
    /// Neither the media type nor the content identifies a manifest or an index.
    #[error("neither a manifest nor an index: media type {0:?}")]
    UnknownType(String),
    /// The fields of a manifest and of an index at once.
    #[error("ambiguous: fields of both a manifest and an index")]
    Ambiguous,
    /// It describes an artifact, which is of this type.
    #[error("not a container image, but an artifact of the type {0:?}")]
    NotAnImage(String),
    /// The media type of a layer cannot be unpacked.
    #[error("layer {digest}: unsupported media type {media_type:?}")]
    UnknownLayer {
        /// Digest of the layer.
        digest: Digest,
        /// Its media type as written.
        media_type: String,
    },
    /// Two layers of an artifact have one digest and are different content.
    #[error("layer {digest} is there twice: with another size, or as a file and as an archive")]
    AmbiguousLayer {
        /// Their digest.
        digest: Digest,
    },
    /// A layer that registries do not serve.
    #[error("layer {digest}: foreign layers are not served by registries")]
    ForeignLayer {
        /// Digest of the layer.
        digest: Digest,
    },
    /// A field of the config is longer than 1,024 bytes.
    #[error("{field} is too long: {length} bytes, the limit is {MAX_LISTED_TEXT} bytes")]
    FieldTooLong {
        /// The field, such as `config.User`.
        field: &'static str,
        /// Its length in bytes.
        length: usize,
    },
    /// The numbers of layers and diff IDs differ.
    #[error("layer count mismatch: {layers} in the manifest, {diff_ids} diff IDs in the config")]
    LayerCount {
        /// Layers in the manifest.
        layers: usize,
        /// Diff IDs in the config.
        diff_ids: usize,
    },
    /// The index has no entry for the requested platform.
    #[error("no match for platform in manifest: wanted {wanted}, offered {}", list(.offered))]
    NoPlatform {
        /// The requested platform, such as `linux/arm64/v8`.
        wanted: String,
        /// The platforms of the index.
        offered: Vec<String>,
    },
    /// A layer of an artifact has no place there.
    #[error("path {path:?} of a file: {problem}")]
    ArtifactPath {
        /// The path that the manifest names, at most 200 characters.
        path: String,
        /// Why it cannot be one.
        problem: String,
    },
    /// An index lists several artifacts, and says of none for which platform it is.
    #[error("an index of several artifacts: {}", list(.artifacts))]
    SeveralArtifacts {
        /// Type and digest of each.
        artifacts: Vec<String>,
    },
    /// Indexes are nested too deep, or lead to too many manifests.
    #[error("no image within {MAX_DEPTH} levels of indexes and {MAX_DOCUMENTS} manifests")]
    TooDeep,
}

impl ManifestError {
    /// Returns true if the document is valid and describes other content than an image of layers that can be unpacked,
    /// such as a signature, an SBOM or a chart. An index may list such documents beside images.
    pub fn is_other_content(&self) -> bool {
        matches!(
            self,
            ManifestError::NotAnImage(_)
                | ManifestError::UnknownLayer { .. }
                | ManifestError::UnknownType(_)
                | ManifestError::ForeignLayer { .. }
                | ManifestError::SeveralArtifacts { .. }
        )
    }

    /// The next step for the user.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            ManifestError::SchemaOne => Some("push the image again with a builder or tool newer than 2017"),
            ManifestError::NotAnImage(_) => Some(
                "a container needs an image; mount an artifact as an image volume, or pull it by its own name",
            ),
            ManifestError::SeveralArtifacts { .. } => Some("pull one of them by its digest"),
            ManifestError::ForeignLayer { .. } => Some(
                "push the image again with its base layers, as `--allow-nondistributable-artifacts` does",
            ),
            ManifestError::NoPlatform { .. } => Some("build the image for this platform"),
            ManifestError::LayerCount { .. } => {
                Some("build the image again: its manifest names the config of another image")
            }
            ManifestError::TooLarge { .. }
            | ManifestError::Malformed(_)
            | ManifestError::UnknownType(_)
            | ManifestError::Ambiguous
            | ManifestError::AmbiguousLayer { .. }
            | ManifestError::UnknownLayer { .. }
            | ManifestError::FieldTooLong { .. }
            | ManifestError::ArtifactPath { .. }
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
