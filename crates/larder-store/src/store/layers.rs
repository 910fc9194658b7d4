//! The life of a layer: unpacked in `staging`, moved into `layers`, made visible by a commit.
//!
//! A [`LayerHandle`] keeps its layer in the store as long as the handle lives. A layer that no image was committed with
//! is removed with its last handle, unless it is resumable by a later pull (`resumable_layers.rs`).

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use larder::backend::MinimumRate;
use larder::reference::Digest;
use larder::scheduler::Callers;
use larder::threads::in_place;
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use super::blob_source::{BlobSource, IngestId, is_proved, merge_transfers};
use super::claims::{self, ClaimRequest, Claimed, KeyedLayer, LayerClaims};
use super::db::{DbRead as _, DbReadTransaction, DbResult, LAYERS, TRANSFERS, encode};
use super::error::{StoreError, StoreErrorContext as _};
use super::fetch_progress::FetchProgress;
use super::handle::{OpenStore, Store};
use super::layer_file::{LAYER_FILE, write_record};
use super::records::{LayerKey, LayerMetadata, LayerRecord, PartialSource};
use super::references::{ItemReference, ReferencedItem};
use super::resumable_list::{LayerRecordFile, ResumableLayers, UncommittedLayer};
use super::sync_descriptor::{SyncDescriptor, has_failed};
use crate::disk::{DiskSpace, FileOpenMode};
use crate::erofs::ErofsFile;
use crate::unpack::{LayerReader, open_layer, read_implied};

/// A layer in the store. It is not removed while a clone of this handle exists.
#[derive(Debug, Clone)]
pub struct LayerHandle(Arc<LayerHandleInner>);

#[derive(Debug)]
struct LayerHandleInner {
    record: LayerRecord,
    path: PathBuf,
    /// No commit has made it durable yet.
    uncommitted: AtomicBool,
    /// Opened before its first write. `None` if it is durable, or if a dead process wrote it.
    written: Option<Arc<SyncDescriptor>>,
    /// Not completely written to disk.
    lost: AtomicBool,
    /// Sources that have sent the layer.
    transfers: Mutex<Vec<BlobSource>>,
    _hold: ItemReference,
    store: Arc<OpenStore>,
}

impl LayerHandle {
    /// Names its file.
    pub fn key(&self) -> &LayerKey {
        &self.0.record.key
    }

    /// Returns the layer's record.
    pub fn record(&self) -> &LayerRecord {
        &self.0.record
    }

    /// Its file, which begins with an EROFS filesystem. It does not move; a pull replaces it if it is damaged.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Paths of the directories that its archive only implies.
    pub(crate) fn implied_directories(&self) -> io::Result<Vec<Vec<u8>>> {
        let layer = self.open()?;
        read_implied(layer.input(), layer.filesystem_end(), &self.record().erofs)
    }

    /// Opens it, to read its files.
    pub fn open(&self) -> io::Result<LayerReader> {
        open_layer(&self.0.path)
    }

    /// Returns true while the layer waits for a commit.
    pub fn is_uncommitted(&self) -> bool {
        self.0.uncommitted.load(Ordering::Acquire)
    }

    /// Returns the sync that makes the layer durable; `None` if a dead process wrote it.
    pub(super) fn written(&self) -> Option<&Arc<SyncDescriptor>> {
        self.0.written.as_ref()
    }

    /// Notes that it was not completely written to disk: it is removed, not retained for another pull.
    pub(super) fn set_lost(&self) {
        self.0.lost.store(true, Ordering::Release);
    }

    /// Returns true if a source that has sent the layer proves that `source` may use it.
    pub(crate) fn is_proved_for(&self, source: &BlobSource) -> bool {
        // The source of missing data proves the layer to itself only: nothing of it is verified as a whole.
        let is_sending = self.record().partial.as_ref().is_some_and(|partial| partial.blob == *source);
        is_sending || is_proved(&self.0.transfers(), source)
    }

