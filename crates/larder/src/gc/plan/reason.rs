//! Why an image goes or stays, as data and as a sentence.

use std::fmt;
use std::time::Duration;

use crate::gc::uses::ImageUse;
use crate::go_format;
use crate::reference::LayerId;

/// Whether an image goes, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GcDecision {
    /// It is removed.
    Remove(RemovalReason),
    /// It is not.
    Retain(RetainReason),
}

/// Why an image is removed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RemovalReason {
    /// It was unused for longer than the maximum age.
    TooOld {
        /// How long; `None` if never used, which kubelet takes for longer than any time.
        unused_for: Option<Duration>,
        /// The maximum age.
        maximum: Duration,
    },
    /// Room is needed, and it is the least recently used image that frees any.
    Room {
        /// How long it was unused.
        unused_for: Duration,
    },
    /// Room is needed, and a layer that it shares with others is freed only when all of them go.
    SharedLayer {
        /// The layer.
        layer: LayerId,
        /// How many images go for it.
        images: usize,
    },
    /// Nothing uses it, and all such images are to go.
    Unused,
}

/// Why an image is not removed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RetainReason {
    /// It is in use.
    InUse(Vec<ImageUse>),
    /// The runtime asks to keep it.
    Pinned,
    /// A rule keeps it.
    Kept {
        /// The rule's place in the list, from 0.
        rule: usize,
        /// The rule, in words.
        text: String,
    },
    /// It was first seen too short a time ago.
    TooYoung {
        /// How long ago.
        age: Duration,
        /// The minimum age.
        minimum: Duration,
    },
    /// It was last used in the future: the clock went back.
    ClockWentBack,
    /// Removing it frees nothing but its own few files: images that stay have all its layers.
    FreesNothing,
    /// Enough is free without removing it, or other images come first.
    NotNeeded,
    /// Its id is empty, so that a runtime could take it for any image.
    InvalidId,
    /// It was tried, and the backend could not remove it.
    Failed(String),
}

impl fmt::Display for GcDecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GcDecision::Remove(why) => write!(f, "remove: {why}"),
            GcDecision::Retain(why) => write!(f, "retain: {why}"),
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
            RemovalReason::Room { unused_for } => {
                write!(f, "unused for {}, least recently used", whole_seconds(*unused_for))
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
                [ImageUse::Lease { left } | ImageUse::Ensured { left, .. }] if left.is_zero() => {
                    f.write_str("leased")
                }
                [ImageUse::Lease { left } | ImageUse::Ensured { left, .. }] => {
                    write!(f, "leased (expires in {})", whole_seconds(*left))
                }
                [one] => write!(f, "in use by {one}"),
                [first, rest @ ..] => write!(f, "in use by {first} and {} more", rest.len()),
            },
            RetainReason::Pinned => f.write_str("pinned by the runtime"),
            RetainReason::Kept { rule, text } => write!(f, "kept by rule {} ({text})", rule + 1),
            RetainReason::TooYoung { age, minimum } => {
                write!(f, "first seen {} ago (minimum age {})", whole_seconds(*age), whole_seconds(*minimum))
            }
            RetainReason::ClockWentBack => f.write_str("last used in the future: the clock was set back"),
            RetainReason::FreesNothing => {
                f.write_str("frees only metadata: retained images share all layers")
            }
            RetainReason::NotNeeded => f.write_str("unused, removal not needed"),
            RetainReason::InvalidId => f.write_str("the runtime reports no image ID"),
            RetainReason::Failed(error) => write!(f, "removal failed: {error}"),
        }
    }
}
