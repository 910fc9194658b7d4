//! All that a plan depends on.

use crate::gc::layers::Layers;
use crate::gc::time::Stamp;
use crate::gc::uses::Use;
use crate::image_service::Disk;
use crate::reference::ImageId;

/// One image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject {
    /// Its id.
    pub id: ImageId,
    /// Its runtime handler, usually empty.
    pub handler: String,
    /// Its names, with tags and digests.
    pub names: Vec<String>,
    /// Size in bytes, as the runtime counts.
    pub size: u64,
    /// The runtime asks not to collect it.
    pub pinned: bool,
    /// When it was first seen.
    pub first_seen: Stamp,
    /// When it was last used, if ever.
    pub last_used: Option<Stamp>,
    /// Who uses it now.
    pub uses: Vec<Use>,
    /// It was tried in this round and could not be removed; the error.
    pub failed: Option<String>,
}

/// Everything at one moment.
#[derive(Debug, Clone)]
pub struct Scene {
    /// The moment.
    pub now: Stamp,
    /// When this process began to collect.
    pub began: Stamp,
    /// Since when records are kept here: the time before tells nothing of use.
    pub watched: Stamp,
    /// All images.
    pub images: Vec<Subject>,
    /// Their layers, as far as they are known.
    pub layers: Layers,
    /// The file system that holds them, if it was read.
    pub disk: Option<Disk>,
}

impl Scene {
    /// Takes away an image that was removed.
    pub(in crate::gc) fn forget(&mut self, id: &ImageId, handler: &str) {
        self.images.retain(|image| image.id != *id || image.handler != handler);
        if !self.images.iter().any(|image| image.id == *id) {
            self.layers.forget(id);
        }
    }
}
