//! Removes images, and the layers and blobs that no image uses after that.
//!
//! An image disappears from lists in one transaction. Its unused layers and blobs leave the database in the same
//! transaction and are moved to the trash right after it; readers never wait for that.

use std::collections::HashSet;

use larder::backend::RemoveOptions;
use larder::reference::{Digest, ImageName};
use parking_lot::MutexGuard;

use super::commit::delete_uses;
use super::db::{
    DbRead, DbResult, DbTransaction, IMAGES, LAYERS, LEASES, MOUNTS, TRANSFERS, TransactionAbort, USES,
};
use super::error::{StoreError, StoreErrorContext as _};
use super::handle::{OpenStore, Store};
use super::images::find;
use super::names::delete_names;
use super::records::{ImageRecord, LayerKey, LayerRecord, LeaseRecord, MountRecord, PartialSource};
use super::references::{ReferenceCounts, ReferencedItem};
use super::remnants::{OpenRemoved, RemovedLayer};
use super::snapshot_records::each_snapshot_layer;
use super::usage::taken;
use crate::disk::{DiskSpace, SizeAccuracy};

/// Removed layers whose files are open at once, for their remnants. More layers leave none.
const REMNANTS_AT_ONCE: usize = 64;

/// An image that was removed, or has lost names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreRemoval {
    /// The image's record, without the names that were removed.
    pub image: ImageRecord,
    /// Whether the image is present under other names.
    pub is_present: bool,
    /// Layers that were removed with it, because nothing else references them.
    pub layers: Vec<LayerKey>,
    /// Space that this frees once the files are deleted in the background.
    pub freed: DiskSpace,
}

impl Store {
    /// Removes an image, or names of it. `None` if it is not found.
    pub fn remove(
        &self,
        image: impl Into<ImageName>,
        options: &RemoveOptions,
    ) -> Result<Option<StoreRemoval>, StoreError> {
        self.0.remove(&image.into(), options)
    }

    /// Lets the closing of this store wait until everything that was removed is deleted, as
    /// [`finish_deletion`](super::StoreConfig::finish_deletion) does. For a caller that removes an image and then
    /// closes the store.
    pub fn finish_deletion(&self) {
        self.0.trash.finish();
    }

    /// Whether the filesystem counts the blocks of a file as free as soon as it is deleted. XFS and btrfs do so some
    /// time later.
    pub fn frees_at_once(&self) -> bool {
        self.0.sizes == SizeAccuracy::WhileWritten
    }

    /// Deletes removed files now. Returns when the space is free.
    pub fn empty_trash(&self) -> Result<(), StoreError> {
        let doing = "empty the trash";
        self.0.trash.empty().context(doing)?;
        if self.frees_at_once() {
            return Ok(());
        }
        // A sync makes most of the space free.
        let sync = || self.0.disk.open_sync(self.0.layout.root()).and_then(|filesystem| filesystem.sync());
        self.0.trash.sync_deletions(sync).context(doing)
    }
}

impl OpenStore {
    fn remove(&self, image: &ImageName, options: &RemoveOptions) -> Result<Option<StoreRemoval>, StoreError> {
        match &options.names {
            None => self.remove_locked(self.lock_content(), image, options),
            Some(names) => self.remove_names(image, names, options),
        }
    }

    /// Removes an image while `guard` keeps out commits.
    pub(super) fn remove_locked(
        &self,
        guard: MutexGuard<'_, ()>,
        image: &ImageName,
        options: &RemoveOptions,
    ) -> Result<Option<StoreRemoval>, StoreError> {
        let doing = "remove an image";
        let removed = self.db.write(doing, |writer| {
            let Some(record) = find(writer, image)? else { return Ok(None) };
            refuse_used(writer, image, &record, options)?;
            remove_image(writer, &record)?;
            let needed = ReferencedContent::beside_images(writer, &self.references, |_| true)?;
            let mut freed = FreedContent::default();
            for key in record.keys() {
                freed.layer_unless_needed(self, writer, &needed, key)?;
            }
            for digest in record.blobs() {
                freed.blob_unless_needed(writer, &needed, digest)?;
            }
            Ok(Some((record, freed)))
        })?;
        let Some((record, freed)) = removed else { return Ok(None) };
        let files = freed.blobs.iter().map(|digest| self.layout.blob(digest));
        let own = files.chain([self.layout.image(&record.id)]).map(|path| taken(&path)).sum::<DiskSpace>();
        // The image is gone; what cannot be moved now is found by the next sweep or start.
        let mut open = Vec::new();
        let discard_freed = |()| self.discard_freed(&freed, &mut open);
        let moved = self.discard(&self.layout.image(&record.id)).and_then(discard_freed);
        drop(guard);
        self.keep_remnants(open);
        self.trash.kick();
        if let Err(error) = moved {
            tracing::warn!(image = %record.id, %error, "cannot move the removed image's files to the trash");
        }
        let (layers, freed) = (freed.layers, freed.usage + own);
        Ok(Some(StoreRemoval { image: record, is_present: false, layers, freed }))
    }

    /// Removes layers that no image, lease, mount, snapshot or pull needs; returns what they take.
    pub(crate) fn sweep(&self) -> Result<DiskSpace, StoreError> {
        let doing = "remove unused layers";
        // A look first: a write costs a sync.
        let layers = self.db.read(doing, |reader| unused(reader, &self.references, |_| true))?;
        if layers.is_empty() {
            return Ok(DiskSpace::ZERO);
        }
        let guard = self.lock_content();
        let freed = self.db.write(doing, |writer| {
            let needed = ReferencedContent::beside_images(writer, &self.references, |_| true)?;
            let mut freed = FreedContent::default();
            for key in &layers {
                freed.layer_unless_needed(self, writer, &needed, key)?;
            }
            Ok(freed)
        })?;
        let mut open = Vec::new();
        let moved = self.discard_freed(&freed, &mut open);
        drop(guard);
        self.keep_remnants(open);
        self.trash.kick();
        moved.context(doing)?;
        Ok(freed.usage)
    }

