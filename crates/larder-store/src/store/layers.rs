//! The life of a layer: unpacked in `staging`, moved into `layers`, made visible by a commit.
//!
//! A [`LayerHandle`] keeps its layer in the store as long as the handle lives. A layer that no image was committed with is
//! removed with its last handle, unless it is resumable by a later pull (`resumable_layers.rs`).

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use larder::reference::Digest;
use rustix::fs::{Mode, OFlags, open};

use super::claims::{self, Claimed, KeyedLayer, LayerClaims};
use super::db::{DbRead as _, DbSnapshot, LAYERS, MOUNTS, encode};
use super::error::{StoreError, StoreErrorContext as _};
use super::fetch_progress::FetchProgress;
use super::handle::{OpenStore, Store};
use super::layer_file::{
    ARCHIVE, FILES, FS, IMAGE, RECORD, append_manifest, image_of, manifest_of, write_record,
};
use super::records::{LayerKey, LayerMetadata, LayerRecord, MountRecord};
use super::references::{ItemReference, ReferencedItem};
use super::resumable_list::{LayerRecordFile, ResumableLayers, UncommittedLayer};
use super::shared_sync::{SharedSync, has_failed};
use super::snapshot_records::mountable_layers;
use super::unpacking::UnpackingDirs;
use crate::disk::{DiskSpace, FileOpenMode, measure, measure_one};
use crate::erofs::ErofsFile;
use crate::unpack::layer_manifest::ManifestLocation;
use crate::unpack::{ArchiveRecord, UnpackProgress};

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
    written: Option<Arc<SharedSync>>,
    /// Not completely written to disk.
    lost: AtomicBool,
    _hold: ItemReference,
    store: Arc<OpenStore>,
}

impl LayerHandle {
    /// Names its directory.
    pub fn key(&self) -> &LayerKey {
        &self.0.record.key
    }

    /// What is known of it.
    pub fn record(&self) -> &LayerRecord {
        &self.0.record
    }

    /// Its directory, or its file if it is an [image](LayerHandle::image). It does not move.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Its files, unless they are an [image](LayerHandle::image).
    pub fn fs(&self) -> PathBuf {
        self.0.path.join(FS)
    }

    /// The EROFS image with its files, if it is one.
    pub fn image(&self) -> Option<PathBuf> {
        self.record().erofs.as_ref().map(|_| image_of(&self.0.path))
    }

    /// Where the list is of what it leaves to the layers below.
    pub(crate) fn manifest(&self) -> ManifestLocation {
        manifest_of(&self.0.path, self.record().erofs.as_ref())
    }

    /// What it takes to write its archive again.
    pub fn archive_record(&self) -> ArchiveRecord {
        match self.image() {
            Some(image) => ArchiveRecord::Image(image),
            None => ArchiveRecord::File(self.0.path.join(ARCHIVE)),
        }
    }

    /// The root of its files, opened. An image is mounted for as long as that is open, where only descriptors lead to it.
    pub fn open_root(&self) -> io::Result<OwnedFd> {
        let Some(image) = self.image() else {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            return Ok(open(self.fs(), flags, Mode::empty())?);
        };
        self.0.store.mount_image(&image)?.root()
    }

    /// Whether it still waits for a commit.
    pub fn is_fresh(&self) -> bool {
        self.0.uncommitted.load(Ordering::Acquire)
    }

    /// What makes it durable; `None` if a dead process wrote it.
    pub(super) fn written(&self) -> Option<&Arc<SharedSync>> {
        self.0.written.as_ref()
    }

    /// Notes that it was not completely written to disk: it is removed, not retained for another pull.
    pub(super) fn set_lost(&self) {
        self.0.lost.store(true, Ordering::Release);
    }

    pub(super) fn set_committed(&self) {
        self.0.uncommitted.store(false, Ordering::Release);
    }
}

impl LayerHandleInner {
    /// Whether some of it may not be on disk, although a reader still sees it.
    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire) || has_failed(self.written.as_ref())
    }
}

