//! Mounts layers: once for all overlays, at `lowers/KEY` in the store.
//!
//! A layer is mounted as long as a recorded mount, or a snapshot that can be mounted, has it. Nothing else is noted:
//! the kernel's mount table says which layers are mounted, and the records of mounts say which must be. So a restart
//! finds the mounts of an earlier process, and removes those that it left behind.
//!
//! Where layers cannot be mounted, they are extracted instead, for as long (`extracted.rs`).

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::PathBuf;

use super::MountError;
use super::extracted::key_of;
use super::table::MountTable;
use larder::reference::ImageName;

use crate::disk::ensure_dir;
use crate::erofs::detach;
use crate::store::db::{DbRead as _, MOUNTS};
use crate::store::error::StoreErrorContext as _;
use crate::store::layout::names_in;
use crate::store::snapshot_records::mountable_layers;
use crate::store::{LayerHandle, LayerKey, LayerRecord, MountRecord, OpenStore, StoreError};

const CREATE: &str = "create a directory to mount a layer at";

impl OpenStore {
    /// The lower directories of layers, in their order; mounts those that are not mounted. The record of a mount, or of
    /// a snapshot, must have the layers.
    pub(crate) fn mount_layers(&self, layers: &[LayerHandle]) -> Result<Vec<PathBuf>, MountError> {
        let mounted = self.try_mount_layers(layers);
        if let Err(MountError::Layer { .. }) = mounted {
            let damaged = self.find_damage(layers.iter().filter(|layer| !self.is_being_repaired(layer)));
            if let Some(key) = damaged.first().map(|layer| layer.key()) {
                let image = self.names_of_images_with(key)?.into_iter().next();
                let image = ImageName::from(image.unwrap_or_else(|| key.to_string()));
                return Err(MountError::Damaged { key: key.clone(), image });
            }
        }
        mounted
    }

    fn try_mount_layers(&self, layers: &[LayerHandle]) -> Result<Vec<PathBuf>, MountError> {
        self.verify_metadata(layers)?;
        // An image may have a layer twice.
        let mut lowers: HashMap<&LayerKey, PathBuf> = self.mount_missing(layers)?;
        // Extracting takes as long as unpacking: mounts of other layers do not wait for it.
        for layer in layers {
            if !lowers.contains_key(layer.key()) {
                lowers.insert(layer.key(), self.extract_once(layer)?);
            }
        }
        Ok(layers.iter().filter_map(|layer| lowers.get(layer.key()).cloned()).collect())
    }

    /// Verifies the metadata of layers that are about to be mounted, where reads are verified.
    fn verify_metadata(&self, layers: &[LayerHandle]) -> Result<(), MountError> {
        if !self.verified.is_enabled() {
            return Ok(());
        }
        // A repair takes as long as a pull: mounts of other layers do not wait for it.
        let table = MountTable::read()?;
        for layer in layers.iter().filter(|layer| !table.has_layer(&self.layout.lower(layer.key()))) {
            let failed = |cause| MountError::Layer { key: layer.key().clone(), cause };
            self.verify_before_mount(layer).map_err(failed)?;
        }
        Ok(())
    }

