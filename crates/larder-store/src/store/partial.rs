//! Layers without all their data: placed when their metadata is there, completed when the archive was read.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use larder::backend::{FillProblem, ImageFill};
use larder::gc::ClockReading;
use tokio::time::Instant;

use super::blob_source::BlobSource;
use super::db::{DbRead as _, DbReadTransaction, DbResult, IMAGES, LAYERS, LEASES, START_READS};
use super::error::{StoreError, StoreErrorContext as _};
use super::handle::{OpenStore, Store};
use super::records::{ImageRecord, LayerKey, LayerMetadata, LayerRecord, LeaseRecord, PartialSource};
use super::suspects;
use super::transfers::put_transfers;
use super::verified::file_of;
use crate::erofs::ErofsFile;
use crate::lazy::group::probe;
use crate::lazy::journal::FileId;
use crate::lazy::partial_layer::{FillProgress, PartialLayer};
use crate::lazy::reads::GuardedReads;
use crate::lazy::start_reads::{ChunkName, StartReads};
use crate::lazy::{FillObserver, GroupKeeper, GroupState};
use crate::unpack::UnfilledLayer as _;

/// A layer whose data is not complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IncompleteLayer {
    /// The layer.
    pub key: LayerKey,
    /// Names of the images that have it, one for each.
    pub images: Vec<String>,
    /// Bytes that it takes once it is complete.
    pub total_bytes: u64,
    /// The missing data, and where it comes from.
    pub fill: ImageFill,
    /// Time since an image has the layer.
    pub age: Duration,
}

impl IncompleteLayer {
    /// Bytes of the data of several layers, and what is missing of them.
    pub fn sum(layers: &[IncompleteLayer]) -> (u64, ImageFill) {
        let mut fill = ImageFill::default();
        for layer in layers {
            fill.add(layer.fill.clone());
        }
        (layers.iter().map(|layer| layer.total_bytes).sum(), fill)
    }
}

impl Store {
    /// Opens the guard of reads; [`begin_guard`](Store::begin_guard) then answers them. Fails where the kernel or the
    /// filesystem has no such events.
    pub(crate) fn open_guard(
        &self,
        keeper: Arc<dyn GroupKeeper>,
        longest_wait: Duration,
    ) -> Result<GroupState, StoreError> {
        let doing = "guard the reads of incomplete layers";
        let unsupported = |reason| io::Error::new(io::ErrorKind::Unsupported, reason);
        probe(self.root()).context(doing)?.map_err(unsupported).context(doing)?;
        let reads = GuardedReads::open(keeper, &self.0.layout.guard(), longest_wait).context(doing)?;
        let state = reads.state();
        self.0.partials.enable(reads);
        Ok(state)
    }

    /// Why reads of incomplete layers are not guarded, if that was tried and failed.
    pub fn unguarded(&self) -> Option<String> {
        self.0.partials.unguarded()
    }

    /// Fails where reads of incomplete layers cannot be guarded.
    pub fn check_guard(&self) -> Result<(), StoreError> {
        if self.0.partials.reads().is_some() {
            return Ok(());
        }
        let unsupported = |reason| io::Error::new(io::ErrorKind::Unsupported, reason);
        let doing = "guard the reads of incomplete layers";
        probe(self.root()).context(doing)?.map_err(unsupported).context(doing)
    }

    /// Answers reads from now on: all layers of earlier processes are guarded again.
    pub(crate) fn begin_guard(&self) {
        self.0.partials.reads().inspect(|reads| GuardedReads::start(reads));
    }

    /// Ends the guard of reads if no layer is incomplete or known to be damaged: nothing needs to be kept when this
    /// process ends. Reads of complete layers go on, and are verified again from the next start on.
    pub fn end_guard(&self) -> Result<(), StoreError> {
        let has_damaged = self.0.release_sound_layers();
        match self.0.partials.reads() {
            Some(reads) if !has_damaged && self.partial_layers()?.is_empty() => {
                reads.end().context("end the guard of reads")
            }
            _ => Ok(()),
        }
    }

    /// A pull has ended: the fill of layers gives way to the start of a container.
    pub(crate) fn expect_start(&self) {
        self.0.partials.demand().expect_start(Instant::now());
    }

    /// Chunks that containers of a repository's images have read when they started: those of the latest start first, in
    /// the order of the reads.
    pub(crate) fn start_reads(&self, repository: &str) -> Result<Vec<ChunkName>, StoreError> {
        let get = |reader: &DbReadTransaction| reader.get::<StartReads>(START_READS, repository);
        let found = self.0.db.read("look up start-up reads", get)?;
        Ok(found.map(|record| record.chunks).unwrap_or_default())
    }

    /// Records what containers of an image have read when they started.
    pub(crate) fn add_start_reads(&self, repository: &str, read: &[ChunkName]) -> Result<(), StoreError> {
        self.0.db.write("record start-up reads", |writer| {
            let (record, removed) = StartReads::add(writer.all(START_READS)?, repository, read);
            for repository in removed {
                writer.delete(START_READS, &repository)?;
            }
            Ok(writer.put(START_READS, repository, &record)?)
        })
    }

