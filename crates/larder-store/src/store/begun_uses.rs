//! Uses of images that began: a container may have ended before the next look at mounts and containers.

use std::collections::HashMap;
use std::mem;

use larder::gc::{ClockReading, UnixMillis};
use parking_lot::Mutex;

use super::records::LayerKey;

/// The most stacks of layers that are remembered. A use beyond them is not reported.
const LIMIT: usize = 4096;

/// When stacks of layers, lowest first, were last mounted or given to a container.
#[derive(Debug, Default)]
pub(crate) struct BegunUses(Mutex<HashMap<Vec<LayerKey>, UnixMillis>>);

impl BegunUses {
    /// Records that a use of the images with these layers, lowest first, has begun now.
    pub(crate) fn note(&self, layers: Vec<LayerKey>) {
        let mut begun = self.0.lock();
        if !layers.is_empty() && (begun.len() < LIMIT || begun.contains_key(&layers)) {
            begun.insert(layers, ClockReading::now().wall);
        }
    }

    /// The uses since the last call.
    pub(crate) fn take(&self) -> HashMap<Vec<LayerKey>, UnixMillis> {
        mem::take(&mut *self.0.lock())
    }
}
