//! Complete layers whose reads are verified: each piece when it is first read, the metadata before the mount.

use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::sync::Arc;

use super::db::{DbRead as _, LAYERS};
use super::error::{StoreError, StoreErrorContext as _};
use super::handle::{OpenStore, Store};
use super::layers::LayerHandle;
use super::layout::names_in;
use super::records::{LayerKey, LayerRecord};
use crate::lazy::group::open_without_events;
use crate::lazy::journal::FileId;
use crate::lazy::verified_layer::VerifiedLayer;
use crate::lazy::{DamageObserver, LayerDamage, ReadVerification};
use crate::unpack::UnfilledLayer as _;

const DOING: &str = "verify the reads of a layer";

impl Store {
    /// Verification of complete layers when they are read; `None` where reads are not verified.
    pub fn read_verification(&self) -> Option<ReadVerification> {
        self.0.verified.report()
    }

    /// Reports damage of complete layers that reads have met.
    pub fn observe_damage(&self, observer: Box<DamageObserver>) {
        self.0.verified.observe_damage(observer);
    }

    /// Reports that damage of a layer was repaired, or why reads of it fail.
    pub(crate) fn report_damage(&self, layer: &LayerKey, failure: Option<String>) {
        let images = self.0.names_of_images_with(layer).unwrap_or_else(|error| {
            tracing::warn!(%error, %layer, "cannot name the images of a damaged layer");
            Vec::new()
        });
        self.0.verified.report_damage(&LayerDamage { layer: layer.clone(), images, failure });
    }

    /// Verifies the reads of layers again that an earlier process has left guarded or mounted. Returns those that may
    /// have been mounted without a guard: their mounts raise no events.
    pub(crate) fn resume_verification(&self) -> Result<Vec<Arc<VerifiedLayer>>, StoreError> {
        let Some(reads) = self.0.partials.reads() else { return Ok(Vec::new()) };
        let marked = reads.marked().context(DOING)?;
        let mounted = names_in(&self.0.layout.lowers()).context(DOING)?;
        let layers: Vec<LayerRecord> = self.0.db.read(DOING, |reader| reader.all(LAYERS))?;
        let mut unguarded = Vec::new();
        for record in layers.into_iter().filter(OpenStore::has_verified_reads) {
            let path = self.0.layout.layer(&record.key);
            let is_guarded = file_of(&path).is_ok_and(|file| marked.contains(&file.ino));
            if is_guarded || mounted.iter().any(|key| key == record.key.as_str()) {
                let key = record.key.clone();
                match self.0.begin_verification(record) {
                    Ok(layer) if is_guarded => layer.request_metadata(),
                    Ok(layer) => unguarded.push(layer),
                    // Its reads fail.
                    Err(error) => {
                        let images = self.0.names_of_images_with(&key).unwrap_or_default();
                        tracing::error!(layer = %key, ?images, %error, "cannot verify the reads of a layer");
                    }
                }
            }
        }
        Ok(unguarded)
    }

    /// Mounts a layer again for the containers that start from now on, whose reads are verified then. Blocks until its
    /// metadata is right, or cannot be repaired in time.
    pub(crate) fn remount_verified(&self, layer: &VerifiedLayer) {
        let remounted = layer.read_metadata().and_then(|()| self.0.remount_layer(&layer.record));
        if let Err(error) = remounted {
            let layer = &layer.record.key;
            let images = self.0.names_of_images_with(layer).unwrap_or_default();
            tracing::warn!(%layer, ?images, %error, "reads of a layer that was mounted before are not verified");
        }
    }

    /// A layer is like any other once all its pieces are verified.
    pub(crate) fn end_if_verified(&self, layer: &Arc<VerifiedLayer>) {
        if layer.is_verified() {
            self.0.verified.end(layer);
            self.0.release_verified(layer);
        }
    }

    /// Records that a layer is damaged, or no longer is, unless it was replaced.
    pub(crate) fn note_damage(&self, layer: &VerifiedLayer, is_damaged: bool) -> Result<(), StoreError> {
        match FileId::of(layer.file().as_fd()) {
            Ok(file) => self.0.note_damage_of(&layer.record.key, file, is_damaged),
            Err(_) => Ok(()),
        }
    }
}

impl OpenStore {
    /// Returns true if the pieces of a layer can be verified: it is complete.
    fn has_verified_reads(record: &LayerRecord) -> bool {
        record.present && record.partial.is_none()
    }

    /// Guards a layer that is about to be mounted, and verifies its metadata. Fails if that is damaged and was not
    /// repaired in time. Blocks, not within the runtime.
    pub(crate) fn verify_before_mount(&self, layer: &LayerHandle) -> io::Result<()> {
        if !self.verified.is_enabled() || !OpenStore::has_verified_reads(layer.record()) {
            return Ok(());
        }
        match self.verified.get(layer.key(), file_of(layer.path())?) {
            Some(guarded) => guarded.read_metadata(),
            None => self.begin_verification(layer.record().clone())?.read_metadata(),
        }
    }

    /// Returns true if a layer is known to be damaged by the verification of its reads, which repairs it and records
    /// the damage if that takes long.
    pub(crate) fn is_being_repaired(&self, layer: &LayerHandle) -> bool {
        let guarded = file_of(layer.path()).ok().and_then(|file| self.verified.get(layer.key(), file));
        guarded.is_some_and(|guarded| guarded.is_damaged())
    }

    fn begin_verification(&self, record: LayerRecord) -> io::Result<Arc<VerifiedLayer>> {
        let reads = self.partials.reads().ok_or(io::ErrorKind::Unsupported)?;
        let file = open_without_events(&self.layout.layer(&record.key))?;
        let damaged = "the layer and the digests of its pieces are damaged";
        let key = record.key.clone();
        let Some((layer, demand)) = VerifiedLayer::open(file.into(), record, self.verified.counts())? else {
            self.note_damaged(&key, true).map_err(io::Error::other)?;
            return Err(io::Error::new(io::ErrorKind::InvalidData, damaged));
        };
        let layer = Arc::new(layer);
        reads.guard(&layer.reads)?;
        self.verified.begin(&layer, demand)?;
        Ok(layer)
    }

    /// Ends the verification of a layer that is removed: nothing has it mounted.
    pub(super) fn forget_verified(&self, key: &LayerKey) {
        if let Some(layer) = self.verified.remove(key) {
            layer.reads.end();
            self.release_verified(&layer);
        }
    }

    /// Ends the verification of the layers of which no damage is known. Returns whether there are others.
    pub(super) fn release_sound_layers(&self) -> bool {
        let (damaged, sound): (Vec<_>, Vec<_>) =
            self.verified.all().into_iter().partition(|layer| layer.is_damaged());
        for layer in sound {
            self.release_verified(&layer);
        }
        !damaged.is_empty()
    }

    fn release_verified(&self, layer: &VerifiedLayer) {
        if let Some(Err(error)) = self.partials.reads().map(|reads| reads.release(&layer.reads)) {
            tracing::warn!(%error, layer = %layer.record.key, "cannot end the guard of a layer: its reads stay slower");
        }
    }
}

/// The file at this path.
pub(super) fn file_of(path: &Path) -> io::Result<FileId> {
    FileId::of(fs_err::File::open(path)?.file().as_fd())
}
