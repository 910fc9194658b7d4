//! Proof that the repository of a pull has the blobs that the pull would take from the store instead.
//!
//! Digests are no secrets: a manifest may name any config and any layer. Without proof, a repository that names the config of
//! a private image would make that image available to all who may pull from that repository. Therefore a pull reuses
//!
//! - a config only if its image was pulled from this repository before; otherwise the config is fetched, it is small;
//! - a layer only if the registry serves its blob to this pull's credential, and the stored layer came from that blob.
//!   A layer stored from another blob, for example with another compression, is fetched and verified once more.
//!
//! A manifest that this repository served before, and serves again to this credential, needs no further proof.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use futures_util::future::try_join_all;
use larder::reference::{Digest, Reference};
use larder_registry::manifest::Descriptor;
use larder_registry::{FetchError, ImageDocuments, RepositorySession};

use super::plan::PlannedLayer;
use crate::store::{ImageRecord, LayerRecord, Store};

/// The config of this digest, if the store has it and this repository has served it before. Blocks.
pub(super) fn served_config(store: &Store, repository: &Reference, digest: &Digest) -> Option<Bytes> {
    let image = store.image(digest).ok().flatten()?;
    let bytes = || store.blob(digest).ok().flatten().map(Bytes::from);
    has_served(&image, repository).then(bytes).flatten()
}

/// Returns true if this repository has served the config of `image` before.
fn has_served(image: &ImageRecord, repository: &Reference) -> bool {
    let named = |name: &String| name.split_once('@').is_some_and(|(name, _)| name == repository.name());
    image.digests.iter().any(named)
}

/// Returns true if this repository has served exactly these documents before.
pub(super) fn has_served_documents(
    image: &ImageRecord,
    repository: &Reference,
    documents: &ImageDocuments,
) -> bool {
    let target = format!("{}@{}", repository.name(), documents.target.descriptor.digest);
    image.digests.contains(&target) && image.manifests.contains(&documents.manifest.descriptor.digest)
}

/// The blobs of one pull that its repository has proved to have.
#[derive(Debug, Default)]
pub(super) struct ProvedBlobs {
    /// The repository served the same documents before.
    all: bool,
    digests: Mutex<HashSet<Digest>>,
}

impl ProvedBlobs {
    pub(super) fn new(all: bool) -> ProvedBlobs {
        ProvedBlobs { all, digests: Mutex::default() }
    }

    /// Requests the proof for each of these blobs; fails if the registry refuses one.
    pub(super) async fn check<'b>(
        &self,
        session: &RepositorySession,
        blobs: impl Iterator<Item = &'b Descriptor>,
    ) -> Result<(), FetchError> {
        if self.all {
            return Ok(());
        }
        let mut seen = HashSet::new();
        let missing: Vec<_> =
            blobs.filter(|blob| !self.has(&blob.digest) && seen.insert(&blob.digest)).collect();
        try_join_all(missing.iter().map(|blob| session.check_blob(blob))).await?;
        for blob in missing {
            self.add(&blob.digest);
        }
        Ok(())
    }

    fn add(&self, digest: &Digest) {
        self.digests.lock().unwrap_or_else(PoisonError::into_inner).insert(digest.clone());
    }

    /// Returns true if a stored layer may stand for the blob that the manifest names.
    pub(super) fn covers(&self, layer: &LayerRecord, planned: &PlannedLayer) -> bool {
        let (facts, blob) = (&layer.facts, &planned.descriptor);
        let is_from_blob = facts.digest == blob.digest && facts.compressed_bytes == blob.size;
        self.all || (is_from_blob && self.has(&blob.digest))
    }

    fn has(&self, digest: &Digest) -> bool {
        self.digests.lock().unwrap_or_else(PoisonError::into_inner).contains(digest)
    }
}
