//! Finds damage in a store and repairs it.
//!
//! ```text
//! index -> records -> blobs -> layers (all bytes, at disk speed) -> remnants, indexes -> leftovers
//! ```
//!
//! Nothing is changed without `repair`. A repair never guesses content: the [`IncompleteImage`] list names what a pull
//! must fetch. A damaged layer and its images are retained and listed until then, since it is unknown whether the
//! content is still available, but an image with one is not present for a pull policy and cannot be mounted or
//! exported; a damaged manifest or config is moved to the trash. A damaged remnant or index is removed: these are
//! caches. Incomplete images are hidden, complete ones are not touched. The store may be in use during the check: each
//! finding is rechecked under the lock before it counts.

mod blobs;
mod layers;
mod leftovers;
mod names;
mod options;
pub(crate) mod rebuild;
mod remnants;
mod report;

use std::collections::HashSet;

pub use options::FsckOptions;
pub use rebuild::RebuildReport;
pub use report::{FsckProblem, FsckReport, IncompleteImage, MissingContent, RepairState, StoreDamage};

use crate::disk::measure;
use crate::store::db::{DbRead as _, IMAGES, LAYERS};
use crate::store::error::StoreErrorContext as _;
use crate::store::{ImageRecord, LayerKey, LayerRecord, Store, StoreError};

impl Store {
    /// Checks the store.
    pub fn fsck(&self, options: &FsckOptions) -> Result<FsckReport, StoreError> {
        // Nothing is judged, nor repaired, by an index that is damaged itself.
        self.0.db.verify().context("check the database")?;
        let mut report = FsckReport::default();
        self.0.check_records(options.repair, &mut report)?;
        self.0.check_names(options.repair, &mut report)?;
        self.0.check_blobs(options.repair, &mut report)?;
        self.0.check_layers(options, &mut report)?;
        self.0.check_remnants(options, &mut report)?;
        self.0.check_indexes(options.repair, &mut report)?;
        self.0.check_leftovers(options.repair, &mut report)?;
        if options.repair {
            self.0.note_missing_images()?;
        }
        report.refetch = self.missing()?;
        report.trash = measure(&self.0.layout.trash()).context("measure the trash")?;
        if options.repair {
            self.0.trash.kick();
        }
        Ok(report)
    }

    /// Missing or damaged content of images, for a pull to fetch. Empty unless something was damaged.
    pub fn missing(&self) -> Result<Vec<IncompleteImage>, StoreError> {
        let images: Vec<ImageRecord> = self.0.db.read("find incomplete images", |reader| {
            let layers: Vec<LayerRecord> = reader.all(LAYERS)?;
            let damaged: HashSet<LayerKey> =
                layers.into_iter().filter(|layer| layer.damaged).map(|layer| layer.key).collect();
            let mut images: Vec<ImageRecord> = reader.all(IMAGES)?;
            images.retain(|image| !image.complete || image.keys().iter().any(|key| damaged.contains(*key)));
            // Shared missing content is listed for an image with a registry digest, if there is one.
            images.sort_by_key(|image| image.digests.is_empty());
            Ok(images)
        })?;
        let mut refetch: Vec<IncompleteImage> = Vec::new();
        for image in images {
            for lacks in self.lacking(&image)? {
                if !refetch.iter().any(|other| other.lacks == lacks) {
                    let names = image.names().cloned().collect();
                    refetch.push(IncompleteImage {
                        image: image.id.clone(),
                        names,
                        preloaded: image.preloaded,
                        lacks,
                    });
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
