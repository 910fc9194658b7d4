//! Rebuilds a lost or damaged database from the files on disk.
//!
//! Each layer has a copy of its record at the end of its file, each image has one in `images`, each mount has one in
//! its directory. Content that an image, a mount or a lease refers to is never dropped: a layer that does not match its
//! digest is recorded as damaged, an image without all of its content as incomplete, so that a pull fetches just that.
//! Leases, mounts and the learned unpack ratio are taken from what can still be read of the old database.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::names::write_names;
use super::report::StoreDamage;
use crate::disk::{Disk, RealDisk, measure};
use crate::erofs::ErofsFile;
use crate::erofs::digest::LayerCheck;
use crate::mounts::mounted_of;
use crate::snapshots::{find_snapshots, keep_lost_snapshots};
use crate::store::blobs::{check_digest, read_blob};
use crate::store::db::{
    Db, DbTable, DbTransaction, IMAGES, LAYERS, LEASES, META, MOUNTS, SNAPSHOTS, TRANSFERS, decode, log_of,
};
use crate::store::error::StoreOpenError;
use crate::store::layer_check::check_layer_file;
use crate::store::layer_file::read_record;
use crate::store::layout::{StoreLayout, names_in};
use crate::store::open::{LockedStoreDir, MissingStoreAction};
use crate::store::resumable_list::LayerRecordFile;
use crate::store::snapshot_records::put_rebuilt;
use crate::store::transfers::put_transfers;
use crate::store::{
    BlobSource, ImageLayer, ImageRecord, LayerKey, LayerMetadata, LayerRecord, LeaseRecord, MountRecord,
    OpenStore, SnapshotRecord, Store, StoreConfig,
};
use larder::reference::Digest;

/// Result of a rebuild.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RebuildReport {
    /// Complete images.
    pub images: u64,
    /// Incomplete images; a pull completes them.
    pub incomplete: u64,
    /// Layers, damaged ones included.
    pub layers: u64,
    /// Damaged layers, and why: `layers/abc...: EROFS: content differs`. A pull replaces them.
    pub damaged: Vec<String>,
    /// Files that were left out, and why: `images/sha256-abc....json: ...`.
    pub left_out: Vec<String>,
    /// Path of the old database, if there was one.
    pub old: Option<PathBuf>,
}

impl fmt::Display for RebuildReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RebuildReport { images, incomplete, layers, damaged, left_out, old } = self;
        write!(f, "rebuilt the database: {images} images, {layers} layers")?;
        if *incomplete > 0 {
            write!(f, ", {incomplete} incomplete images")?;
        }
        for (list, what) in [(damaged, "damaged"), (left_out, "left out")] {
            if !list.is_empty() {
                write!(f, "; {what}: {}", list.join("; "))?;
            }
        }
        old.as_ref().map_or(Ok(()), |old| write!(f, "; the old database is kept as {}", old.display()))
    }
}

/// Extent of the check of the layers' files.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RebuildLayerCheck {
    /// Sizes and records: the index of a store that is needed now was damaged, not its layers.
    Size,
    /// Every byte.
    Content,
}

impl RebuildLayerCheck {
    /// Returns the damage of a layer, if any.
    fn check(self, record: &LayerRecord, layer: &Path) -> Option<String> {
        let check = match self {
            RebuildLayerCheck::Size => LayerCheck::Size,
            RebuildLayerCheck::Content => LayerCheck::Content,
        };
        check_layer_file(record, layer, check).unwrap_or_else(|error| Some(error.to_string()))
    }
}

impl Store {
    /// Rebuilds the database of a store from its blobs and layers, and opens it. The old one is renamed, not removed.
    pub fn rebuild(root: &Path, config: StoreConfig) -> Result<(Store, RebuildReport), StoreOpenError> {
        let opening = LockedStoreDir::begin(Arc::new(RealDisk), root, MissingStoreAction::Rebuild)?;
        rebuild_begun(opening, config, RebuildLayerCheck::Content)
    }
}

