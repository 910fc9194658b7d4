//! Reports of garbage collection.

use std::fmt;

use super::error::GcError;
use super::open_files::SpaceHolder;
use super::plan::{GcPlan, GcSnapshot};
use super::reclaim::ReclaimableSpace;
use super::sweep::{RemovedImage, SweepReport};
use crate::go_format;
use crate::image_service::FsStats;
use crate::retention::KeepWarning;

/// The report of one round.
#[derive(Debug, Clone, Default)]
pub struct GcReport {
    /// The plans: for age, if there is a maximum age, and for space.
    pub plans: Vec<GcPlan>,
    /// The result of each plan.
    pub swept: Vec<SweepReport>,
    /// Space that was reclaimed beside images, before any image was removed.
    pub reclaimed: ReclaimableSpace,
    /// The filesystem before anything was reclaimed or removed, if it was measured.
    pub before: Option<FsStats>,
    /// The last measurement of the filesystem.
    pub after: Option<FsStats>,
    /// The processes that hold deleted files open, as far as known, if a sweep was [lagging](SweepReport::lagging).
    pub space_holders: Vec<SpaceHolder>,
    /// Keep rules that match no image.
    pub warnings: Vec<KeepWarning>,
}

impl GcReport {
    /// The images that were removed, in order.
    pub fn removed(&self) -> impl Iterator<Item = &RemovedImage> {
        self.swept.iter().flat_map(|sweep| &sweep.removed)
    }
}

/// The report of one round, and the error that ended it.
#[derive(Debug, Clone)]
pub struct GcRoundResult {
    /// The report up to the error.
    pub report: GcReport,
    /// The error, if the round did not complete.
    pub error: Option<GcError>,
}

impl fmt::Display for GcRoundResult {
    /// What it did, after its error if it has one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let GcRoundResult { report, error } = self;
        let mut parts: Vec<String> = error.iter().map(ToString::to_string).collect();
        let removed = report.removed().count();
        if removed > 0 {
            let freed: i64 = report.swept.iter().map(|swept| swept.freed).sum();
            let images = if removed == 1 { "image" } else { "images" };
            let freed = go_format::bytes(u64::try_from(freed).unwrap_or(0));
            parts.push(format!("removed {removed} {images} and freed {freed}"));
        }
        if report.reclaimed != ReclaimableSpace::default() {
            parts.push(format!("reclaimed {}", report.reclaimed));
        }
        if parts.is_empty() { f.write_str("nothing to remove") } else { f.write_str(&parts.join("; ")) }
    }
}

impl GcRoundResult {
    /// The report of a round that completed, or its error.
    pub fn into_result(self) -> Result<GcReport, GcError> {
        self.error.map_or(Ok(self.report), Err)
    }
}

/// The plan of a round that was not executed.
#[derive(Debug, Clone)]
pub struct DryRun {
    /// The report of the round, with one plan and without removals.
    pub report: GcReport,
    /// The input of the plan, without images if the goal is [`GcGoal::FailedPulls`](super::GcGoal::FailedPulls).
    pub snapshot: GcSnapshot,
}

impl DryRun {
    /// The plan.
    pub fn plan(&self) -> Option<&GcPlan> {
        self.report.plans.last()
    }
}

#[cfg(test)]
mod tests {
    use crate::backend::BackendError;
    use crate::gc::DiskSpace;

    use super::*;

    #[test]
    fn a_failed_round_says_what_it_reclaimed() {
        let mut round = GcRoundResult { report: GcReport::default(), error: None };
        assert_eq!(round.to_string(), "nothing to remove");
        round.report.reclaimed.downloads = DiskSpace { bytes: 150_000_000, inodes: 2 };
        assert_eq!(round.to_string(), "reclaimed 150MB (downloads 150MB)");
        round.error = Some(GcError::List(BackendError::Incomplete("no answer".into())));
        assert_eq!(round.to_string(), "no answer; reclaimed 150MB (downloads 150MB)");
    }
}
