//! What collection tells of itself.

use super::error::GcError;
use super::keep::KeepWarning;
use super::plan::GcPlan;
use super::sweep::SweepReport;
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
    /// What was planned: for age, if there is a maximum age, and for room.
    pub plans: Vec<GcPlan>,
    /// What was done about each plan.
    pub swept: Vec<SweepReport>,
    /// The file system before anything was removed, if it was read.
    pub before: Option<FsStats>,
    /// The file system as it was last read.
    pub after: Option<FsStats>,
    /// Keep rules that match nothing.
    pub warnings: Vec<KeepWarning>,
}

/// What one round did, and what kept it from doing all that it should.
#[derive(Debug, Clone)]
pub struct GcRoundResult {
    /// What was done until then.
    pub report: GcReport,
    /// Why it is not all.
    pub error: Option<GcError>,
}
