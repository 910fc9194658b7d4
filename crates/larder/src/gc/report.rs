//! Reports of garbage collection.

use super::error::GcError;
use super::keep::KeepWarning;
use super::open_files::SpaceHolder;
use super::plan::GcPlan;
use super::reclaim::SpaceBesideImages;
use super::sweep::{RemovedImage, SweepReport};
use crate::image_service::FsStats;

/// How many images were removed, for `kubelet_image_garbage_collected_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GcCounts {
    /// With `reason="age"`.
    pub age: u64,
    /// With `reason="space"`.
    pub space: u64,
}

/// What one round did.
#[derive(Debug, Clone, Default)]
pub struct GcReport {
    /// The plans: for age, if there is a maximum age, and for space.
    pub plans: Vec<GcPlan>,
    /// The result of each plan.
    pub swept: Vec<SweepReport>,
    /// Space that was reclaimed beside images, before any image was removed.
    pub reclaimed: SpaceBesideImages,
    /// The filesystem before anything was reclaimed or removed, if it was measured.
    pub before: Option<FsStats>,
    /// The last measurement of the filesystem.
    pub after: Option<FsStats>,
    /// The processes that hold deleted files open, as far as known, if a sweep was [lagging](SweepReport::lagging).
    pub space_holders: Vec<SpaceHolder>,
    /// Whether the round only reclaimed space beside images, because the policy has no threshold that can be exceeded.
    pub disabled: bool,
    /// Keep rules that match no image.
    pub warnings: Vec<KeepWarning>,
}

impl GcReport {
    /// The images that were removed, in order.
    pub fn removed(&self) -> impl Iterator<Item = &RemovedImage> {
        self.swept.iter().flat_map(|sweep| &sweep.done)
    }
}

/// What one round did, and the error that ended it.
#[derive(Debug, Clone)]
pub struct GcRoundResult {
    /// What was done before the error.
    pub report: GcReport,
    /// The error, if the round did not complete.
    pub error: Option<GcError>,
}