    /// Mounts those of the layers that are not mounted. Returns the lower directories that there are then: all but
    /// those of layers that must be extracted first.
    fn mount_missing<'a>(
        &self,
        layers: &'a [LayerHandle],
    ) -> Result<HashMap<&'a LayerKey, PathBuf>, MountError> {
        let _alone = self.layer_mounts.lock();
        ensure_dir(&*self.disk, &self.layout.lowers()).context(CREATE)?;
        let table = MountTable::read()?;
        let mut lowers = HashMap::new();
        for layer in layers {
            if !lowers.contains_key(layer.key())
                && let Some(lower) = self.lower_of(layer, &table)?
            {
                lowers.insert(layer.key(), lower);
            }
        }
        Ok(lowers)
    }

    fn lower_of(&self, layer: &LayerHandle, table: &MountTable) -> Result<Option<PathBuf>, MountError> {
        let target = self.layout.lower(layer.key());
        // Also where it is mounted: what guarded that mount may have been killed.
        if layer.record().partial.is_some() && !self.is_guarded(layer.key())? {
            let key = layer.key().clone();
            let image = self.names_of_images_with(&key)?.into_iter().next();
            return Err(MountError::Incomplete { image: image.unwrap_or_else(|| key.to_string()), key });
        }
        if table.has_layer(&target) {
            return Ok(Some(target));
        }
        let failed = |cause| MountError::Layer { key: layer.key().clone(), cause };
        if let Some(mount) = self.mount_layer(layer.path()).map_err(failed)? {
            ensure_dir(&*self.disk, &target).context(CREATE)?;
            mount.attach(&target).map_err(failed)?;
            return Ok(Some(target));
        }
        Ok(self.extracted_files(layer.key()))
    }

    /// Mounts a layer that was replaced, where the earlier one is mounted. Overlays that have that keep it.
    pub(crate) fn remount_layer(&self, layer: &LayerRecord) -> io::Result<()> {
        let target = self.layout.lower(&layer.key);
        if !target.exists() {
            return Ok(());
        }
        let _alone = self.layer_mounts.lock();
        let mount = self.mount_layer(&self.layout.layer(&layer.key))?;
        detach(&target)?;
        mount.map_or(Ok(()), |mount| mount.attach(&target))
    }

    /// Takes a layer's mount away from new overlays; those that have it keep it. Returns whether there was one.
    pub(crate) fn unmount_layer(&self, key: &LayerKey) -> io::Result<bool> {
        let _alone = self.layer_mounts.lock();
        let target = self.layout.lower(key);
        let table = MountTable::read().map_err(io::Error::other)?;
        let is_mounted = table.has_layer(&target);
        if is_mounted {
            detach(&target)?;
        }
        Ok(is_mounted)
    }

    /// Unmounts the layers that no recorded mount and no mountable snapshot has, and removes them where they were
    /// extracted.
    pub(crate) fn release_layers(&self) -> Result<(), StoreError> {
        let doing = "unmount layers";
        let _alone = self.layer_mounts.lock();
        let [mounted, extracted] = [self.layout.lowers(), self.layout.extracted()];
        let [names, extracted_names] = [&mounted, &extracted].map(|dir| names_in(dir).context(doing));
        let (names, extracted_names) = (names?, extracted_names?);
        if names.is_empty() && extracted_names.is_empty() {
            return Ok(());
        }
        let used = self.layers_to_mount()?;
        for name in names.iter().filter(|name| LayerKey::parse(name).is_none_or(|key| !used.contains(&key))) {
            let target = mounted.join(name);
            // Without the directory there is no mount, so a failure is tried again by the next release.
            if let Err(error) = detach(&target).and_then(|()| fs_err::remove_dir(&target)) {
                tracing::warn!(%error, "cannot unmount an unused layer");
            }
        }
        for name in extracted_names.iter().filter(|name| key_of(name).is_none_or(|key| !used.contains(&key)))
        {
            // A failure is tried again by the next release, and must not keep the store from being opened.
            match self.discard(&extracted.join(name)) {
                Ok(()) => self.trash.kick(),
                Err(error) => tracing::warn!(%error, "cannot remove an unused extracted layer"),
            }
        }
        Ok(())
    }

    /// Layers that recorded mounts, and snapshots that can be mounted, have.
    pub(crate) fn layers_to_mount(&self) -> Result<HashSet<LayerKey>, StoreError> {
        let used = self.db.read("find the layers of mounts", |reader| {
            let mut used = mountable_layers(reader)?;
            reader.for_each(MOUNTS, |mount: MountRecord| used.extend(mount.layers))?;
            Ok(used)
        })?;
        Ok(used.into_iter().collect())
    }
}

/// How many of these lower directories, the nearest first, are visible in an overlay of them. An opaque whiteout in the
/// root of a layer hides all layers below it, but the kernel does not look for its mark there.
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
