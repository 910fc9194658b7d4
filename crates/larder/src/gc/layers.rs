//! Layers of images and their disk usage, where the backend reports them.

use std::collections::{HashMap, HashSet};

use async_trait::async_trait;

use super::disk_space::DiskSpace;
use crate::backend::{BackendError, Image};
use crate::reference::{ImageId, LayerId};

/// A source of image layers.
#[async_trait]
pub trait LayerSource: Send + Sync {
    /// The layers of these images. Images with unknown layers are omitted.
    async fn layers(&self, images: &[Image]) -> Result<LayerUsageIndex, BackendError>;
}

/// One layer on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeasuredLayer {
    /// Its ID: a diff ID, a chain ID, or another identifier of this backend.
    pub id: LayerId,
    /// Its disk usage.
    pub amount: DiskSpace,
    /// Whether the amount is estimated.
    pub estimated: bool,
    /// A reference other than an image, such as a mount of a removed image; then removing images does not free it.
    pub referenced_by: Option<String>,
}

/// The layers of one image.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ImageLayers {
    /// Its layers, as indices into [`LayerUsageIndex::all`]; each once, in no particular order.
    pub layers: Vec<u32>,
    /// The disk usage of its metadata: config and manifests.
    pub own: DiskSpace,
}

/// Layers and the images that reference them.
#[derive(Debug, Clone, Default)]
pub struct LayerUsageIndex {
    all: Vec<MeasuredLayer>,
    index: HashMap<LayerId, u32>,
    images: HashMap<ImageId, ImageLayers>,
}

impl LayerUsageIndex {
    /// An empty index: all layers are unknown.
    pub fn unknown() -> LayerUsageIndex {
        LayerUsageIndex::default()
    }

    /// Adds or updates a layer.
    pub fn add(&mut self, layer: MeasuredLayer) {
        match self.index.get(&layer.id) {
            Some(&at) => self.all[at as usize] = layer,
            None => {
                if let Ok(at) = u32::try_from(self.all.len()) {
                    self.index.insert(layer.id.clone(), at);
                    self.all.push(layer);
                }
            }
        }
    }

    /// Adds an image with these layers, which must have been added. Returns false and does not add an image with an
    /// unknown layer.
    pub fn add_image(
        &mut self,
        id: impl Into<ImageId>,
        layers: impl IntoIterator<Item = impl AsRef<str>>,
        own: DiskSpace,
    ) -> bool {
        let found: Option<Vec<u32>> =
            layers.into_iter().map(|layer| self.index.get(layer.as_ref()).copied()).collect();
        let Some(mut layers) = found else { return false };
        layers.sort_unstable();
        layers.dedup();
        self.images.insert(id.into(), ImageLayers { layers, own });
        true
    }

    /// Notes what references a known layer beside images.
    pub fn set_reference(&mut self, layer: &LayerId, by: &str) {
        if let Some(&at) = self.index.get(layer) {
            self.all[at as usize].referenced_by.get_or_insert_with(|| by.to_owned());
        }
    }

    /// All layers.
    pub fn all(&self) -> &[MeasuredLayer] {
        &self.all
    }

    /// All layers, without the images that reference them.
    pub fn into_all(self) -> Vec<MeasuredLayer> {
        self.all
    }

    /// The layers of an image, if known.
    pub fn layers_of(&self, image: impl AsRef<str>) -> Option<&ImageLayers> {
        self.images.get(image.as_ref())
    }

    /// Returns the disk usage of an image with all its layers, shared or not, if they are known.
    pub fn size_of(&self, image: impl AsRef<str>) -> Option<DiskSpace> {
        let image = self.layers_of(image)?;
        let layers = image.layers.iter().map(|&layer| self.all[layer as usize].amount);
        Some(layers.sum::<DiskSpace>() + image.own)
    }

    /// Layers of images other than these, such as images added after the list.
    pub(super) fn layers_of_other_images<'a>(
        &self,
        listed: impl Iterator<Item = &'a ImageId> + Clone,
    ) -> Vec<u32> {
        if listed.clone().filter(|id| self.images.contains_key(*id)).count() == self.images.len() {
            return Vec::new();
        }
        let listed: HashSet<&ImageId> = listed.collect();
        let others = self.images.iter().filter(|(id, _)| !listed.contains(id));
        others.flat_map(|(_, image)| image.layers.iter().copied()).collect()
    }

    /// Whether there is a layer of this id.
    pub fn contains(&self, id: &LayerId) -> bool {
        self.index.contains_key(id)
    }

    /// The layer of this id.
    pub(super) fn get(&self, id: &LayerId) -> Option<&MeasuredLayer> {
        self.index.get(id).map(|&at| &self.all[at as usize])
    }

    /// The amounts of all layers, mutable.
    pub(super) fn amounts_mut(&mut self) -> impl Iterator<Item = &mut DiskSpace> {
        self.all.iter_mut().map(|layer| &mut layer.amount)
    }

    /// Drops a removed image.
    pub(super) fn forget(&mut self, image: &ImageId) {
        self.images.remove(image);
    }
}