impl Drop for LayerHandleInner {
    fn drop(&mut self) {
        if self.uncommitted.load(Ordering::Acquire)
            && let Err(error) = self.store.abandon(self)
        {
            tracing::warn!(layer = %self.record.key, %error, "cannot remove an unused layer");
        }
    }
}

/// Layers being fetched, and layers without a commit.
#[derive(Debug, Default)]
pub(crate) struct PendingLayers {
    /// In-flight fetches.
    pub(super) claims: LayerClaims<LayerHandle>,
    /// Layers in their place that no commit has named.
    fresh: Mutex<HashMap<LayerKey, Weak<LayerHandleInner>>>,
    /// Those of them without a handle.
    pub(super) kept: ResumableLayers,
    pub(super) unpacking: UnpackingDirs,
}

impl PendingLayers {
    fn fresh(&self) -> MutexGuard<'_, HashMap<LayerKey, Weak<LayerHandleInner>>> {
        self.fresh.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the layers take that no commit has named.
    pub(super) fn usage(&self) -> DiskSpace {
        // Let go of the list first: the last handle of a layer may be dropped here, which needs it.
        let layers: Vec<_> = self.fresh().values().filter_map(Weak::upgrade).collect();
        layers.iter().map(|layer| layer.record.usage).sum::<DiskSpace>() + self.kept.usage_of(|_| true)
    }

    /// Whether a layer waits for its commit under this key.
    pub(crate) fn has(&self, key: &LayerKey) -> bool {
        self.fresh().contains_key(key) || self.kept.has(key)
    }
}

/// The right to fetch a layer. If it is dropped without `done`, the next waiter gets it.
pub type LayerClaim = claims::LayerClaim<LayerHandle>;

/// A layer that another pull fetches.
pub type LayerWait = claims::LayerWait<LayerHandle>;

/// Answer to [`Store::claim`].
#[derive(Debug)]
pub enum ClaimOutcome {
    /// The layer is present.
    Present(LayerHandle),
    /// The caller must fetch it.
    Fetch(LayerClaim),
    /// Another pull of this process fetches it.
    Wait(LayerWait),
}

impl KeyedLayer for LayerHandle {
    fn layer_key(&self) -> &LayerKey {
        self.key()
    }
}

/// A directory in which a layer is unpacked. It is moved to the trash unless it is [finished](LayerStaging::finish).
#[derive(Debug)]
pub struct LayerStaging {
    store: Arc<OpenStore>,
    dir: PathBuf,
    written: Arc<SharedSync>,
    finished: bool,
}

impl LayerStaging {
    /// The directory; it is empty. Files belong in [`FS`] below it, their manifest in [`FILES`]; or their image in [`IMAGE`].
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Moves the layer into the store. It is visible and durable only after an image was committed with it.
    ///
    /// `usage` is what [`FS`] takes on disk; `None` to have it counted.
    pub fn finish(
        self,
        key: &LayerKey,
        facts: LayerMetadata,
        usage: Option<DiskSpace>,
    ) -> Result<LayerHandle, StoreError> {
        let mut record = LayerStaging::record(key, facts, None);
        self.write_copy(&record)?; // once for its own size, then with it
        record.usage = self.usage(usage)?;
        self.write_copy(&record)?;
        let from = self.dir.clone();
        self.place(&from, record)
    }

    /// Like [`finish`](LayerStaging::finish), of a layer whose files are one EROFS image. The image's file, with what the store
    /// knows of the layer behind it, is all that is kept.
    pub fn finish_image(
        self,
        key: &LayerKey,
        facts: LayerMetadata,
        image: ErofsFile,
    ) -> Result<LayerHandle, StoreError> {
        let (path, record) = self.complete_image(key, facts, image)?;
        let (store, dir) = (self.store.clone(), self.dir.clone());
        let layer = self.place(&path, record)?;
        // If this fails too, the rest is removed when the store is opened.
        let _ = store.disk.remove_tree(&dir, &|| true).or_else(|_| store.discard(&dir));
        Ok(layer)
    }

