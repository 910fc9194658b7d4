//! Mounts layers: once for all overlays, at `lowers/KEY` in the store.
//!
//! A layer is mounted as long as a recorded mount, or a snapshot that can be mounted, has it. Nothing else is noted: the
//! kernel's mount table says which layers are mounted, and the records of mounts say which must be. So a restart finds the
//! mounts of an earlier process, and removes those that it left behind.
//!
//! Where layers cannot be mounted, they are extracted to `extracted/KEY` instead, for as long.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;

use super::MountError;
use super::overlay::in_user_namespace;
use super::table::MountTable;
use crate::disk::ensure_dir;
use crate::erofs::detach;
use crate::erofs::digest::LayerCheck;
use crate::store::db::{DbRead as _, MOUNTS};
use crate::store::error::StoreErrorContext as _;
use crate::store::layer_check::check_layer_file;
use crate::store::layout::{FOR_USERS, names_in};
use crate::store::snapshot_records::mountable_layers;
use crate::store::{LayerHandle, LayerKey, LayerRecord, MountRecord, OpenStore, StoreError};
use crate::unpack::{OverlayForm, UnpackError, extract_layer};

const CREATE: &str = "create a directory to mount a layer at";
/// The files of an extracted layer, in its wrapper.
const EXTRACTED_FILES: &str = "fs";

impl OpenStore {
    /// The lower directories of layers, in their order; mounts those that are not mounted. The record of a mount, or of a
    /// snapshot, must have the layers.
    pub(crate) fn mount_layers(&self, layers: &[LayerHandle]) -> Result<Vec<PathBuf>, MountError> {
        let _alone = self.layer_mounts.lock().unwrap_or_else(PoisonError::into_inner);
        ensure_dir(&*self.disk, &self.layout.lowers()).context(CREATE)?;
        let table = MountTable::read()?;
        // An image may have a layer twice.
        let mut lowers: HashMap<&LayerKey, PathBuf> = HashMap::new();
        for layer in layers {
            if !lowers.contains_key(layer.key()) {
                lowers.insert(layer.key(), self.lower_of(layer, &table)?);
            }
        }
        Ok(layers.iter().filter_map(|layer| lowers.get(layer.key()).cloned()).collect())
    }

    fn lower_of(&self, layer: &LayerHandle, table: &MountTable) -> Result<PathBuf, MountError> {
        let target = self.layout.lower(layer.key());
        if table.has_layer(&target) {
            return Ok(target);
        }
        let failed = |cause| MountError::Layer { key: layer.key().clone(), cause };
        if let Some(mount) = self.mount_layer(layer.path()).map_err(failed)? {
            ensure_dir(&*self.disk, &target).context(CREATE)?;
            mount.attach(&target).map_err(failed)?;
            return Ok(target);
        }
        let wrapper = self.layout.extracted_layer(layer.key(), in_user_namespace());
        if !wrapper.exists() {
            let failed = |cause| MountError::Extract { key: layer.key().clone(), cause };
            self.extract(layer, &wrapper).map_err(failed)?;
        }
        Ok(wrapper.join(EXTRACTED_FILES))
    }

    /// Extracts a layer to a directory in a wrapper, which is complete and durable when it appears.
    fn extract(&self, layer: &LayerHandle, to: &Path) -> io::Result<()> {
        if let Some(damage) = check_layer_file(layer.record(), layer.path(), LayerCheck::Content)? {
            return Err(io::Error::new(io::ErrorKind::InvalidData, damage));
        }
        ensure_dir(&*self.disk, &self.layout.extracted())?;
        let staged = self.layout.new_staging();
        let files_dir = staged.join(EXTRACTED_FILES);
        self.disk.create_dir(&staged)?;
        self.disk.create_dir(&files_dir)?;
        let writes = self.disk.open_sync(self.layout.root())?;
        let overlay = if in_user_namespace() { OverlayForm::User } else { OverlayForm::Trusted };
        let extracted = layer.open().and_then(|files| {
            extract_layer(&files, &files_dir, overlay).map_err(UnpackError::into_io)?;
            writes.sync()?;
            self.disk.rename(&staged, to)?;
            self.disk.sync_dir(&self.layout.extracted())
        });
        if extracted.is_err() {
            // If this fails too, it is removed when the store is opened.
            let _ = self.discard(&staged);
            self.trash.kick();
        }
        extracted
    }

    /// Mounts a layer that was replaced, where the earlier one is mounted. Overlays that have that keep it.
    pub(crate) fn remount_layer(&self, layer: &LayerRecord) -> io::Result<()> {
        let target = self.layout.lower(&layer.key);
        if !target.exists() {
            return Ok(());
        }
        let _alone = self.layer_mounts.lock().unwrap_or_else(PoisonError::into_inner);
        detach(&target)?;
        let mount = self.mount_layer(&self.layout.layer(&layer.key))?;
        mount.map_or(Ok(()), |mount| mount.attach(&target))
    }

    /// Unmounts the layers that no recorded mount and no mountable snapshot has, and removes them where they were extracted.
    pub(crate) fn release_layers(&self) -> Result<(), StoreError> {
        let doing = "unmount layers";
        let _alone = self.layer_mounts.lock().unwrap_or_else(PoisonError::into_inner);
        let [mounted, extracted] = [self.layout.lowers(), self.layout.extracted()];
        let [names, extracted_names] = [&mounted, &extracted].map(|dir| names_in(dir).context(doing));
        let (names, extracted_names) = (names?, extracted_names?);
        if names.is_empty() && extracted_names.is_empty() {
            return Ok(());
        }
        let used = self.db.read(doing, |reader| {
            let mut used = mountable_layers(reader)?;
            reader.for_each(MOUNTS, |mount: MountRecord| used.extend(mount.layers))?;
            Ok(used)
        })?;
        let used: HashSet<&str> = used.iter().map(LayerKey::as_str).collect();
        for name in names.iter().filter(|name| !used.contains(name.as_str())) {
            let target = mounted.join(name);
            // Without the directory there is no mount, so a failure is tried again by the next release.
            if let Err(error) = detach(&target).and_then(|()| fs_err::remove_dir(&target)) {
                tracing::warn!(%error, "cannot unmount an unused layer");
            }
        }
        for name in extracted_names.iter().filter(|name| !used.contains(name.trim_end_matches(FOR_USERS))) {
            // A failure is tried again by the next release, and must not keep the store from being opened.
            match self.discard(&extracted.join(name)) {
                Ok(()) => self.trash.kick(),
                Err(error) => tracing::warn!(%error, "cannot remove an unused extracted layer"),
            }
        }
        Ok(())
    }
}

/// How many of these lower directories, the nearest first, are visible in an overlay of them. An opaque whiteout in the root
/// of a layer hides all layers below it, but the kernel does not look for its mark there.
pub(crate) fn visible_lowers(lowers: &[PathBuf]) -> io::Result<usize> {
    for (at, lower) in lowers.iter().enumerate() {
        let root = fs_err::File::open(lower)?;
        let mut value = [0; 1];
        let is_opaque =
            |name: &str| rustix::fs::fgetxattr(&root, name, &mut value[..]) == Ok(1) && value == *b"y";
        if ["trusted.overlay.opaque", "user.overlay.opaque"].into_iter().any(is_opaque) {
            return Ok(at + 1);
        }
    }
    Ok(lowers.len())
}
