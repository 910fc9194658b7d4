//! The progress of the running round.

use parking_lot::Mutex;
use tokio::time::Instant;

use super::disk_space::DiskSpace;
use super::goal::GcGoal;
use super::plan::{GcPlan, PlannedRemoval};

/// The step of a running round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GcPhase {
    /// Reclaims space beside images.
    Reclaiming,
    /// Lists images and their uses, and plans.
    Planning,
    /// Removes images.
    Removing,
}

/// The progress of a running round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GcRoundProgress {
    /// The goal.
    pub goal: GcGoal,
    /// When it began.
    pub since: Instant,
    /// Its current step.
    pub phase: GcPhase,
    /// The amount to free, with what was freed before the last plan; zero before the plan and for goals without an
    /// amount.
    pub need: DiskSpace,
    /// The amount that all removals free together, as planned.
    pub expected_freed: DiskSpace,
    /// The amount that the removals so far freed; as planned where it was not measured.
    pub freed: DiskSpace,
    /// How many images are to be removed, with those that are.
    pub planned: usize,
    /// How many images were removed.
    pub removed: usize,
    /// The image that is being removed.
    pub removing: Option<PlannedRemoval>,
}

/// The progress of a collector's round; `None` while none runs.
#[derive(Debug, Default)]
pub(super) struct RoundTracker(Mutex<Option<GcRoundProgress>>);

/// A running round, until dropped.
#[must_use]
pub(super) struct RunningRound<'a>(&'a RoundTracker);

impl RoundTracker {
    pub(super) fn begin(&self, goal: GcGoal) -> RunningRound<'_> {
        *self.0.lock() = Some(GcRoundProgress {
            goal,
            since: Instant::now(),
            phase: GcPhase::Reclaiming,
            need: DiskSpace::ZERO,
            expected_freed: DiskSpace::ZERO,
            freed: DiskSpace::ZERO,
            planned: 0,
            removed: 0,
            removing: None,
        });
        RunningRound(self)
    }

    pub(super) fn current(&self) -> Option<GcRoundProgress> {
        self.0.lock().clone()
    }

    pub(super) fn planning(&self) {
        self.update(|round| (round.phase, round.removing) = (GcPhase::Planning, None));
    }

    pub(super) fn planned(&self, plan: &GcPlan) {
        self.update(|round| {
            round.phase = GcPhase::Removing;
            round.planned = round.removed + plan.removals.len();
            round.expected_freed = round.freed + plan.expected_freed;
            round.need = if plan.need == DiskSpace::ZERO { plan.need } else { round.freed + plan.need };
        });
    }

    pub(super) fn removing(&self, image: &PlannedRemoval) {
        self.update(|round| round.removing = Some(image.clone()));
    }

    pub(super) fn removed(&self, freed: DiskSpace) {
        self.update(|round| {
            round.removed += 1;
            round.freed += freed;
            round.removing = None;
        });
    }

    fn update(&self, change: impl FnOnce(&mut GcRoundProgress)) {
        if let Some(round) = &mut *self.0.lock() {
            change(round);
        }
    }
}

impl Drop for RunningRound<'_> {
    fn drop(&mut self) {
        *self.0.0.lock() = None;
    }
}
