//! Merges unpacked layers with the layers below them, and checks whether layers of the store fit there.

use std::io;
use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

use super::StorePuller;
use super::error::PullError;
use super::fetch_layer::{CancelUnpackOnDrop, LayerSource, StagedLayer};
use super::plan::PlannedLayer;
use super::pull_tasks::PullTaskHandle;
use super::spans::merge_span;
use crate::erofs::digest::LayerCheck;
use crate::store::layer_check::check_layer_file;
use crate::store::{LayerHandle, LayerKey, LayerMetadata};
use crate::unpack::{MergedLayers, UnpackError, UnpackProgress, UnpackedLayer, fits_lowers};

impl StorePuller {
    /// Gives an unpacked layer what it takes from those below, and moves it to its place.
    pub(super) async fn merge_layer(
        &self,
        planned: &PlannedLayer,
        staged: StagedLayer,
        below: &[LayerHandle],
        worker: &PullTaskHandle,
    ) -> Result<LayerHandle, PullError> {
        let StagedLayer { staging, unpacked, file, source, blob } = staged;
        let (planned_layer, lowers) = (planned.clone(), below.to_vec());
        let permit = if unpacked.pending.is_empty() { None } else { Some(self.permit_lowers(below).await?) };
        let progress = Arc::<UnpackProgress>::default();
        let _cancel = CancelUnpackOnDrop(Arc::clone(&progress));
        // The thread owns the directory, as during unpacking.
        let merge = move || {
            let failed = |cause| unpack_error(&planned_layer, cause);
            let visible = match permit {
                None => 0,
                Some(_) if file.needs_nearest_only() => 1,
                Some(_) => lowers.len(),
            };
            if unpacked.pending.cross_layer_links > 0 {
                check_content(&lowers, &progress).map_err(failed)?;
            }
            let lowers = open_lowers(&lowers, visible).map_err(failed)?;
            let file = file.finish(&lowers, &progress).map_err(failed)?;
            let id = if file.changed { &planned_layer.chain_id } else { &planned_layer.diff_id };
            let (key, facts) = (LayerKey::from(id), metadata_of(&planned_layer, &unpacked));
            let layer = staging.finish(&key, facts, file.file, &blob)?;
            // Its bytes are of no more use: if the image is not committed now, the layer itself is kept for the next attempt.
            if let LayerSource::Ingest(ingest) = source {
                ingest.discard()?;
            }
            Ok(layer)
        };
        merge_span(planned).in_scope(|| worker.blocking(merge)).await?
    }

    /// Returns true if a layer of the store has the right content on top of `below`.
    pub(super) async fn fits(
        &self,
        planned: &PlannedLayer,
        layer: &LayerHandle,
        below: &[LayerHandle],
        worker: &PullTaskHandle,
    ) -> Result<bool, PullError> {
        if *layer.key() == LayerKey::from(&planned.chain_id) || layer.record().fits_any_lowers() {
            return Ok(true);
        }
        let (layer, lowers) = (layer.clone(), below.to_vec());
        let permit = self.permit_lowers(below).await?;
        let check = move || {
            let lowers = open_lowers(&lowers, lowers.len())?;
            let fits =
                layer.open().and_then(|file| fits_lowers(&file, &layer.implied_directories()?, &lowers));
            drop(permit);
            fits.map_err(|error| UnpackError::file("read", layer.path(), error))
        };
        worker.blocking(check).await?.map_err(|cause| unpack_error(planned, cause))
    }

    /// The permission to open the layers below. A pull that waits for it holds nothing else that is bounded.
    async fn permit_lowers(&self, below: &[LayerHandle]) -> Result<OwnedSemaphorePermit, PullError> {
        // The layer itself as well. A layer on top of more layers than may be open is merged alone.
        let files = u32::try_from(below.len() + 1).unwrap_or(u32::MAX).min(self.files.lowers);
        let permit = Arc::clone(&self.lowers).acquire_many_owned(files).await;
        permit.map_err(|_| PullError::Abandoned)
    }
}

fn unpack_error(planned: &PlannedLayer, cause: UnpackError) -> PullError {
    PullError::Unpack { digest: planned.descriptor.digest.clone(), cause }
}

/// Fails if a layer is damaged: its bytes would be copied under a digest that covers the damage.
fn check_content(layers: &[LayerHandle], progress: &UnpackProgress) -> Result<(), UnpackError> {
    for layer in layers {
        if progress.is_canceled() {
            return Err(UnpackError::Canceled);
        }
        let damage = check_layer_file(layer.record(), layer.path(), LayerCheck::Content);
        if let Some(damage) = damage.map_err(|error| UnpackError::file("read", layer.path(), error))? {
            let cause = io::Error::new(io::ErrorKind::InvalidData, damage);
            return Err(UnpackError::file("copy files of", layer.path(), cause));
        }
    }
    Ok(())
}

/// Opens the last `count` of the layers below.
fn open_lowers(below: &[LayerHandle], count: usize) -> Result<MergedLayers, UnpackError> {
    let open = |layer: &LayerHandle| {
        layer.open().map_err(|error| UnpackError::file("open the layer", layer.path(), error))
    };
    let layers = below.iter().rev().take(count).map(open).collect::<Result<_, _>>()?;
    MergedLayers::new(layers).map_err(|error| UnpackError::file("read", "the layers below", error))
}

fn metadata_of(planned: &PlannedLayer, unpacked: &UnpackedLayer) -> LayerMetadata {
    LayerMetadata {
        diff_id: planned.diff_id.clone(),
        digest: planned.descriptor.digest.clone(),
        compressed_bytes: unpacked.compressed_bytes,
        plain_bytes: unpacked.plain_bytes,
        files: unpacked.entries,
    }
}
