//! Finding what is damaged, and putting right what can be.
//!
//! ```text
//! records -> blobs -> layers (all files, at disk speed) -> leftovers
//! ```
//!
//! Nothing is changed without `repair`. Repairing never guesses content: the [`IncompleteImage`] list says what a pull brings
//! back. A damaged layer stays as it is until then, and so do the images with it, since nobody knows whether another can
//! be had; a damaged manifest or config goes to the trash. Images that lack something are hidden, and those that are whole
//! stay as they are. The store may be in use meanwhile: each finding is looked at again, while nothing
//! moves, before it counts.

mod blobs;
mod layers;
mod leftovers;
mod names;
mod options;
mod rebuild;
mod report;

use std::collections::HashSet;

pub use options::{FsckOptions, LayerChecker, ManifestLayerChecker};
pub use rebuild::RebuildReport;
pub use report::{FsckProblem, FsckReport, IncompleteImage, MissingContent, StoreDamage};

use crate::disk::measure;
use crate::store::db::{DbRead as _, IMAGES, LAYERS};
use crate::store::error::StoreErrorContext as _;
use crate::store::{ImageRecord, LayerKey, LayerRecord, Store, StoreError};

impl Store {
    /// Checks the store.
    pub fn fsck(&self, options: &FsckOptions<'_>) -> Result<FsckReport, StoreError> {
        let mut report = FsckReport::default();
        self.0.check_records(options.repair, &mut report)?;
        self.0.check_names(options.repair, &mut report)?;
        self.0.check_blobs(options.repair, &mut report)?;
        self.0.check_layers(options, &mut report)?;
        self.0.check_leftovers(options.repair, &mut report)?;
        if options.repair {
            self.0.note_missing_images()?;
        }
        report.refetch = self.missing()?;
        report.trash = measure(&self.0.layout.trash()).context("measure the trash")?;
        self.0.trash.kick();
        Ok(report)
    }

    /// What images lack, or have damaged, so that a pull can bring it back. Empty unless something was damaged.
    pub fn missing(&self) -> Result<Vec<IncompleteImage>, StoreError> {
        let images: Vec<ImageRecord> = self.0.db.read("look for incomplete images", |reader| {
            let layers: Vec<LayerRecord> = reader.all(LAYERS)?;
            let damaged: HashSet<LayerKey> =
                layers.into_iter().filter(|layer| layer.damaged).map(|layer| layer.key).collect();
            let mut images: Vec<ImageRecord> = reader.all(IMAGES)?;
            images.retain(|image| !image.complete || image.keys().iter().any(|key| damaged.contains(*key)));
            // What several lack is told of one that a registry has, if there is one.
            images.sort_by_key(|image| image.digests.is_empty());
            Ok(images)
        })?;
        let mut refetch: Vec<IncompleteImage> = Vec::new();
        for image in images {
            for lacks in self.lacking(&image)? {
                if !refetch.iter().any(|other| other.lacks == lacks) {
                    let names = image.names().cloned().collect();
                    refetch.push(IncompleteImage { image: image.id.clone(), names, lacks });
                }
            }
        }
        Ok(refetch)
    }

    fn lacking(&self, image: &ImageRecord) -> Result<Vec<MissingContent>, StoreError> {
        let absent = image.blobs().filter(|digest| !self.0.layout.blob(digest).exists());
        let mut lacking: Vec<MissingContent> = absent.cloned().map(MissingContent::Blob).collect();
        for layer in &image.layers {
            let record = self
                .0
                .db
                .read("look up a layer", |reader| reader.get::<LayerRecord>(LAYERS, layer.key.as_str()))?;
            if !record.is_some_and(|record| record.is_whole()) {
                lacking.push(MissingContent::Layer {
                    key: layer.key.clone(),
                    diff_id: layer.diff_id.clone(),
                    digest: layer.digest.clone(),
                    size: layer.size,
                    media_type: layer.media_type.clone(),
                });
            }
        }
        Ok(lacking)
    }
}
