//! Chooses which images to remove. A pure function: no clock, no disk, no backend.
//!
//! Promises: an image in use, pinned, kept by a rule or too young for its goal is never in a [`GcPlan`]; removals are
//! ordered least recently used first, and equal input in any order gives an equal plan.
//!
//! [`plan`] retains what no goal may remove ([`retained`]), orders the rest and selects from it by the [`Strategy`] of
//! the policy: [`exact`] is larder's, [`kubelet`] is kubelet's algorithm.

mod exact;
mod kubelet;
mod layer_graph;
mod reason;
mod retained;
mod snapshot;
mod strategy;
mod usage_by_class;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

pub use reason::{GcDecision, RemovalReason, RetainReason};
pub use snapshot::{GcImage, GcSnapshot};
pub use usage_by_class::{RetentionBreakdown, RetentionClassUsage, usage_by_class};

pub(super) use retained::{is_tag, keep_rule_inputs};
pub(super) use strategy::ReclaimTarget;

use self::exact::ExactStrategy;
use self::kubelet::KubeletStrategy;
use self::layer_graph::exclusive_space;
use self::retained::{retain_reasons, retain_recent};
use self::strategy::{PlanInput, Selection, Strategy};
use super::disk_space::DiskSpace;
use super::filesystem_stats::with_more_free;
use super::goal::GcGoal;
use super::policy::{GcPolicy, GcStrategy, WhenUnreachable};
use super::unix_millis::UnixMillis;
use crate::image_service::FsStats;
use crate::reference::ImageId;

/// The images to remove, in order and with reasons, and the reasons for which the others are retained.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GcPlan {
    /// The goal.
    pub goal: GcGoal,
    /// The amount to free; zero for goals without an amount.
    pub need: DiskSpace,
    /// The removals, in order.
    pub removals: Vec<PlannedRemoval>,
    /// The decision for every image, ordered by ID.
    pub decisions: Vec<ImageDecision>,
    /// The amount that all removals free together.
    pub expected_freed: DiskSpace,
    /// Whether the removals free enough.
    pub reachable: bool,
    /// The amount that all candidates would free if the goal cannot be reached, else that the removals free; zero for
    /// goals without an amount.
    pub reclaimable: DiskSpace,
    /// The rule by which images were retained because the goal cannot be reached; `None` if it can, or if all
    /// candidates are removed nonetheless.
    pub when_unreachable: Option<WhenUnreachable>,
    /// The expected filesystem after the removals, if the snapshot has the filesystem.
    pub after: Option<FsStats>,
    /// IDs that kubelet's space pass examines and retains before it stops, in its order.
    pub(super) examined: Vec<ImageId>,
}

/// One removal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedRemoval {
    /// Id of the image.
    pub id: ImageId,
    /// Its runtime handler, usually empty.
    pub handler: String,
    /// Its names.
    pub names: Arc<[String]>,
    /// The amount that it frees after the removals before it.
    pub frees: DiskSpace,
    /// Whether the amount is estimated because the backend does not report layer sizes.
    pub estimated: bool,
    /// Why it is removed.
    pub reason: RemovalReason,
    /// When it was first seen.
    pub first_seen: UnixMillis,
    /// When it was last used, if ever.
    pub last_used: Option<UnixMillis>,
}

/// The decision for one image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageDecision {
    /// Id of the image.
    pub id: ImageId,
    /// Its runtime handler, usually empty.
    pub handler: String,
    /// The type of an artifact; empty for an image.
    pub artifact_type: String,
    /// Its names.
    pub names: Arc<[String]>,
    /// Size in bytes, as the runtime counts.
    pub size: u64,
    /// The amount that removing only this image would free.
    pub alone: DiskSpace,
    /// When it was first seen.
    pub first_seen: UnixMillis,
    /// When it was last used, if ever.
    pub last_used: Option<UnixMillis>,
    /// Removal or retention of the image, with the reason.
    pub decision: GcDecision,
}

