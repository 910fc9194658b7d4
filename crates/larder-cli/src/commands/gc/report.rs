//! The shape of `larder gc -o json`: the plan, and what came of it.

use std::collections::HashMap;

use larder::gc::disk::used_percent;
use larder::gc::{Amount, Goal, ImageVerdict, Plan, Round, Stamp, Stays, Verdict, Why};
use larder::image_service::Disk;
use serde::Serialize;

/// One round, done or planned. Sizes are bytes, times RFC 3339.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Report {
    pub(super) dry_run: bool,
    /// `thresholds`, `free` or `allUnused`.
    pub(super) goal: &'static str,
    pub(super) before: Option<Filesystem>,
    pub(super) after: Option<Filesystem>,
    /// What had to be freed.
    pub(super) needed_bytes: u64,
    pub(super) needed_inodes: u64,
    pub(super) promised_bytes: u64,
    pub(super) promised_inodes: u64,
    /// What really came free; `null` in a dry run.
    pub(super) freed_bytes: Option<i64>,
    /// Whether the goal is reached, or would be.
    pub(super) reached: bool,
    pub(super) removals: Vec<Removed>,
    pub(super) images: Vec<ImageReport>,
    pub(super) failed: Vec<FailedRemoval>,
    /// Ids of images that came into use since the plan.
    pub(super) spared: Vec<String>,
}

/// How full a file system is.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Filesystem {
    pub(super) size_bytes: u64,
    pub(super) available_bytes: u64,
    pub(super) used_percent: i64,
    pub(super) inodes: u64,
    pub(super) inodes_free: u64,
}

/// One removal, in order.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Removed {
    pub(super) id: String,
    pub(super) names: Vec<String>,
    /// `TooOld`, `Room`, `SharedLayer` or `Unused`.
    pub(super) reason: &'static str,
    pub(super) why: String,
    pub(super) promised_bytes: u64,
    pub(super) promised_inodes: u64,
    /// Whether the promise is a guess.
    pub(super) estimated: bool,
    pub(super) freed_bytes: Option<u64>,
    pub(super) freed_inodes: Option<u64>,
}

/// One image, and whether it goes.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(in crate::commands) struct ImageReport {
    pub(in crate::commands) id: String,
    pub(in crate::commands) names: Vec<String>,
    pub(in crate::commands) size_bytes: u64,
    /// What removing just this image frees.
    pub(in crate::commands) unique_bytes: u64,
    pub(in crate::commands) first_seen: Option<String>,
    pub(in crate::commands) last_used: Option<String>,
    pub(in crate::commands) goes: bool,
    pub(in crate::commands) reason: &'static str,
    pub(in crate::commands) why: String,
    pub(in crate::commands) used_by: Vec<String>,
}

/// One image that could not be removed.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct FailedRemoval {
    pub(super) id: String,
    pub(super) message: String,
}

impl Report {
    pub(super) fn of_plan(plan: &Plan, disk: Option<Disk>) -> Report {
        Report {
            before: disk.map(Filesystem::from),
            after: plan.after.map(Filesystem::from),
            needed_bytes: plan.need.bytes,
            needed_inodes: plan.need.inodes,
            promised_bytes: plan.frees.bytes,
            promised_inodes: plan.frees.inodes,
            reached: plan.reachable,
            removals: plan.removals.iter().map(|removal| Removed::of(removal, None)).collect(),
            images: plan.verdicts.iter().map(ImageReport::from).collect(),
            ..Report::empty(true, plan.goal)
        }
    }