    pub(super) fn has_transfer(&self, source: &BlobSource) -> bool {
        self.0.transfers().contains(source)
    }

    /// The sources that have sent the layer.
    pub(super) fn transfers(&self) -> Vec<BlobSource> {
        self.0.transfers().clone()
    }

    /// The ingests that became the layer.
    pub(crate) fn ingests(&self) -> Vec<IngestId> {
        self.0.transfers().iter().map(BlobSource::ingest_id).collect()
    }

    pub(super) fn note_transfers(&self, new: &[BlobSource]) {
        merge_transfers(&mut self.0.transfers(), new);
    }

    pub(super) fn set_committed(&self) {
        self.0.uncommitted.store(false, Ordering::Release);
    }
}

impl LayerHandleInner {
    fn transfers(&self) -> MutexGuard<'_, Vec<BlobSource>> {
        self.transfers.lock()
    }

    /// Whether some of it may not be on disk, although a reader still sees it.
    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire) || has_failed(self.written.as_ref())
    }
}

impl Drop for LayerHandleInner {
    fn drop(&mut self) {
        if self.uncommitted.load(Ordering::Acquire)
            && let Err(error) = in_place(|| self.store.abandon(self))
        {
            tracing::warn!(layer = %self.record.key, %error, "cannot remove an unused layer");
            // No commit begins its fill, which would keep the store open.
            self.store.partials.forget(&self.record.key);
        }
    }
}

/// Layers being fetched, and layers without a commit.
#[derive(Debug, Default)]
pub(crate) struct UncommittedLayers {
    /// In-flight fetches.
    pub(super) claims: LayerClaims<LayerHandle>,
    /// Layers in their place that no commit has named.
    placed: Mutex<HashMap<LayerKey, Weak<LayerHandleInner>>>,
    /// Layers without a handle.
    pub(super) kept: ResumableLayers,
}

impl UncommittedLayers {
    fn placed(&self) -> MutexGuard<'_, HashMap<LayerKey, Weak<LayerHandleInner>>> {
        self.placed.lock()
    }

    /// Returns the disk usage of the layers that no commit has named.
    pub(super) fn usage(&self) -> DiskSpace {
        // Let go of the list first: the last handle of a layer may be dropped here, which needs it.
        let layers: Vec<_> = self.placed().values().filter_map(Weak::upgrade).collect();
        layers.iter().map(|layer| layer.record.usage).sum::<DiskSpace>() + self.kept.usage_of(|_| true)
    }

    /// Whether a layer waits for its commit under this key.
    pub(crate) fn has(&self, key: &LayerKey) -> bool {
        self.placed().contains_key(key) || self.kept.has(key)
    }
}

/// The right to fetch a layer. If it is dropped without `done`, the next waiter gets it.
pub type LayerClaim = claims::LayerClaim<LayerHandle>;

/// A layer that another pull fetches.
pub type LayerWait = claims::LayerWait<LayerHandle>;

/// Answer to [`Store::claim`].
pub type ClaimOutcome = Claimed<LayerClaim, LayerWait, LayerHandle>;

impl KeyedLayer for LayerHandle {
    fn is_requested(&self, request: &ClaimRequest) -> bool {
        request.keys().contains(self.key()) && self.is_proved_for(request.source())
    }
}

/// A directory in which a layer is unpacked. It is moved to the trash unless it is [finished](LayerStaging::finish).
#[derive(Debug)]
pub struct LayerStaging {
    store: Arc<OpenStore>,
    dir: PathBuf,
    written: Arc<SyncDescriptor>,
    finished: bool,
}

