//! The plan of a pull, computed from the image's documents alone. Pure.

use larder::reference::Digest;

use crate::store::layer_index::{LayerIndex, LayerIndexHead};
use crate::store::{ClaimOutcome, CommitArtifact, CommitLayer, LayerHandle, LayerKey, LayerMetadata};
use crate::unpack::{ExpectedLayer, FinishedLayer, UnpackedLayer};
use larder_registry::ImageDocuments;
use larder_registry::manifest::{ArtifactFile, Descriptor, ImageConfig, ImageManifest, ResolvedArtifact};

/// The layers of an image, from the bottom up.
#[derive(Clone)]
pub(super) struct PullPlan {
    pub(super) layers: Vec<PlannedLayer>,
    /// Type and own config of an artifact; an image has none.
    pub(super) artifact: Option<CommitArtifact>,
    /// Digest of the config, and its bytes.
    pub(super) config: (Digest, Vec<u8>),
}

/// One layer of the image.
#[derive(Debug, Clone)]
pub(super) struct PlannedLayer {
    pub(super) descriptor: Descriptor,
    pub(super) diff_id: Digest,
    /// Identity of this layer on top of those below it.
    pub(super) chain_id: Digest,
    /// Names of the file that the blob itself is; none for an archive.
    pub(super) files: Vec<ArtifactFile>,
}

impl PlannedLayer {
    /// What its blob must be.
    pub(super) fn expected(&self) -> ExpectedLayer<'_> {
        let Descriptor { digest, size, .. } = &self.descriptor;
        ExpectedLayer { digest: Some(digest), size: Some(*size), diff_id: &self.diff_id }
    }

    /// Facts about the layer once it is unpacked.
    pub(super) fn metadata(&self, unpacked: &UnpackedLayer) -> LayerMetadata {
        LayerMetadata {
            diff_id: self.diff_id.clone(),
            digest: self.descriptor.digest.clone(),
            compressed_bytes: unpacked.compressed_bytes,
            plain_bytes: unpacked.plain_bytes,
            skipped_xattrs: unpacked.skipped_xattrs,
        }
    }

    /// Index of the layer that its blob was unpacked into.
    pub(super) fn index(&self, unpacked: UnpackedLayer, finished: &FinishedLayer) -> LayerIndex {
        let head = LayerIndexHead {
            diff_id: self.diff_id.clone(),
            digest: self.descriptor.digest.clone(),
            size: unpacked.compressed_bytes,
            compression: unpacked.compression,
            erofs: finished.file.clone(),
        };
        LayerIndex { head, checkpoints: unpacked.checkpoints }
    }

    /// Returns true if this layer of the store fits on the layers below, whatever they are.
    pub(super) fn surely_fits(&self, layer: &LayerHandle) -> bool {
        *layer.key() == LayerKey::from(&self.chain_id) || layer.record().fits_any_lowers()
    }
}

impl PullPlan {
    pub(super) fn of(documents: &ImageDocuments) -> PullPlan {
        let config = (documents.layers.config.digest.clone(), documents.config_raw.to_vec());
        PullPlan::new(&documents.layers, &documents.config, config, documents.artifact.as_ref())
    }

    /// The plan of a manifest whose layers are as many as the config's diff ids.
    pub(super) fn new(
        manifest: &ImageManifest,
        parsed: &ImageConfig,
        config: (Digest, Vec<u8>),
        artifact: Option<&ResolvedArtifact>,
    ) -> PullPlan {
        let mut layers: Vec<PlannedLayer> = Vec::with_capacity(manifest.layers.len());
        for (descriptor, diff_id) in manifest.layers.iter().zip(&parsed.diff_ids) {
            let chain_id = chain_id(layers.last().map(|below| &below.chain_id), diff_id);
            let (descriptor, diff_id) = (descriptor.clone(), diff_id.clone());
            layers.push(PlannedLayer { descriptor, diff_id, chain_id, files: Vec::new() });
        }
        for (layer, content) in layers.iter_mut().zip(artifact.iter().flat_map(|artifact| &artifact.contents))
        {
            layer.files.clone_from(&content.files);
        }
        let artifact = artifact.map(|ResolvedArtifact { manifest, config, .. }| CommitArtifact {
            artifact_type: manifest.artifact_type.clone(),
            config: (manifest.config.digest.clone(), config.clone()),
        });
        PullPlan { layers, artifact, config }
    }

    /// The layers that this pull has to fetch itself.
    pub(super) fn to_fetch(&self, claims: &[ClaimOutcome]) -> impl Iterator<Item = &PlannedLayer> {
        let claimed = self.layers.iter().zip(claims);
        claimed.filter(|(_, claim)| matches!(claim, ClaimOutcome::Fetch(_))).map(|(layer, _)| layer)
    }

    /// Returns true if nothing is fetched: each layer is present, durable, and sure to fit on the layers below.
    pub(super) fn is_present(&self, claims: &[ClaimOutcome]) -> bool {
        self.layers.iter().zip(claims).all(|(planned, claim)| {
            matches!(claim, ClaimOutcome::Present(layer) if !layer.is_uncommitted() && planned.surely_fits(layer))
        })
    }

    /// The layers as a commit takes them.
    pub(super) fn committed(&self, layers: &[LayerHandle]) -> Vec<CommitLayer> {
        let planned_layers = self.layers.iter().zip(layers);
        planned_layers
            .map(|(planned, layer)| CommitLayer {
                layer: layer.clone(),
                digest: planned.descriptor.digest.clone(),
                size: planned.descriptor.size,
                media_type: planned.descriptor.media_type.clone(),
            })
            .collect()
    }
}

/// The chain id of the OCI image specification: the bottom layer's is its diff id; each further one is the SHA-256 of
/// the chain below, a space, and its own diff id.
pub fn chain_id(below: Option<&Digest>, diff_id: &Digest) -> Digest {
    let Some(below) = below else { return diff_id.clone() };
    Digest::sha256(format!("{below} {diff_id}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chain_ids_hash_the_chain_below() {
        let digest = |c: char| Digest::parse(&format!("sha256:{}", c.to_string().repeat(64))).unwrap();
        let bottom = chain_id(None, &digest('a'));
        assert_eq!(bottom, digest('a'));
        // printf 'sha256:aaa... sha256:bbb...' | sha256sum
        let expected = "ccd722928bd92476ba1745586fed6e45a102504185ad88cd89e01ff116fd146c";
        assert_eq!(chain_id(Some(&bottom), &digest('b')).hex(), expected);
    }
}
