//! Mounts layers that are EROFS images: once for all overlays, at `lowers/KEY` in the store.
//!
//! A layer is mounted as long as a recorded mount, or a snapshot that can be mounted, has it. Nothing else is noted: the kernel's mount table says which layers
//! are mounted, and the records of mounts say which must be. So a restart finds the mounts of an earlier process, and
//! removes those that it left behind.

use std::collections::HashSet;
use std::io;
use std::path::PathBuf;
use std::sync::PoisonError;

use super::MountError;
use super::table::MountTable;
use crate::disk::ensure_dir;
use crate::erofs::detach;
use crate::store::db::{DbRead as _, MOUNTS};
use crate::store::error::StoreErrorContext as _;
use crate::store::layout::names_in;
use crate::store::snapshot_records::mountable_layers;
use crate::store::{LayerHandle, LayerKey, LayerRecord, MountRecord, OpenStore, StoreError};

impl OpenStore {
    /// The lower directories of layers, in their order; mounts those that are images, unless they are mounted. The record of
    /// a mount, or of a snapshot, must have the layers.
    pub(crate) fn mount_layers(&self, layers: &[LayerHandle]) -> Result<Vec<PathBuf>, MountError> {
        if layers.iter().all(|layer| layer.image().is_none()) {
            return Ok(layers.iter().map(LayerHandle::fs).collect());
        }
        let _alone = self.layer_mounts.lock().unwrap_or_else(PoisonError::into_inner);
        let doing = "create a directory to mount a layer at";
        ensure_dir(&*self.disk, &self.layout.lowers()).context(doing)?;
        let table = MountTable::read()?;
        let mut mounted = HashSet::new();
        let mut lowers = Vec::with_capacity(layers.len());
        for layer in layers {
            let Some(image) = layer.image() else {
                lowers.push(layer.fs());
                continue;
            };
            let target = self.layout.lower(layer.key());
            // An image may have a layer twice.
            if !table.has_image(&target) && mounted.insert(layer.key()) {
                ensure_dir(&*self.disk, &target).context(doing)?;
                let mount = self.mount_image(&image);
                mount
                    .and_then(|mount| mount.attach(&target))
                    .map_err(|cause| MountError::Layer { key: layer.key().clone(), cause })?;
            }
            lowers.push(target);
        }
        Ok(lowers)
    }

    /// Mounts the image of a layer that was replaced, where the earlier one is mounted. Overlays that have that keep it.
    pub(crate) fn remount_layer(&self, layer: &LayerRecord) -> io::Result<()> {
        let target = self.layout.lower(&layer.key);
        if !target.exists() {
            return Ok(());
        }
        let _alone = self.layer_mounts.lock().unwrap_or_else(PoisonError::into_inner);
        detach(&target)?;
        if layer.erofs.is_none() {
            return fs_err::remove_dir(&target);
        }
        self.mount_image(&self.layout.layer(&layer.key))?.attach(&target)
    }

    /// Unmounts the layers that no recorded mount and no mountable snapshot has.
    pub(crate) fn release_layers(&self) -> Result<(), StoreError> {
        let doing = "unmount layers";
        let _alone = self.layer_mounts.lock().unwrap_or_else(PoisonError::into_inner);
        let names = names_in(&self.layout.lowers()).context(doing)?;
        if names.is_empty() {
            return Ok(());
        }
        let used = self.db.read(doing, |reader| {
            let mut used = mountable_layers(reader)?;
            reader.for_each(MOUNTS, |mount: MountRecord| used.extend(mount.layers))?;
            Ok(used)
        })?;
        let used: HashSet<&str> = used.iter().map(LayerKey::as_str).collect();
        for name in names.iter().filter(|name| !used.contains(name.as_str())) {
            let target = self.layout.lowers().join(name);
            // Without the directory there is no mount, so a failure is tried again by the next release.
            if let Err(error) = detach(&target).and_then(|()| fs_err::remove_dir(&target)) {
                tracing::warn!(%error, "cannot unmount an unused layer");
            }
        }
        Ok(())
    }
}