impl LayerStaging {
    /// The directory. The layer's file belongs in [`LAYER_FILE`].
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Moves the layer into the store: its file, with what the store knows of the layer behind it. It is visible and
    /// durable only after an image was committed with it. `source` has sent the bytes of the layer.
    pub fn finish(
        self,
        key: &LayerKey,
        facts: LayerMetadata,
        file: ErofsFile,
        source: &BlobSource,
    ) -> Result<LayerHandle, StoreError> {
        let path = self.dir.join(LAYER_FILE);
        self.finish_at(&path, key, facts, file, source)
    }

    /// Like [`finish`](LayerStaging::finish), for a layer whose file is elsewhere in the store: it moves from there to
    /// the layers at once, so that a kill loses none of it.
    pub(crate) fn finish_at(
        self,
        path: &Path,
        key: &LayerKey,
        facts: LayerMetadata,
        file: ErofsFile,
        source: &BlobSource,
    ) -> Result<LayerHandle, StoreError> {
        let transfers = vec![source.clone()];
        let record = LayerRecord::of_file(key, facts, file);
        let record = self.store.record_layer(path, record, &transfers)?;
        let layer = self.place(path, record, transfers)?;
        layer.0.store.add_transfer(&layer, source)?;
        Ok(layer)
    }

    /// Moves a layer into the store whose data comes later, from the blob of `partial`. Its file can be mounted once
    /// its reads are guarded.
    pub(crate) fn finish_partial(
        self,
        key: &LayerKey,
        facts: LayerMetadata,
        file: ErofsFile,
        partial: PartialSource,
    ) -> Result<LayerHandle, StoreError> {
        let path = self.dir.join(LAYER_FILE);
        let record = LayerRecord { partial: Some(partial), ..LayerRecord::of_file(key, facts, file) };
        let record = self.store.record_layer(&path, record, &[])?;
        self.place(&path, record, Vec::new())
    }

    fn place(
        mut self,
        path: &Path,
        record: LayerRecord,
        transfers: Vec<BlobSource>,
    ) -> Result<LayerHandle, StoreError> {
        let written = Some(self.written.clone());
        let layer = self.store.place(path, UncommittedLayer { record, written, transfers })?;
        self.finished = true;
        // If this fails too, the rest is removed when the store is opened.
        let _ = self.store.disk.remove_tree(&self.dir, &|| true).or_else(|_| self.store.discard(&self.dir));
        Ok(layer)
    }
}

impl Drop for LayerStaging {
    fn drop(&mut self) {
        if !self.finished {
            // If this fails it is cleaned when the store is opened.
            let _ = in_place(|| self.store.discard(&self.dir));
            self.store.trash.kick();
        }
    }
}

impl Store {
    /// Finds a layer that `source` may use, or claims its fetch for one caller, so that a blob that several pulls need
    /// is fetched once from each registry with each credential.
    ///
    /// `chain_id` is that of the layers up to this one; it names the layer where its content depends on them.
    pub fn claim(
        &self,
        source: &BlobSource,
        diff_id: &Digest,
        chain_id: &Digest,
    ) -> Result<ClaimOutcome, StoreError> {
        self.claim_for(
            &ClaimRequest::new(source.clone(), diff_id.clone(), chain_id),
            FetchProgress::new(MinimumRate::default(), &Callers::new(""), Instant::now()),
        )
    }

    /// Like [`claim`](Store::claim), for a fetch with this progress.
    pub(crate) fn claim_for(
        &self,
        request: &ClaimRequest,
        progress: FetchProgress,
    ) -> Result<ClaimOutcome, StoreError> {
        let present = |request: &ClaimRequest| {
            let is_usable = |layer: &LayerHandle| {
                let is_complete = layer.record().is_whole() || self.0.partials.is_guarded(layer.key());
                is_complete && layer.record().is_mountable() && layer.is_proved_for(request.source())
            };
            for key in request.keys() {
                if let Some(layer) = self.layer(key)?.filter(is_usable) {
                    return Ok(Some(layer));
                }
            }
            Ok::<_, StoreError>(None)
        };
        self.0.uncommitted_layers.claims.claim(request, progress, present)
    }

