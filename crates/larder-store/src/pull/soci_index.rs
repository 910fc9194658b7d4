//! The SOCI index of an image: the tables of contents of its layers, beside them in the registry.

use std::collections::HashMap;

use larder::reference::Digest;
use larder_registry::RepositorySession;
use larder_registry::manifest::{Descriptor, ImageManifest, ManifestOrIndex};
use tokio::sync::OnceCell;

use crate::lazy::toc::SociToc;

/// The SOCI index that the manifest of an image names, fetched once.
#[derive(Debug, Default)]
pub(super) struct SociIndex {
    digest: Option<Digest>,
    /// Annotations for its layers, by their digests.
    annotations: OnceCell<HashMap<Digest, (String, String)>>,
}

impl SociIndex {
    pub(super) fn of(image: &ImageManifest) -> SociIndex {
        SociIndex { digest: SociToc::index_of(image), annotations: OnceCell::new() }
    }

    /// The layer with the annotation of its table of contents, if the index has one. One request for all layers of an
    /// image.
    pub(super) async fn annotated(&self, session: &RepositorySession, layer: &Descriptor) -> Descriptor {
        let mut layer = layer.clone();
        if let Some(digest) = &self.digest {
            let annotations = self.annotations.get_or_init(|| fetch(session, digest)).await;
            layer.annotations.extend(annotations.get(&layer.digest).cloned());
        }
        layer
    }
}

async fn fetch(session: &RepositorySession, digest: &Digest) -> HashMap<Digest, (String, String)> {
    match session.manifest(&Descriptor::new("", digest.clone(), 0)).await.map(|found| found.document) {
        Ok(ManifestOrIndex::Artifact(index)) => SociToc::annotations(&index),
        Ok(_) => {
            tracing::info!(image = %session.image(), %digest, "the SOCI index of an image is something else: it is not used");
            HashMap::new()
        }
        Err(error) => {
            let error = larder::error_chain(&error);
            tracing::info!(image = %session.image(), %digest, error, "cannot fetch the SOCI index of an image");
            HashMap::new()
        }
    }
}
