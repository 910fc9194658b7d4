//! Executes a plan: removes images in order and measures what that freed.
//!
//! A removal that fails, or whose image is now in use, does not stop the sweep: if the goal is not reached at the end
//! of the plan, the remaining images are planned again. With larder's strategy the filesystem is measured after each
//! removal, the sweep waits a bounded time for a backend that frees in the background, and stops as soon as the
//! measured free space is enough. It also stops when removals were planned to free half as much again as was missing
//! and the filesystem does not show it: more removals would not help while other processes hold the files.

use std::time::Duration;

use tracing::field::Empty;
use tracing::{Instrument as _, Span};

use super::disk_space::DiskSpace;
use super::error::GcError;
use super::filesystem_stats;
use super::goal::GcGoal;
use super::meter::{MeteredRemoval, SpaceMeter};
use super::plan::{GcImage, GcPlan, GcSnapshot, PlannedRemoval, ReclaimTarget, plan_rest, reclaim_target};
use super::policy::GcPolicy;
use super::remover::{ImageRemover, RemovalOutcome};
use crate::image_service::FsStats;
use crate::reference::ImageId;
use crate::retention::{Lease, LeasePurpose, RetentionPurpose};
use crate::trace_context;

/// One image that was removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemovedImage {
    /// The removal, with the amount that was planned.
    pub removal: PlannedRemoval,
    /// The size of the removed files as the backend counted them. Otherwise the change of the filesystem, which
    /// includes what other writers changed; `None` if it was not measured.
    pub freed: Option<DiskSpace>,
}

/// The result of a sweep.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SweepReport {
    /// Removed, in order.
    pub removed: Vec<RemovedImage>,
    /// Tried and failed: id and error text, in order.
    pub errors: Vec<(ImageId, String)>,
    /// Skipped because they are now in use or kept, by ID.
    pub skipped: Vec<ImageId>,
    /// Removed by another process before the sweep reached them, by ID.
    pub already_removed: Vec<ImageId>,
    /// Bytes freed: of the removed files, if the backend counted them, else the change of the filesystem, without what
    /// the images in `already_removed` were planned to free. Nominal with kubelet's strategy.
    pub freed: i64,
    /// Change of the available bytes of the filesystem, including what other writers changed during the sweep. `None`
    /// if it was not measured.
    pub available_change: Option<i64>,
    /// Bytes that had to be freed.
    pub wanted: i64,
    /// Whether the goal was reached.
    pub reached: bool,
    /// True if the sweep stopped because removals freed much less than planned: their files may be open in other
    /// processes.
    pub lagging: bool,
    /// The last measurement of the filesystem.
    pub disk: Option<FsStats>,
    /// For kubelet's hooks: the images that the space pass examined and retained.
    pub(super) examined: Vec<ImageId>,
}

/// The amount that a sweep has to free.
struct SweepGoal {
    goal: GcGoal,
    target: ReclaimTarget,
    /// The amount that was missing before the first removal.
    missing: DiskSpace,
}

struct Sweep<'a> {
    remover: &'a ImageRemover<'a>,
    goal: SweepGoal,
    meter: SpaceMeter<'a>,
    snapshot: &'a mut GcSnapshot,
    report: SweepReport,
}

/// Executes the first plan, and further plans for the rest of the goal. `snapshot` is the input of the first plan, and
/// is updated with each removal.
pub(super) async fn sweep(
    remover: &ImageRemover<'_>,
    meter: SpaceMeter<'_>,
    snapshot: &mut GcSnapshot,
    policy: &GcPolicy,
    first: GcPlan,
) -> SweepReport {
    let target = reclaim_target(first.goal, snapshot, policy);
    let goal = SweepGoal { goal: first.goal, target, missing: first.need };
    let mut sweep = Sweep { remover, goal, meter, snapshot, report: SweepReport::default() };
    let mut plan = first;
    while sweep.execute(plan).await {
        let SweepGoal { goal, missing, .. } = sweep.goal;
        plan = plan_rest(sweep.snapshot, policy, goal, sweep.rest(), Some(missing));
    }
    sweep.into_report()
}

impl SweepGoal {
    /// The kinds of space that are waited for.
    fn relevant_space(&self) -> DiskSpace {
        match self.target {
            ReclaimTarget::Free(wanted) => wanted,
            _ => DiskSpace { bytes: 1, inodes: 0 },
        }
    }

    /// Whether the goal is a number of bytes, which other writers neither reach nor miss.
    fn is_number_of_bytes(&self) -> bool {
        matches!((self.goal, self.target), (GcGoal::Free { .. }, ReclaimTarget::Free(_)))
    }