    /// The layer of this key, if it is here.
    pub fn layer(&self, key: &LayerKey) -> Result<Option<LayerHandle>, StoreError> {
        let _guard = self.0.lock_content();
        if let Some(layer) = self.0.uncommitted_layers.placed().get(key).and_then(Weak::upgrade) {
            return Ok(Some(LayerHandle(layer)));
        }
        let hold = self.0.references.add(ReferencedItem::Layer(key.clone()));
        match self.0.uncommitted_layers.kept.take(key) {
            Some(kept) if kept.is_lost() => {
                self.0.discard(&self.0.layout.layer(key)).context("remove a layer with lost writes")?;
                self.0.trash.kick();
            }
            Some(kept) => return Ok(Some(self.0.uncommitted(kept, hold))),
            None => {}
        }
        let found = self.0.db.read("look up a layer", |reader| read_layer(reader, key))?;
        let found = found.filter(|(record, _)| record.present);
        Ok(found.map(|(record, transfers)| self.0.committed(record, transfers, hold)))
    }

    /// A new directory to unpack a layer into.
    pub fn begin_layer(&self) -> Result<LayerStaging, StoreError> {
        let doing = "create a directory for a layer";
        let dir = self.0.layout.new_staging();
        let written = self.0.begin_writes().context(doing)?;
        self.0.disk.create_dir(&dir).context(doing)?;
        Ok(LayerStaging { store: self.0.clone(), dir, written, finished: false })
    }
}

/// The record of a layer, and the sources that have sent it.
fn read_layer(
    reader: &DbReadTransaction,
    key: &LayerKey,
) -> DbResult<Option<(LayerRecord, Vec<BlobSource>)>> {
    let Some(record) = reader.get::<LayerRecord>(LAYERS, key.as_str())? else { return Ok(None) };
    let transfers = reader.get::<Vec<BlobSource>>(TRANSFERS, key.as_str())?;
    Ok(Some((record, transfers.unwrap_or_default())))
}

impl OpenStore {
    /// Writes what the store knows of a layer to the end of its file. Returns the layer's record, with its size: that
    /// of its index, too, and of an incomplete layer all its data.
    pub(super) fn record_layer(
        &self,
        path: &Path,
        mut record: LayerRecord,
        transfers: &[BlobSource],
    ) -> Result<LayerRecord, StoreError> {
        let doing = "record a layer";
        let file = self.disk.open(path, FileOpenMode::Existing).context(doing)?;
        let transfers: Vec<_> = transfers.iter().map(BlobSource::without_login).collect();
        let write = |record: &LayerRecord| {
            let (boot, transfers) = (self.disk.boot_id(), transfers.clone());
            let copy = LayerRecordFile { record: record.clone(), boot, transfers };
            let copy = encode(record.key.as_str(), &copy).context(doing)?;
            write_record(&*file, record.erofs.end_of_digests(), &copy).context(doing)
        };
        write(&record)?;
        record.usage = self.measure_layer(path, &record.key)?;
        record.remnant = self.remnant_space(&record);
        if record.partial.is_some() {
            let index = self.index_space(&record.key);
            record.usage.bytes = record.usage.bytes.max(record.erofs.bytes.saturating_add(index.bytes));
        }
        write(&record)?;
        Ok(record)
    }

    /// The handle of a layer in the database.
    fn committed(
        self: &Arc<Self>,
        record: LayerRecord,
        transfers: Vec<BlobSource>,
        hold: ItemReference,
    ) -> LayerHandle {
        let path = self.layout.layer(&record.key);
        let (uncommitted, store) = (AtomicBool::new(false), self.clone());
        LayerHandle(Arc::new(LayerHandleInner {
            record,
            path,
            uncommitted,
            written: None,
            lost: AtomicBool::new(false),
            transfers: Mutex::new(transfers),
            _hold: hold,
            store,
        }))
    }

