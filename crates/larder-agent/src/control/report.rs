//! GC plans, rounds and disk usage as messages.

use std::collections::HashMap;

use larder::gc::disk::used_percent;
use larder::gc::{
    Amount, GcPolicy, Goal, Holder, Holders, ImageVerdict, Plan, Removal, Round, Stamp, Stays, Verdict, Why,
};
use larder::image_service::Disk;
use larder::reference::ImageId;
use larder_api::v1alpha1::{self as api, CollectionGoal, VerdictReason};

/// What would be done.
pub(super) fn of_plan(plan: &Plan, disk: Option<Disk>, policy: &GcPolicy) -> api::Collection {
    api::Collection {
        before: disk.map(file_system),
        after: plan.after.map(file_system),
        needed_bytes: plan.need.bytes,
        needed_inodes: plan.need.inodes,
        promised_bytes: plan.frees.bytes,
        promised_inodes: plan.frees.inodes,
        reached: plan.reachable,
        removals: plan.removals.iter().map(|removal| removed(removal, None)).collect(),
        images: plan.verdicts.iter().map(|verdict| image(verdict, policy)).collect(),
        planned: true,
        ..empty(true, plan.goal, policy)
    }
}

/// What was done.
pub(super) fn of_round(goal: Goal, round: &Round, policy: &GcPolicy) -> api::Collection {
    let done = || round.report.swept.iter().flat_map(|swept| &swept.done);
    let promised: Amount = done().map(|done| done.removal.frees).sum();
    let need = round.report.plans.last().map_or(Amount::ZERO, |plan| plan.need);
    // An image is in the plan for age and in the one for room; the later one knows more.
    let mut images: HashMap<(&ImageId, &str), &ImageVerdict> = HashMap::new();
    for verdict in round.report.plans.iter().flat_map(|plan| &plan.verdicts) {
        images.insert((&verdict.id, &verdict.handler), verdict);
    }
    let mut images: Vec<_> = images.into_values().collect();
    images.sort_by(|a, b| (&a.id, &a.handler).cmp(&(&b.id, &b.handler)));
    let swept = &round.report.swept;
    let errors = swept.iter().flat_map(|swept| swept.errors.clone());
    api::Collection {
        before: round.report.before.map(file_system),
        after: round.report.after.map(file_system),
        needed_bytes: need.bytes,
        needed_inodes: need.inodes,
        promised_bytes: promised.bytes,
        promised_inodes: promised.inodes,
        freed_bytes: Some(swept.iter().map(|swept| swept.freed).sum()),
        reached: round.error.is_none(),
        removals: done().map(|done| removed(&done.removal, done.freed)).collect(),
        images: images.into_iter().map(|verdict| image(verdict, policy)).collect(),
        failed: errors.map(|(id, message)| api::FailedRemoval { id: id.into(), message }).collect(),
        spared: swept.iter().flat_map(|swept| swept.spared.iter().map(ToString::to_string)).collect(),
        gone: swept.iter().flat_map(|swept| swept.gone.iter().map(ToString::to_string)).collect(),
        planned: !round.report.plans.is_empty(),
        ..empty(false, goal, policy)
    }
}

fn empty(dry_run: bool, goal: Goal, policy: &GcPolicy) -> api::Collection {
    let (goal, asked_bytes) = match goal {
        Goal::Age | Goal::Thresholds => (CollectionGoal::Thresholds, 0),
        Goal::Free { bytes } => (CollectionGoal::Free, bytes),
        Goal::AllUnused => (CollectionGoal::AllUnused, 0),
    };
    api::Collection {
        dry_run,
        goal: goal.into(),
        asked_bytes,
        reached: true,
        high_threshold_percent: policy.high_threshold_percent,
        low_threshold_percent: policy.low_threshold_percent,
        ..api::Collection::default()
    }
}

fn file_system(disk: Disk) -> api::FileSystem {
    api::FileSystem {
        size_bytes: disk.capacity,
        available_bytes: disk.available,
        reserved_bytes: disk.reserved,
        used_percent: used_percent(disk.capacity, disk.available),
        inodes: disk.inodes,
        inodes_free: disk.inodes_free,
    }
}

