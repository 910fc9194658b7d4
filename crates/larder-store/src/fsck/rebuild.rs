//! Rebuilds a lost or damaged database from the files on disk.
//!
//! Each layer has a copy of its record beside its files, each image has one in `images`. Only intact content is used: a
//! layer that matches its manifest byte for byte, a manifest and config that match their digests. An image without all
//! of its layers is recorded as incomplete, so that a pull fetches just those. Leases and the learned unpack ratio are
//! lost.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder::reference::Digest;

use super::names::write_names;
use super::options::LayerChecker;
use crate::disk::{Disk, RealDisk};
use crate::mounts::mounted_of;
use crate::store::blobs::{check_digest, read_blob};
use crate::store::db::{Db, DbTransaction, IMAGES, LAYERS, decode};
use crate::store::error::StoreOpenError;
use crate::store::layers::RECORD;
use crate::store::layout::{StoreLayout, names_in};
use crate::store::open::{LockedStoreDir, MissingStoreAction};
use crate::store::{ImageRecord, LayerKey, LayerRecord, Store, StoreConfig, StoreError};

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RebuildReport {
    /// Complete images.
    pub images: u64,
    /// Incomplete images; a pull completes them.
    pub incomplete: u64,
    /// Intact layers.
    pub layers: u64,
    /// What was left out, and why: `layers/abc...: usr/bin/tool: content differs`.
    pub left_out: Vec<String>,
    /// Path of the old database, if there was one.
    pub old: Option<PathBuf>,
}

impl Store {
    /// Rebuilds the database of a store from its blobs and layers, and opens it. The old one is renamed, not removed.
    pub fn rebuild(
        root: &Path,
        config: StoreConfig,
        check: &dyn LayerChecker,
    ) -> Result<(Store, RebuildReport), StoreOpenError> {
        Store::rebuild_on(Arc::new(RealDisk), root, config, check)
    }

    /// Like [`rebuild`](Store::rebuild), on a disk of the caller's choice.
    fn rebuild_on(
        disk: Arc<dyn Disk>,
        root: &Path,
        config: StoreConfig,
        check: &dyn LayerChecker,
    ) -> Result<(Store, RebuildReport), StoreOpenError> {
        let opening = LockedStoreDir::begin(disk, root, MissingStoreAction::Rebuild)?;
        let root = opening.layout.root().to_owned();
        let failed = |cause| StoreOpenError::Io { doing: "rebuild", root: root.clone(), cause };
        // A mount's record cannot be rebuilt, and without it the layers would not be protected.
        let mounted = mounted_of(&opening.layout.mounts()).map_err(failed)?;
        if !mounted.is_empty() {
            return Err(StoreOpenError::Mounted { root, mounted });
        }
        let mut rebuilt = RebuildReport::default();
        let layers = find_layers(&opening.layout, check, &mut rebuilt).map_err(failed)?;
        let images = find_images(&opening.layout, &layers, &mut rebuilt).map_err(failed)?;
        rebuilt.old = keep_old(&*opening.disk, &opening.layout).map_err(failed)?;

        let path = opening.layout.database();
        let database = |cause| StoreOpenError::Database { path: path.clone(), cause };
        // It appears with everything in it: an empty one would make all layers look like leftovers.
        let fill = |writer: &DbTransaction| {
            for layer in &layers {
                writer.put(LAYERS, layer.key.as_str(), layer)?;
            }
            for image in &images {
                writer.put(IMAGES, image.id.as_str(), image)?;
            }
            write_names(writer)
        };
        Db::create(&*opening.disk, &path, fill).map_err(database)?;
        let db = Db::open(&opening.disk, &path, config.database_cache_bytes).map_err(database)?;
        Ok((opening.finish(db, config)?, rebuilt))
    }
}

/// Moves the old database out of the way. Without one the store does not open, but for another rebuild.
fn keep_old(disk: &dyn Disk, layout: &StoreLayout) -> std::io::Result<Option<PathBuf>> {
    let path = layout.database();
    if !path.exists() {
        return Ok(None);
    }
    let old = layout.root().join("larder.redb.old");
    disk.rename(&path, &old)?;
    disk.sync_dir(layout.root())?;
    Ok(Some(old))
}

/// The layers that are whole.
fn find_layers(
    layout: &StoreLayout,
    check: &dyn LayerChecker,
    rebuilt: &mut RebuildReport,
) -> std::io::Result<Vec<LayerRecord>> {
    let mut layers = Vec::new();
    for name in names_in(&layout.layers())? {
        match whole_layer(layout, &name, check) {
            Ok(layer) => layers.push(layer),
            Err(reason) => rebuilt.left_out.push(format!("layers/{name}: {reason}")),
        }
    }
    rebuilt.layers = layers.len() as u64;
    Ok(layers)
}

fn whole_layer(layout: &StoreLayout, name: &str, check: &dyn LayerChecker) -> Result<LayerRecord, String> {
    let key = LayerKey::parse(name).ok_or("not a layer key")?;
    let path = layout.layer(&key);
    let copy = fs_err::read(path.join(RECORD)).map_err(|error| error.to_string())?;
    let mut layer: LayerRecord = decode(name, &copy).map_err(|error| error.to_string())?;
    if layer.key != key {
        return Err(format!("its record belongs to {}", layer.key));
    }
    let mut first = None;
    let checked = check.check(&path, true, &mut |damage| {
        first.get_or_insert(damage);
    });
    checked.map_err(|error| error.to_string())?;
    layer.present = true;
    first.map_or(Ok(layer), Err)
}

/// The images whose manifests and configs are whole, complete if their layers are.
fn find_images(
    layout: &StoreLayout,
    layers: &[LayerRecord],
    rebuilt: &mut RebuildReport,
) -> std::io::Result<Vec<ImageRecord>> {
    let mut images = Vec::new();
    for name in names_in(&layout.images())? {
        match whole_image(layout, &name) {
            Ok(mut image) => {
                image.complete =
                    image.keys().into_iter().all(|key| layers.iter().any(|layer| layer.key == *key));
                *(if image.complete { &mut rebuilt.images } else { &mut rebuilt.incomplete }) += 1;
                images.push(image);
            }
            Err(reason) => rebuilt.left_out.push(format!("images/{name}: {reason}")),
        }
    }
    Ok(images)
}

fn whole_image(layout: &StoreLayout, name: &str) -> Result<ImageRecord, String> {
    let copy = fs_err::read(layout.images().join(name)).map_err(|error| error.to_string())?;
    let image: ImageRecord = decode(name, &copy).map_err(|error| error.to_string())?;
    if layout.image(&image.id) != layout.images().join(name) {
        return Err(format!("its record belongs to {}", image.id));
    }
    for digest in image.blobs() {
        whole_blob(layout, digest)?;
    }
    Ok(image)
}

fn whole_blob(layout: &StoreLayout, digest: &Digest) -> Result<(), String> {
    let bytes = read_blob(&layout.blob(digest)).map_err(|error| error.to_string())?;
    let bytes = bytes.ok_or_else(|| format!("{digest} is missing"))?;
    check_digest(&bytes, digest).map_err(|error: StoreError| error.to_string())
}