    /// Moves a finished layer to its place; what was there gives way if it is damaged, or not in the database. Overlays
    /// that have a damaged layer keep its file, which is deleted with the last of them; new ones get this layer.
    fn place(self: &Arc<Self>, from: &Path, layer: UncommittedLayer) -> Result<LayerHandle, StoreError> {
        let doing = "move a layer into the store";
        let key = layer.record.key.clone();
        let waiting; // outlives the guard: the last handle of a layer needs it to go
        let _guard = self.lock_content();
        let hold = self.references.add(ReferencedItem::Layer(key.clone()));
        waiting = self.uncommitted_layers.placed().get(&key).and_then(Weak::upgrade);
        if let Some(layer) = &waiting {
            self.discard(from).context(doing)?;
            return Ok(LayerHandle(layer.clone()));
        }
        let present = self.db.read(doing, |reader| read_layer(reader, &key))?;
        if let Some((present, transfers)) = present.filter(|(present, _)| present.is_whole()) {
            self.discard(from).context(doing)?;
            return Ok(self.committed(present, transfers, hold));
        }
        self.make_way(&key).and_then(|()| self.disk.rename(from, &self.layout.layer(&key))).context(doing)?;
        if let Err(error) = self.remount_layer(&layer.record) {
            tracing::warn!(layer = %key, %error, "cannot mount a layer that was replaced");
        }
        Ok(self.uncommitted(layer, hold))
    }

    /// The handle of a layer that waits for a commit.
    fn uncommitted(self: &Arc<Self>, layer: UncommittedLayer, hold: ItemReference) -> LayerHandle {
        let UncommittedLayer { record, written, transfers } = layer;
        let path = self.layout.layer(&record.key);
        let (uncommitted, store) = (AtomicBool::new(true), self.clone());
        let (lost, transfers) = (AtomicBool::new(false), Mutex::new(transfers));
        let inner =
            LayerHandleInner { record, path, uncommitted, written, lost, transfers, _hold: hold, store };
        let layer = Arc::new(inner);
        self.uncommitted_layers.placed().insert(layer.record.key.clone(), Arc::downgrade(&layer));
        LayerHandle(layer)
    }

    /// Retains an uncommitted layer if a pull may resume with it, and removes it otherwise.
    fn abandon(&self, layer: &LayerHandleInner) -> io::Result<()> {
        let _guard = self.lock_content();
        let mut placed = self.uncommitted_layers.placed();
        // Another one may have taken its place.
        if placed.get(&layer.record.key).is_none_or(|listed| !std::ptr::eq(listed.as_ptr(), layer)) {
            return Ok(());
        }
        placed.remove(&layer.record.key);
        drop(placed);
        // A commit that reported an error may have succeeded nevertheless: only the database knows. When it
        // cannot, the next start will.
        let key = layer.record.key.as_str();
        let get = |reader: &DbReadTransaction| reader.get::<LayerRecord>(LAYERS, key);
        let committed = self.db.read("look up a layer", get).map_err(io::Error::other)?;
        if committed.is_some_and(|layer| layer.present) {
            return Ok(());
        }
        let leased = self.leased_ingests().map_err(io::Error::other)?;
        let (record, written) = (layer.record.clone(), layer.written.clone());
        let kept = UncommittedLayer { record, written, transfers: layer.transfers().clone() };
        if kept.is_of(&leased) && !layer.is_lost() {
            self.uncommitted_layers.kept.put(kept);
            return Ok(());
        }
        self.discard_layer(&layer.record.key)?;
        self.trash.kick();
        Ok(())
    }

    /// Takes layers off the list of those that wait for a commit.
    pub(super) fn note_committed<'a>(&self, layers: impl Iterator<Item = &'a LayerHandle>) {
        let mut placed = self.uncommitted_layers.placed();
        for layer in layers {
            layer.set_committed();
            placed.remove(layer.key());
        }
    }
}
