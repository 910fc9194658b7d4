//! Layers and blobs in use by this process, which must not be removed: those of in-flight pulls.
//!
//! References live in memory and end with the process, as the pulls do. What must outlive the process is a lease. They
//! are no sources of retention: they order writers of one layer or ingest, and nothing asks them about an image.

use std::collections::HashMap;
use std::sync::Arc;

use larder::reference::Digest;
use parking_lot::{Mutex, MutexGuard};

use super::blob_source::IngestId;
use super::records::LayerKey;

/// Item that can be referenced.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum ReferencedItem {
    Layer(LayerKey),
    Blob(Digest),
    /// An ingest: one writer at a time.
    Ingest(IngestId),
    /// A blob that a running pull needs, with its ingest and its layer.
    PulledBlob(IngestId),
}

/// How often each thing is held.
#[derive(Debug, Default)]
pub(crate) struct ReferenceCounts(Mutex<HashMap<ReferencedItem, usize>>);

impl ReferenceCounts {
    fn counts(&self) -> MutexGuard<'_, HashMap<ReferencedItem, usize>> {
        self.0.lock()
    }

    pub(crate) fn add(self: &Arc<Self>, item: ReferencedItem) -> ItemReference {
        *self.counts().entry(item.clone()).or_default() += 1;
        ItemReference { references: self.clone(), item }
    }

    /// References it unless it is referenced already.
    pub(crate) fn add_exclusive(self: &Arc<Self>, item: ReferencedItem) -> Option<ItemReference> {
        let mut counts = self.counts();
        let count = counts.entry(item.clone()).or_default();
        if *count > 0 {
            return None;
        }
        *count = 1;
        Some(ItemReference { references: self.clone(), item })
    }

    pub(crate) fn has(&self, item: &ReferencedItem) -> bool {
        self.counts().contains_key(item)
    }
}

/// Holds one thing until dropped.
#[derive(Debug)]
pub(crate) struct ItemReference {
    references: Arc<ReferenceCounts>,
    item: ReferencedItem,
}

impl Drop for ItemReference {
    fn drop(&mut self) {
        let mut counts = self.references.counts();
        if let Some(count) = counts.get_mut(&self.item) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.item);
            }
        }
    }
}
