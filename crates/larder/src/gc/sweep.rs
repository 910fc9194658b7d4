//! Acts on a plan: removes in order and looks what that really freed.
//!
//! A removal that fails, or whose image is used by now, does not stop the sweep: when the plan is through and its goal
//! is not reached, a new one is made of what is left. With exact accounting the file system is measured after each
//! removal, the sweep waits a bounded time for a backend that frees in the background, and stops as soon as enough is
//! really free.

use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use super::disk_space::DiskSpace;
use super::error::GcError;
use super::filesystem_stats;
use super::plan::{GcGoal, GcPlan, GcSnapshot, PlannedRemoval, ReclaimTarget, plan_for, reclaim_target};
use super::policy::{Accounting, GcPolicy};
use super::uses::{ImageUse, ImageUseError};
use crate::backend::BackendError;
use crate::image_service::FsStats;
use crate::reference::ImageId;

/// What a sweep acts through.
#[async_trait]
pub trait ImageRemover: Send + Sync {
    /// Removes one image, unless it is in use by now.
    async fn remove(&self, image: &PlannedRemoval) -> Result<RemovalOutcome, RemovalError>;
    /// Reads the file system that holds the images.
    async fn measure(&self) -> Result<FsStats, String>;
    /// Takes note of an image that is gone, with what that really freed, where it was measured.
    async fn removed(&self, image: &PlannedRemoval, freed: Option<DiskSpace>);
}

/// How a removal ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RemovalOutcome {
    /// The image is gone.
    Removed,
    /// It was gone before: somebody else removed it.
    AlreadyGone,
    /// It is used now, and was left alone.
    InUse(Vec<ImageUse>),
    /// A keep rule that came after the plan keeps it, and it was left alone: the rule in words.
    Kept(String),
}

/// Why an image was not removed. The text is the backend's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RemovalError {
    /// The backend could not.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// Nobody could tell whether it is in use.
    #[error(transparent)]
    UseUnknown(#[from] ImageUseError),
}

/// How long a sweep waits for room that a backend frees in the background.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReclaimWait {
    /// Time between two looks at the file system. Default 50 ms.
    pub poll: Duration,
    /// After so long without a change, no more is expected of a removal. Default 1 s.
    pub quiet: Duration,
    /// The longest wait for one removal. Default 10 s.
    pub longest: Duration,
    /// The longest wait of a whole sweep. Default 1 min.
    pub sweep: Duration,
    /// So little missing of a promise is not waited for, since others write meanwhile: logs, databases. The next
    /// measurement finds it if it does come. Default 64 KiB and 4 inodes.
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
    /// The removal, with what was promised.
    pub removal: PlannedRemoval,
    /// What the file system says; `None` if it was not measured. Other writers are in it.
    pub freed: Option<DiskSpace>,
}

/// What a sweep did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SweepReport {
    /// Removed, in order.
    pub done: Vec<RemovedImage>,
    /// Tried and failed: id and error text, in order.
    pub errors: Vec<(ImageId, String)>,
    /// Left alone because they are used or kept by now, by id.
    pub skipped: Vec<ImageId>,
    /// Gone before their turn came, because somebody else removed them, by id.
    pub gone: Vec<ImageId>,
    /// Bytes freed: measured if the accounting is exact, nominal otherwise. Of what came free, what images of `gone`
    /// were to free does not count; what else others wrote or deleted meanwhile is in it.
    pub freed: i64,
    /// Bytes that had to be freed.
    pub wanted: i64,
    /// Whether the goal was reached.
    pub reached: bool,
    /// The last reading of the file system.
    pub disk: Option<FsStats>,
    /// For kubelet's hooks: what the space pass looked at and kept.
    pub(super) examined: Vec<ImageId>,
}

struct Sweep<'a> {
    hands: &'a dyn ImageRemover,
    exact: bool,
    aim: ReclaimTarget,
    patience: ReclaimWait,
    waited: Duration,
    /// Bytes that somebody else has freed by removing images, by what the plan promised of these.
    elsewhere: u64,
    scene: &'a mut GcSnapshot,
    swept: SweepReport,
}

