//! The list of layers that are retained for the next attempt of a pull; `resumable_layers.rs` decides which.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};

use super::blob_source::{BlobSource, IngestId};
use super::records::{LayerKey, LayerRecord};
use super::sync_descriptor::{SyncDescriptor, has_failed};
use crate::disk::DiskSpace;

/// Content of a layer's own copy of its record.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct LayerRecordFile {
    /// In the same object, so that a rebuild reads the copy as the record.
    #[serde(flatten)]
    pub(crate) record: LayerRecord,
    /// The run of the machine in which it was unpacked.
    pub(crate) boot: String,
    /// The source that has sent it, without the hash of its credential.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) transfers: Vec<BlobSource>,
}

/// A finished layer that no commit has named.
#[derive(Debug)]
pub(super) struct UncommittedLayer {
    pub(super) record: LayerRecord,
    /// Opened before its first write; `None` if a dead process wrote it.
    pub(super) written: Option<Arc<SyncDescriptor>>,
    /// The sources that have sent it.
    pub(super) transfers: Vec<BlobSource>,
}

impl UncommittedLayer {
    /// Whether one of these ingests became this layer.
    pub(super) fn is_of(&self, ingests: &HashSet<IngestId>) -> bool {
        self.ingests().any(|ingest| ingests.contains(&ingest))
    }

    /// The ingests that became this layer.
    pub(super) fn ingests(&self) -> impl Iterator<Item = IngestId> {
        self.transfers.iter().map(BlobSource::ingest_id)
    }

    /// Whether some of it may not be on disk, although a reader still sees it.
    pub(super) fn is_lost(&self) -> bool {
        has_failed(self.written.as_ref())
    }
}

/// Retained layers without a handle.
#[derive(Debug, Default)]
pub(super) struct ResumableLayers(Mutex<HashMap<LayerKey, UncommittedLayer>>);

impl ResumableLayers {
    fn layers(&self) -> MutexGuard<'_, HashMap<LayerKey, UncommittedLayer>> {
        self.0.lock()
    }

    pub(super) fn put(&self, layer: UncommittedLayer) {
        self.layers().insert(layer.record.key.clone(), layer);
    }

    /// Takes it off the list; the caller uses or discards its file.
    pub(super) fn take(&self, key: &LayerKey) -> Option<UncommittedLayer> {
        self.layers().remove(key)
    }

    pub(super) fn has(&self, key: &LayerKey) -> bool {
        self.layers().contains_key(key)
    }

    /// Returns the disk usage of the layers that `choose` selects.
    pub(super) fn usage_of(&self, choose: impl Fn(&UncommittedLayer) -> bool) -> DiskSpace {
        let layers = self.layers();
        layers.values().filter(|layer| choose(layer)).map(|layer| layer.record.usage).sum()
    }

    /// Lists the layers that `choose` selects.
    pub(super) fn layers_that(&self, choose: impl Fn(&UncommittedLayer) -> bool) -> Vec<LayerRecord> {
        let layers = self.layers();
        layers.values().filter(|layer| choose(layer)).map(|layer| layer.record.clone()).collect()
    }
}
