//! Makes an image visible.
//!
//! ```text
//! layers and blobs in the store -> one sync of the filesystem -> one transaction
//! ```
//!
//! Guarantees: before the transaction, no reader sees any of it; after it, everything that the image needs is durable.
//! The leftovers of an interrupted commit are removed when the store is opened.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;

use larder::reference::{Digest, Reference};

use super::admission::learn;
use super::blob_source::IngestId;
use super::db::{
    DbRead, DbResult, DbTransaction, IMAGES, LAYERS, LEASES, META, NAMES, TransactionAbort, USES,
};
use super::error::{StoreError, StoreErrorContext as _};
use super::handle::{OpenStore, Store};
use super::layer_check::check_layer_file;
use super::layers::LayerHandle;
use super::listing::put_image;
use super::records::{
    ImageLayer, ImageRecord, LayerKey, LayerRecord, LeaseRecord, PartialSource, UnpackRatio, seconds,
};
use super::references::ReferencedItem;
use super::sync_descriptor::{SyncDescriptor, sync_each};
use super::transfers::put_transfers;
use super::usage::taken;
use crate::disk::{DiskSpace, SizeAccuracy};
use crate::erofs::digest::LayerCheck;
use larder_registry::manifest::{ImageConfig, ManifestError};

/// Key of the learned [`UnpackRatio`] in the table of what is known of the store as a whole.
pub(super) const RATIO: &str = "ratio";

/// Maximum of manifests stored per image, so that repeated pulls with new manifests do not fill the disk.
const MAX_MANIFESTS: usize = 32;

/// An image to commit, with all layers present.
#[derive(Debug, Clone)]
pub struct ImageCommit {
    /// The image's names. A name with a digest adds no tag, even if it has one.
    pub names: Vec<Reference>,
    /// Digest of the config, and its bytes.
    pub config: (Digest, Vec<u8>),
    /// Indexes and manifest that led to the config, with their bytes, outermost first. Names are remembered with the
    /// first one's digest.
    pub manifests: Vec<(Digest, Vec<u8>)>,
    /// Whether a registry knows the first manifest by its digest. False for one that was made up for an archive.
    pub has_digest: bool,
    /// Type and own config of an artifact; an image has none.
    pub artifact: Option<CommitArtifact>,
    /// Its layers, lowest first.
    pub layers: Vec<CommitLayer>,
    /// Ingests of its layers, which are of no more use.
    pub ingests: Vec<IngestId>,
    /// Pinned: never removed by GC.
    pub pinned: bool,
    /// Loaded from an archive by an administrator.
    pub preloaded: bool,
    /// A lease to end in the same transaction: that of the pull.
    pub end_lease: Option<String>,
}

/// An artifact that is committed as an image.
#[derive(Debug, Clone)]
pub struct CommitArtifact {
    /// Its type.
    pub artifact_type: String,
    /// Digest of its own config, and its bytes.
    pub config: (Digest, Vec<u8>),
}

/// One layer of an [`ImageCommit`].
#[derive(Debug, Clone)]
pub struct CommitLayer {
    /// The layer.
    pub layer: LayerHandle,
    /// Digest of the archive in this image's manifest.
    pub digest: Digest,
    /// Size of that archive in bytes.
    pub size: u64,
    /// Its media type in the manifest.
    pub media_type: String,
}

impl Store {
    /// Makes an image visible under its names; each tag is taken from the image that had it.
    pub fn commit(&self, image: &ImageCommit, now: SystemTime) -> Result<ImageRecord, StoreError> {
        self.0.commit(image, now)
    }

    /// Makes layers durable without an image, so that a retry after another failure, or a repair, need not fetch them
    /// again. Unless an image, a lease or a snapshot references them, they are removed by the next
    /// [`sweep`](Store::sweep).
    pub fn commit_layers(
        &self,
        layers: &[LayerHandle],
        lease: Option<&LeaseRecord>,
    ) -> Result<(), StoreError> {
        let doing = "keep layers";
        let writes = self.0.begin_writes().context(doing)?;
        sync_layers(doing, writes, layers)?;
        let records = self.0.measured_records(layers)?;
        let _guard = self.0.lock_content();
        let rechecked = self.0.db.write(doing, |writer| {
            let rechecked = self.0.put_layers(writer, layers, &records)?;
            lease.map_or(Ok(()), |lease| writer.put(LEASES, &lease.id, lease))?;
            Ok(rechecked)
        })?;
        self.0.discard_superseded_remnants(whole_keys(layers));
        self.0.note_committed(layers.iter());
        self.0.note_images(rechecked.iter());
        Ok(())
    }
}

