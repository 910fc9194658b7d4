//! Resolves an image name to the documents that describe the image: index, manifest and config, without layers.

use std::pin::Pin;

use bytes::Bytes;
use larder::reference::Digest;

use super::error::{FetchError, FetchErrorKind, FetchTarget};
use super::next_step::OtherFailures;
use super::session::{RepositorySession, ResolvedManifest};
use crate::manifest::{
    ArtifactCandidates, ArtifactImage, Descriptor, ImageConfig, ImageIndex, ImageManifest, MAX_DEPTH,
    MAX_DOCUMENTS, ManifestCandidate, ManifestError, ManifestOrIndex, PlatformMatcher, ResolvedArtifact,
};

/// Looks up a config that need not be fetched.
type KnownConfigs<'a> =
    dyn Fn(&Digest) -> Pin<Box<dyn Future<Output = Option<Bytes>> + Send>> + Send + Sync + 'a;

/// The documents of one image.
#[derive(Debug, Clone)]
pub struct ImageDocuments {
    /// The target of the name: the index, or the manifest itself. Its digest is that of `NAME@DIGEST`.
    pub target: ResolvedManifest,
    /// The manifest for the platform; equal to `target` if that is a manifest.
    pub manifest: ResolvedManifest,
    /// The parsed manifest, with one layer for each diff ID of the config.
    pub layers: ImageManifest,
    /// The config.
    pub config: ImageConfig,
    /// The config's bytes as received, or as made for an artifact; their digest is the image ID.
    pub config_raw: Bytes,
    /// The artifact, if it is no image.
    pub artifact: Option<ResolvedArtifact>,
}

impl RepositorySession {
    /// Fetches the documents of the image that the session's name points at, for the best platform on offer.
    ///
    /// A name that points at a manifest selects that manifest, whatever its platform, unless a caller requested one.
    pub async fn documents(&self, platform: &PlatformMatcher) -> Result<ImageDocuments, FetchError> {
        self.documents_with_known_configs(platform, &|_| Box::pin(std::future::ready(None))).await
    }

    /// Like [`documents`](RepositorySession::documents); a config that `known` returns for its digest is not fetched.
    pub async fn documents_with_known_configs(
        &self,
        platform: &PlatformMatcher,
        known: &KnownConfigs<'_>,
    ) -> Result<ImageDocuments, FetchError> {
        let target = self.resolve().await?;
        let index = match &target.document {
            ManifestOrIndex::Manifest(_) => {
                let documents = self.finish(target.clone(), target, known).await?;
                let built_for = &documents.config.platform;
                if platform.is_requested() && !built_for.os.is_empty() && platform.rank(built_for).is_none() {
                    return Err(self.no_platform(&documents.target, platform, vec![built_for.to_string()]));
                }
                return Ok(documents);
            }
            ManifestOrIndex::Artifact(_) => return self.finish_artifact(target.clone(), target, known).await,
            ManifestOrIndex::Index(index) => index,
        };
        let mut offered = index.platforms();
        let (mut fetched, mut other_content, mut artifacts) = (0, None, ArtifactCandidates::default());
        let mut stack = Vec::new();
        push_candidates(&mut stack, index, platform, 1);
        while let Some(PendingManifest { descriptor, matches, depth }) = stack.pop() {
            fetched += 1;
            if depth > MAX_DEPTH || fetched > MAX_DOCUMENTS {
                return Err(self.unusable(&descriptor, &target.host, ManifestError::TooDeep));
            }
            let found = match self.manifest(&descriptor).await {
                Err(error) if is_other_content(&error) => {
                    other_content.get_or_insert(error);
                    continue;
                }
                found => found?,
            };
            match &found.document {
                ManifestOrIndex::Index(index) => {
                    offered.extend(index.platforms());
                    push_candidates(&mut stack, index, platform, depth + 1);
                }
                // Beside the images of an index it is a signature, an SBOM, or a chart.
                ManifestOrIndex::Artifact(artifact) => {
                    artifacts.add(found.clone(), matches, &artifact.artifact_type, &descriptor.digest);
                }
                ManifestOrIndex::Manifest(_) => {
                    let documents = self.finish(target.clone(), found, known).await?;
                    let built_for = &documents.config.platform;
                    // Without a platform in the index, the config decides; without one there, the manifest is accepted.
                    if matches || built_for.os.is_empty() || platform.rank(built_for).is_some() {
                        return Ok(documents);
                    }
                    offered.push(built_for.to_string());
                }
            }
        }
        match other_content {
            Some(error) if offered.is_empty() => return Err(error),
            Some(_) => {}
            None => {
                let chosen = artifacts.choose(!offered.is_empty());
                let chosen =
                    chosen.map_err(|error| self.unusable(&target.descriptor, &target.host, error))?;
                if let Some(artifact) = chosen {
                    return self.finish_artifact(target, artifact, known).await;
                }
            }
        }
        offered.dedup();
        Err(self.no_platform(&target, platform, offered))
    }

