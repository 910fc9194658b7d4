//! Uses of images that began: a container may have ended before the next look at mounts and containers.

use std::collections::HashMap;
use std::mem;

use larder::gc::{ActivityKind, ClockReading, ImageActivity, UnixMillis};
use parking_lot::Mutex;

use super::error::StoreError;
use super::handle::{OpenStore, Store};
use super::records::LayerKey;

/// The most stacks of layers that are remembered. A use beyond them is not reported.
const LIMIT: usize = 4096;

/// When stacks of layers, lowest first, were last mounted or given to a container.
#[derive(Debug, Default)]
pub(crate) struct BegunUses(Mutex<HashMap<Vec<LayerKey>, UnixMillis>>);

impl OpenStore {
    /// Records that a use of the images with these layers, lowest first, has begun now.
    pub(crate) fn note_use(&self, layers: Vec<LayerKey>) {
        let mut begun = self.begun_uses.0.lock();
        if !layers.is_empty() && (begun.len() < LIMIT || begun.contains_key(&layers)) {
            begun.insert(layers, ClockReading::now().wall);
        }
    }
}

impl Store {
    /// The images whose uses have begun since the last call.
    pub fn take_begun_uses(&self) -> Result<Vec<ImageActivity>, StoreError> {
        let begun = mem::take(&mut *self.0.begun_uses.0.lock());
        if begun.is_empty() {
            return Ok(Vec::new());
        }
        let images = self.images()?.into_iter().filter_map(|image| {
            let layers: Vec<LayerKey> = image.layers.iter().map(|layer| layer.key.clone()).collect();
            let at = *begun.get(&layers)?;
            Some(ImageActivity { image: image.id.into(), at, what: ActivityKind::Used })
        });
        Ok(images.collect())
    }
}
