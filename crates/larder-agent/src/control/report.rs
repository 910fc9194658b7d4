//! GC plans, rounds and disk usage as messages.

use std::collections::HashMap;

use larder::gc::filesystem_stats::used_percent;
use larder::gc::{
    DiskSpace, DryRun, GcDecision, GcGoal, GcPhase, GcPolicy, GcReport, GcRoundProgress, GcRoundResult,
    ImageDecision, PlannedRemoval, RemovalReason, RetainReason, RetentionBreakdown, UnixMillis,
    usage_by_class,
};
use larder::image_service::FsStats;
use larder::reference::ImageId;
use larder::retention::{Lease, LeasePurpose, RetentionClass};
use larder_api::convert;
use larder_api::v1::{self as api, CollectionGoal, DecisionReason};
use tokio::time::Instant;

/// Reports a plan.
pub(super) fn of_dry_run(goal: GcGoal, run: &DryRun, policy: &GcPolicy) -> api::Collection {
    let round = of_report(goal, &run.report, policy);
    let Some(plan) = run.plan() else { return round };
    api::Collection {
        dry_run: true,
        freed_bytes: None,
        available_change_bytes: None,
        after: plan.after.map(file_system),
        promised_bytes: plan.expected_freed.bytes,
        promised_inodes: plan.expected_freed.inodes,
        reached: plan.reachable,
        removals: plan.removals.iter().map(|removal| removed(removal, None)).collect(),
        usage_by_state: (!plan.reachable).then(|| usage_by_state(&usage_by_class(&run.snapshot, policy))),
        ..round
    }
}

/// Reports a round.
pub(super) fn of_round(goal: GcGoal, round: &GcRoundResult, policy: &GcPolicy) -> api::Collection {
    api::Collection { reached: round.error.is_none(), ..of_report(goal, &round.report, policy) }
}

fn of_report(goal: GcGoal, report: &GcReport, policy: &GcPolicy) -> api::Collection {
    let done = || report.removed();
    let promised: DiskSpace = done().map(|done| done.removal.frees).sum();
    let last = report.plans.last();
    let need = last.map_or(DiskSpace::ZERO, |plan| plan.need);
    let reclaimable = last.map_or(DiskSpace::ZERO, |plan| plan.reclaimable);
    let space_holders = report.space_holders.iter().map(|holder| api::SpaceHolder {
        process: holder.process,
        command: holder.command.clone(),
        bytes: holder.bytes,
    });
    // An image is in the plan for age and in the one for space; the later one knows more.
    let mut images: HashMap<(&ImageId, &str), &ImageDecision> = HashMap::new();
    for decision in report.plans.iter().flat_map(|plan| &plan.decisions) {
        images.insert((&decision.id, &decision.handler), decision);
    }
    let mut images: Vec<_> = images.into_values().collect();
    images.sort_by(|a, b| (&a.id, &a.handler).cmp(&(&b.id, &b.handler)));
    let swept = &report.swept;
    let errors = swept.iter().flat_map(|swept| swept.errors.clone());
    api::Collection {
        before: report.before.map(file_system),
        after: report.after.map(file_system),
        needed_bytes: need.bytes,
        needed_inodes: need.inodes,
        promised_bytes: promised.bytes,
        promised_inodes: promised.inodes,
        reclaimable_bytes: reclaimable.bytes,
        reclaimable_inodes: reclaimable.inodes,
        when_unreachable: last
            .and_then(|plan| plan.when_unreachable)
            .map_or_else(String::new, |rule| rule.as_str().to_owned()),
        disabled: goal == GcGoal::Detect,
        lagging: swept.iter().any(|swept| swept.lagging),
        space_holders: space_holders.collect(),
        freed_bytes: Some(swept.iter().map(|swept| swept.freed).sum()),
        available_change_bytes: swept.iter().map(|swept| swept.available_change).sum(),
        removals: done().map(|done| removed(&done.removal, done.freed)).collect(),
        images: images.into_iter().map(image).collect(),
        failed: errors.map(|(id, message)| api::FailedRemoval { id: id.into(), message }).collect(),
        skipped: swept.iter().flat_map(|swept| swept.skipped.iter().map(ToString::to_string)).collect(),
        already_removed: swept
            .iter()
            .flat_map(|swept| swept.already_removed.iter().map(ToString::to_string))
            .collect(),
        warnings: report.warnings.iter().map(ToString::to_string).collect(),
        planned: goal == GcGoal::FailedPulls || !report.plans.is_empty(),
        reclaimed: Some(convert::space_beside_images(&report.reclaimed)),
        ..empty(goal, policy)
    }
}

fn empty(goal: GcGoal, policy: &GcPolicy) -> api::Collection {
    api::Collection {
        goal: collection_goal(goal).into(),
        asked_bytes: if let GcGoal::Free { bytes } = goal { bytes } else { 0 },
        reached: true,
        high_threshold_percent: policy.high_threshold_percent,
        low_threshold_percent: policy.low_threshold_percent,
        ..api::Collection::default()
    }
}

fn collection_goal(goal: GcGoal) -> CollectionGoal {
    match goal {
        GcGoal::Age | GcGoal::Thresholds | GcGoal::Detect => CollectionGoal::Thresholds,
        GcGoal::FailedPulls => CollectionGoal::FailedPulls,
        GcGoal::Free { .. } => CollectionGoal::Free,
        GcGoal::AllUnused => CollectionGoal::AllUnused,
        GcGoal::Dangling => CollectionGoal::Dangling,
    }
}

