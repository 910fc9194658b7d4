//! Chooses which images to remove. A pure function: no clock, no disk, no backend.
//!
//! Promises: an image in use, pinned, kept by a rule or too young for its goal is never in a [`GcPlan`]; removals come
//! least recently used first, and equal input in any order gives an equal plan. With [`Accounting::Exact`] each
//! removal names what it frees given those before it, no removal is in vain, and leaving out the last one would miss
//! the goal.
//!
//! [`Accounting::Exact`]: super::policy::Accounting::Exact

mod decide;
mod layer_graph;
mod reason;
mod retention;
mod snapshot;

use std::time::Duration;

pub use decide::{plan, plan_round};
pub use reason::{GcDecision, RemovalReason, RetainReason};
pub use retention::{RetentionBreakdown, RetentionClass, RetentionClassUsage, holders};
pub use snapshot::{GcImage, GcSnapshot};

pub(super) use decide::{ReclaimTarget, insufficient, keepables, plan_for, reclaim_target};

use super::disk_space::DiskSpace;
use super::unix_millis::UnixMillis;
use crate::image_service::FsStats;
use crate::reference::ImageId;

/// What a collection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GcGoal {
    /// Remove what was unused for longer than the maximum age.
    Age,
    /// If the disk is past a limit of the policy, free until it is not.
    Thresholds,
    /// Free so many bytes, and the policy's margin.
    Free {
        /// Bytes.
        bytes: u64,
    },
    /// Remove all that may be removed.
    AllUnused,
}

impl GcGoal {
    /// The name of what a removal was for, in the journal and in the log.
    pub(super) fn name(self) -> &'static str {
        match self {
            GcGoal::Age => "age",
            GcGoal::Thresholds => "space",
            GcGoal::Free { .. } => "demand",
            GcGoal::AllUnused => "unused",
        }
    }
}

/// What to remove, in order, and why; and why the rest stays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GcPlan {
    /// What it is for.
    pub goal: GcGoal,
    /// What has to be freed; nothing for goals that do not count.
    pub need: DiskSpace,
    /// In this order.
    pub removals: Vec<PlannedRemoval>,
    /// For every image, in the order of ids, whether it goes and why.
    pub decisions: Vec<ImageDecision>,
    /// What all removals together free.
    pub expected_freed: DiskSpace,
    /// Whether that is enough.
    pub reachable: bool,
    /// The file system afterwards, if it was given before.
    pub after: Option<FsStats>,
    /// Ids that kubelet's space pass looks at and keeps before it stops, in its order.
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
    /// What it frees, given the removals before it.
    pub frees: DiskSpace,
    /// Whether that is a guess, because the backend does not tell what layers take.
    pub estimated: bool,
    /// Why it goes.
    pub why: RemovalReason,
    /// When it was first seen.
    pub first_seen: UnixMillis,
    /// When it was last used, if ever.
    pub last_used: Option<UnixMillis>,
}

/// Whether one image goes, and why.
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
    /// What removing just this image would free.
    pub alone: DiskSpace,
    /// When it was first seen.
    pub first_seen: UnixMillis,
    /// When it was last used, if ever.
    pub last_used: Option<UnixMillis>,
    /// Goes or stays.
    pub verdict: GcDecision,
}

/// How long an image was not used: since its last use, or since it was first seen.
pub(super) fn unused_for(now: UnixMillis, subject: &GcImage) -> Duration {
    now.since(subject.last_used.unwrap_or(subject.first_seen))
}