    /// Bytes still to be freed, where the goal is a number of bytes and the backend counts them.
    fn bytes_left(&self, meter: &SpaceMeter<'_>) -> Option<u64> {
        let counted = meter.counted_bytes().filter(|_| self.is_number_of_bytes())?;
        Some(self.missing.bytes.saturating_sub(counted))
    }

    /// Whether enough is free. Goals without an amount are reached at the end of their plan.
    fn is_reached(&self, meter: &SpaceMeter<'_>) -> bool {
        match (self.target, meter.now()) {
            (ReclaimTarget::Nothing, _) => true,
            (ReclaimTarget::NominalBytes(wanted), _) => i128::from(meter.freed_bytes()) >= i128::from(wanted),
            (ReclaimTarget::Free(wanted), Some(disk)) => match self.bytes_left(meter) {
                Some(left) => left == 0,
                None => filesystem_stats::free(disk).shortfall_to(wanted) == DiskSpace::ZERO,
            },
            (ReclaimTarget::Free(_), None) | (ReclaimTarget::Old | ReclaimTarget::Everything, _) => false,
        }
    }

    /// Whether the counted removals with another one reach the goal, if nothing else writes to the filesystem. A goal
    /// that is a number of bytes does not wait for the filesystem.
    fn would_be_reached(&self, meter: &SpaceMeter<'_>, counted: Option<DiskSpace>) -> bool {
        let (ReclaimTarget::Free(wanted), Some(free), Some(counted)) =
            (self.target, meter.expected_free(), counted)
        else {
            return false;
        };
        !self.is_number_of_bytes() && (free + counted).shortfall_to(wanted) == DiskSpace::ZERO
    }

    /// Whether everything that is still missing should be free by the plans, and half as much again. Counted bytes do
    /// not lag.
    fn is_lagging(&self, meter: &SpaceMeter<'_>) -> bool {
        let (ReclaimTarget::Free(wanted), Some(disk), None) =
            (self.target, meter.now(), self.bytes_left(meter))
        else {
            return false;
        };
        let missing = filesystem_stats::free(disk).shortfall_to(wanted);
        let lags = |missing: u64, at_first: u64, promised: u64| {
            missing == 0 || (promised > 0 && promised >= at_first.saturating_add(at_first / 2))
        };
        lags(missing.bytes, self.missing.bytes, meter.promised().bytes)
            && lags(missing.inodes, self.missing.inodes, meter.promised().inodes)
    }
}

