//! The store's shared state, which all clones of the handle use.

use std::io;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, MutexGuard};

use super::begun_uses::BegunUses;
use super::config::StoreConfig;
use super::db::Db;
use super::extraction_locks::ExtractionLocks;
use super::image_chains::ImageChains;
use super::layers::UncommittedLayers;
use super::layout::StoreLayout;
use super::lock::StoreLock;
use super::references::ReferenceCounts;
use super::sync_descriptor::SyncDescriptor;
use super::trash::Trash;
use crate::disk::{Disk, SizeAccuracy};
use crate::erofs::LayerMountKind;
use crate::lazy::{PartialLayers, VerifiedLayers};

/// A store of images. Clones share it; it is closed with the last of them, and of the layers and files it gave out.
#[derive(Debug, Clone)]
pub struct Store(pub(crate) Arc<OpenStore>);

/// Fields are dropped in this order: the trash stops, the database closes, and the lock is released last.
#[derive(Debug)]
pub(crate) struct OpenStore {
    pub(crate) trash: Trash,
    pub(crate) db: Db,
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) layout: StoreLayout,
    pub(crate) config: StoreConfig,
    pub(crate) references: Arc<ReferenceCounts>,
    pub(crate) uncommitted_layers: UncommittedLayers,
    /// Held while layers and blobs come to their place or leave it, together with what the database says of them.
    /// Looking at images does not need it.
    pub(super) content: Mutex<()>,
    pub(super) sizes: SizeAccuracy,
    /// How layers become lower directories of overlays, once that was tried.
    pub(super) erofs: OnceLock<LayerMountKind>,
    /// For lookups of layers by chain ID.
    pub(crate) chains: ImageChains,
    /// Layers whose data is being filled in.
    pub(crate) partials: PartialLayers,
    /// Complete layers whose reads are verified.
    pub(crate) verified: VerifiedLayers,
    /// Held while layers are mounted for overlays, or unmounted; not while one is extracted.
    pub(crate) layer_mounts: Mutex<()>,
    pub(crate) extractions: ExtractionLocks,
    pub(crate) begun_uses: BegunUses,
    /// For what is written from now on; `None` until the first write.
    pub(super) writes: Mutex<Option<Arc<SyncDescriptor>>>,
    pub(super) _lock: StoreLock,
}

impl OpenStore {
    pub(crate) fn lock_content(&self) -> MutexGuard<'_, ()> {
        self.content.lock()
    }

    /// The descriptor for what is written from now on.
    pub(super) fn begin_writes(&self) -> io::Result<Arc<SyncDescriptor>> {
        let mut current = self.writes.lock();
        if let Some(shared) = current.as_ref().filter(|shared| !shared.has_failed()) {
            return Ok(shared.clone());
        }
        let filesystem = self.disk.open_sync(self.layout.root())?;
        Ok(current.insert(Arc::new(SyncDescriptor::new(filesystem))).clone())
    }
}

impl Store {
    /// The store's directory.
    pub fn root(&self) -> &Path {
        self.0.layout.root()
    }
}