/// Rebuilds the database of a store that is being opened.
pub(crate) fn rebuild_begun(
    opening: LockedStoreDir,
    config: StoreConfig,
    check: RebuildLayerCheck,
) -> Result<(Store, RebuildReport), StoreOpenError> {
    let root = opening.layout.root().to_owned();
    let failed = |cause| StoreOpenError::Io { doing: "rebuild", root: root.clone(), cause };
    let layout = &opening.layout;
    let ratio = Db::salvage(&layout.database(), META);
    let leases = salvaged::<LeaseRecord>(layout, LEASES);
    let transfers = salvaged::<Vec<BlobSource>>(layout, TRANSFERS);
    let mounts = find_mounts(layout).map_err(failed)?;
    // Without its record, a mount's layers would not be protected.
    let mut mounted = mounted_of(&layout.mounts()).map_err(failed)?;
    mounted.retain(|target| !mounts.values().any(|mount| mount.target.display().to_string() == *target));
    if !mounted.is_empty() {
        return Err(StoreOpenError::Mounted { root, mounted });
    }
    let snapshots = find_snapshots(layout, salvaged::<SnapshotRecord>(layout, SNAPSHOTS)).map_err(failed)?;
    let mut rebuilt = RebuildReport::default();
    let mut images = find_images(layout, &mut rebuilt).map_err(failed)?;
    let mut needed: BTreeMap<&LayerKey, Option<&ImageLayer>> = BTreeMap::new();
    needed.extend(leases.values().flat_map(|lease| &lease.leased.layers).map(|key| (key, None)));
    needed.extend(mounts.values().flat_map(|mount| &mount.layers).map(|key| (key, None)));
    needed.extend(snapshots.values().filter_map(|snapshot| snapshot.layer.as_ref()).map(|key| (key, None)));
    needed.extend(images.iter().flat_map(|image| &image.layers).map(|layer| (&layer.key, Some(layer))));
    let layers = find_layers(layout, &needed, check, &mut rebuilt);
    for image in &mut images {
        image.complete &=
            image.keys().into_iter().all(|key| layers.iter().any(|layer| layer.record.key == *key));
        *(if image.complete { &mut rebuilt.images } else { &mut rebuilt.incomplete }) += 1;
    }
    let known = snapshots.values().map(|snapshot| snapshot.id).collect();
    for path in keep_lost_snapshots(&*opening.disk, layout, &known).map_err(failed)? {
        let what = StoreDamage::LostSnapshot { path };
        rebuilt.left_out.push(what.to_string());
    }
    rebuilt.old = keep_old(&*opening.disk, layout).map_err(failed)?;

    // It appears with everything in it: an empty one would make all layers look like leftovers.
    let fill = |writer: &DbTransaction| {
        ratio.iter().try_for_each(|(key, value)| writer.put_raw(META, key, value))?;
        put_all(writer, LEASES, &leases)?;
        put_all(writer, MOUNTS, &mounts)?;
        put_rebuilt(writer, &snapshots)?;
        for RebuiltLayer { record, transfers: copied } in &layers {
            let key = &record.key;
            writer.put(LAYERS, key.as_str(), record)?;
            put_transfers(writer, key, transfers.get(key.as_str()).unwrap_or(copied))?;
        }
        images.iter().try_for_each(|image| writer.put(IMAGES, image.id.as_str(), image))?;
        write_names(writer)
    };
    let path = layout.database();
    Db::create(&*opening.disk, &path, fill).map_err(|cause| StoreOpenError::Database { path, cause })?;
    let db = opening.open_database(&config)?;
    let store = opening.into_store(db, config, OpenStore::recover)?;
    // The next rebuild knows no more than these copies.
    store.0.note_images(images.iter().filter(|image| !image.complete));
    Ok((store, rebuilt))
}

fn put_all<T: Serialize>(
    writer: &DbTransaction,
    table: DbTable,
    records: &BTreeMap<String, T>,
) -> Result<(), crate::store::DbError> {
    records.iter().try_for_each(|(key, record)| writer.put(table, key, record))
}

/// The records of a table that can still be read.
fn salvaged<T: DeserializeOwned>(layout: &StoreLayout, table: DbTable) -> BTreeMap<String, T> {
    let rows = Db::salvage(&layout.database(), table);
    rows.into_iter().filter_map(|(key, value)| Some((key.clone(), decode(&key, &value).ok()?))).collect()
}

/// Moves the old database out of the way, with its log. Without one the store does not open, but for another rebuild.
fn keep_old(disk: &dyn Disk, layout: &StoreLayout) -> std::io::Result<Option<PathBuf>> {
    let (path, old) = (layout.database(), layout.old_database());
    if !path.exists() {
        return Ok(None);
    }
    disk.remove_file(&log_of(&old))?;
    disk.rename(&path, &old)?;
    if log_of(&path).exists() {
        disk.rename(&log_of(&path), &log_of(&old))?;
    }
    disk.sync_dir(layout.root())?;
    Ok(Some(old))
}