    fn no_platform(
        &self,
        target: &ResolvedManifest,
        platform: &PlatformMatcher,
        offered: Vec<String>,
    ) -> FetchError {
        let error = ManifestError::NoPlatform { wanted: platform.wanted().to_string(), offered };
        self.unusable(&target.descriptor, &target.host, error)
    }

    async fn finish(
        &self,
        target: ResolvedManifest,
        manifest: ResolvedManifest,
        known: &KnownConfigs<'_>,
    ) -> Result<ImageDocuments, FetchError> {
        let problem = |error| self.unusable(&manifest.descriptor, &manifest.host, error);
        let ManifestOrIndex::Manifest(layers) = manifest.document.clone() else {
            return Err(problem(ManifestError::Ambiguous));
        };
        let config_raw = self.config_or_known(&layers.config, known).await?;
        let config = ImageConfig::parse(&config_raw);
        let config = config.map_err(|error| self.unusable_config(&layers.config, &manifest.host, error))?;
        config.check_layers(layers.layers.len()).map_err(problem)?;
        Ok(ImageDocuments { target, layers: *layers, config, config_raw, manifest, artifact: None })
    }

    /// The documents of an artifact: those of the image as which a store keeps it.
    async fn finish_artifact(
        &self,
        target: ResolvedManifest,
        manifest: ResolvedManifest,
        known: &KnownConfigs<'_>,
    ) -> Result<ImageDocuments, FetchError> {
        let problem = |error| self.unusable(&manifest.descriptor, &manifest.host, error);
        let ManifestOrIndex::Artifact(artifact) = manifest.document.clone() else {
            return Err(problem(ManifestError::Ambiguous));
        };
        if self.refuse_artifacts {
            return Err(problem(ManifestError::NotAnImage(artifact.artifact_type)));
        }
        // Before its config is fetched.
        artifact.contents().map_err(problem)?;
        let own_config = match artifact.known_config() {
            Some(raw) => raw.to_vec(),
            None => self.config_or_known(&artifact.config, known).await?.to_vec(),
        };
        let config = artifact.config.clone();
        let image = artifact.into_image(manifest.descriptor.digest.clone(), own_config);
        let image = image.map_err(|error| match error {
            ManifestError::Malformed(_) => self.unusable_config(&config, &manifest.host, error),
            error => problem(error),
        })?;
        let ArtifactImage { artifact, manifest: layers, config, config_raw } = image;
        let (artifact, config_raw) = (Some(artifact), config_raw.into());
        Ok(ImageDocuments { target, manifest, layers, config, config_raw, artifact })
    }

    async fn config_or_known(
        &self,
        config: &Descriptor,
        known: &KnownConfigs<'_>,
    ) -> Result<Bytes, FetchError> {
        match known(&config.digest).await.filter(|raw| config.digest.check(raw).is_ok()) {
            Some(raw) => Ok(raw),
            None => self.config(config).await,
        }
    }

    fn unusable_config(&self, config: &Descriptor, host: &str, error: ManifestError) -> FetchError {
        let target = FetchTarget::Config(config.digest.clone());
        self.error(target, host.to_owned(), FetchErrorKind::Manifest(error), OtherFailures::default())
    }

    fn unusable(&self, descriptor: &Descriptor, host: &str, error: ManifestError) -> FetchError {
        let what = FetchTarget::Manifest(descriptor.digest.to_string());
        self.error(what, host.to_owned(), FetchErrorKind::Manifest(error), OtherFailures::default())
    }
}

fn is_other_content(error: &FetchError) -> bool {
    matches!(&*error.kind, FetchErrorKind::Manifest(cause) if cause.is_other_content())
}

/// An entry of an index that is to be fetched.
struct PendingManifest {
    descriptor: Descriptor,
    /// Whether the index declares the platform.
    matches: bool,
    /// Nesting depth of the index.
    depth: usize,
}

/// Adds the entries of an index for a platform. The best candidate is on top.
fn push_candidates(
    stack: &mut Vec<PendingManifest>,
    index: &ImageIndex,
    platform: &PlatformMatcher,
    depth: usize,
) {
    let found = index.candidates(platform).into_iter().rev();
    stack.extend(found.map(|next| {
        let ManifestCandidate { descriptor, matches } = next;
        PendingManifest { descriptor: descriptor.clone(), matches, depth }
    }));
}
