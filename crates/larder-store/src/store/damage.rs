//! Images with layers that were found damaged: by `fsck`, by a verified read, or by an export.

use std::collections::{BTreeMap, BTreeSet};

use larder::hint::Hint;
use larder::reference::Digest;
use serde::Deserialize;

use super::db::{DbRead, DbResult, IMAGES, LAYERS, USES};
use super::error::StoreError;
use super::handle::{OpenStore, Store};
use super::layer_check::check_layer_file;
use super::layers::LayerHandle;
use super::listing::ImageListing;
use super::records::{LayerKey, LayerRecord};
use super::verified::file_of;
use crate::erofs::digest::LayerCheck;
use crate::lazy::journal::FileId;

/// An image that is listed, but cannot be mounted or saved before a pull has replaced its damaged layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DamagedImage {
    /// ID of the image.
    pub id: Digest,
    /// One of its names, or its ID.
    pub name: String,
    /// Layers of the image that are damaged.
    pub layers: Vec<LayerKey>,
}

/// The parts of a [`LayerRecord`] that say whether it is damaged.
#[derive(Deserialize)]
struct LayerDamageMark {
    key: LayerKey,
    damaged: bool,
}

impl Store {
    /// Images with layers that are recorded as damaged, in the order of their IDs.
    pub fn damaged_images(&self) -> Result<Vec<DamagedImage>, StoreError> {
        self.0.db.read("list damaged images", |reader| damaged_images(reader))
    }
}

fn damaged_images(reader: &impl DbRead) -> DbResult<Vec<DamagedImage>> {
    let mut damaged: Vec<LayerKey> = Vec::new();
    reader.for_each(LAYERS, |layer: LayerDamageMark| damaged.extend(layer.damaged.then_some(layer.key)))?;
    let mut images: BTreeMap<String, DamagedImage> = BTreeMap::new();
    for key in damaged {
        for id in reader.endings(USES, &format!("layer/{key}/"))? {
            if let Some(image) = images.get_mut(&id) {
                image.layers.push(key.clone());
            } else if let Some(image) =
                reader.get::<ImageListing>(IMAGES, &id)?.filter(|image| image.complete)
            {
                let name = image.name().to_owned();
                images.insert(id, DamagedImage { id: image.id, name, layers: vec![key.clone()] });
            }
        }
    }
    Ok(images.into_values().collect())
}

/// The next step for an image with damaged layers.
pub fn damage_hint(image: &str) -> Hint {
    Hint::new()
        .command(["pull".to_owned(), image.to_owned()])
        .text(" replaces what is damaged; without a registry, ")
        .command(["load".to_owned(), "FILE".to_owned()])
}

impl OpenStore {
    /// Compares layers with their digests after a failure that damage may be the reason of, and records which are
    /// damaged, as a check of the store does: the next pull replaces them. Returns those.
    pub(crate) fn find_damage<'a>(
        &self,
        layers: impl IntoIterator<Item = &'a LayerHandle>,
    ) -> Vec<&'a LayerHandle> {
        let (mut damaged, mut seen) = (Vec::new(), BTreeSet::new());
        for layer in layers.into_iter().filter(|layer| seen.insert(layer.key())) {
            let Ok(file) = file_of(layer.path()) else { continue };
            let checked = check_layer_file(layer.record(), layer.path(), LayerCheck::Content);
            if !matches!(checked, Ok(Some(_))) {
                continue;
            }
            if let Err(error) = self.note_damage_of(layer.key(), file, true) {
                tracing::warn!(layer = %layer.key(), %error, "cannot record a damaged layer");
            }
            damaged.push(layer);
        }
        damaged
    }

    /// Records that this file of a layer is damaged, or no longer is, unless it was replaced.
    pub(super) fn note_damage_of(
        &self,
        key: &LayerKey,
        file: FileId,
        is_damaged: bool,
    ) -> Result<(), StoreError> {
        let _guard = self.lock_content();
        let is_same = file_of(&self.layout.layer(key)).is_ok_and(|current| current == file);
        if is_same { self.note_damaged(key, is_damaged) } else { Ok(()) }
    }

    /// Records whether a layer is damaged.
    pub(crate) fn note_damaged(&self, key: &LayerKey, damaged: bool) -> Result<(), StoreError> {
        self.db.write("record a damaged layer", |writer| {
            if let Some(mut layer) = writer.get::<LayerRecord>(LAYERS, key.as_str())? {
                layer.damaged = damaged;
                writer.put(LAYERS, key.as_str(), &layer)?;
            }
            Ok(())
        })
    }
}
