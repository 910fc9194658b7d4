//! Layers that a pull finished but no image was committed with: retained for the next attempt.
//!
//! They are in `layers` but not in the database. Two conditions bound them. They were not synced, so they are trusted
//! only until the machine reboots: their record has the boot ID. And they are retained only while a lease names their
//! ingest, such as the lease of an interrupted pull, and no space is needed (`reclaim.rs`). Write errors of a dead
//! process may be unknown, so a commit compares the layers of one with the digest of their files, as they are on disk.

use std::collections::HashSet;
use std::io;

use super::blob_source::IngestId;
use super::db::{DbRead as _, LEASES, decode};
use super::error::{StoreError, StoreErrorContext as _};
use super::handle::OpenStore;
use super::layer_file::read_record;
use super::records::{LayerKey, LeaseRecord};
use super::resumable_list::{LayerRecordFile, UncommittedLayer};
use crate::disk::DiskSpace;

impl OpenStore {
    /// The ingests that leases name: what a pull may come back for.
    pub(super) fn leased_ingests(&self) -> Result<HashSet<IngestId>, StoreError> {
        let mut leased = HashSet::new();
        let note = |lease: LeaseRecord| leased.extend(lease.leased.ingests);
        self.db.read("look up the leases of pulls", |reader| reader.for_each(LEASES, note))?;
        Ok(leased)
    }

    /// Moves resumable layers to the trash. Adds to `freed` what they take.
    pub(super) fn discard_resumable_layers(
        &self,
        choose: impl Fn(&UncommittedLayer) -> bool,
        freed: &mut DiskSpace,
    ) -> Result<(), StoreError> {
        let _guard = self.lock_content();
        for layer in self.uncommitted_layers.kept.layers_that(choose) {
            self.discard_layer(&layer.key).context("remove a resumable layer")?;
            *freed += layer.usage;
            self.trash.kick();
        }
        Ok(())
    }

    /// Moves a layer's file to the trash, whichever pull it was retained for, and removes its index, unless a remnant
    /// of the layer needs it.
    pub(crate) fn discard_layer(&self, key: &LayerKey) -> io::Result<()> {
        self.discard_layer_file(key)?;
        if self.layout.remnant(key).exists() {
            return Ok(());
        }
        self.disk.remove_file(&self.layout.index(key))
    }

    /// Moves a layer's file to the trash, whichever pull it was retained for.
    pub(super) fn discard_layer_file(&self, key: &LayerKey) -> io::Result<()> {
        self.partials.forget(key);
        self.forget_verified(key);
        self.make_way(key)
    }

    /// Moves a layer's file to the trash, for one that replaces it. If it is being filled, that goes on: overlays that
    /// have it keep it.
    pub(super) fn make_way(&self, key: &LayerKey) -> io::Result<()> {
        let kept = self.uncommitted_layers.kept.take(key);
        self.discard(&self.layout.layer(key)).inspect_err(|_| {
            // It is there still.
            if let Some(kept) = kept {
                self.uncommitted_layers.kept.put(kept);
            }
        })
    }

    /// Keeps a layer that a dead process finished, if it can be believed and a pull may come back for it.
    pub(super) fn keep_resumable_layer(&self, name: &str, leased: &HashSet<IngestId>) -> bool {
        let Some(key) = LayerKey::parse(name) else { return false };
        let Ok(note) = read_record(&self.layout.layer(&key)) else { return false };
        let Ok(LayerRecordFile { record, boot, transfers }) = decode::<LayerRecordFile>(name, &note) else {
            return false;
        };
        let layer = UncommittedLayer { record, written: None, transfers };
        let wanted = layer.record.key == key && boot == self.disk.boot_id() && layer.is_of(leased);
        if wanted {
            self.uncommitted_layers.kept.put(layer);
        }
        wanted
    }
}
