//! The layers below one that is being made.

use std::io;
use std::sync::Arc;

use larder::backend::MinimumRate;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time;

use super::StorePuller;
use super::error::PullError;
use super::fill_sessions::OfferedBlob;
use crate::erofs::digest::LayerCheck;
use crate::store::layer_check::check_layer_file;
use crate::store::{LayerHandle, LayerKey};
use crate::unpack::{MergedLayers, UnpackError, UnpackProgress};

impl StorePuller {
    /// Waits until these layers are complete: their files are copied. Fails with [`PullError::NotLazily`] if this pull
    /// itself leaves data of one for later.
    pub(super) async fn wait_for_data_of(&self, layers: &[LayerHandle]) -> Result<(), PullError> {
        for layer in layers.iter().filter(|layer| layer.record().partial.is_some()) {
            if layer.is_uncommitted() {
                return Err(PullError::NotLazily);
            }
            self.wait_until_filled(layer.key(), &layer.record().facts.digest).await?;
        }
        Ok(())
    }

    /// Waits for the fill of a layer that is about to be replaced, as long as its data comes: programs read that file,
    /// and only layers of the store are filled after a restart. One that stands still is filled from the blob of this
    /// pull, `blob`, which proves that its source has the layer, and that of the fill nothing.
    pub(super) async fn wait_for_fill(
        &self,
        keys: &[LayerKey],
        blob: impl Fn(oneshot::Sender<()>) -> Option<OfferedBlob>,
    ) {
        let MinimumRate { bytes_per_second, window } = self.config.minimum_rate;
        for (key, filling) in keys.iter().filter_map(|key| Some((key, self.store.0.partials.get(key)?))) {
            let mut filled = filling.progress().filled_bytes;
            while time::timeout(window, filling.ended()).await.is_err() {
                let before = std::mem::replace(&mut filled, filling.progress().filled_bytes);
                if filled.saturating_sub(before) <= bytes_per_second * window.as_secs() {
                    let (used, mut ended) = oneshot::channel();
                    let Some(sessions) = self.layer_sessions.get(key) else { break };
                    let Some(offered) = blob(used) else { break };
                    if !filling.takes_blob(sessions.digest() == &offered.planned.descriptor.digest) {
                        break;
                    }
                    sessions.offer_blob(offered);
                    // A fill that has not begun takes none.
                    if time::timeout(window, &mut ended).await.is_err() && sessions.take_blob().is_none() {
                        let _ = ended.await;
                    }
                    break;
                }
            }
        }
    }

    /// The permission to open the layers below. A pull that waits for it holds nothing else that is bounded.
    pub(super) async fn permit_lowers(
        &self,
        below: &[LayerHandle],
    ) -> Result<OwnedSemaphorePermit, PullError> {
        // The layer itself as well. A layer on top of more layers than may be open is merged alone.
        let files = u32::try_from(below.len() + 1).unwrap_or(u32::MAX).min(self.files.lowers);
        let permit = Arc::clone(&self.lowers).acquire_many_owned(files).await;
        permit.map_err(|_| PullError::Abandoned)
    }
}

/// Fails if a layer is damaged: its bytes would be copied under a digest that covers the damage.
pub(super) fn check_content(layers: &[LayerHandle], progress: &UnpackProgress) -> Result<(), UnpackError> {
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
pub(super) fn open_lowers(below: &[LayerHandle], count: usize) -> Result<MergedLayers, UnpackError> {
    let open = |layer: &LayerHandle| {
        layer.open().map_err(|error| UnpackError::file("open the layer", layer.path(), error))
    };
    let layers = below.iter().rev().take(count).map(open).collect::<Result<_, _>>()?;
    MergedLayers::new(layers).map_err(|error| UnpackError::file("read", "the layers below", error))
}
