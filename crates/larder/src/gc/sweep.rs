//! Executes a plan: removes images in order and measures what that freed.
//!
//! A removal that fails, or whose image is now in use, does not stop the sweep: if the goal is not reached at the end
//! of the plan, the remaining images are planned again. With exact accounting the filesystem is measured after each
//! removal, the sweep waits a bounded time for a backend that frees in the background, and stops as soon as the
//! measured free space is enough. It also stops when removals were planned to free half as much again as was missing and
//! the filesystem does not show it: more removals would not help while other processes hold the files.

use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;
use tracing::field::Empty;
use tracing::{Instrument as _, Span};

use super::disk_space::DiskSpace;
use super::error::GcError;
use super::filesystem_stats;
use super::plan::{GcGoal, GcPlan, GcSnapshot, PlannedRemoval, ReclaimTarget, plan_for, reclaim_target};
use super::policy::{Accounting, GcPolicy};
use super::uses::{ImageUse, ImageUseError};
use crate::backend::BackendError;
use crate::image_service::FsStats;
use crate::reference::ImageId;
use crate::trace_context;

/// The effects of a sweep.
#[async_trait]
pub trait ImageRemover: Send + Sync {
    /// Removes one image, unless it is now in use.
    async fn remove(&self, image: &PlannedRemoval) -> Result<RemovalOutcome, RemovalError>;
    /// Measures the image filesystem.
    async fn measure(&self) -> Result<FsStats, String>;
    /// Records a removed image, with the amount that it freed.
    async fn removed(&self, image: &PlannedRemoval, freed: Option<DiskSpace>);
}

/// The outcome of a removal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RemovalOutcome {
    /// The image was removed, and with it files of this size, if the backend counted them.
    Removed(Option<DiskSpace>),
    /// Another process had removed it before.
    AlreadyGone,
    /// Skipped: it is now in use.
    InUse(Vec<ImageUse>),
    /// Skipped: a keep rule that was added after the plan retains it; the rule as text.
    Kept(String),
}

/// Why an image was not removed. The text is the backend's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RemovalError {
    /// The backend failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// Its uses could not be determined.
    #[error(transparent)]
    UseUnknown(#[from] ImageUseError),
}

/// How long a sweep waits for space that a backend frees in the background.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReclaimWait {
    /// Time between two measurements of the filesystem. Default 50 ms.
    pub poll: Duration,
    /// After this long without a change, a removal counts as complete. Default 1 s.
    pub quiet: Duration,
    /// The longest wait for one removal. Default 10 s.
    pub longest: Duration,
    /// The longest wait of a whole sweep. Default 1 min.
    pub sweep: Duration,
    /// A shortfall of this size is not waited for, because other processes write to the same filesystem. The next
    /// measurement includes it if it is freed later. Default 64 KiB and 4 inodes.
    pub tolerance: DiskSpace,
}

impl Default for ReclaimWait {
    fn default() -> Self {
        ReclaimWait {
            poll: Duration::from_millis(50),
            quiet: Duration::from_secs(1),
            longest: Duration::from_secs(10),
            sweep: Duration::from_secs(60),
            tolerance: DiskSpace { bytes: 64 << 10, inodes: 4 },
        }
    }
}

/// One image that was removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemovedImage {
    /// The removal, with the amount that was planned.
    pub removal: PlannedRemoval,
    /// The size of the removed files as the backend counted them. Otherwise the change of the filesystem, which includes
    /// what other writers changed; `None` if it was not measured.
    pub freed: Option<DiskSpace>,
}