    /// Path of a layer's file.
    pub(crate) fn layer_path(&self, key: &LayerKey) -> PathBuf {
        self.0.layout.layer(key)
    }

    /// Takes mounts of layers away from new overlays, after reads of them were not guarded, and records what has them.
    /// Returns the images of which these may have read zeros.
    pub(crate) fn drop_unguarded_mounts(
        &self,
        partial: &[LayerRecord],
    ) -> Result<Vec<ImageRecord>, StoreError> {
        let doing = "unmount layers that may have been read wrongly";
        let keys: HashSet<LayerKey> = partial.iter().map(|record| record.key.clone()).collect();
        let read = self.0.db.write(doing, |writer| Ok(suspects::record(writer, &keys)?))?;
        for key in &keys {
            self.0.unmount_layer(key).context(doing)?;
        }
        let acknowledged = self.0.partials.reads().map_or(Ok(()), |reads| reads.acknowledge_loss());
        acknowledged.context(doing)?;
        let mut images = self.images()?;
        images.retain(|image| image.keys().iter().any(|key| read.contains(key)));
        Ok(images)
    }

    /// Records that a layer has all its data, which the archive of its diff ID has: from now on it is a layer like any
    /// other. `source` has sent the blob if the one of its missing data has not: that proves nothing then. Does nothing
    /// if the layer was removed meanwhile.
    pub(crate) fn complete_layer(
        &self,
        key: &LayerKey,
        layer: &Arc<PartialLayer>,
        facts: &LayerMetadata,
        erofs: &ErofsFile,
        source: Option<BlobSource>,
    ) -> Result<(), StoreError> {
        self.0.complete_layer(key, layer, facts, erofs, source)?;
        self.0.partials.complete(key, layer);
        Ok(())
    }

    /// Marks a layer as damaged whose archive is another than its table of contents says. What was read of it had the
    /// digests of that table; nothing more is read of it.
    pub(crate) fn fail_layer(&self, key: &LayerKey) -> Result<(), StoreError> {
        self.0.db.write("record a damaged layer", |writer| {
            let Some(mut record) = writer.get::<LayerRecord>(LAYERS, key.as_str())? else { return Ok(()) };
            if record.partial.take().is_some() {
                record.damaged = true;
                writer.put(LAYERS, key.as_str(), &record)?;
                writer.delete(LEASES, &PartialSource::lease_id(key))?;
            }
            Ok(())
        })?;
        self.0.partials.forget(key);
        Ok(())
    }