    /// Writes what belongs behind an image to its file. Returns the file and the layer's record.
    pub(crate) fn complete_image(
        &self,
        key: &LayerKey,
        facts: LayerMetadata,
        image: ErofsFile,
    ) -> Result<(PathBuf, LayerRecord), StoreError> {
        let doing = "record a layer";
        let path = self.dir.join(IMAGE);
        let file = self.store.disk.open(&path, FileOpenMode::Existing).context(doing)?;
        let end = append_manifest(&*file, image.bytes, &self.dir.join(FILES)).context(doing)?;
        // What was left to the layers below is in the manifest, or was settled.
        let facts = LayerMetadata { pending: end > image.bytes, ..facts };
        let mut record = LayerStaging::record(key, facts, Some(image));
        write_record(&*file, end, &self.copy_of(&record)?).context(doing)?;
        record.usage = measure(&path).context("measure a layer")?;
        write_record(&*file, end, &self.copy_of(&record)?).context(doing)?;
        Ok((path, record))
    }

    /// Makes durable what was written.
    pub(crate) fn sync(&self) -> io::Result<()> {
        self.written.sync()
    }

    fn record(key: &LayerKey, facts: LayerMetadata, erofs: Option<ErofsFile>) -> LayerRecord {
        LayerRecord {
            key: key.clone(),
            facts,
            erofs,
            usage: DiskSpace::default(),
            present: true,
            damaged: false,
        }
    }

    fn place(mut self, from: &Path, record: LayerRecord) -> Result<LayerHandle, StoreError> {
        let written = Some(self.written.clone());
        let layer = self.store.place(from, UncommittedLayer { record, written })?;
        self.finished = true;
        Ok(layer)
    }

    fn copy_of(&self, record: &LayerRecord) -> Result<Vec<u8>, StoreError> {
        let copy = LayerRecordFile { record: record.clone(), boot: self.store.disk.boot_id() };
        encode(record.key.as_str(), &copy).context("record a layer")
    }

    fn write_copy(&self, record: &LayerRecord) -> Result<(), StoreError> {
        let doing = "record a layer";
        let file = self.store.disk.open(&self.dir.join(RECORD), FileOpenMode::Create).context(doing)?;
        file.write_all_at(&self.copy_of(record)?, 0).context(doing)
    }

    fn usage(&self, fs: Option<DiskSpace>) -> Result<DiskSpace, StoreError> {
        let doing = "measure a layer";
        let Some(fs) = fs else {
            return measure(&self.dir).context(doing);
        };
        let mut total = fs + measure_one(&self.dir).context(doing)?;
        for name in super::layout::names_in(&self.dir).context(doing)? {
            if name != FS {
                total += measure(&self.dir.join(name)).context(doing)?;
            }
        }
        Ok(total)
    }
}

impl Drop for LayerStaging {
    fn drop(&mut self) {
        if !self.finished {
            // If this fails it is cleaned when the store is opened.
            let _ = self.store.discard(&self.dir);
            self.store.trash.kick();
        }
        self.store.arrivals.unpacking.remove(&self.dir);
    }
}

impl Store {
    /// Finds a layer, or claims its fetch for one caller, so that a layer needed by several pulls is fetched once.
    ///
    /// `chain_id` is that of the layers up to this one; it names the layer where its content depends on them.
    pub fn claim(&self, diff_id: &Digest, chain_id: &Digest) -> Result<ClaimOutcome, StoreError> {
        let progress = FetchProgress::default();
        self.claim_one_of(diff_id, &[LayerKey::from(chain_id), LayerKey::from(diff_id)], progress)
    }

    /// Like [`claim`](Store::claim), for a pull from a source: another pull may take the fetch over.
    pub(crate) fn claim_for(
        &self,
        diff_id: &Digest,
        chain_id: &Digest,
        progress: FetchProgress,
    ) -> Result<ClaimOutcome, StoreError> {
        self.claim_one_of(diff_id, &[LayerKey::from(chain_id), LayerKey::from(diff_id)], progress)
    }