/// The stages of a round for this goal, in order: the images past the maximum age go first if the goal is
/// [`GcGoal::Thresholds`].
pub(super) fn stages(goal: GcGoal, policy: &GcPolicy) -> impl Iterator<Item = GcGoal> {
    let has_age_stage = goal == GcGoal::Thresholds && !policy.maximum_age.is_zero();
    has_age_stage.then_some(GcGoal::Age).into_iter().chain([goal])
}

/// Plans all `stages` of a round for this goal. Every image that no stage removes gets the reason for which the last
/// one retains it.
pub fn plan(snapshot: &GcSnapshot, policy: &GcPolicy, goal: GcGoal) -> GcPlan {
    let (mut rest, mut planned): (_, Option<GcPlan>) = (Cow::Borrowed(snapshot), None);
    for stage in stages(goal, policy) {
        if let Some(before) = planned.as_ref().filter(|before| !before.removals.is_empty()) {
            let rest = rest.to_mut();
            before.removals.iter().for_each(|removal| rest.forget(&removal.id, &removal.handler));
            rest.disk = before.after;
        }
        let next = plan_stage(&rest, policy, stage);
        planned = Some(match planned {
            None => next,
            Some(before) => next.after_stage(before),
        });
    }
    planned.unwrap_or_else(|| plan_stage(snapshot, policy, goal))
}

impl GcPlan {
    /// The plan of this stage and the one before it.
    fn after_stage(mut self, before: GcPlan) -> GcPlan {
        self.expected_freed += before.expected_freed;
        self.removals.splice(0..0, before.removals);
        let is_removed = |image: &ImageDecision| matches!(image.decision, GcDecision::Remove(_));
        self.decisions.extend(before.decisions.into_iter().filter(is_removed));
        self.decisions.sort_by(|a, b| (&a.id, &a.handler).cmp(&(&b.id, &b.handler)));
        self
    }
}

/// Plans one stage of a round.
pub(super) fn plan_stage(snapshot: &GcSnapshot, policy: &GcPolicy, goal: GcGoal) -> GcPlan {
    plan_rest(snapshot, policy, goal, reclaim_target(goal, snapshot, policy), None)
}

/// Plans the rest of a stage. `missing` is the amount that was missing when the stage began, if that is not now.
pub(super) fn plan_rest(
    snapshot: &GcSnapshot,
    policy: &GcPolicy,
    goal: GcGoal,
    target: ReclaimTarget,
    missing: Option<DiskSpace>,
) -> GcPlan {
    let strategy = strategy(policy);
    let mut retained = retain_reasons(snapshot, policy, goal, target);
    retain_recent(snapshot, policy, target, &mut retained);
    let order = strategy.removal_order(&snapshot.images, &retained);
    let need = target.need(snapshot.disk);
    let missing = missing.unwrap_or(need);
    let input =
        PlanInput { snapshot, policy, goal, target, need, missing, retained: &retained, order: &order };
    let selection = strategy.select(&input);
    let reasons = strategy.removal_reasons(&input, &selection.steps);
    let expected_freed: DiskSpace = selection.steps.iter().map(|step| step.frees).sum();
    let has_amount = need != DiskSpace::ZERO;
    GcPlan {
        goal,
        need,
        removals: removals(snapshot, &selection, &reasons),
        decisions: decisions(snapshot, &selection, reasons, retained),
        expected_freed,
        reclaimable: if has_amount { selection.reclaimable } else { DiskSpace::ZERO },
        when_unreachable: selection.when_unreachable,
        reachable: selection.reachable,
        after: snapshot.disk.map(|disk| with_more_free(disk, expected_freed)),
        examined: selection.examined,
    }
}