/// A running round.
pub(super) fn running_round(round: &GcRoundProgress, now: Instant) -> api::GcRound {
    let count = |images: usize| u32::try_from(images).unwrap_or(u32::MAX);
    api::GcRound {
        goal: collection_goal(round.goal).into(),
        phase: match round.phase {
            GcPhase::Reclaiming => api::GcPhase::Reclaiming,
            GcPhase::Planning => api::GcPhase::Planning,
            GcPhase::Removing => api::GcPhase::Removing,
        }
        .into(),
        milliseconds: convert::millis(now.saturating_duration_since(round.since)),
        needed_bytes: round.need.bytes,
        needed_inodes: round.need.inodes,
        promised_bytes: round.expected_freed.bytes,
        freed_bytes: round.freed.bytes,
        freed_inodes: round.freed.inodes,
        planned_images: count(round.planned),
        removed_images: count(round.removed),
        removing: round.removing.as_ref().map(|removal| removed(removal, None)),
    }
}

fn file_system(disk: FsStats) -> api::FileSystem {
    api::FileSystem {
        size_bytes: disk.capacity,
        available_bytes: disk.available,
        reserved_bytes: disk.reserved,
        used_percent: used_percent(disk.capacity, disk.available),
        inodes: disk.inodes,
        inodes_free: disk.inodes_free,
    }
}

fn removed(removal: &PlannedRemoval, freed: Option<DiskSpace>) -> api::Removal {
    api::Removal {
        id: removal.id.to_string(),
        names: removal.names.to_vec(),
        reason: reason_of(&removal.reason).into(),
        why: removal.reason.to_string(),
        promised_bytes: removal.frees.bytes,
        promised_inodes: removal.frees.inodes,
        estimated: removal.estimated,
        freed_bytes: freed.map(|freed| freed.bytes),
        freed_inodes: freed.map(|freed| freed.inodes),
    }
}

/// One image, and whether the round removes it. If a keep rule retains it, the matching name comes first.
pub(super) fn image(image: &ImageDecision) -> api::ImageDecision {
    let (reason, why) = reason(&image.decision);
    let used_by = match &image.decision {
        GcDecision::Retain(RetainReason::InUse(uses)) => uses.iter().map(ToString::to_string).collect(),
        GcDecision::Retain(RetainReason::Leased { left }) => {
            vec![Lease { purpose: LeasePurpose::Request, left: *left }.to_string()]
        }
        _ => Vec::new(),
    };
    let mut names = image.names.to_vec();
    if let GcDecision::Retain(RetainReason::Kept(kept)) = &image.decision
        && let Some(meant) = kept.rule.parse_selector(&names)
    {
        names[..=meant].rotate_right(1);
    }
    api::ImageDecision {
        id: image.id.to_string(),
        artifact_type: image.artifact_type.clone(),
        names,
        size_bytes: image.size,
        unique_bytes: image.alone.bytes,
        first_seen: time(image.first_seen),
        last_used: image.last_used.and_then(time),
        remove: matches!(image.decision, GcDecision::Remove(_)),
        reason: reason.into(),
        why,
        used_by,
    }
}

/// A moment as text; `None` when no calendar has it.
pub(super) fn time(stamp: UnixMillis) -> Option<String> {
    jiff::Timestamp::from_millisecond(stamp.0).ok().map(|time| time.to_string())
}

/// The reason of a decision, and its text.
pub(super) fn reason(decision: &GcDecision) -> (DecisionReason, String) {
    match decision {
        GcDecision::Remove(why) => (reason_of(why), why.to_string()),
        GcDecision::Retain(stays) => (stays_of(stays), stays.to_string()),
    }
}

fn reason_of(why: &RemovalReason) -> DecisionReason {
    match why {
        RemovalReason::TooOld { .. } => DecisionReason::TooOld,
        RemovalReason::LeastRecentlyUsed { .. } | RemovalReason::Untagged { .. } => DecisionReason::Space,
        RemovalReason::SharedLayer { .. } => DecisionReason::SharedLayer,
        RemovalReason::Unused => DecisionReason::Unused,
        _ => DecisionReason::Unspecified,
    }
}

fn stays_of(stays: &RetainReason) -> DecisionReason {
    match stays {
        RetainReason::InUse(_) => DecisionReason::InUse,
        RetainReason::Leased { .. } => DecisionReason::Leased,
        RetainReason::Pinned => DecisionReason::Pinned,
        RetainReason::Kept(_) => DecisionReason::Kept,
        RetainReason::TooYoung { .. } => DecisionReason::TooYoung,
        RetainReason::ClockWentBack => DecisionReason::ClockWentBack,
        RetainReason::FreesNothing => DecisionReason::FreesNothing,
        RetainReason::Unreachable(_) => DecisionReason::Unreachable,
        RetainReason::Recent { .. } => DecisionReason::Recent,
        RetainReason::NotNeeded => DecisionReason::NotNeeded,
        RetainReason::InvalidId => DecisionReason::InvalidId,
        RetainReason::Failed(_) => DecisionReason::Failed,
        _ => DecisionReason::Unspecified,
    }
}

/// The shape of `usageByState` in `larder df -o json`.
pub(super) fn usage_by_state(usage: &RetentionBreakdown) -> api::UsageByState {
    let of = |class: RetentionClass| {
        let found = usage.images.iter().find(|usage| usage.class == class);
        Some(found.map_or(api::ImageTotal::default(), |usage| api::ImageTotal {
            count: usage.images as u64,
            size_bytes: usage.amount.bytes,
        }))
    };
    api::UsageByState {
        in_use: of(RetentionClass::InUse),
        pinned: of(RetentionClass::Pinned),
        kept: of(RetentionClass::Kept),
        leased: of(RetentionClass::Leased),
        too_young: of(RetentionClass::TooYoung),
        unused: of(RetentionClass::Unused),
        other_bytes: usage.other_bytes,
        estimated: usage.estimated,
        reclaimable_bytes: usage.reclaimable.bytes,
    }
}