impl OpenStore {
    fn commit(&self, image: &ImageCommit, now: SystemTime) -> Result<ImageRecord, StoreError> {
        let doing = "commit the image";
        let config = check(image)?;
        let writes = self.begin_writes().context(doing)?;
        let own_config = image.artifact.iter().map(|artifact| &artifact.config);
        let blobs: Vec<_> =
            std::iter::once(&image.config).chain(&image.manifests).chain(own_config).collect();
        let held = {
            // A removal that is under way has either taken them already, or will leave them.
            let _guard = self.lock_content();
            blobs
                .iter()
                .map(|(digest, _)| self.references.add(ReferencedItem::Blob(digest.clone())))
                .collect::<Vec<_>>()
        };
        for (digest, bytes) in blobs {
            self.put_blob(digest, bytes)?;
        }
        let layers: Vec<LayerHandle> = image.layers.iter().map(|layer| layer.layer.clone()).collect();
        sync_layers(doing, writes, &layers)?;
        let records = self.measured_records(&layers)?;

        let guard = self.lock_content();
        let (record, others) = self.db.write(doing, |writer| {
            learn_from(writer, &records)?;
            let mut others = self.put_layers(writer, &layers, &records)?;
            let (record, unnamed) = self.put_image(writer, image, &config, now)?;
            others.extend(unnamed);
            if let Some(lease) = &image.end_lease {
                writer.delete(LEASES, lease)?;
            }
            Ok((record, others))
        })?;
        self.discard_superseded_remnants(whole_keys(&layers));
        self.note_committed(layers.iter());
        self.note_images(others.iter().chain([&record]));
        drop(guard);
        drop(held);
        for layer in &layers {
            self.partials.start_new(layer.key());
        }
        self.discard_ingests(&image.ingests);
        Ok(record)
    }

    /// Writes the image's record, moves its names to it, and returns it with the images that lost a name.
    fn put_image(
        &self,
        writer: &DbTransaction,
        image: &ImageCommit,
        config: &ImageConfig,
        now: SystemTime,
    ) -> DbResult<(ImageRecord, Vec<ImageRecord>)> {
        let id = &image.config.0;
        let before = writer.get::<ImageRecord>(IMAGES, id.as_str())?;
        if let Some(before) = &before {
            // An image that was there may have had its layers under other keys.
            delete_uses(writer, before)?;
        }
        let (tags, digests) = names_of(image);
        let artifact = image.artifact.as_ref();
        let mut record = ImageRecord {
            id: id.clone(),
            artifact_type: artifact.map(|artifact| artifact.artifact_type.clone()).unwrap_or_default(),
            artifact_config: artifact.map(|artifact| artifact.config.0.clone()),
            tags,
            digests,
            manifests: image.manifests.iter().map(|(digest, _)| digest.clone()).collect(),
            layers: image.layers.iter().map(image_layer).collect(),
            blob_bytes: 0,
            disk_bytes: 0,
            user: config.user.clone(),
            pinned: image.pinned,
            preloaded: image.preloaded,
            created: config.created.clone(),
            pulled_at: seconds(now),
            complete: true,
        };
        if let Some(before) = before {
            merge(&mut record, before);
        }
        record.blob_bytes = self.blob_bytes(&record);

        let mut others = Vec::new();
        for name in record.names() {
            others.extend(move_name(writer, name, &record.id)?);
        }
        put_image(writer, &mut record)?;
        put_uses(writer, &record)?;
        Ok((record, others))
    }

    /// Returns the allocated bytes of config and manifests, which must be synced. A missing manifest cannot be
    /// measured; fsck reports it.
    fn blob_bytes(&self, record: &ImageRecord) -> u64 {
        record.blobs().map(|digest| taken(&self.layout.blob(digest)).bytes).sum()
    }

    /// The records of those layers that are uncommitted, with their sizes. The layers must be synced.
    fn measured_records(&self, layers: &[LayerHandle]) -> Result<HashMap<LayerKey, LayerRecord>, StoreError> {
        let mut records = HashMap::new();
        for layer in layers.iter().filter(|layer| layer.is_uncommitted()) {
            let usage = match self.sizes {
                // Space is promised to what is missing.
                _ if layer.record().partial.is_some() => layer.record().usage,
                SizeAccuracy::WhileWritten => layer.record().usage,
                SizeAccuracy::AfterSync | SizeAccuracy::Estimated => {
                    self.measure_layer(layer.path(), layer.key())?
                }
            };
            records.insert(layer.key().clone(), LayerRecord { usage, ..layer.record().clone() });
        }
        Ok(records)
    }

