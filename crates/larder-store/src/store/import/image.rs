//! One image of an archive or layout.

use larder::reference::{Digest, Reference};
use larder_registry::manifest::{ImageConfig, ImageManifest, ResolvedArtifact};

/// One image that was found.
#[derive(Debug, Clone)]
pub struct ImportImage {
    /// Its names; may be empty.
    pub names: Vec<Reference>,
    /// Tags without a repository: they need a `base_name`.
    pub bare_tags: Vec<String>,
    /// Digest of the config, and its bytes.
    pub config: (Digest, Vec<u8>),
    /// The parsed config.
    pub parsed_config: ImageConfig,
    /// Index, if there is one, and manifest, with their bytes.
    pub manifests: Vec<(Digest, Vec<u8>)>,
    /// Whether a registry may know the manifest. False where it was made up, as old archives have none.
    pub has_digest: bool,
    /// The parsed manifest. [`super::Import::open`] takes its layers' digests.
    pub manifest: ImageManifest,
    /// The artifact, whose config was made; an image has none.
    pub artifact: Option<ResolvedArtifact>,
}