impl Sweep<'_> {
    /// Executes one plan. Returns whether another plan may get closer to the goal.
    async fn execute(&mut self, plan: GcPlan) -> bool {
        self.note_examined(&plan);
        let is_empty = plan.removals.is_empty();
        for removal in plan.removals {
            if self.goal.is_lagging(&self.meter) {
                self.report.lagging = true;
                return false;
            }
            let span = tracing::trace_span!(
                "gc.Remove",
                image.id = %removal.id,
                image.names = %removal.names.join(" "),
                larder.gc.reason = %removal.reason,
                larder.gc.promised_bytes = removal.frees.bytes,
                larder.gc.freed_bytes = Empty,
                larder.gc.outcome = Empty,
                otel.status_description = Empty,
                error.type = Empty,
            );
            self.remove(removal).instrument(span).await;
            self.snapshot.disk = self.meter.now().or(self.snapshot.disk);
            // Kubelet checks its sum after a removal that succeeded.
            let may_stop = self.meter.is_measuring() || !self.report.removed.is_empty();
            if may_stop && self.goal.is_reached(&self.meter) {
                return false;
            }
        }
        !is_empty
            // What such a plan retained does not become worth removing by what it removed.
            && plan.when_unreachable.is_none()
            && self.goal.target.is_amount()
    }

    async fn remove(&mut self, removal: PlannedRemoval) {
        match self.remover.remove(&removal, self.snapshot).await {
            Ok(RemovalOutcome::Removed(counted)) => self.note_removed(removal, counted).await,
            Ok(RemovalOutcome::AlreadyRemoved) => {
                Span::current().record("larder.gc.outcome", "not found");
                self.meter.add_by_another(&removal, self.goal.relevant_space()).await;
                self.snapshot.forget(&removal.id, &removal.handler);
                self.report.already_removed.push(removal.id);
            }
            Ok(RemovalOutcome::InUse(reasons)) => {
                Span::current().record("larder.gc.outcome", "in use");
                // Even with an unknown reason, the image must not be in the next plan.
                let unknown = Lease { purpose: LeasePurpose::Ensure, left: Duration::ZERO };
                let unknown = [RetentionPurpose::Lease(unknown)];
                self.skip(removal, if reasons.is_empty() { &unknown[..] } else { &reasons[..] });
            }
            Ok(RemovalOutcome::Kept(kept)) => {
                tracing::info!(image = %removal.id, "skipped: {kept}");
                Span::current().record("larder.gc.outcome", "kept");
                self.skip(removal, &[RetentionPurpose::Kept(kept)]);
            }
            Err(error) => {
                let error = error.to_string();
                trace_context::fail(&Span::current(), "RemoveImage", &error);
                self.update_image(&removal, |image| image.failed = Some(error.clone()));
                self.report.errors.push((removal.id, error));
            }
        }
    }

    async fn note_removed(&mut self, removal: PlannedRemoval, counted: Option<DiskSpace>) {
        let metered = MeteredRemoval {
            removal: &removal,
            counted,
            relevant: self.goal.relevant_space(),
            completes_goal: self.goal.would_be_reached(&self.meter, counted),
        };
        let freed = self.meter.add(metered).await;
        let span = Span::current();
        span.record("larder.gc.freed_bytes", freed.unwrap_or(removal.frees).bytes);
        span.record("larder.gc.outcome", "removed");
        self.remover.record(&removal, freed).await;
        self.snapshot.forget(&removal.id, &removal.handler);
        self.report.removed.push(RemovedImage { removal, freed });
    }

    fn skip(&mut self, removal: PlannedRemoval, reasons: &[RetentionPurpose]) {
        self.update_image(&removal, |image| image.retained_by = reasons.to_vec());
        self.report.skipped.push(removal.id);
    }

    /// Changes an image that was not removed, so that further plans retain it.
    fn update_image(&mut self, removal: &PlannedRemoval, update: impl Fn(&mut GcImage)) {
        let is_same = |image: &&mut GcImage| image.id == removal.id && image.handler == removal.handler;
        self.snapshot.images.iter_mut().filter(is_same).for_each(update);
    }

    /// The rest of the goal.
    fn rest(&self) -> ReclaimTarget {
        match self.goal.target {
            ReclaimTarget::NominalBytes(wanted) => {
                let freed = i64::try_from(self.meter.freed_bytes()).unwrap_or(i64::MAX);
                ReclaimTarget::NominalBytes(wanted.saturating_sub(freed))
            }
            ReclaimTarget::Free(wanted) => match (self.goal.bytes_left(&self.meter), self.meter.now()) {
                (Some(left), Some(disk)) => {
                    let bytes = filesystem_stats::free(disk).bytes.saturating_add(left);
                    ReclaimTarget::Free(DiskSpace { bytes, ..wanted })
                }
                _ => self.goal.target,
            },
            target => target,
        }
    }

    fn note_examined(&mut self, plan: &GcPlan) {
        for id in &plan.examined {
            if !self.report.examined.contains(id) {
                self.report.examined.push(id.clone());
            }
        }
    }

    fn into_report(self) -> SweepReport {
        let reached = match self.goal.target {
            ReclaimTarget::Old | ReclaimTarget::Everything => self.report.errors.is_empty(),
            _ => self.goal.is_reached(&self.meter),
        };
        let wanted = match self.goal.target {
            ReclaimTarget::NominalBytes(wanted) => wanted,
            _ => i64::try_from(self.goal.missing.bytes).unwrap_or(i64::MAX),
        };
        SweepReport {
            freed: i64::try_from(self.meter.total_freed()).unwrap_or(i64::MAX),
            available_change: self.meter.available_change(),
            disk: self.meter.now(),
            reached,
            wanted,
            ..self.report
        }
    }
}

impl SweepReport {
    /// The errors in kubelet's words; `None` without errors.
    pub(super) fn error(&self, goal: GcGoal, policy: &GcPolicy) -> Option<GcError> {
        if self.errors.is_empty() {
            return None;
        }
        let errors = crate::go_format::aggregate(self.errors.iter().map(|(_, error)| error.as_str()));
        Some(match goal {
            GcGoal::Age => GcError::Age { maximum: policy.maximum_age, errors },
            GcGoal::Thresholds | GcGoal::Free { .. } => {
                GcError::Space { wanted: self.wanted, freed: self.freed, errors }
            }
            GcGoal::AllUnused | GcGoal::Dangling | GcGoal::Detect | GcGoal::FailedPulls => {
                GcError::Space { wanted: i64::MAX, freed: self.freed, errors }
            }
        })
    }
}