/// What a sweep did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SweepReport {
    /// Removed, in order.
    pub done: Vec<RemovedImage>,
    /// Tried and failed: id and error text, in order.
    pub errors: Vec<(ImageId, String)>,
    /// Skipped because they are now in use or kept, by ID.
    pub skipped: Vec<ImageId>,
    /// Removed by another process before the sweep reached them, by ID.
    pub gone: Vec<ImageId>,
    /// Bytes freed. With exact accounting those of the removed files, if the backend counted them, else the change of the
    /// filesystem, without what the images in `gone` were planned to free; nominal otherwise.
    pub freed: i64,
    /// Change of the available bytes of the filesystem, including what other writers changed during the sweep. `None` if
    /// it was not measured.
    pub available_change: Option<i64>,
    /// Bytes that had to be freed.
    pub wanted: i64,
    /// Whether the goal was reached.
    pub reached: bool,
    /// Whether it stopped because removals freed much less than planned: their files may be open in other processes.
    pub lagging: bool,
    /// The last measurement of the filesystem.
    pub disk: Option<FsStats>,
    /// For kubelet's hooks: the images that the space pass examined and retained.
    pub(super) examined: Vec<ImageId>,
}

struct Sweep<'a> {
    hands: &'a dyn ImageRemover,
    exact: bool,
    target: ReclaimTarget,
    patience: ReclaimWait,
    waited: Duration,
    /// Bytes that other processes freed by removing images, as planned for these images.
    freed_by_others: u64,
    /// What was missing before the first removal.
    missing: DiskSpace,
    /// What the removals so far were planned to free. Those by others may have been measured before the first one.
    promised: DiskSpace,
    /// Whether the backend counted the files of each removal.
    counted: bool,
    /// Whether the filesystem did not show what a removal freed, because other processes write to it.
    busy: bool,
    /// What was free before the first removal.
    began_with: Option<DiskSpace>,
    /// Bytes to free, where the goal is a number of bytes.
    bytes_to_free: Option<u64>,
    snapshot: &'a mut GcSnapshot,
    swept: SweepReport,
}

/// Executes the first plan, and further plans for the rest of the goal. `snapshot` is the input of the first plan, and
/// is updated with each removal.
pub async fn sweep(
    hands: &dyn ImageRemover,
    snapshot: &mut GcSnapshot,
    policy: &GcPolicy,
    first: GcPlan,
    patience: ReclaimWait,
) -> SweepReport {
    let goal = first.goal;
    let target = reclaim_target(goal, snapshot, policy);
    let before = snapshot.disk;
    let exact = policy.accounting == Accounting::Exact && snapshot.disk.is_some();
    let mut sweep = Sweep {
        hands,
        exact,
        target,
        patience,
        waited: Duration::ZERO,
        freed_by_others: 0,
        missing: first.need,
        promised: DiskSpace::ZERO,
        counted: true,
        busy: false,
        began_with: before.map(filesystem_stats::free),
        bytes_to_free: matches!(goal, GcGoal::Free { .. }).then_some(first.need.bytes),
        snapshot,
        swept: SweepReport::default(),
    };
    sweep.swept.wanted = match target {
        ReclaimTarget::Nominal(wanted) => wanted,
        _ => i64::try_from(first.need.bytes).unwrap_or(i64::MAX),
    };
    let mut plan = first;
    while sweep.carry_out(plan).await {
        plan = plan_for(sweep.snapshot, policy, goal, sweep.rest(target), Some(sweep.missing));
    }
    sweep.end(target, before)
}

