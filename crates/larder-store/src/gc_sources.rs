//! GC's inputs from the store: the layers and labels of its images, disk usage, and what it reclaims.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use larder::backend::{BackendError, CallErrorKind, Image};
use larder::gc::{
    ClockReading, FsStatsProvider, LayerSource, LayerUsageIndex, ReclaimOutcome, ReclaimTrigger,
    ReclaimableSpace, SpaceHolder, SpaceReclaimer, deleted_open_files,
};
use larder::image_service::{FilesystemError, FsStats, local_disk};
use larder::reference::{ImageId, LayerId};

use crate::backend::{StoreBackend, backend_error};
use crate::store::{Store, StoreError};
use larder_registry::manifest::ImageConfig;

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

/// The layers of a store's images, and their labels. One small file is read for each image, once in its life.
pub struct StoreLayerSource {
    store: StoreBackend,
    known: Arc<Mutex<HashMap<ImageId, CachedImageLabels>>>,
}

/// The labels of an image; `None` where its config cannot be read.
type CachedImageLabels = Option<BTreeMap<String, String>>;

impl StoreLayerSource {
    /// Of this store; nothing is read yet.
    pub fn new(store: StoreBackend) -> StoreLayerSource {
        StoreLayerSource { store, known: Arc::default() }
    }
}

#[async_trait]
impl LayerSource for StoreLayerSource {
    async fn layers(&self, images: &[Image]) -> Result<LayerUsageIndex, BackendError> {
        let known = Arc::clone(&self.known);
        let ids: HashSet<ImageId> = images.iter().map(|image| image.id.clone()).collect();
        let read = move |store: &Store| {
            let mut layers = store.layer_usage_index()?;
            let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
            known.retain(|id, labels| labels.is_some() && ids.contains(id));
            for (id, labels) in labels_of(store, &mut known, ids)? {
                layers.set_labels(&id, labels);
            }
            Ok(layers)
        };
        self.store.ask(read).await
    }

    /// Measures nothing.
    async fn labels(
        &self,
        images: &[Image],
    ) -> Result<HashMap<ImageId, BTreeMap<String, String>>, BackendError> {
        let known = Arc::clone(&self.known);
        let ids: HashSet<ImageId> = images.iter().map(|image| image.id.clone()).collect();
        let read = move |store: &Store| {
            labels_of(store, &mut known.lock().unwrap_or_else(PoisonError::into_inner), ids)
        };
        self.store.ask(read).await
    }
}

/// The labels of these images; those of an image with an unreadable config are unknown, and rules about labels retain it.
fn labels_of(
    store: &Store,
    known: &mut HashMap<ImageId, CachedImageLabels>,
    ids: HashSet<ImageId>,
) -> Result<HashMap<ImageId, BTreeMap<String, String>>, StoreError> {
    let mut found = HashMap::new();
    for id in ids {
        let labels = match known.get(&id) {
            Some(labels) => labels.clone(),
            None => config_of(store, &id)?.map(|config| config.labels),
        };
        known.insert(id.clone(), labels.clone());
        found.extend(labels.map(|labels| (id, labels)));
    }
    Ok(found)
}

fn config_of(store: &Store, id: &ImageId) -> Result<Option<ImageConfig>, StoreError> {
    let Some(record) = store.image(id)? else { return Ok(None) };
    let bytes = store.blob(&record.id).unwrap_or_default();
    Ok(bytes.and_then(|bytes| ImageConfig::parse(&bytes).ok()))
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
            local_disk(store.root())
        });
        match measured.await {
            Ok(Ok(disk)) => Ok(disk.unwrap_or_default()),
            Ok(Err(error)) => Err(BackendError::caused_by(CallErrorKind::Other, error).into()),
            Err(error) => Err(BackendError::caused_by(CallErrorKind::Canceled, error).into()),
        }
    }
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