    /// Like [`claim_for`](Store::claim_for), where the layer kept under its diff id was looked at and does not fit the layers
    /// below: only one kept under this chain id will do.
    pub(crate) fn claim_own(
        &self,
        diff_id: &Digest,
        chain_id: &Digest,
        progress: FetchProgress,
    ) -> Result<ClaimOutcome, StoreError> {
        self.claim_one_of(diff_id, &[LayerKey::from(chain_id), LayerKey::from(chain_id)], progress)
    }

    fn claim_one_of(
        &self,
        diff_id: &Digest,
        keys: &[LayerKey; 2],
        progress: FetchProgress,
    ) -> Result<ClaimOutcome, StoreError> {
        let present = |keys: &[LayerKey; 2]| {
            for key in keys {
                if let Some(layer) = self.layer(key)?.filter(|layer| layer.record().is_whole()) {
                    return Ok(Some(layer));
                }
            }
            Ok::<_, StoreError>(None)
        };
        Ok(match self.0.arrivals.claims.claim(diff_id, keys, progress, present)? {
            Ok(layer) => ClaimOutcome::Present(layer),
            Err(Claimed::Fetch(claim)) => ClaimOutcome::Fetch(claim),
            Err(Claimed::Wait(waiting)) => ClaimOutcome::Wait(waiting),
        })
    }

    /// The layer of this key, if it is here.
    pub fn layer(&self, key: &LayerKey) -> Result<Option<LayerHandle>, StoreError> {
        let _gate = self.0.gate();
        if let Some(layer) = self.0.arrivals.fresh().get(key).and_then(Weak::upgrade) {
            return Ok(Some(LayerHandle(layer)));
        }
        let hold = self.0.holds.hold(ReferencedItem::Layer(key.clone()));
        match self.0.arrivals.kept.take(key) {
            Some(kept) if kept.is_lost() => {
                self.0.discard(&self.0.layout.layer(key)).context("remove a layer with lost writes")?;
                self.0.trash.kick();
            }
            Some(kept) => return Ok(Some(self.0.fresh(kept, hold))),
            None => {}
        }
        let get = |reader: &DbSnapshot| reader.get::<LayerRecord>(LAYERS, key.as_str());
        let record = self.0.db.read("look up a layer", get)?.filter(|record| record.present);
        Ok(record.map(|record| self.0.committed(record, hold)))
    }

    /// A new directory to unpack a layer into.
    pub fn begin_layer(&self) -> Result<LayerStaging, StoreError> {
        let doing = "create a directory for a layer";
        let dir = self.0.layout.new_staging();
        let written = self.0.begin_writes().context(doing)?;
        self.0.disk.create_dir(&dir).context(doing)?;
        Ok(LayerStaging { store: self.0.clone(), dir, written, finished: false })
    }

    /// The same, to unpack many files into, which is followed by `progress`.
    pub(crate) fn begin_layer_with_progress(
        &self,
        progress: &Arc<UnpackProgress>,
    ) -> Result<LayerStaging, StoreError> {
        let staging = self.begin_layer()?;
        self.0.arrivals.unpacking.add(&staging.dir, progress);
        Ok(staging)
    }
}

impl OpenStore {
    /// The handle of a layer in the database.
    fn committed(self: &Arc<Self>, record: LayerRecord, hold: ItemReference) -> LayerHandle {
        let path = self.layout.layer(&record.key);
        let (uncommitted, store) = (AtomicBool::new(false), self.clone());
        LayerHandle(Arc::new(LayerHandleInner {
            record,
            path,
            uncommitted,
            written: None,
            lost: AtomicBool::new(false),
            _hold: hold,
            store,
        }))
    }