fn removed(removal: &Removal, freed: Option<Amount>) -> api::Removal {
    api::Removal {
        id: removal.id.to_string(),
        names: removal.names.clone(),
        reason: reason_of(&removal.why).into(),
        why: removal.why.to_string(),
        promised_bytes: removal.frees.bytes,
        promised_inodes: removal.frees.inodes,
        estimated: removal.estimated,
        freed_bytes: freed.map(|freed| freed.bytes),
        freed_inodes: freed.map(|freed| freed.inodes),
    }
}

/// One image, and whether it goes. Of one that a rule keeps, the name that the rule means comes first.
pub(super) fn image(image: &ImageVerdict, policy: &GcPolicy) -> api::ImageVerdict {
    let (goes, reason, why) = match &image.verdict {
        Verdict::Goes(why) => (true, reason_of(why), why.to_string()),
        Verdict::Stays(stays) => (false, stays_of(stays), stays.to_string()),
    };
    let used_by = match &image.verdict {
        Verdict::Stays(Stays::InUse(uses)) => uses.iter().map(ToString::to_string).collect(),
        _ => Vec::new(),
    };
    let mut names = image.names.clone();
    if let Verdict::Stays(Stays::Kept { rule, .. }) = &image.verdict
        && let Some(meant) = policy.keep.get(*rule).and_then(|rule| rule.meant(&names))
    {
        names[..=meant].rotate_right(1);
    }
    api::ImageVerdict {
        id: image.id.to_string(),
        names,
        size_bytes: image.size,
        unique_bytes: image.alone.bytes,
        first_seen: time(image.first_seen),
        last_used: image.last_used.and_then(time),
        goes,
        reason: reason.into(),
        why,
        used_by,
    }
}

/// A moment as text; `None` when no calendar has it.
pub(super) fn time(stamp: Stamp) -> Option<String> {
    jiff::Timestamp::from_millisecond(stamp.0).ok().map(|time| time.to_string())
}

fn reason_of(why: &Why) -> VerdictReason {
    match why {
        Why::TooOld { .. } => VerdictReason::TooOld,
        Why::Room { .. } => VerdictReason::Room,
        Why::SharedLayer { .. } => VerdictReason::SharedLayer,
        Why::Unused => VerdictReason::Unused,
        _ => VerdictReason::Unspecified,
    }
}

fn stays_of(stays: &Stays) -> VerdictReason {
    match stays {
        Stays::InUse(_) => VerdictReason::InUse,
        Stays::Pinned => VerdictReason::Pinned,
        Stays::Kept { .. } => VerdictReason::Kept,
        Stays::TooYoung { .. } => VerdictReason::TooYoung,
        Stays::ClockWentBack => VerdictReason::ClockWentBack,
        Stays::FreesNothing => VerdictReason::FreesNothing,
        Stays::NotNeeded => VerdictReason::NotNeeded,
        Stays::InvalidId => VerdictReason::InvalidId,
        Stays::Failed(_) => VerdictReason::Failed,
        _ => VerdictReason::Unspecified,
    }
}

/// The shape of `heldBy` in `larder df -o json`.
pub(super) fn held_by(holders: &Holders) -> api::HeldBy {
    let of = |holder: Holder| {
        let found = holders.images.iter().find(|held| held.holder == holder);
        found.map_or(api::Held::default(), |held| api::Held {
            count: held.images as u64,
            size_bytes: held.amount.bytes,
        })
    };
    api::HeldBy {
        in_use: Some(of(Holder::InUse)),
        pinned: Some(of(Holder::Pinned)),
        kept: Some(of(Holder::Kept)),
        leased: Some(of(Holder::Leased)),
        too_young: Some(of(Holder::TooYoung)),
        unused: Some(of(Holder::Unused)),
        other_bytes: holders.other_bytes,
        estimated: holders.estimated,
        reclaimable_bytes: holders.reclaimable.bytes,
    }
}
