//! Images with layers that were found damaged: by `fsck`, by a verified read, or by an export.

use std::collections::BTreeMap;

use larder::hint::Hint;
use larder::reference::Digest;
use serde::Deserialize;

use super::db::{DbRead, DbResult, IMAGES, LAYERS, USES};
use super::error::StoreError;
use super::handle::{OpenStore, Store};
use super::listing::ImageListing;
use super::records::{LayerKey, LayerRecord};

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