/// The mounts, by id: from the old database, and from the copies of their records.
fn find_mounts(layout: &StoreLayout) -> std::io::Result<BTreeMap<String, MountRecord>> {
    let mut mounts = salvaged::<MountRecord>(layout, MOUNTS);
    for id in names_in(&layout.mounts())? {
        let copy = fs_err::read(layout.mount_record(&id)).ok();
        if let Some(mount) = copy.and_then(|copy| decode::<MountRecord>(&id, &copy).ok())
            && mount.id == id
        {
            mounts.entry(id).or_insert(mount);
        }
    }
    Ok(mounts)
}

/// The layers that are needed and have a record. What nothing needs would be removed again.
fn find_layers(
    layout: &StoreLayout,
    needed: &BTreeMap<&LayerKey, Option<&ImageLayer>>,
    check: RebuildLayerCheck,
    rebuilt: &mut RebuildReport,
) -> Vec<RebuiltLayer> {
    let mut layers = Vec::new();
    for (key, of_image) in needed {
        let record = layer_record(layout, key);
        let record = record.or_else(|reason| of_image.and_then(|layer| guessed(layout, layer)).ok_or(reason));
        match record {
            Ok(mut layer) => {
                let damage = check.check(&layer.record, &layout.layer(key));
                layer.record.damaged = damage.is_some();
                rebuilt.damaged.extend(damage.map(|damage| format!("layers/{key}: {damage}")));
                layers.push(layer);
            }
            Err(reason) => rebuilt.left_out.push(format!("layers/{key}: {reason}")),
        }
    }
    rebuilt.layers = layers.len() as u64;
    layers
}

/// A layer with its record.
struct RebuiltLayer {
    record: LayerRecord,
    /// The sources that have sent it.
    transfers: Vec<BlobSource>,
}

fn layer_record(layout: &StoreLayout, key: &LayerKey) -> Result<RebuiltLayer, String> {
    let copy = read_record(&layout.layer(key)).map_err(|error| error.to_string())?;
    let copy: LayerRecordFile = decode(key.as_str(), &copy).map_err(|error| larder::error_chain(&error))?;
    let LayerRecordFile { mut record, transfers, .. } = copy;
    if record.key != *key {
        return Err(format!("its record belongs to {}", record.key));
    }
    record.present = true;
    Ok(RebuiltLayer { record, transfers })
}

/// The record of a layer that has none, as far as an image knows it.
fn guessed(layout: &StoreLayout, layer: &ImageLayer) -> Option<RebuiltLayer> {
    let usage = measure(&layout.layer(&layer.key)).ok()?;
    let facts = LayerMetadata {
        diff_id: layer.diff_id.clone(),
        digest: layer.digest.clone(),
        compressed_bytes: layer.size,
        plain_bytes: 0,
        skipped_xattrs: 0,
    };
    let key = layer.key.clone();
    let erofs = ErofsFile::unknown();
    let record = LayerRecord { usage, ..LayerRecord::of_file(&key, facts, erofs) };
    Some(RebuiltLayer { record, transfers: Vec::new() })
}

/// The images that have a record; incomplete if their manifests and configs are not as they were fetched, or if they
/// were incomplete: who may use them may be forgotten, so only a pull of their own completes them, as
/// [`recheck_images`](OpenStore::recheck_images) has it.
fn find_images(layout: &StoreLayout, rebuilt: &mut RebuildReport) -> std::io::Result<Vec<ImageRecord>> {
    let mut images = Vec::new();
    for name in names_in(&layout.images())? {
        match image_record(layout, &name) {
            Ok(mut image) => {
                let damage = image.blobs().find_map(|digest| whole_blob(layout, digest).err());
                image.complete = damage.is_none() && (image.complete || image.preloaded);
                rebuilt.damaged.extend(damage.map(|damage| format!("image {}: {damage}", image.id)));
                images.push(image);
            }
            Err(reason) => rebuilt.left_out.push(format!("images/{name}: {reason}")),
        }
    }
    Ok(images)
}

fn image_record(layout: &StoreLayout, name: &str) -> Result<ImageRecord, String> {
    let copy = fs_err::read(layout.images().join(name)).map_err(|error| error.to_string())?;
    let image: ImageRecord = decode(name, &copy).map_err(|error| larder::error_chain(&error))?;
    if layout.image(&image.id) != layout.images().join(name) {
        return Err(format!("its record belongs to {}", image.id));
    }
    Ok(image)
}

fn whole_blob(layout: &StoreLayout, digest: &Digest) -> Result<(), String> {
    let bytes = read_blob(&layout.blob(digest)).map_err(|error| error.to_string())?;
    let bytes = bytes.ok_or_else(|| format!("{digest} is missing"))?;
    check_digest(&bytes, digest).map_err(|error| error.to_string())
}
