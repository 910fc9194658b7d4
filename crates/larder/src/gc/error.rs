//! Errors of a garbage collection round.

use std::time::Duration;

use super::filesystem_stats::{size_text, used_percent};
use super::policy::WhenUnreachable;
use crate::backend::BackendError;
use crate::go_format;
use crate::image_service::{FilesystemError, FsStats};
use crate::retention::RetentionError;

/// Why a round failed. The texts are kubelet's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GcError {
    /// The images could not be listed. Nothing was removed.
    #[error(transparent)]
    List(BackendError),
    /// A source of use did not answer. Nothing was removed.
    #[error(transparent)]
    Uses(#[from] RetentionError),
    /// The layers could not be looked up. Nothing was removed.
    #[error("look up layers: {0}")]
    Layers(BackendError),
    /// The labels that keep rules ask for could not be looked up. Nothing was removed.
    #[error("look up labels: {0}")]
    Labels(BackendError),
    /// The filesystem could not be measured. Nothing was removed for space.
    #[error(transparent)]
    Disk(#[from] FilesystemError),
    /// Space beside images could not be reclaimed.
    #[error(transparent)]
    Reclaim(BackendError),
    /// The filesystem reports no size.
    #[error("invalid capacity 0 on image filesystem")]
    NoCapacity,
    /// Images past the maximum age could not all be removed.
    #[error("wanted to free images older than {}, encountered errors in image deletion: {errors}", go_format::duration(*maximum))]
    Age {
        /// The maximum age.
        maximum: Duration,
        /// The texts of the errors, each once.
        errors: String,
    },
    /// Some images could not be removed.
    #[error(
        "wanted to free {wanted} bytes, but freed {freed} bytes space with errors in image deletion: {errors}"
    )]
    Space {
        /// Bytes that were wanted.
        wanted: i64,
        /// Bytes that were freed.
        freed: i64,
        /// The texts of the errors, each once.
        errors: String,
    },
    /// All candidates were removed, and that did not free enough.
    #[error("{0}")]
    Insufficient(String),
}

/// Unused images that a round retained because its goal cannot be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LeftUnused {
    /// The bytes that their removal would free.
    pub(super) bytes: u64,
    /// The rule that retained them.
    pub(super) by: WhenUnreachable,
}

impl GcError {
    /// A round that did not free enough, in kubelet's words; `disk` is the measurement before the removals. What was
    /// retained on purpose is named in place of other data.
    pub(super) fn insufficient(disk: FsStats, freed: i64, left: Option<LeftUnused>) -> GcError {
        let used = used_percent(disk.capacity, disk.available);
        let size = size_text(i64::try_from(disk.capacity).unwrap_or(i64::MAX));
        let cause = left.map_or_else(
            || {
                "Investigate disk usage, as it could be used by active images, logs, volumes, or other data."
                    .to_owned()
            },
            |left| {
                format!(
                    "Left unused images of {} bytes, as removing them would not free enough either \
                     (gc.whenUnreachable: {}).",
                    left.bytes,
                    left.by.as_str()
                )
            },
        );
        GcError::Insufficient(format!(
            "Insufficient free disk space on the node's image filesystem ({used}% of {size} used). Failed to free \
             sufficient space by deleting unused images (freed {freed} bytes). {cause}"
        ))
    }

    /// Whether the round did what it should, and there was too little to remove.
    pub(super) fn is_shortage(&self) -> bool {
        matches!(self, GcError::Insufficient(_))
    }

    /// Whether an event of its own has reported it.
    pub(super) fn has_own_event(&self) -> bool {
        matches!(self, GcError::Insufficient(_) | GcError::NoCapacity)
    }

    /// Whether the round ended before it measured the filesystem.
    pub(super) fn is_before_the_disk(&self) -> bool {
        match self {
            GcError::List(_)
            | GcError::Uses(_)
            | GcError::Layers(_)
            | GcError::Labels(_)
            | GcError::Disk(_)
            | GcError::Reclaim(_)
            | GcError::NoCapacity => true,
            GcError::Age { .. } | GcError::Space { .. } | GcError::Insufficient(_) => false,
        }
    }
}