fn removals(snapshot: &GcSnapshot, selection: &Selection, reasons: &[RemovalReason]) -> Vec<PlannedRemoval> {
    let removal = |(step, reason): (&layer_graph::RemovalStep, &RemovalReason)| {
        let image = &snapshot.images[step.image];
        PlannedRemoval {
            id: image.id.clone(),
            handler: image.handler.clone(),
            names: Arc::clone(&image.names),
            frees: step.frees,
            estimated: step.estimated,
            reason: reason.clone(),
            first_seen: image.first_seen,
            last_used: image.last_used,
        }
    };
    selection.steps.iter().zip(reasons).map(removal).collect()
}

/// The decision for each image, ordered by ID.
fn decisions(
    snapshot: &GcSnapshot,
    selection: &Selection,
    reasons: Vec<RemovalReason>,
    retained: Vec<Option<RetainReason>>,
) -> Vec<ImageDecision> {
    let mut decided: Vec<Option<GcDecision>> =
        retained.into_iter().map(|reason| reason.map(GcDecision::Retain)).collect();
    for (step, reason) in selection.steps.iter().zip(reasons) {
        decided[step.image] = Some(GcDecision::Remove(reason));
    }
    let alone = exclusive_space(&snapshot.images, &snapshot.layers);
    let rest = |index: usize| match selection.when_unreachable {
        _ if selection.frees_nothing.get(index) == Some(&true) => RetainReason::FreesNothing,
        Some(rule) => RetainReason::Unreachable(rule),
        None => RetainReason::NotNeeded,
    };
    let images = snapshot.images.iter().zip(alone).zip(decided).enumerate();
    let decision = |(index, ((image, alone), decided)): (usize, ((&GcImage, DiskSpace), _))| ImageDecision {
        id: image.id.clone(),
        handler: image.handler.clone(),
        artifact_type: image.artifact_type.clone(),
        names: Arc::clone(&image.names),
        size: image.size,
        alone,
        first_seen: image.first_seen,
        last_used: image.last_used,
        decision: Option::unwrap_or_else(decided, || GcDecision::Retain(rest(index))),
    };
    let mut decisions: Vec<ImageDecision> = images.map(decision).collect();
    decisions.sort_by(|a, b| (&a.id, &a.handler).cmp(&(&b.id, &b.handler)));
    decisions
}

/// When the image was last used; if never, when it was first seen.
fn last_use(image: &GcImage) -> UnixMillis {
    image.last_used.unwrap_or(image.first_seen)
}

/// Time since the image's last use, or since it was first seen.
fn unused_for(now: UnixMillis, image: &GcImage) -> Duration {
    now.since(last_use(image))
}

/// The strategy of a policy.
fn strategy(policy: &GcPolicy) -> &'static dyn Strategy {
    match policy.strategy {
        GcStrategy::Larder => &ExactStrategy,
        GcStrategy::Kubelet => &KubeletStrategy,
    }
}

/// Translates the goal for the filesystem of this snapshot.
pub(super) fn reclaim_target(goal: GcGoal, snapshot: &GcSnapshot, policy: &GcPolicy) -> ReclaimTarget {
    match goal {
        GcGoal::Age => ReclaimTarget::Old,
        GcGoal::AllUnused | GcGoal::Dangling => ReclaimTarget::Everything,
        GcGoal::Detect | GcGoal::FailedPulls => ReclaimTarget::Nothing,
        GcGoal::Thresholds => snapshot
            .disk
            .and_then(|disk| strategy(policy).threshold_target(disk, policy))
            .unwrap_or(ReclaimTarget::Nothing),
        GcGoal::Free { bytes } => {
            let wanted = bytes.saturating_add(bytes / 100 * u64::from(policy.free_margin_percent));
            let left = wanted.saturating_sub(snapshot.reclaimed.bytes);
            if left == 0 && snapshot.reclaimed.bytes > 0 {
                return ReclaimTarget::Nothing;
            }
            strategy(policy).bytes_target(left, snapshot.disk)
        }
    }
}

/// Whether the filesystem is past a threshold of the policy.
pub(super) fn is_due(disk: FsStats, policy: &GcPolicy) -> bool {
    strategy(policy).threshold_target(disk, policy).is_some()
}
