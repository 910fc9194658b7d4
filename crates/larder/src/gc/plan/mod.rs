//! Chooses which images to remove. A pure function: no clock, no disk, no backend.
//!
//! Promises: an image in use, pinned, kept by a rule or too young for its goal is never in a [`GcPlan`]; removals are
//! ordered least recently used first, and equal input in any order gives an equal plan. With [`Accounting::Exact`] each
//! removal states what it frees after the removals before it, every removal frees something, and the plan without the
//! last removal would miss the goal.
//!
//! [`Accounting::Exact`]: super::policy::Accounting::Exact

mod decide;
mod floor;
mod layer_graph;
mod reason;
mod retention;
mod snapshot;
mod unreachable;

use std::time::Duration;

pub use decide::{plan, plan_round};
pub use reason::{GcDecision, RemovalReason, RetainReason};
pub use retention::{RetentionBreakdown, RetentionClass, RetentionClassUsage, holders};
pub use snapshot::{GcImage, GcSnapshot};

pub(super) use decide::{ReclaimTarget, insufficient, is_tag, keep_rule_inputs, plan_for, reclaim_target};

use super::disk_space::DiskSpace;
use super::policy::WhenUnreachable;
use super::unix_millis::UnixMillis;
use crate::image_service::FsStats;
use crate::reference::ImageId;

/// The goal of a collection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GcGoal {
    /// Remove images unused for longer than the maximum age.
    Age,
    /// If the filesystem is past a threshold of the policy, free until it is not.
    Thresholds,
    /// Free this many bytes plus the policy's margin.
    Free {
        /// Bytes.
        bytes: u64,
    },
    /// Remove every candidate.
    AllUnused,
    /// Remove every candidate that has no tag.
    Dangling,
}

impl GcGoal {
    /// One of each.
    pub const ALL: [GcGoal; 5] =
        [GcGoal::Age, GcGoal::Thresholds, GcGoal::Free { bytes: 0 }, GcGoal::AllUnused, GcGoal::Dangling];

    /// The goal's name in the history and in the log.
    pub fn name(self) -> &'static str {
        match self {
            GcGoal::Age => "age",
            GcGoal::Thresholds => "space",
            GcGoal::Free { .. } => "free",
            GcGoal::AllUnused => "allUnused",
            GcGoal::Dangling => "dangling",
        }
    }
}

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
    /// What removing all candidates would free if the goal cannot be reached, else what the removals free; zero for
    /// goals without an amount.
    pub reclaimable: DiskSpace,
    /// The rule by which images were retained because the goal cannot be reached; `None` if it can, or if all
    /// candidates are removed nonetheless.
    pub held_back: Option<WhenUnreachable>,
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
    pub names: Vec<String>,
    /// The amount that it frees after the removals before it.
    pub frees: DiskSpace,
    /// Whether the amount is estimated because the backend does not report layer sizes.
    pub estimated: bool,
    /// The reason.
    pub why: RemovalReason,
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
    /// Its names.
    pub names: Vec<String>,
    /// Size in bytes, as the runtime counts.
    pub size: u64,
    /// The amount that removing only this image would free.
    pub alone: DiskSpace,
    /// When it was first seen.
    pub first_seen: UnixMillis,
    /// When it was last used, if ever.
    pub last_used: Option<UnixMillis>,
    /// Whether it is removed, and the reason.
    pub verdict: GcDecision,
}

/// When the image was last used; if never, when it was first seen.
pub(super) fn last_use(subject: &GcImage) -> UnixMillis {
    subject.last_used.unwrap_or(subject.first_seen)
}

/// Time since the image's last use, or since it was first seen.
pub(super) fn unused_for(now: UnixMillis, subject: &GcImage) -> Duration {
    now.since(last_use(subject))
}
