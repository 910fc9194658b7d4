//! GC's inputs from the store: the layers of its images, disk usage, and what it reclaims.

use async_trait::async_trait;
use larder::backend::{BackendError, CallErrorKind, Image};
use larder::gc::{
    ActivityFeed, ClockReading, FsStatsProvider, ImageActivity, LayerSource, LayerUsageIndex, ReclaimOutcome,
    ReclaimTrigger, ReclaimableSpace, SpaceHolder, SpaceReclaimer, deleted_open_files,
};
use larder::image_service::{FilesystemError, FsStats, local_disk};
use larder::reference::LayerId;

use crate::backend::{StoreBackend, backend_error};
use crate::store::{PromisedSpace, Store};

impl StoreBackend {
    /// The layers that containerd's snapshots have, each with the chain ID of the snapshot.
    pub async fn layer_snapshots(&self) -> Result<Vec<(LayerId, String)>, BackendError> {
        let found = self.ask(Store::layer_snapshots).await?;
        Ok(found.into_iter().map(|(layer, chain)| (layer.as_str().into(), chain)).collect())
    }
}

#[async_trait]
impl SpaceReclaimer for StoreBackend {
    async fn reclaimable(&self, trigger: ReclaimTrigger) -> Result<ReclaimableSpace, BackendError> {
        self.ask(move |store| store.reclaimable(trigger, &ClockReading::now())).await
    }

    async fn reclaim(&self, trigger: ReclaimTrigger) -> ReclaimOutcome {
        match self.ask(move |store| Ok(store.reclaim(trigger, &ClockReading::now()))).await {
            Ok(ReclaimOutcome { freed, error }) => ReclaimOutcome { freed, error: error.map(backend_error) },
            Err(error) => Err(error).into(),
        }
    }
}

/// The uses that began since the last observation: by mounts and, where containerd has its snapshots in the store, by
/// its containers.
#[async_trait]
impl ActivityFeed for StoreBackend {
    async fn take_activity(&self, _images: &[Image]) -> Result<Vec<ImageActivity>, BackendError> {
        self.ask(Store::take_begun_uses).await
    }
}

#[async_trait]
impl LayerSource for StoreBackend {
    async fn layers(&self, _: &[Image]) -> Result<LayerUsageIndex, BackendError> {
        self.ask(Store::layer_usage_index).await
    }
}

/// The filesystem of a store.
pub struct StoreFsStats(pub Store);

impl StoreFsStats {
    /// Measures on a thread where it may block, after `first`.
    async fn measure_after(
        &self,
        first: impl FnOnce(&Store) + Send + 'static,
    ) -> Result<FsStats, FilesystemError> {
        let store = self.0.clone();
        let measured = tokio::task::spawn_blocking(move || {
            first(&store);
            let disk = local_disk(store.root());
            disk.map(|disk| disk.map(|disk| without_promised(disk, &store)))
        });
        match measured.await {
            Ok(Ok(disk)) => Ok(disk.unwrap_or_default()),
            Ok(Err(error)) => Err(BackendError::caused_by(CallErrorKind::Other, error).into()),
            Err(error) => Err(BackendError::caused_by(CallErrorKind::Canceled, error).into()),
        }
    }
}

/// The filesystem as if incomplete layers took already what they are going to take: removing one gives it back.
fn without_promised(disk: FsStats, store: &Store) -> FsStats {
    let promised = store.promised().unwrap_or_else(|error| {
        tracing::warn!("{}", larder::error_chain(&error));
        PromisedSpace::default()
    });
    FsStats { available: disk.available.saturating_sub(promised.total().bytes), ..disk }
}

#[async_trait]
impl FsStatsProvider for StoreFsStats {
    async fn deleted_open_files(&self) -> Vec<SpaceHolder> {
        deleted_open_files(self.0.root().to_owned()).await
    }

    async fn measure(&self) -> Result<FsStats, FilesystemError> {
        self.measure_after(|_| ()).await
    }

    async fn measure_after_deletion(&self) -> Result<FsStats, FilesystemError> {
        self.measure_after(|store| {
            if let Err(error) = store.empty_trash() {
                tracing::warn!("{error}");
            }
        })
        .await
    }
}
