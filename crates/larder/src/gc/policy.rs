//! Settings of garbage collection: when to start, when to stop, which images to retain. Names are kubelet's where it
//! has them.

use std::fmt;
use std::time::Duration;

use super::keep::KeepRule;

/// When images are collected, and which.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GcPolicy {
    /// Start when this percentage of the filesystem is used. 0 to 100, default 85; 100 is never (for kubelet, when the
    /// filesystem is full). Other limits still apply.
    pub high_threshold_percent: i32,
    /// Free until this percentage is used. 0 to 100, not above the high threshold, default 80.
    pub low_threshold_percent: i32,
    /// An image first seen more recently is not removed for space. Default 2 min.
    pub minimum_age: Duration,
    /// An image unused for longer is removed even if no space is needed. Default 0: never.
    pub maximum_age: Duration,
    /// Start when fewer bytes are free, and free until they are. Default 0: only percentages count. Kubelet: none.
    pub min_free_bytes: u64,
    /// The thresholds for inodes. Default 90 and 85; kubelet: none.
    pub inodes: Option<InodeThresholds>,
    /// Percentage freed on demand in addition to the request. 0 to 100, default 5.
    pub free_margin_percent: u32,
    /// What is removed when the goal cannot be reached. Default [`WhenUnreachable::Helpful`]; kubelet:
    /// [`WhenUnreachable::All`].
    pub when_unreachable: WhenUnreachable,
    /// The most recently used candidates are not removed for space, up to this many bytes on disk. Default 0: none;
    /// kubelet: none.
    pub keep_bytes: u64,
    /// Keep rules. Default none; kubelet: none.
    pub keep: Vec<KeepRule>,
    /// How freed space is counted. Default [`Accounting::Exact`]; kubelet: [`Accounting::Nominal`].
    pub accounting: Accounting,
    /// How the age of a never used image is counted. Default [`AgeRule::FromFirstSeen`]; kubelet:
    /// [`AgeRule::Kubelet`].
    pub age: AgeRule,
    /// What a container must name for its image to be in use. Default [`UseRule::IdsAndNames`]; kubelet:
    /// [`UseRule::Ids`].
    pub uses: UseRule,
    /// What steps of the wall clock do to ages. Default [`ClockRule::KeepAges`]; kubelet: [`ClockRule::Believe`].
    pub clock: ClockRule,
    /// Which images hooks receive. Default [`HookRule::AllPresent`]; kubelet: [`HookRule::Examined`].
    pub hooks: HookRule,
}

/// The thresholds for inodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InodeThresholds {
    /// Start when this percentage of the inodes is used.
    pub high_percent: i32,
    /// Free until this percentage is used.
    pub low_percent: i32,
}

/// What is removed when removing all candidates would not reach the goal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhenUnreachable {
    /// Every candidate that frees something.
    All,
    /// As few images as bring usage below the high threshold, if that is possible; else all candidates, if together
    /// they free at least half of what is missing; else only those that each free at least a tenth of it.
    Helpful,
    /// Nothing.
    Nothing,
}

impl WhenUnreachable {
    /// Its value in the settings.
    pub const fn as_str(self) -> &'static str {
        match self {
            WhenUnreachable::All => "all",
            WhenUnreachable::Helpful => "helpful",
            WhenUnreachable::Nothing => "nothing",
        }
    }
}

/// How freed space is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accounting {
    /// The size that the runtime reports for each image counts as freed. Wrong as soon as layers are shared.
    Nominal,
    /// A layer counts once, for the image that is removed last, and the filesystem is measured after each removal.
    Exact,
}

/// How the age of a never used image is counted, for the maximum age.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AgeRule {
    /// It is older than any maximum age, whatever the minimum age; no image is removed by age before larder itself has
    /// run that long.
    Kubelet,
    /// The age counts from when it was first seen; the minimum age applies.
    FromFirstSeen,
}

/// What a container must name for its image to be in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UseRule {
    /// The image's id. An image mounted by name, or one of a runtime handler mounted at all, is not in use.
    Ids,
    /// Its id or one of its names; a mount protects it for all runtime handlers.
    IdsAndNames,
}

/// What steps of the wall clock do to ages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClockRule {
    /// Images become older or younger with the clock.
    Believe,
    /// Recorded times move with the clock, so that ages do not change.
    KeepAges,
}

/// Which images hooks receive after a space pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HookRule {
    /// The images that were examined and retained, without images in use, pinned or not reached.
    Examined,
    /// All images that are present.
    AllPresent,
}

impl Default for GcPolicy {
    fn default() -> Self {
        GcPolicy {
            inodes: Some(InodeThresholds { high_percent: 90, low_percent: 85 }),
            when_unreachable: WhenUnreachable::Helpful,
            accounting: Accounting::Exact,
            age: AgeRule::FromFirstSeen,
            uses: UseRule::IdsAndNames,
            clock: ClockRule::KeepAges,
            hooks: HookRule::AllPresent,
            ..GcPolicy::kubelet()
        }
    }
}

