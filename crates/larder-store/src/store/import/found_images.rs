//! The images of an archive, and what it has beside them: content of other kinds, and images for other platforms.

use larder::reference::{Digest, Platform};
use larder_registry::manifest::{
    ArtifactCandidates, ArtifactManifest, Descriptor, ImageIndex, MAX_DEPTH, MAX_DOCUMENTS, ManifestError,
    PlatformMatcher,
};

use super::error::ImportError;
use super::image::ImportImage;

/// A manifest of an archive that is not loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOutManifest {
    /// Its digest; that of the config where the archive has no manifests.
    pub digest: Digest,
    /// Why it is left out.
    pub reason: String,
}

/// Images of an archive.
#[derive(Debug, Default)]
pub(super) struct FoundImages {
    pub(super) images: Vec<ImportImage>,
    pub(super) left_out: Vec<LeftOutManifest>,
    /// The error of the first manifest that was left out, for an archive without an image.
    first_error: Option<ImportError>,
    /// Platforms of the images that were left out.
    pub(super) offered: Vec<String>,
}

impl FoundImages {
    /// Leaves a manifest out if `error` says that the archive is in order, and has no image for this platform there.
    pub(super) fn leave_out(&mut self, digest: &Digest, error: ImportError) -> Result<(), ImportError> {
        let reason = match &error {
            ImportError::NoPlatform { offered, .. } => {
                self.offered.extend(offered.iter().cloned());
                format!("for platform {}", offered.join(", "))
            }
            ImportError::Manifest { cause, .. } if cause.is_other_content() => cause.to_string(),
            error if error.is_other_content() => error.to_string(),
            _ => return Err(error),
        };
        self.left_out.push(LeftOutManifest { digest: digest.clone(), reason });
        self.first_error.get_or_insert(error);
        Ok(())
    }

    /// Adds an image, or its names and documents to the same image: it was pulled from several repositories.
    pub(super) fn add(&mut self, image: ImportImage) {
        let is_same = |other: &&mut ImportImage| {
            other.config.0 == image.config.0
                && (other.manifests == image.manifests || !other.has_digest && !image.has_digest)
        };
        let Some(other) = self.images.iter_mut().find(is_same) else {
            return self.images.push(image);
        };
        other.names.extend(image.names);
        other.bare_tags.extend(image.bare_tags);
        for document in image.manifests {
            if !other.manifests.contains(&document) {
                other.manifests.push(document);
            }
        }
    }

    /// The images, unless there is none.
    pub(super) fn finish(
        self,
        platform: &PlatformMatcher,
    ) -> Result<(Vec<ImportImage>, Vec<LeftOutManifest>), ImportError> {
        let FoundImages { images, left_out, first_error, mut offered } = self;
        if !images.is_empty() {
            return Ok((images, left_out));
        }
        offered.dedup();
        Err(match first_error {
            _ if !offered.is_empty() => {
                ImportError::NoPlatform { wanted: platform.wanted().to_string(), offered }
            }
            Some(error) => error,
            None => ImportError::NoImages,
        })
    }
}

/// An artifact of an archive.
#[derive(Debug)]
pub(super) struct FoundArtifact {
    pub(super) manifest: ArtifactManifest,
    /// The indexes that lead to it, and its manifest.
    pub(super) documents: Vec<(Digest, Vec<u8>)>,
    /// The note as what it was pulled.
    pub(super) pulled_as: Option<String>,
}

/// The search for the image of one name.
pub(super) struct PlatformSearch<'a> {
    pub(super) platform: &'a PlatformMatcher,
    /// Whether the name may be that of an artifact.
    pub(super) takes_artifact: bool,
    /// Artifacts of indexes.
    pub(super) artifacts: ArtifactCandidates<FoundArtifact>,
    /// The note of the accepted manifest as what it was pulled.
    pub(super) pulled_as: Option<String>,
    /// Present manifests for other platforms.
    pub(super) other_platforms: Vec<LeftOutManifest>,
    documents: usize,
    pub(super) offered: Vec<String>,
    first_error: Option<ImportError>,
}

impl<'a> PlatformSearch<'a> {
    pub(super) fn new(platform: &'a PlatformMatcher, takes_artifact: bool) -> PlatformSearch<'a> {
        PlatformSearch {
            platform,
            takes_artifact,
            artifacts: ArtifactCandidates::default(),
            pulled_as: None,
            other_platforms: Vec::new(),
            documents: 0,
            offered: Vec::new(),
            first_error: None,
        }
    }

    /// Notes an entry of an index that is for another platform.
    pub(super) fn pass_over(&mut self, entry: &Descriptor) {
        let other = entry.platform.as_ref().filter(|_| !entry.is_attestation());
        if let Some(other) = other.filter(|other| self.platform.rank(other).is_none()) {
            let (digest, reason) = (entry.digest.clone(), format!("for platform {other}"));
            self.other_platforms.push(LeftOutManifest { digest, reason });
        }
    }

    /// Counts a document that so many indexes lead to.
    pub(super) fn count(&mut self, depth: usize) -> Result<(), ManifestError> {
        self.documents += 1;
        if depth > MAX_DEPTH || self.documents > MAX_DOCUMENTS { Err(ManifestError::TooDeep) } else { Ok(()) }
    }

    /// Notes the platforms of an index.
    pub(super) fn offer(&mut self, index: &ImageIndex) {
        self.offered.extend(index.platforms());
    }

    /// Returns true if the image is for the platform: an index says so, or else its config, or nothing does.
    pub(super) fn accepts(&mut self, image: &ImportImage, matches: bool) -> bool {
        let built_for = &image.parsed_config.platform;
        let accepted = matches || built_for.os.is_empty() || self.platform.rank(built_for).is_some();
        if !accepted {
            self.offered.push(built_for.to_string());
        }
        accepted
    }

    /// Notes why a candidate cannot be used. Returns that it is no image.
    pub(super) fn failed(&mut self, error: ImportError) -> Option<ImportImage> {
        self.first_error.get_or_insert(error);
        None
    }

    /// The artifact that the name stands for, if no image is.
    pub(super) fn take_artifact(&mut self) -> Result<Option<FoundArtifact>, ManifestError> {
        if self.first_error.is_some() {
            return Ok(None);
        }
        std::mem::take(&mut self.artifacts).choose(!self.offered.is_empty())
    }

    /// The error for an image of this platform only.
    pub(super) fn no_platform(&mut self, offered: &Platform) -> ImportError {
        self.offered.push(offered.to_string());
        ImportError::NoPlatform {
            wanted: self.platform.wanted().to_string(),
            offered: std::mem::take(&mut self.offered),
        }
    }

    /// Why there is no image.
    pub(super) fn end(self) -> ImportError {
        let PlatformSearch { platform, mut offered, first_error, .. } = self;
        offered.dedup();
        match first_error {
            Some(error @ ImportError::Missing { .. }) => error,
            Some(error) if offered.is_empty() => error,
            _ => ImportError::NoPlatform { wanted: platform.wanted().to_string(), offered },
        }
    }
}
