//! The goals of a collection.

/// The goal of a collection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GcGoal {
    /// Remove images unused for longer than the maximum age: the first stage of [`GcGoal::Thresholds`].
    Age,
    /// Remove images past the maximum age; then, if the filesystem is past a threshold of the policy, free until it is
    /// not.
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
    /// Remove no image: reclaim what no image and no later pull can use, and record which images are present and used.
    Detect,
    /// Remove no image: reclaim what failed and interrupted pulls left.
    FailedPulls,
}

impl GcGoal {
    /// The goals that remove images.
    pub const REMOVING: [GcGoal; 5] =
        [GcGoal::Age, GcGoal::Thresholds, GcGoal::Free { bytes: 0 }, GcGoal::AllUnused, GcGoal::Dangling];

    /// The goal's name in the history and in the log.
    pub fn name(self) -> &'static str {
        match self {
            GcGoal::Age => "age",
            GcGoal::Thresholds => "space",
            GcGoal::Free { .. } => "free",
            GcGoal::AllUnused => "allUnused",
            GcGoal::Dangling => "dangling",
            GcGoal::Detect => "detect",
            GcGoal::FailedPulls => "failedPulls",
        }
    }

    /// Whether a round for this goal fails where the filesystem cannot be measured.
    pub(super) fn needs_filesystem(self) -> bool {
        !matches!(self, GcGoal::AllUnused | GcGoal::Dangling | GcGoal::Detect)
    }
}