impl GcPolicy {
    /// Kubelet's own behaviour, accidents included, with kubelet's defaults.
    pub fn kubelet() -> Self {
        GcPolicy {
            high_threshold_percent: 85,
            low_threshold_percent: 80,
            minimum_age: Duration::from_secs(120),
            maximum_age: Duration::ZERO,
            min_free_bytes: 0,
            inodes: None,
            free_margin_percent: 5,
            when_unreachable: WhenUnreachable::All,
            keep_bytes: 0,
            keep: Vec::new(),
            accounting: Accounting::Nominal,
            age: AgeRule::Kubelet,
            uses: UseRule::Ids,
            clock: ClockRule::Believe,
            hooks: HookRule::Examined,
        }
    }

    /// All errors, kubelet's own checks first and in kubelet's order. Kubelet reports only the first.
    pub fn problems(&self) -> Vec<PolicyError> {
        let (high, low) = (self.high_threshold_percent, self.low_threshold_percent);
        let mut problems = Vec::new();
        let mut unless = |fine: bool, problem: PolicyError| {
            if !fine {
                problems.push(problem);
            }
        };
        unless(is_percent(high), PolicyError::High(high));
        unless(is_percent(low), PolicyError::Low(low));
        unless(low <= high, PolicyError::LowAboveHigh { low, high });
        if let Some(InodeThresholds { high_percent: high, low_percent: low }) = self.inodes {
            unless(is_percent(high), PolicyError::InodePercent { which: ThresholdKind::High, percent: high });
            unless(is_percent(low), PolicyError::InodePercent { which: ThresholdKind::Low, percent: low });
            unless(low <= high, PolicyError::InodeLowAboveHigh { low, high });
        }
        unless(self.free_margin_percent <= 100, PolicyError::Margin(self.free_margin_percent));
        for (index, rule) in self.keep.iter().enumerate() {
            if let Some(problem) = rule.problem() {
                unless(false, PolicyError::Keep { index, problem });
            }
        }
        problems
    }

    /// Whether a keep rule selects by label.
    pub(crate) fn asks_for_labels(&self) -> bool {
        self.keep.iter().any(|rule| matches!(rule.select, super::keep::Selector::Label(..)))
    }

    /// The policy without any limit that a round could enforce.
    #[must_use]
    pub fn disabled(&self) -> GcPolicy {
        GcPolicy {
            high_threshold_percent: 100,
            maximum_age: Duration::ZERO,
            min_free_bytes: 0,
            inodes: None,
            ..self.clone()
        }
    }

    /// Whether rounds can remove anything: with a threshold of 100 percent and no other limit they cannot.
    pub fn is_enabled(&self) -> bool {
        self.high_threshold_percent != 100
            || !self.maximum_age.is_zero()
            || self.min_free_bytes > 0
            || self.inodes.is_some_and(|inodes| inodes.high_percent != 100)
    }
}

fn is_percent(percent: i32) -> bool {
    (0..=100).contains(&percent)
}

/// Why a policy is invalid. The first three texts are kubelet's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PolicyError {
    /// The high threshold is not a percentage.
    #[error("invalid HighThresholdPercent {0}, must be in range [0-100]")]
    High(i32),
    /// The low threshold is not a percentage.
    #[error("invalid LowThresholdPercent {0}, must be in range [0-100]")]
    Low(i32),
    /// The low threshold is above the high threshold.
    #[error("LowThresholdPercent {low} can not be higher than HighThresholdPercent {high}")]
    LowAboveHigh {
        /// As given.
        low: i32,
        /// As given.
        high: i32,
    },
    /// An inode threshold is not a percentage.
    #[error("invalid {which} inode threshold {percent}: must be in range [0-100]")]
    InodePercent {
        /// Which threshold.
        which: ThresholdKind,
        /// As given.
        percent: i32,
    },
    /// The low inode threshold is above the high one.
    #[error("low inode threshold {low} is above high inode threshold {high}; lower it")]
    InodeLowAboveHigh {
        /// As given.
        low: i32,
        /// As given.
        high: i32,
    },
    /// The margin is not a percentage.
    #[error("invalid free margin {0}: must be in range [0-100]")]
    Margin(u32),
    /// A keep rule is invalid.
    #[error("keep rule {}: {problem}", index + 1)]
    Keep {
        /// Its index, from 0.
        index: usize,
        /// The error.
        problem: String,
    },
}

/// One of two thresholds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThresholdKind {
    /// Where collection starts.
    High,
    /// Where it ends.
    Low,
}

impl fmt::Display for ThresholdKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ThresholdKind::High => "high",
            ThresholdKind::Low => "low",
        })
    }
}