    /// Writes the records of uncommitted layers; the others must be there. Returns the images whose
    /// copies are outdated.
    fn put_layers(
        &self,
        writer: &DbTransaction,
        layers: &[LayerHandle],
        records: &HashMap<LayerKey, LayerRecord>,
    ) -> Result<Vec<ImageRecord>, TransactionAbort> {
        let mut rechecked = Vec::new();
        for layer in layers {
            let key = layer.key();
            let before = writer.get::<LayerRecord>(LAYERS, key.as_str())?;
            if let Some(record) = records.get(key).filter(|_| layer.is_uncommitted()) {
                writer.put(LAYERS, key.as_str(), record)?;
                put_transfers(writer, key, &layer.transfers())?;
                let lease = PartialSource::lease_id(key);
                match &record.partial {
                    Some(partial) => writer.put(LEASES, &lease, &partial.lease(key))?,
                    None => writer.delete(LEASES, &lease)?,
                }
                if before.is_some() {
                    // It was damaged and is back: preloaded images that waited for it may be whole again.
                    rechecked.extend(self.recheck_images(writer, key)?);
                }
            } else if !before.is_some_and(|before| before.present) {
                return Err(StoreError::NoLayer { key: key.clone() }.into());
            }
        }
        Ok(rechecked)
    }

    /// Notes for each image that needs this layer whether all that it needs is there. An image that was absent, and was
    /// not preloaded, stays so until a pull of its own: kubelet may have forgotten who may use it. Returns the images
    /// whose copies must say so: those that are absent, and those that were.
    pub(crate) fn recheck_images(
        &self,
        writer: &DbTransaction,
        key: &LayerKey,
    ) -> DbResult<Vec<ImageRecord>> {
        let mut noted = Vec::new();
        for id in writer.endings(USES, &format!("layer/{key}/"))? {
            let Some(mut image) = writer.get::<ImageRecord>(IMAGES, &id)? else { continue };
            let mut complete = image.blobs().all(|digest| self.layout.blob(digest).exists());
            for key in image.keys() {
                let layer = writer.get::<LayerRecord>(LAYERS, key.as_str())?;
                complete &= layer.is_some_and(|layer| layer.present);
            }
            let was_complete = image.complete;
            image.complete = complete && (was_complete || image.preloaded);
            put_image(writer, &mut image)?; // also for the layer's size, which may differ from what it was
            if !(image.complete && was_complete) {
                noted.push(image);
            }
        }
        Ok(noted)
    }
}

/// Keys of the layers that have all their data.
fn whole_keys(layers: &[LayerHandle]) -> impl Iterator<Item = &LayerKey> {
    layers.iter().filter(|layer| layer.record().is_whole()).map(LayerHandle::key)
}

/// Makes uncommitted layers durable, and what was written since `writes` began.
fn sync_layers(
    doing: &'static str,
    writes: Arc<SyncDescriptor>,
    layers: &[LayerHandle],
) -> Result<(), StoreError> {
    let uncommitted = || layers.iter().filter(|layer| layer.is_uncommitted());
    let of_layers = uncommitted().filter_map(LayerHandle::written).cloned();
    sync_each(of_layers.chain([writes]).collect()).context(doing)?;
    uncommitted().filter(|layer| layer.written().is_none()).try_for_each(verify_on_disk)
}

/// Compares a layer that a dead process wrote with its digest. Its write errors may have gone to another process.
fn verify_on_disk(layer: &LayerHandle) -> Result<(), StoreError> {
    let checked = check_layer_file(layer.record(), layer.path(), LayerCheck::Disk);
    let whole = checked.is_ok_and(|damage| damage.is_none());
    if whole {
        return Ok(());
    }
    layer.set_lost();
    Err(StoreError::LostWrites { key: layer.key().clone() })
}

/// Checks the config, and that its layers are those that were given.
fn check(image: &ImageCommit) -> Result<ImageConfig, StoreError> {
    let (id, bytes) = &image.config;
    let config = ImageConfig::parse(bytes)
        .map_err(|cause: ManifestError| StoreError::Config { id: id.clone(), cause: Box::new(cause) })?;
    let given = image.layers.iter().map(|layer| &layer.layer.record().facts.diff_id);
    if !given.eq(config.diff_ids.iter()) {
        return Err(StoreError::WrongLayers { id: id.clone() });
    }
    Ok(config)
}

