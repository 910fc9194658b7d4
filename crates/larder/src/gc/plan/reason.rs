//! Reasons for removing or retaining an image, as data and as text.

use std::fmt;
use std::time::Duration;

use crate::gc::policy::WhenUnreachable;
use crate::go_format;
use crate::reference::LayerId;
use crate::retention::{KeptBy, RetentionClass, RetentionPurpose};

/// The decision for one image, with its reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GcDecision {
    /// It is removed.
    Remove(RemovalReason),
    /// It is retained.
    Retain(RetainReason),
}

/// Why an image is removed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RemovalReason {
    /// It was unused for longer than the maximum age.
    TooOld {
        /// Time since the last use; `None` if never used, which kubelet counts as longer than any age.
        unused_for: Option<Duration>,
        /// The maximum age.
        maximum: Duration,
    },
    /// Space is needed, and it is the least recently used image that frees any.
    LeastRecentlyUsed {
        /// Time since the last use.
        unused_for: Duration,
        /// How many candidates are unused for longer and free too little on their own.
        skipped_older: usize,
    },
    /// Space is needed, and it has no name, so that no pod can request it by name: such images come first.
    Untagged {
        /// Time since the last use.
        unused_for: Duration,
    },
    /// Space is needed, and a shared layer is freed only when all images that share it are removed.
    SharedLayer {
        /// The layer.
        layer: LayerId,
        /// How many images are removed to free it.
        images: usize,
    },
    /// It is unused, and the goal is to remove all unused images.
    Unused,
}

/// Why an image is not removed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RetainReason {
    /// It is in use.
    InUse(Vec<RetentionPurpose>),
    /// The runtime has pinned it.
    Pinned,
    /// It has a lease.
    Leased {
        /// Time until the last one expires.
        left: Duration,
    },
    /// A keep rule retains it.
    Kept(KeptBy),
    /// It is younger than the minimum age.
    TooYoung {
        /// Time since it was first seen.
        age: Duration,
        /// The minimum age.
        minimum: Duration,
    },
    /// It was last used in the future: the clock was set back.
    ClockWentBack,
    /// Removing it frees only metadata: retained images share all its layers.
    FreesNothing,
    /// The goal cannot be reached, and the policy does not remove it in vain.
    Unreachable(WhenUnreachable),
    /// It is among the most recently used, which the policy retains.
    Recent {
        /// The policy's bound, in bytes.
        keep_bytes: u64,
    },
    /// Enough is free without its removal, or other images are removed first.
    NotNeeded,
    /// Its ID is empty, which a runtime could match with any image.
    InvalidId,
    /// The backend failed to remove it; the error.
    Failed(String),
}

impl GcDecision {
    /// The class of the image in the retention model.
    pub fn class(&self) -> RetentionClass {
        match self {
            GcDecision::Remove(_) => RetentionClass::Unused,
            GcDecision::Retain(reason) => reason.class(),
        }
    }
}

impl RetainReason {
    fn class(&self) -> RetentionClass {
        match self {
            RetainReason::InUse(_) => RetentionClass::InUse,
            RetainReason::Pinned => RetentionClass::Pinned,
            RetainReason::Kept(_) => RetentionClass::Kept,
            RetainReason::Leased { .. } => RetentionClass::Leased,
            RetainReason::TooYoung { .. } | RetainReason::ClockWentBack => RetentionClass::TooYoung,
            RetainReason::FreesNothing
            | RetainReason::Unreachable(_)
            | RetainReason::Recent { .. }
            | RetainReason::NotNeeded
            | RetainReason::InvalidId
            | RetainReason::Failed(_) => RetentionClass::Unused,
        }
    }
}

impl fmt::Display for GcDecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GcDecision::Remove(reason) => write!(f, "remove: {reason}"),
            GcDecision::Retain(reason) => write!(f, "retain: {reason}"),
        }
    }
}

fn whole_seconds(duration: Duration) -> String {
    go_format::duration(Duration::from_secs(duration.as_secs()))
}

impl fmt::Display for RemovalReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RemovalReason::TooOld { unused_for: Some(unused), maximum } => {
                write!(f, "unused for {} (maximum age {})", whole_seconds(*unused), whole_seconds(*maximum))
            }
            RemovalReason::TooOld { unused_for: None, maximum } => {
                write!(f, "never used since larder started (maximum age {})", whole_seconds(*maximum))
            }
            RemovalReason::LeastRecentlyUsed { unused_for, skipped_older: 0 } => {
                write!(f, "unused for {}, least recently used", whole_seconds(*unused_for))
            }
            RemovalReason::LeastRecentlyUsed { unused_for, skipped_older } => {
                let older = if *skipped_older == 1 { "image frees" } else { "images free" };
                let unused_for = whole_seconds(*unused_for);
                write!(f, "unused for {unused_for}; {skipped_older} older {older} too little alone")
            }
            RemovalReason::Untagged { unused_for } => {
                write!(f, "untagged, unused for {}", whole_seconds(*unused_for))
            }
            RemovalReason::SharedLayer { layer, images } => {
                write!(f, "one of {images} images removed together to free layer {layer}")
            }
            RemovalReason::Unused => f.write_str("unused"),
        }
    }
}

impl fmt::Display for RetainReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RetainReason::InUse(uses) => match uses.as_slice() {
                [] => f.write_str("in use"),
                [one] => write!(f, "in use by {one}"),
                [one, other] => write!(f, "in use by {one} and {other}"),
                [first, rest @ ..] => write!(f, "in use by {first} and {} more", rest.len()),
            },
            RetainReason::Leased { left } if left.is_zero() => f.write_str("leased"),
            RetainReason::Leased { left } => write!(f, "leased (expires in {})", whole_seconds(*left)),
            RetainReason::Pinned => f.write_str("pinned by the runtime"),
            RetainReason::Kept(kept) => write!(f, "{kept}"),
            RetainReason::TooYoung { age, minimum } => {
                write!(f, "first seen {} ago (minimum age {})", whole_seconds(*age), whole_seconds(*minimum))
            }
            RetainReason::ClockWentBack => f.write_str("last used in the future: the clock was set back"),
            RetainReason::FreesNothing => {
                f.write_str("frees only metadata: retained images share all layers")
            }
            RetainReason::Unreachable(rule) => {
                write!(f, "goal cannot be reached (gc.whenUnreachable: {})", rule.as_str())
            }
            RetainReason::Recent { keep_bytes } => {
                write!(f, "recently used (gc.keepBytes: {})", go_format::bytes(*keep_bytes))
            }
            RetainReason::NotNeeded => f.write_str("unused, removal not needed"),
            RetainReason::InvalidId => f.write_str("the runtime reports no image ID"),
            RetainReason::Failed(error) => write!(f, "removal failed: {error}"),
        }
    }
}