    /// Moves a finished layer to its place; what was there gives way if it is damaged, or not in the database.
    fn place(self: &Arc<Self>, from: &Path, layer: UncommittedLayer) -> Result<LayerHandle, StoreError> {
        let doing = "move a layer into the store";
        let key = layer.record.key.clone();
        let waiting; // outlives the gate: the last handle of a layer needs it to go
        let _gate = self.gate();
        let used = self.is_used(&key)?;
        let hold = self.holds.hold(ReferencedItem::Layer(key.clone()));
        waiting = self.arrivals.fresh().get(&key).and_then(Weak::upgrade);
        if let Some(layer) = &waiting {
            self.discard(from).context(doing)?;
            return Ok(LayerHandle(layer.clone()));
        }
        let present = self.db.read(doing, |reader| reader.get::<LayerRecord>(LAYERS, key.as_str()))?;
        if let Some(present) = present.filter(|present| present.is_whole() || (present.present && used)) {
            self.discard(from).context(doing)?;
            return Ok(self.committed(present, hold));
        }
        self.discard_layer(&key)
            .and_then(|()| self.disk.rename(from, &self.layout.layer(&key)))
            .context(doing)?;
        if let Err(error) = self.remount_layer(&layer.record) {
            tracing::warn!(layer = %key, %error, "cannot mount a layer that was replaced");
        }
        Ok(self.fresh(layer, hold))
    }

    /// Whether a layer is mounted, may be mounted for a snapshot, or is referenced. A committed snapshot alone is no use: it
    /// needs some layer of this key. The caller must hold the gate.
    pub(crate) fn is_used(&self, key: &LayerKey) -> Result<bool, StoreError> {
        let in_mount = self.db.read("look up the users of a layer", |reader| {
            let mut found = mountable_layers(reader)?.contains(key);
            reader.for_each(MOUNTS, |mount: MountRecord| found |= mount.layers.contains(key))?;
            Ok(found)
        })?;
        Ok(in_mount || self.holds.has(&ReferencedItem::Layer(key.clone())))
    }

    /// The handle of a layer that waits for a commit.
    fn fresh(self: &Arc<Self>, layer: UncommittedLayer, hold: ItemReference) -> LayerHandle {
        let UncommittedLayer { record, written } = layer;
        let path = self.layout.layer(&record.key);
        let (uncommitted, store) = (AtomicBool::new(true), self.clone());
        let lost = AtomicBool::new(false);
        let inner = LayerHandleInner { record, path, uncommitted, written, lost, _hold: hold, store };
        let layer = Arc::new(inner);
        self.arrivals.fresh().insert(layer.record.key.clone(), Arc::downgrade(&layer));
        LayerHandle(layer)
    }

    /// Retains an uncommitted layer if a pull may resume with it, and removes it otherwise.
    fn abandon(&self, layer: &LayerHandleInner) -> io::Result<()> {
        let _gate = self.gate();
        let mut fresh = self.arrivals.fresh();
        // Another one may have taken its place.
        if fresh.get(&layer.record.key).is_none_or(|listed| !std::ptr::eq(listed.as_ptr(), layer)) {
            return Ok(());
        }
        fresh.remove(&layer.record.key);
        drop(fresh);
        // A commit that reported an error may have succeeded nevertheless: only the database knows. When it
        // cannot, the next start will.
        let key = layer.record.key.as_str();
        let get = |reader: &DbSnapshot| reader.get::<LayerRecord>(LAYERS, key);
        let committed = self.db.read("look up a layer", get).map_err(io::Error::other)?;
        if committed.is_some_and(|layer| layer.present) {
            return Ok(());
        }
        let leased = self.leased_archives().map_err(io::Error::other)?;
        if leased.contains(&layer.record.facts.digest) && !layer.is_lost() {
            let (record, written) = (layer.record.clone(), layer.written.clone());
            self.arrivals.kept.put(UncommittedLayer { record, written });
            return Ok(());
        }
        self.discard(&layer.path)?;
        self.trash.kick();
        Ok(())
    }

    /// Takes layers off the list of those that wait for a commit.
    pub(super) fn forget_fresh<'a>(&self, layers: impl Iterator<Item = &'a LayerHandle>) {
        let mut fresh = self.arrivals.fresh();
        for layer in layers {
            layer.set_committed();
            fresh.remove(layer.key());
        }
    }
}
