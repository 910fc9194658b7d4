//! The input of a plan.

use std::sync::Arc;

use crate::gc::disk_space::DiskSpace;
use crate::gc::labels::ImageLabels;
use crate::gc::layers::LayerUsageIndex;
use crate::gc::unix_millis::UnixMillis;
use crate::image_service::FsStats;
use crate::reference::ImageId;
use crate::retention::RetentionPurpose;

/// One image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GcImage {
    /// Its id.
    pub id: ImageId,
    /// Its runtime handler, usually empty.
    pub handler: String,
    /// The type of an artifact; empty for an image.
    pub artifact_type: String,
    /// Its names, with tags and digests.
    pub names: Arc<[String]>,
    /// Size in bytes, as the runtime counts.
    pub size: u64,
    /// Whether the runtime has pinned it.
    pub pinned: bool,
    /// When it was first seen.
    pub first_seen: UnixMillis,
    /// When it was last used, if ever.
    pub last_used: Option<UnixMillis>,
    /// The reasons of all sources of retention. The runtime's pin and keep rules are not among them.
    pub retained_by: Vec<RetentionPurpose>,
    /// The error of a failed removal in this round.
    pub failed: Option<String>,
}

/// Images, layers and filesystem at one moment.
#[derive(Debug, Clone)]
pub struct GcSnapshot {
    /// The moment.
    pub now: UnixMillis,
    /// When garbage collection of this process started.
    pub began: UnixMillis,
    /// When the usage records begin; use before that is unknown.
    pub watched: UnixMillis,
    /// All images.
    pub images: Vec<GcImage>,
    /// Their layers, where known.
    pub layers: LayerUsageIndex,
    /// Their labels, as far as keep rules ask for them.
    pub labels: ImageLabels,
    /// The image filesystem, if it was measured.
    pub disk: Option<FsStats>,
    /// Space that was reclaimed beside images for this goal. `disk` has it as free, and it counts towards
    /// [`GcGoal::Free`](super::GcGoal::Free).
    pub reclaimed: DiskSpace,
}

impl GcSnapshot {
    /// A snapshot without images.
    pub(in crate::gc) fn empty(now: UnixMillis) -> GcSnapshot {
        GcSnapshot {
            now,
            began: now,
            watched: now,
            images: Vec::new(),
            layers: LayerUsageIndex::unknown(),
            labels: ImageLabels::new(),
            disk: None,
            reclaimed: DiskSpace::ZERO,
        }
    }

    /// Drops a removed image.
    pub(in crate::gc) fn forget(&mut self, id: &ImageId, handler: &str) {
        self.images.retain(|image| image.id != *id || image.handler != handler);
        if !self.images.iter().any(|image| image.id == *id) {
            self.layers.forget(id);
        }
    }
}