fn image_layer(given: &CommitLayer) -> ImageLayer {
    ImageLayer {
        diff_id: given.layer.record().facts.diff_id.clone(),
        key: given.layer.key().clone(),
        digest: given.digest.clone(),
        size: given.size,
        media_type: given.media_type.clone(),
    }
}

/// The names with tags and those with digests, sorted.
pub(crate) fn names_of(image: &ImageCommit) -> (Vec<String>, Vec<String>) {
    let (mut tags, mut digests) = (Vec::new(), Vec::new());
    for name in &image.names {
        if name.digest().is_some() {
            digests.push(name.stored().to_string());
            continue;
        }
        tags.push(name.stored().to_string());
        let target = image.manifests.first().filter(|_| image.has_digest);
        digests.extend(target.map(|(digest, _)| name.with_digest(digest).to_string()));
    }
    sort(&mut tags);
    sort(&mut digests);
    (tags, digests)
}

pub(super) fn sort(names: &mut Vec<String>) {
    names.sort_unstable();
    names.dedup();
}

/// Adds what was known of the image before. Its layers keep the blobs they were made from, whatever another manifest of
/// the same config names.
fn merge(record: &mut ImageRecord, before: ImageRecord) {
    for (layer, before) in record.layers.iter_mut().zip(before.layers) {
        if layer.key == before.key {
            *layer = before;
        }
    }
    record.tags.extend(before.tags);
    record.digests.extend(before.digests);
    sort(&mut record.tags);
    sort(&mut record.digests);
    for manifest in before.manifests {
        if !record.manifests.contains(&manifest) && record.manifests.len() < MAX_MANIFESTS {
            record.manifests.push(manifest);
        }
    }
    // Anybody may name the made config of an artifact as that of an image.
    if record.artifact_config.is_none() {
        record.artifact_type = before.artifact_type;
        record.artifact_config = before.artifact_config;
    }
    record.pinned |= before.pinned;
    record.preloaded |= before.preloaded;
}

/// Gives a name to an image; returns the image that had it before.
pub(super) fn move_name(writer: &DbTransaction, name: &str, id: &Digest) -> DbResult<Option<ImageRecord>> {
    let before = writer.value(NAMES, name)?;
    writer.put_raw(NAMES, name, id.as_str().as_bytes())?;
    let Some(before) = before.filter(|before| before != id.as_str().as_bytes()) else {
        return Ok(None);
    };
    let before = String::from_utf8_lossy(&before).into_owned();
    let Some(mut other) = writer.get::<ImageRecord>(IMAGES, &before)? else {
        return Ok(None);
    };
    other.tags.retain(|tag| tag != name);
    other.digests.retain(|digest| digest != name);
    put_image(writer, &mut other)?;
    Ok(Some(other))
}

/// Notes that an image needs its layers and blobs.
pub(crate) fn put_uses(writer: &DbTransaction, image: &ImageRecord) -> DbResult<()> {
    for_uses(image, |key| writer.put_raw(USES, key, b""))
}

/// Takes back what [`put_uses`] noted.
pub(super) fn delete_uses(writer: &DbTransaction, image: &ImageRecord) -> DbResult<()> {
    for_uses(image, |key| writer.delete(USES, key))
}

pub(crate) fn for_uses(image: &ImageRecord, mut with: impl FnMut(&str) -> DbResult<()>) -> DbResult<()> {
    for key in image.keys() {
        with(&format!("layer/{key}/{}", image.id))?;
    }
    for digest in image.blobs() {
        with(&format!("blob/{digest}/{}", image.id))?;
    }
    Ok(())
}

/// Remembers what fetched bytes became on disk. The size of uncompressed ones is known before, and a model has so many
/// of them that they would hide all others.
fn learn_from(writer: &DbTransaction, records: &HashMap<LayerKey, LayerRecord>) -> DbResult<()> {
    let (mut fetched, mut became) = (0_u64, DiskSpace::default());
    let compressed = |record: &&LayerRecord| {
        record.partial.is_none() && record.facts.compressed_bytes != record.facts.plain_bytes
    };
    for layer in records.values().filter(compressed) {
        fetched = fetched.saturating_add(layer.facts.compressed_bytes);
        became += layer.usage;
    }
    let before = writer.get::<UnpackRatio>(META, RATIO)?;
    match learn(before, fetched, became) {
        Some(ratio) => writer.put(META, RATIO, &ratio),
        None => Ok(()),
    }
}