impl Sweep<'_> {
    /// Executes one plan. Returns whether another plan may get closer to the goal.
    async fn carry_out(&mut self, plan: GcPlan) -> bool {
        self.note_examined(&plan);
        let planned = plan.removals.len();
        for removal in plan.removals {
            if self.is_lagging() {
                self.swept.lagging = true;
                return false;
            }
            let span = tracing::trace_span!(
                "gc.Remove",
                image.id = %removal.id,
                image.names = %removal.names.join(" "),
                larder.gc.reason = %removal.why,
                larder.gc.promised_bytes = removal.frees.bytes,
                larder.gc.freed_bytes = Empty,
                larder.gc.outcome = Empty,
                otel.status_description = Empty,
                error.type = Empty,
            );
            self.take(removal).instrument(span).await;
            self.swept.reached = self.is_reached(self.target);
            if self.swept.reached {
                return false;
            }
        }
        !self.swept.reached
            && planned != 0
            // What such a plan retained does not become worth removing by what it removed.
            && plan.held_back.is_none()
            && !matches!(self.target, ReclaimTarget::Old | ReclaimTarget::Everything)
    }

    async fn take(&mut self, removal: PlannedRemoval) {
        let before = self.snapshot.disk;
        match self.hands.remove(&removal).await {
            Ok(RemovalOutcome::Removed(counted)) => {
                let counted = counted.filter(|_| self.exact);
                self.counted &= counted.is_some();
                let measured = if self.exact { self.freed_by(&removal, counted, before).await } else { None };
                let freed = counted.or(measured);
                let span = Span::current();
                span.record("larder.gc.freed_bytes", freed.unwrap_or(removal.frees).bytes);
                span.record("larder.gc.outcome", "removed");
                self.hands.removed(&removal, freed).await;
                self.snapshot.forget(&removal.id, &removal.handler);
                self.promised += removal.frees;
                let bytes = i64::try_from(counted.unwrap_or(removal.frees).bytes).unwrap_or(i64::MAX);
                self.swept.freed = self.swept.freed.saturating_add(bytes);
                self.swept.done.push(RemovedImage { removal, freed });
            }
            Ok(RemovalOutcome::AlreadyGone) => {
                Span::current().record("larder.gc.outcome", "not found");
                self.gone(removal).await;
            }
            Ok(RemovalOutcome::InUse(uses)) => {
                // Even with an unknown user, the image must not be in the next plan.
                let uses = if uses.is_empty() {
                    vec![ImageUse::Ensured { ago: None, left: Duration::ZERO }]
                } else {
                    uses
                };
                Span::current().record("larder.gc.outcome", "in use");
                self.exclude(&removal, |image| image.uses.clone_from(&uses));
                self.swept.skipped.push(removal.id);
            }
            Ok(RemovalOutcome::Kept(rule)) => {
                tracing::info!(image = %removal.id, rule, "skipped: kept by rule");
                Span::current().record("larder.gc.outcome", "kept");
                let wanted = vec![ImageUse::Desired { by: format!("keep rule {rule}") }];
                self.exclude(&removal, |image| image.uses.clone_from(&wanted));
                self.swept.skipped.push(removal.id);
            }
            Err(error) => {
                let error = error.to_string();
                trace_context::fail(&Span::current(), "RemoveImage", &error);
                self.exclude(&removal, |image| image.failed = Some(error.clone()));
                self.swept.errors.push((removal.id, error));
            }
        }
    }

    /// Handles an image that another process removed. Its space is waited for and counts towards the goal, but not as
    /// freed by this sweep.
    async fn gone(&mut self, removal: PlannedRemoval) {
        if self.exact {
            self.freed_by(&removal, None, self.snapshot.disk).await;
            self.freed_by_others = self.freed_by_others.saturating_add(removal.frees.bytes);
        }
        self.snapshot.forget(&removal.id, &removal.handler);
        self.swept.gone.push(removal.id);
    }

    /// Keeps an image out of further plans.
    fn exclude(&mut self, removal: &PlannedRemoval, why: impl Fn(&mut super::plan::GcImage)) {
        let same =
            |image: &&mut super::plan::GcImage| image.id == removal.id && image.handler == removal.handler;
        self.snapshot.images.iter_mut().filter(same).for_each(why);
    }

    /// Measures what a removal freed, and waits while more may be freed: of the `counted` amount, or of the planned one.
    /// `None` if it cannot be measured; then that amount counts. What a backend counted is waited for only until the
    /// filesystem has once failed to show it.
    async fn freed_by(
        &mut self,
        removal: &PlannedRemoval,
        counted: Option<DiskSpace>,
        before: Option<FsStats>,
    ) -> Option<DiskSpace> {
        let before = before?;
        let expected = counted.unwrap_or(removal.frees);
        let (longest, waits) = match counted {
            Some(counted) => (self.patience.quiet, !self.busy || self.should_be_reached(counted)),
            None => (self.patience.longest, true),
        };
        let (start, mut changed) = (Instant::now(), Instant::now());
        let mut last: Option<FsStats> = None;
        loop {
            let Ok(disk) = self.hands.measure().await else {
                self.snapshot.disk = Some(filesystem_stats::with_more_free(before, expected));
                return None;
            };
            if last != Some(disk) {
                (last, changed) = (Some(disk), Instant::now());
            }
            self.snapshot.disk = Some(disk);
            let freed = filesystem_stats::free(before).shortfall_to(filesystem_stats::free(disk));
            let missing = self.watched(freed.shortfall_to(expected));
            let waiting = start.elapsed();
            let given_up = !waits
                || changed.elapsed() >= self.patience.quiet
                || waiting >= longest
                || self.waited + waiting >= self.patience.sweep;
            let complete = self.patience.tolerance.shortfall_to(missing) == DiskSpace::ZERO;
            if complete || given_up {
                self.busy |= counted.is_some() && !complete;
                self.waited += waiting;
                return Some(freed);
            }
            tokio::time::sleep(self.patience.poll).await;
        }
    }

    /// Whether the goal is reached by the counted removals, `last` included, if nothing else writes to the filesystem. A
    /// goal that is a number of bytes does not wait for the filesystem.
    fn should_be_reached(&self, last: DiskSpace) -> bool {
        let (ReclaimTarget::Free(wanted), Some(began)) = (self.target, self.began_with) else { return false };
        if self.bytes_to_free.is_some() {
            return false;
        }
        let counted = self.swept.done.iter().filter_map(|done| done.freed).sum::<DiskSpace>();
        (began + counted + last).shortfall_to(wanted) == DiskSpace::ZERO
    }

    /// The part of an amount that the goal counts; the rest is not waited for.
    fn watched(&self, amount: DiskSpace) -> DiskSpace {
        match self.target {
            ReclaimTarget::Free(wanted) => DiskSpace {
                bytes: if wanted.bytes > 0 { amount.bytes } else { 0 },
                inodes: if wanted.inodes > 0 { amount.inodes } else { 0 },
            },
            _ => DiskSpace { inodes: 0, ..amount },
        }
    }

    fn is_reached(&self, target: ReclaimTarget) -> bool {
        match (target, self.snapshot.disk) {
            (ReclaimTarget::Nothing, _) => true,
            // Only after a success, so that at least one image is removed.
            (ReclaimTarget::Nominal(wanted), _) => !self.swept.done.is_empty() && self.swept.freed >= wanted,
            (ReclaimTarget::Free(_), Some(_)) if self.counted_goal().is_some() => {
                self.counted_goal() == Some(0)
            }
            (ReclaimTarget::Free(wanted), Some(disk)) => {
                filesystem_stats::free(disk).shortfall_to(wanted) == DiskSpace::ZERO
            }
            (ReclaimTarget::Free(_), None) | (ReclaimTarget::Old | ReclaimTarget::Everything, _) => false,
        }
    }

    /// Whether everything that is still missing should be free by the plans, and half as much again. Counted bytes do not
    /// lag.
    fn is_lagging(&self) -> bool {
        if self.counted_goal().is_some() {
            return false;
        }
        let (ReclaimTarget::Free(wanted), Some(disk), true) = (self.target, self.snapshot.disk, self.exact)
        else {
            return false;
        };
        let missing = filesystem_stats::free(disk).shortfall_to(wanted);
        let lags = |missing: u64, at_first: u64, promised: u64| {
            missing == 0 || (promised > 0 && promised >= at_first.saturating_add(at_first / 2))
        };
        lags(missing.bytes, self.missing.bytes, self.promised.bytes)
            && lags(missing.inodes, self.missing.inodes, self.promised.inodes)
    }

    /// Bytes still to be freed, where the goal is a number of bytes and the backend counts them: other writers neither
    /// reach nor miss such a goal. Without a removal there is nothing to count yet.
    fn counted_goal(&self) -> Option<u64> {
        let wanted = self.bytes_to_free.filter(|_| self.counted && !self.swept.done.is_empty())?;
        Some(wanted.saturating_sub(self.freed_by_others).saturating_sub(self.swept.freed.unsigned_abs()))
    }

    /// The rest of the goal.
    fn rest(&self, target: ReclaimTarget) -> ReclaimTarget {
        match target {
            ReclaimTarget::Nominal(i64::MAX) => target,
            ReclaimTarget::Nominal(wanted) => ReclaimTarget::Nominal(wanted.saturating_sub(self.swept.freed)),
            ReclaimTarget::Free(wanted) => match (self.counted_goal(), self.snapshot.disk) {
                (Some(rest), Some(disk)) => {
                    let bytes = filesystem_stats::free(disk).bytes.saturating_add(rest);
                    ReclaimTarget::Free(DiskSpace { bytes, ..wanted })
                }
                _ => target,
            },
            target => target,
        }
    }

    fn note_examined(&mut self, plan: &GcPlan) {
        for id in &plan.examined {
            if !self.swept.examined.contains(id) {
                self.swept.examined.push(id.clone());
            }
        }
    }

    fn end(mut self, target: ReclaimTarget, before: Option<FsStats>) -> SweepReport {
        self.swept.disk = self.snapshot.disk;
        if let (Some(before), Some(after)) = (before, self.snapshot.disk) {
            let [before, after] = [before, after].map(|disk| filesystem_stats::free(disk).bytes);
            self.swept.available_change =
                self.exact.then(|| i64::try_from(i128::from(after) - i128::from(before)).unwrap_or(i64::MAX));
        }
        if let (true, Some(before), Some(after)) = (self.exact && !self.counted, before, self.snapshot.disk) {
            let freed = filesystem_stats::free(before).shortfall_to(filesystem_stats::free(after)).bytes;
            // The space of other processes' removals may have been free before the first measurement, so this is at
            // least what was measured after this sweep's own removals.
            let freed = freed.saturating_sub(self.freed_by_others).max(self.swept.measured().min(freed));
            self.swept.freed = i64::try_from(freed).unwrap_or(i64::MAX);
        }
        match target {
            ReclaimTarget::Nothing => self.swept.reached = true,
            ReclaimTarget::Old | ReclaimTarget::Everything | ReclaimTarget::Nominal(i64::MAX) => {
                self.swept.reached = self.swept.errors.is_empty();
            }
            ReclaimTarget::Nominal(wanted) => self.swept.reached = self.swept.freed >= wanted,
            ReclaimTarget::Free(_) => self.swept.reached = self.is_reached(target),
        }
        self.swept
    }
}

impl SweepReport {
    /// Bytes measured right after this sweep's own removals, for each at most the planned amount.
    fn measured(&self) -> u64 {
        let bytes = |done: &RemovedImage| {
            let promised = done.removal.frees.bytes;
            done.freed.map_or(promised, |freed| freed.bytes.min(promised))
        };
        self.done.iter().map(bytes).fold(0, u64::saturating_add)
    }

    /// The errors in kubelet's words; `None` without errors.
    pub(crate) fn error(&self, goal: GcGoal, policy: &GcPolicy) -> Option<GcError> {
        if self.errors.is_empty() {
            return None;
        }
        let errors = crate::go_format::aggregate(self.errors.iter().map(|(_, error)| error.as_str()));
        Some(match goal {
            GcGoal::Age => GcError::Age { maximum: policy.maximum_age, errors },
            GcGoal::AllUnused | GcGoal::Dangling => {
                GcError::Space { wanted: i64::MAX, freed: self.freed, errors }
            }
            GcGoal::Thresholds | GcGoal::Free { .. } => {
                GcError::Space { wanted: self.wanted, freed: self.freed, errors }
            }
        })
    }
}