/// Carries out the first plan, and further ones for what it left open. `scene` is what the first plan was made of;
/// afterwards it is what is left.
pub async fn sweep(
    hands: &dyn ImageRemover,
    scene: &mut GcSnapshot,
    policy: &GcPolicy,
    first: GcPlan,
    patience: ReclaimWait,
) -> SweepReport {
    let goal = first.goal;
    let aim = reclaim_target(goal, scene.disk, policy);
    let before = scene.disk;
    let exact = policy.accounting == Accounting::Exact && scene.disk.is_some();
    let mut sweep = Sweep {
        hands,
        exact,
        aim,
        patience,
        waited: Duration::ZERO,
        elsewhere: 0,
        scene,
        swept: SweepReport::default(),
    };
    sweep.swept.wanted = match aim {
        ReclaimTarget::Nominal(wanted) => wanted,
        _ => i64::try_from(first.need.bytes).unwrap_or(i64::MAX),
    };
    let mut plan = first;
    while sweep.carry_out(plan).await {
        plan = plan_for(sweep.scene, policy, goal, sweep.rest(aim));
    }
    sweep.end(aim, before)
}

impl Sweep<'_> {
    /// Whether another plan may bring it nearer to the goal.
    async fn carry_out(&mut self, plan: GcPlan) -> bool {
        self.note_examined(&plan);
        let planned = plan.removals.len();
        for removal in plan.removals {
            self.take(removal).await;
            self.swept.reached = self.is_reached(self.aim);
            if self.swept.reached {
                return false;
            }
        }
        !self.swept.reached
            && planned != 0
            && !matches!(self.aim, ReclaimTarget::Old | ReclaimTarget::Everything)
    }

    async fn take(&mut self, removal: PlannedRemoval) {
        let before = self.scene.disk;
        match self.hands.remove(&removal).await {
            Ok(RemovalOutcome::Removed) => {
                let freed = if self.exact { self.freed_by(&removal, before).await } else { None };
                self.hands.removed(&removal, freed).await;
                self.scene.forget(&removal.id, &removal.handler);
                let counted = i64::try_from(removal.frees.bytes).unwrap_or(i64::MAX);
                self.swept.freed = self.swept.freed.saturating_add(counted);
                self.swept.done.push(RemovedImage { removal, freed });
            }
            Ok(RemovalOutcome::AlreadyGone) => self.gone(removal).await,
            Ok(RemovalOutcome::InUse(uses)) => {
                // Whoever uses it, it must not come up in the next plan.
                let uses = if uses.is_empty() {
                    vec![ImageUse::Ensured { ago: None, left: Duration::ZERO }]
                } else {
                    uses
                };
                self.exclude(&removal, |image| image.uses.clone_from(&uses));
                self.swept.skipped.push(removal.id);
            }
            Ok(RemovalOutcome::Kept(rule)) => {
                tracing::info!(image = %removal.id, rule, "skipped: kept by rule");
                let wanted = vec![ImageUse::Desired { by: format!("keep rule {rule}") }];
                self.exclude(&removal, |image| image.uses.clone_from(&wanted));
                self.swept.skipped.push(removal.id);
            }
            Err(error) => {
                let error = error.to_string();
                self.exclude(&removal, |image| image.failed = Some(error.clone()));
                self.swept.errors.push((removal.id, error));
            }
        }
    }

    /// An image that somebody else removed. Its room is waited for, counts, and is nothing that this sweep has freed.
    async fn gone(&mut self, removal: PlannedRemoval) {
        if self.exact {
            self.freed_by(&removal, self.scene.disk).await;
            self.elsewhere = self.elsewhere.saturating_add(removal.frees.bytes);
        }
        self.scene.forget(&removal.id, &removal.handler);
        self.swept.gone.push(removal.id);
    }

    /// Keeps an image out of further plans.
    fn exclude(&mut self, removal: &PlannedRemoval, why: impl Fn(&mut super::plan::GcImage)) {
        let same =
            |image: &&mut super::plan::GcImage| image.id == removal.id && image.handler == removal.handler;
        self.scene.images.iter_mut().filter(same).for_each(why);
    }

    /// Measures what a removal freed, and waits for it while it may still come. `None` if it cannot be measured; then
    /// the promise counts.
    async fn freed_by(&mut self, removal: &PlannedRemoval, before: Option<FsStats>) -> Option<DiskSpace> {
        let before = before?;
        let (start, mut changed) = (Instant::now(), Instant::now());
        let mut last: Option<FsStats> = None;
        loop {
            let Ok(disk) = self.hands.measure().await else {
                self.scene.disk = Some(filesystem_stats::with_more_free(before, removal.frees));
                return None;
            };
            if last != Some(disk) {
                (last, changed) = (Some(disk), Instant::now());
            }
            self.scene.disk = Some(disk);
            let freed = filesystem_stats::free(before).shortfall_to(filesystem_stats::free(disk));
            let missing = self.watched(freed.shortfall_to(removal.frees));
            let waiting = start.elapsed();
            let given_up = changed.elapsed() >= self.patience.quiet
                || waiting >= self.patience.longest
                || self.waited + waiting >= self.patience.sweep;
            if self.patience.tolerance.shortfall_to(missing) == DiskSpace::ZERO || given_up {
                self.waited += waiting;
                return Some(freed);
            }
            tokio::time::sleep(self.patience.poll).await;
        }
    }

    /// Of an amount, what the goal is about: it makes no sense to wait for the rest.
    fn watched(&self, amount: DiskSpace) -> DiskSpace {
        match self.aim {
            ReclaimTarget::Free(wanted) => DiskSpace {
                bytes: if wanted.bytes > 0 { amount.bytes } else { 0 },
                inodes: if wanted.inodes > 0 { amount.inodes } else { 0 },
            },
            _ => DiskSpace { inodes: 0, ..amount },
        }
    }

    fn is_reached(&self, aim: ReclaimTarget) -> bool {
        match (aim, self.scene.disk) {
            (ReclaimTarget::Nothing, _) => true,
            // Looked at after a success only, so that at least one image goes.
            (ReclaimTarget::Nominal(wanted), _) => !self.swept.done.is_empty() && self.swept.freed >= wanted,
            (ReclaimTarget::Free(wanted), Some(disk)) => {
                filesystem_stats::free(disk).shortfall_to(wanted) == DiskSpace::ZERO
            }
            (ReclaimTarget::Free(_), None) | (ReclaimTarget::Old | ReclaimTarget::Everything, _) => false,
        }
    }

    /// What is still wanted.
    fn rest(&self, aim: ReclaimTarget) -> ReclaimTarget {
        match aim {
            ReclaimTarget::Nominal(i64::MAX) => aim,
            ReclaimTarget::Nominal(wanted) => ReclaimTarget::Nominal(wanted.saturating_sub(self.swept.freed)),
            aim => aim,
        }
    }

    fn note_examined(&mut self, plan: &GcPlan) {
        for id in &plan.examined {
            if !self.swept.examined.contains(id) {
                self.swept.examined.push(id.clone());
            }
        }
    }

    fn end(mut self, aim: ReclaimTarget, before: Option<FsStats>) -> SweepReport {
        self.swept.disk = self.scene.disk;
        if let (true, Some(before), Some(after)) = (self.exact, before, self.scene.disk) {
            let freed = filesystem_stats::free(before).shortfall_to(filesystem_stats::free(after)).bytes;
            // Theirs may have been free before the first measure; what was measured after its own removals is no less.
            let freed = freed.saturating_sub(self.elsewhere).max(self.swept.measured().min(freed));
            self.swept.freed = i64::try_from(freed).unwrap_or(i64::MAX);
        }
        match aim {
            ReclaimTarget::Nothing => self.swept.reached = true,
            ReclaimTarget::Old | ReclaimTarget::Everything | ReclaimTarget::Nominal(i64::MAX) => {
                self.swept.reached = self.swept.errors.is_empty();
            }
            ReclaimTarget::Nominal(wanted) => self.swept.reached = self.swept.freed >= wanted,
            ReclaimTarget::Free(_) => self.swept.reached = self.is_reached(aim),
        }
        self.swept
    }
}

impl SweepReport {
    /// Bytes that came free right after its own removals, of each at most what was promised.
    fn measured(&self) -> u64 {
        let bytes = |done: &RemovedImage| {
            let promised = done.removal.frees.bytes;
            done.freed.map_or(promised, |freed| freed.bytes.min(promised))
        };
        self.done.iter().map(bytes).fold(0, u64::saturating_add)
    }

    /// What failed, in kubelet's words; `None` if nothing did.
    pub(crate) fn error(&self, goal: GcGoal, policy: &GcPolicy) -> Option<GcError> {
        if self.errors.is_empty() {
            return None;
        }
        let errors = crate::go_format::aggregate(self.errors.iter().map(|(_, error)| error.as_str()));
        Some(match goal {
            GcGoal::Age => GcError::Age { maximum: policy.maximum_age, errors },
            GcGoal::AllUnused => GcError::Space { wanted: i64::MAX, freed: self.freed, errors },
            GcGoal::Thresholds | GcGoal::Free { .. } => {
                GcError::Space { wanted: self.wanted, freed: self.freed, errors }
            }
        })
    }
}
