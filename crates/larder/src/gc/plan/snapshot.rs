//! All that a plan depends on.

use crate::gc::layers::LayerUsageIndex;
use crate::gc::unix_millis::UnixMillis;
use crate::gc::uses::ImageUse;
use crate::image_service::FsStats;
use crate::reference::ImageId;

/// One image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GcImage {
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
    pub first_seen: UnixMillis,
    /// When it was last used, if ever.
    pub last_used: Option<UnixMillis>,
    /// Who uses it now.
    pub uses: Vec<ImageUse>,
    /// It was tried in this round and could not be removed; the error.
    pub failed: Option<String>,
}

/// Everything at one moment.
#[derive(Debug, Clone)]
pub struct GcSnapshot {
    /// The moment.
    pub now: UnixMillis,
    /// When this process began to collect.
    pub began: UnixMillis,
    /// Since when records are kept here: the time before tells nothing of use.
    pub watched: UnixMillis,
    /// All images.
    pub images: Vec<GcImage>,
    /// Their layers, as far as they are known.
    pub layers: LayerUsageIndex,
    /// The file system that holds them, if it was read.
    pub disk: Option<FsStats>,
}

impl GcSnapshot {
    /// Takes away an image that was removed.
    pub(in crate::gc) fn forget(&mut self, id: &ImageId, handler: &str) {
        self.images.retain(|image| image.id != *id || image.handler != handler);
        if !self.images.iter().any(|image| image.id == *id) {
            self.layers.forget(id);
        }
    }
}
