//! Chooses which images to remove. A pure function: no clock, no disk, no backend.
//!
//! Promises: an image in use, pinned, kept by a rule or too young for its goal is never in a [`Plan`]; removals come
//! least recently used first, and equal input in any order gives an equal plan. With [`Accounting::Exact`] each
//! removal names what it frees given those before it, no removal is in vain, and leaving out the last one would miss
//! the goal.
//!
//! [`Accounting::Exact`]: super::policy::Accounting::Exact

mod decide;
mod holders;
mod reason;
mod release;
mod scene;

use std::time::Duration;

pub use decide::{plan, plan_round};
pub use holders::{Holder, Holders, Holding, holders};
pub use reason::{Stays, Verdict, Why};
pub use scene::{Scene, Subject};

pub(super) use decide::{Aim, aim, insufficient, keepables, plan_for};

use super::amount::Amount;
use super::time::Stamp;
use crate::image_service::Disk;
use crate::reference::ImageId;

/// What a collection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
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

impl Goal {
    /// The name of what a removal was for, in the journal and in the log.
    pub(super) fn name(self) -> &'static str {
        match self {
            Goal::Age => "age",
            Goal::Thresholds => "space",
            Goal::Free { .. } => "demand",
            Goal::AllUnused => "unused",
        }
    }
}

/// What to remove, in order, and why; and why the rest stays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// What it is for.
    pub goal: Goal,
    /// What has to be freed; nothing for goals that do not count.
    pub need: Amount,
    /// In this order.
    pub removals: Vec<Removal>,
    /// For every image, in the order of ids, whether it goes and why.
    pub verdicts: Vec<ImageVerdict>,
    /// What all removals together free.
    pub frees: Amount,
    /// Whether that is enough.
    pub reachable: bool,
    /// The file system afterwards, if it was given before.
    pub after: Option<Disk>,
    /// Ids that kubelet's space pass looks at and keeps before it stops, in its order.
    pub(super) examined: Vec<ImageId>,
}

/// One removal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Removal {
    /// Id of the image.
    pub id: ImageId,
    /// Its runtime handler, usually empty.
    pub handler: String,
    /// Its names.
    pub names: Vec<String>,
    /// What it frees, given the removals before it.
    pub frees: Amount,
    /// Whether that is a guess, because the backend does not tell what layers take.
    pub estimated: bool,
    /// Why it goes.
    pub why: Why,
    /// When it was first seen.
    pub first_seen: Stamp,
    /// When it was last used, if ever.
    pub last_used: Option<Stamp>,
}

/// Whether one image goes, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageVerdict {
    /// Id of the image.
    pub id: ImageId,
    /// Its runtime handler, usually empty.
    pub handler: String,
    /// Its names.
    pub names: Vec<String>,
    /// Size in bytes, as the runtime counts.
    pub size: u64,
    /// What removing just this image would free.
    pub alone: Amount,
    /// When it was first seen.
    pub first_seen: Stamp,
    /// When it was last used, if ever.
    pub last_used: Option<Stamp>,
    /// Goes or stays.
    pub verdict: Verdict,
}

/// How long an image was not used: since its last use, or since it was first seen.
pub(super) fn unused_for(now: Stamp, subject: &Subject) -> Duration {
    now.since(subject.last_used.unwrap_or(subject.first_seen))
}