    /// Whether a layer is here under one of these keys, in whatever state.
    pub(crate) fn has_layer(&self, keys: &[LayerKey]) -> Result<bool, StoreError> {
        for key in keys {
            if self.layer(key)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// How much is there of each incomplete layer that is being filled.
    pub fn filling_layers(&self) -> Vec<(LayerKey, FillProgress)> {
        self.0.partials.progress()
    }

    /// The layers that are not complete, also those that nothing fills at present. The oldest is the first.
    pub fn incomplete_layers(&self, now: &ClockReading) -> Result<Vec<IncompleteLayer>, StoreError> {
        let doing = "list incomplete layers";
        let mut layers = self.0.db.read(doing, |reader| self.incomplete(reader, now))?;
        layers.sort_by(|a, b| b.age.cmp(&a.age).then_with(|| a.key.cmp(&b.key)));
        Ok(layers)
    }

    pub(super) fn incomplete(
        &self,
        reader: &DbReadTransaction,
        now: &ClockReading,
    ) -> DbResult<Vec<IncompleteLayer>> {
        let records = incomplete_records(reader)?;
        if records.is_empty() {
            return Ok(Vec::new());
        }
        let filling: HashMap<_, _> = self.filling_layers().into_iter().collect();
        let images: Vec<ImageRecord> = reader.all(IMAGES)?;
        let mut layers = Vec::new();
        for (LayerRecord { key, usage, .. }, partial) in records {
            let lease: Option<LeaseRecord> = reader.get(LEASES, &PartialSource::lease_id(&key))?;
            let progress = filling.get(&key).copied();
            let here = self.0.space_here(&key);
            let missing_bytes = missing_bytes(usage.bytes, here.bytes, progress.as_ref());
            let progress = progress.unwrap_or_default();
            let (host, problem) = self.0.partials.source(&key, Instant::now());
            let problem = problem.or_else(|| {
                // A daemon that could not guard reads, or no daemon.
                let is_guarding = self.0.partials.reads().is_some();
                let reason = self.unguarded().unwrap_or_else(|| FillProblem::NO_DAEMON.to_owned());
                (!is_guarding).then_some(FillProblem { reason, retry_in: None })
            });
            let having = images.iter().filter(|image| image.complete && image.has_layer(&key));
            layers.push(IncompleteLayer {
                images: having.map(|image| image.name().to_owned()).collect(),
                total_bytes: usage.bytes,
                fill: ImageFill {
                    missing_bytes,
                    waiting_reads: progress.waiting as u64,
                    hosts: BTreeSet::from([host.unwrap_or_else(|| partial.blob.registry_name().to_owned())]),
                    bytes_per_second: progress.bytes_per_second,
                    problem,
                },
                age: lease.map_or(Duration::ZERO, |lease| lease.granted_at.age(now)),
                key,
            });
        }
        Ok(layers)
    }

    /// Has fetches for incomplete layers and waits of their reads counted.
    pub fn observe_fills(&self, observer: Arc<dyn FillObserver>) {
        self.0.partials.demand().observe_with(observer);
    }

    /// Whether data of a layer is missing.
    pub fn has_incomplete_layers(&self) -> Result<bool, StoreError> {
        Ok(!self.partial_layers()?.is_empty())
    }

    /// Records of the layers whose data is not complete.
    pub(crate) fn partial_layers(&self) -> Result<Vec<LayerRecord>, StoreError> {
        let mut partial: Vec<LayerRecord> =
            self.0.db.read("list incomplete layers", |reader| reader.all(LAYERS))?;
        partial.retain(|layer| layer.present && layer.partial.is_some());
        Ok(partial)
    }
}

/// Missing bytes of an incomplete layer that takes `total` bytes once it is complete; `here` are on the disk. The next
/// process knows less of what is filled than the disk has: it must not look as if data were lost. Never zero: the layer
/// is not complete.
fn missing_bytes(total: u64, here: u64, progress: Option<&FillProgress>) -> u64 {
    let unfilled = progress.map_or(u64::MAX, |progress| progress.total_bytes - progress.filled_bytes);
    total.saturating_sub(here).min(unfilled).max(1)
}

/// The layers of images, mounts and containers that are not complete. Each has a lease.
pub(super) fn incomplete_records(reader: &DbReadTransaction) -> DbResult<Vec<(LayerRecord, PartialSource)>> {
    let mut records = Vec::new();
    for key in reader.endings(LEASES, &PartialSource::lease_id_start())? {
        let record: Option<LayerRecord> = reader.get(LAYERS, &key)?;
        if let Some((record, partial)) =
            record.and_then(|record| record.partial.clone().map(|from| (record, from)))
        {
            records.push((record, partial));
        }
    }
    Ok(records)
}

impl OpenStore {
    /// Whether a layer that was incomplete is complete now, or its data comes while it is read.
    pub(crate) fn is_guarded(&self, key: &LayerKey) -> Result<bool, StoreError> {
        if self.partials.is_guarded(key) {
            return Ok(true);
        }
        let get = |reader: &DbReadTransaction| reader.get::<LayerRecord>(LAYERS, key.as_str());
        Ok(self.db.read("look up a layer", get)?.is_some_and(|layer| layer.is_whole()))
    }

    fn complete_layer(
        &self,
        key: &LayerKey,
        layer: &PartialLayer,
        facts: &LayerMetadata,
        erofs: &ErofsFile,
        source: Option<BlobSource>,
    ) -> Result<(), StoreError> {
        let doing = "complete a layer";
        layer.file().sync_all().context(doing)?;
        let path = self.layout.layer(key);
        let _guard = self.lock_content();
        let get = |reader: &DbReadTransaction| reader.get::<LayerRecord>(LAYERS, key.as_str());
        let is_same = file_of(&path).ok() == Some(FileId::of(layer.file().as_fd()).context(doing)?);
        let before = self.db.read(doing, get)?.filter(|_| is_same);
        let Some(LayerRecord { partial: Some(partial), .. }) = before else { return Ok(()) };
        let transfers = [source.unwrap_or(partial.blob)];
        let record = LayerRecord::of_file(key, facts.clone(), erofs.clone());
        let record = self.record_layer(&path, record, &transfers)?;
        layer.file().sync_all().context(doing)?;
        let images = self.db.write(doing, |writer| {
            writer.put(LAYERS, key.as_str(), &record)?;
            put_transfers(writer, key, &transfers)?;
            writer.delete(LEASES, &PartialSource::lease_id(key))?;
            Ok(self.recheck_images(writer, key)?)
        })?;
        self.discard_superseded_remnants(std::iter::once(key));
        self.note_images(images.iter());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn less_is_never_here_because_another_process_goes_on() {
        let progress =
            |filled_bytes| Some(FillProgress { filled_bytes, total_bytes: 900, ..FillProgress::default() });
        let steps = [
            missing_bytes(1000, 100, progress(0).as_ref()),
            missing_bytes(1000, 400, progress(350).as_ref()),
            // Nothing fills it.
            missing_bytes(1000, 400, None),
            // The next process has not yet compared what is on the disk.
            missing_bytes(1000, 400, progress(0).as_ref()),
            missing_bytes(1000, 700, progress(200).as_ref()),
            // Zeros take no space.
            missing_bytes(1000, 700, progress(900).as_ref()),
            missing_bytes(1000, 1000, None),
        ];
        assert_eq!(steps, [900, 550, 600, 600, 300, 1, 1]);
    }
}
