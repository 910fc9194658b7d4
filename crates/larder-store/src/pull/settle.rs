//! Completes staged layers on the layers below, and moves them to their places.

use std::sync::Arc;

use larder::reference::Digest;
use tokio::sync::OwnedSemaphorePermit;

use super::StorePuller;
use super::error::PullError;
use super::fetch_layer::{LayerSource, StagedLayer};
use super::layer_fetches::LayerFetches;
use super::plan::PlannedLayer;
use super::spans::settle_span;
use crate::store::{LayerHandle, LayerKey, LayerMetadata};
use crate::unpack::{MergedLayers, UnpackError, UnpackedLayer};

impl StorePuller {
    /// Gives a staged layer what it takes from those below, and moves it to its place.
    pub(super) async fn settle_staged(
        &self,
        wanted: &PlannedLayer,
        staged: StagedLayer,
        below: &[LayerHandle],
        own: &mut LayerFetches,
    ) -> Result<LayerHandle, PullError> {
        let StagedLayer { staging, unpacked, image, source } = staged;
        let (diff_id, chain_id) = (wanted.diff_id.clone(), wanted.chain_id.clone());
        let (digest, lowers) = (wanted.descriptor.digest.clone(), below.to_vec());
        let open = if unpacked.pending.is_empty() { None } else { Some(self.may_open_lowers(below).await?) };
        // The thread owns the directory, as during unpacking.
        let settle = move || {
            let failed = |cause| PullError::Unpack { digest: digest.clone(), cause };
            let visible = if image.needs_nearest_only() { 1 } else { lowers.len() };
            let visible = if open.is_some() { visible } else { 0 };
            let lowers = open_lowers(&lowers, visible).map_err(failed)?;
            let facts = facts_of(&unpacked, diff_id.clone(), digest.clone());
            let image = image.finish(&lowers).map_err(failed)?;
            let key = LayerKey::from(if image.changed { &chain_id } else { &diff_id });
            let layer = staging.finish(&key, facts, image.file)?;
            // Its bytes are of no more use: if the image is not committed now, the layer itself is kept for the next try.
            if let LayerSource::Ingest(ingest) = source {
                ingest.discard()?;
            }
            Ok::<_, PullError>(layer)
        };
        let layer = settle_span(wanted).in_scope(|| own.worker.blocking(settle)).await??;
        own.fetched.insert(layer.key().clone());
        Ok(layer)
    }

    /// The right to have these layers open. What waits for it holds nothing else that is bounded.
    pub(super) async fn may_open_lowers(
        &self,
        below: &[LayerHandle],
    ) -> Result<OwnedSemaphorePermit, PullError> {
        // The layer itself as well. An image of more layers than may be open is settled alone.
        let files = u32::try_from(below.len() + 1).unwrap_or(u32::MAX).min(self.files.lowers);
        let permit = Arc::clone(&self.lowers).acquire_many_owned(files).await;
        permit.map_err(|_| PullError::Abandoned)
    }
}

/// Opens the last `count` of the layers below.
pub(super) fn open_lowers(below: &[LayerHandle], count: usize) -> Result<MergedLayers, UnpackError> {
    let open = |layer: &LayerHandle| {
        layer.open().map_err(|error| UnpackError::file("open the layer", layer.path(), error))
    };
    let layers = below.iter().rev().take(count).map(open).collect::<Result<_, _>>()?;
    MergedLayers::new(layers).map_err(|error| UnpackError::file("read", "the layers below", error))
}

fn facts_of(unpacked: &UnpackedLayer, diff_id: Digest, digest: Digest) -> LayerMetadata {
    LayerMetadata {
        diff_id,
        digest,
        compressed_bytes: unpacked.compressed_bytes,
        plain_bytes: unpacked.plain_bytes,
        files: unpacked.entries,
    }
}