    /// Moves files to the trash; adds those to `open` of which remnants are to be kept.
    fn discard_freed<'a>(
        &self,
        freed: &'a FreedContent,
        open: &mut Vec<OpenRemoved<'a>>,
    ) -> std::io::Result<()> {
        for key in &freed.layers {
            match freed.remnants.iter().find(|(layer, _)| layer.key == *key) {
                Some(removed) if open.len() < REMNANTS_AT_ONCE => {
                    open.extend(self.discard_removed(removed)?);
                }
                _ => self.discard_layer(key)?,
            }
        }
        for digest in &freed.blobs {
            self.discard(&self.layout.blob(digest))?;
        }
        Ok(())
    }
}

fn refuse_used(
    writer: &DbTransaction,
    asked: &ImageName,
    image: &ImageRecord,
    options: &RemoveOptions,
) -> Result<(), TransactionAbort> {
    if !options.force {
        let mut mounts = Vec::new();
        let note = |mount: MountRecord| {
            if mount.image == image.id {
                mounts.push(mount.target.display().to_string());
            }
        };
        writer.for_each(MOUNTS, note)?;
        if !mounts.is_empty() {
            return Err(StoreError::Mounted { image: asked.clone(), mounts }.into());
        }
    }
    Ok(())
}

fn remove_image(writer: &DbTransaction, image: &ImageRecord) -> DbResult<()> {
    delete_names(writer, &image.id, image.names())?;
    writer.delete(IMAGES, image.id.as_str())?;
    delete_uses(writer, image)
}

/// Content that other users than images need: leases in force, mounts, snapshots, and pulls under way.
struct ReferencedContent<'a> {
    layers: HashSet<LayerKey>,
    references: &'a ReferenceCounts,
}

impl<'a> ReferencedContent<'a> {
    fn beside_images(
        source: &impl DbRead,
        references: &'a ReferenceCounts,
        is_in_force: impl Fn(&LeaseRecord) -> bool,
    ) -> DbResult<ReferencedContent<'a>> {
        let mut layers = HashSet::new();
        source.for_each(LEASES, |lease: LeaseRecord| {
            if is_in_force(&lease) {
                layers.extend(lease.leased.layers);
            }
        })?;
        source.for_each(MOUNTS, |mount: MountRecord| layers.extend(mount.layers))?;
        each_snapshot_layer(source, |key| {
            layers.insert(key);
        })?;
        Ok(ReferencedContent { layers, references })
    }

    fn layer(&self, key: &LayerKey) -> bool {
        self.layers.contains(key) || self.references.has(&ReferencedItem::Layer(key.clone()))
    }
}

/// Layers and blobs that are not in the database any more.
#[derive(Default)]
struct FreedContent {
    layers: Vec<LayerKey>,
    /// Those of them of which something is kept.
    remnants: Vec<RemovedLayer>,
    blobs: Vec<Digest>,
    usage: DiskSpace,
}

impl FreedContent {
    fn layer_unless_needed(
        &mut self,
        store: &OpenStore,
        writer: &DbTransaction,
        needed: &ReferencedContent<'_>,
        key: &LayerKey,
    ) -> DbResult<()> {
        if needed.layer(key) || writer.any(USES, &format!("layer/{key}/"))? {
            return Ok(());
        }
        if let Some(layer) = writer.get::<LayerRecord>(LAYERS, key.as_str())?
            && layer.present
        {
            let removed = store.removed_layer(writer, &layer)?;
            let kept = removed.as_ref().map_or(DiskSpace::ZERO, |(layer, _)| layer.remnant);
            let path = store.layout.layer(key);
            // Its record has what it is going to take.
            let here = layer.partial.as_ref().and_then(|_| store.measure_layer(&path, key).ok());
            self.usage += kept.shortfall_to(here.unwrap_or(layer.usage));
            self.remnants.extend(removed);
        }
        writer.delete(LAYERS, key.as_str())?;
        writer.delete(TRANSFERS, key.as_str())?;
        writer.delete(LEASES, &PartialSource::lease_id(key))?;
        self.layers.push(key.clone());
        Ok(())
    }

    fn blob_unless_needed(
        &mut self,
        writer: &DbTransaction,
        needed: &ReferencedContent<'_>,
        digest: &Digest,
    ) -> DbResult<()> {
        let held = needed.references.has(&ReferencedItem::Blob(digest.clone()));
        if !held && !writer.any(USES, &format!("blob/{digest}/"))? {
            self.blobs.push(digest.clone());
        }
        Ok(())
    }
}

/// Layers that nothing needs, as far as can be seen without keeping others from changing it.
pub(super) fn unused(
    source: &impl DbRead,
    references: &ReferenceCounts,
    is_in_force: impl Fn(&LeaseRecord) -> bool,
) -> DbResult<Vec<LayerKey>> {
    // Both tables are in the order of layers, so one walk through each is enough.
    let mut used: Vec<String> = Vec::new();
    source.visit(USES, "layer/", &mut |key, _| {
        let layer = key.split('/').nth(1).unwrap_or_default();
        if used.last().is_none_or(|last| last != layer) {
            used.push(layer.to_owned());
        }
        Ok(true)
    })?;
    let needed = ReferencedContent::beside_images(source, references, is_in_force)?;
    let mut unused = source.endings(LAYERS, "")?;
    unused.retain(|key| used.binary_search(key).is_err());
    Ok(unused.iter().filter_map(|key| LayerKey::parse(key)).filter(|key| !needed.layer(key)).collect())
}