    pub(super) fn of_round(goal: Goal, round: &Round) -> Report {
        let done = || round.report.swept.iter().flat_map(|swept| &swept.done);
        let promised: Amount = done().map(|done| done.removal.frees).sum();
        let need = round.report.plans.last().map_or(Amount::ZERO, |plan| plan.need);
        // An image is in the plan for age and in the one for room; the later one knows more.
        let mut images: HashMap<(&str, &str), &ImageVerdict> = HashMap::new();
        for verdict in round.report.plans.iter().flat_map(|plan| &plan.verdicts) {
            images.insert((&verdict.id, &verdict.handler), verdict);
        }
        let mut images: Vec<_> = images.into_values().collect();
        images.sort_by(|a, b| (&a.id, &a.handler).cmp(&(&b.id, &b.handler)));
        let swept = &round.report.swept;
        let errors = swept.iter().flat_map(|swept| swept.errors.clone());
        Report {
            before: round.report.before.map(Filesystem::from),
            after: round.report.after.map(Filesystem::from),
            needed_bytes: need.bytes,
            needed_inodes: need.inodes,
            promised_bytes: promised.bytes,
            promised_inodes: promised.inodes,
            freed_bytes: Some(swept.iter().map(|swept| swept.freed).sum()),
            reached: round.error.is_none(),
            removals: done().map(|done| Removed::of(&done.removal, done.freed)).collect(),
            images: images.into_iter().map(ImageReport::from).collect(),
            failed: errors.map(|(id, message)| FailedRemoval { id, message }).collect(),
            spared: swept.iter().flat_map(|swept| swept.spared.clone()).collect(),
            ..Report::empty(false, goal)
        }
    }

    fn empty(dry_run: bool, goal: Goal) -> Report {
        Report {
            dry_run,
            goal: match goal {
                Goal::Age | Goal::Thresholds => "thresholds",
                Goal::Free { .. } => "free",
                Goal::AllUnused => "allUnused",
            },
            before: None,
            after: None,
            needed_bytes: 0,
            needed_inodes: 0,
            promised_bytes: 0,
            promised_inodes: 0,
            freed_bytes: None,
            reached: true,
            removals: Vec::new(),
            images: Vec::new(),
            failed: Vec::new(),
            spared: Vec::new(),
        }
    }
}

impl From<Disk> for Filesystem {
    fn from(disk: Disk) -> Filesystem {
        Filesystem {
            size_bytes: disk.capacity,
            available_bytes: disk.available,
            used_percent: used_percent(disk.capacity, disk.available),
            inodes: disk.inodes,
            inodes_free: disk.inodes_free,
        }
    }
}

impl Removed {
    fn of(removal: &larder::gc::Removal, freed: Option<Amount>) -> Removed {
        Removed {
            id: removal.id.clone(),
            names: removal.names.clone(),
            reason: reason_of(&removal.why),
            why: removal.why.to_string(),
            promised_bytes: removal.frees.bytes,
            promised_inodes: removal.frees.inodes,
            estimated: removal.estimated,
            freed_bytes: freed.map(|freed| freed.bytes),
            freed_inodes: freed.map(|freed| freed.inodes),
        }
    }
}

impl From<&ImageVerdict> for ImageReport {
    fn from(image: &ImageVerdict) -> ImageReport {
        let (goes, reason, why) = match &image.verdict {
            Verdict::Goes(why) => (true, reason_of(why), why.to_string()),
            Verdict::Stays(stays) => (false, stays_of(stays), stays.to_string()),
        };
        let used_by = match &image.verdict {
            Verdict::Stays(Stays::InUse(uses)) => uses.iter().map(ToString::to_string).collect(),
            _ => Vec::new(),
        };
        ImageReport {
            id: image.id.clone(),
            names: image.names.clone(),
            size_bytes: image.size,
            unique_bytes: image.alone.bytes,
            first_seen: time(image.first_seen),
            last_used: image.last_used.and_then(time),
            goes,
            reason,
            why,
            used_by,
        }
    }
}

/// A moment as text; `None` when no calendar has it.
pub(in crate::commands) fn time(stamp: Stamp) -> Option<String> {
    jiff::Timestamp::from_millisecond(stamp.0).ok().map(|time| time.to_string())
}

fn reason_of(why: &Why) -> &'static str {
    match why {
        Why::TooOld { .. } => "TooOld",
        Why::Room { .. } => "Room",
        Why::SharedLayer { .. } => "SharedLayer",
        Why::Unused => "Unused",
        _ => "Other",
    }
}

fn stays_of(stays: &Stays) -> &'static str {
    match stays {
        Stays::InUse(_) => "InUse",
        Stays::Pinned => "Pinned",
        Stays::Kept { .. } => "Kept",
        Stays::TooYoung { .. } => "TooYoung",
        Stays::ClockWentBack => "ClockWentBack",
        Stays::FreesNothing => "FreesNothing",
        Stays::NotNeeded => "NotNeeded",
        Stays::InvalidId => "InvalidId",
        Stays::Failed(_) => "Failed",
        _ => "Other",
    }
}
