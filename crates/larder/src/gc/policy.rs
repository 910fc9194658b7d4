//! What collection is told: when to start, how far to go, what to spare. Names are kubelet's where it has them.

use std::fmt;
use std::time::Duration;

use super::keep::KeepRule;

/// When images are collected, and which.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GcPolicy {
    /// Collect when so many percent of the file system are in use. 0 to 100, default 85; 100 is never.
    pub high_threshold_percent: i32,
    /// Free until so many percent are in use. 0 to 100, not above the high one, default 80.
    pub low_threshold_percent: i32,
    /// An image seen for a shorter time is not removed for room. Default 2 min.
    pub minimum_age: Duration,
    /// An image unused for longer is removed although there is room; 0 is never, and the default.
    pub maximum_age: Duration,
    /// Collect when fewer bytes are free than this, until they are. Default 0: only percents count. Kubelet: none.
    pub min_free_bytes: u64,
    /// The thresholds for inodes. Default 90 and 85; kubelet: none.
    pub inodes: Option<InodeThresholds>,
    /// How many percent more than asked for are freed on demand. 0 to 100, default 5.
    pub free_margin_percent: u32,
    /// Images to spare. Default none; kubelet: none.
    pub keep: Vec<KeepRule>,
    /// How freed room is counted. Default [`Accounting::Exact`]; kubelet: [`Accounting::Nominal`].
    pub accounting: Accounting,
    /// How the age of a never used image is counted. Default [`AgeRule::FromFirstSeen`]; kubelet:
    /// [`AgeRule::Kubelet`].
    pub age: AgeRule,
    /// What a container must name for its image to be in use. Default [`UseRule::IdsAndNames`]; kubelet:
    /// [`UseRule::Ids`].
    pub uses: UseRule,
    /// What steps of the wall clock do to ages. Default [`ClockRule::KeepAges`]; kubelet: [`ClockRule::Believe`].
    pub clock: ClockRule,
    /// What hooks are told. Default [`HookRule::AllPresent`]; kubelet: [`HookRule::Examined`].
    pub hooks: HookRule,
}

/// When to collect for inodes, and how far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InodeThresholds {
    /// Collect when so many percent of the inodes are in use.
    pub high_percent: i32,
    /// Free until so many percent are in use.
    pub low_percent: i32,
}

/// How freed room is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accounting {
    /// The size that the runtime reports for each image counts as freed. Wrong as soon as layers are shared.
    Nominal,
    /// Layers count once, for the image that is removed last; and the file system is measured after each removal.
    Exact,
}

/// How the age of a never used image is counted, for the maximum age.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AgeRule {
    /// It is older than any maximum age, whatever the minimum age; nothing goes by age before larder itself runs that
    /// long.
    Kubelet,
    /// From when it was first seen; the minimum age holds.
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
    /// Times on record move with the clock, so that ages stay.
    KeepAges,
}

/// What the hooks are told after a collection for room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HookRule {
    /// The images that were looked at and kept; images in use, pinned, or not reached are left out.
    Examined,
    /// All images that are present.
    AllPresent,
}

impl Default for GcPolicy {
    fn default() -> Self {
        GcPolicy {
            inodes: Some(InodeThresholds { high_percent: 90, low_percent: 85 }),
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
            keep: Vec::new(),
            accounting: Accounting::Nominal,
            age: AgeRule::Kubelet,
            uses: UseRule::Ids,
            clock: ClockRule::Believe,
            hooks: HookRule::Examined,
        }
    }

    /// All that is wrong with it, kubelet's own checks first and in kubelet's order. Kubelet reports the first only.
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

    /// Whether a keep rule is about labels.
    pub(crate) fn asks_for_labels(&self) -> bool {
        self.keep.iter().any(|rule| matches!(rule.select, super::keep::Selector::Label(..)))
    }

    /// Whether rounds are worth starting: at a threshold of 100 percent, and with no other limit, nothing would ever
    /// go.
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
    /// The high threshold is no percentage.
    #[error("invalid HighThresholdPercent {0}, must be in range [0-100]")]
    High(i32),
    /// The low threshold is no percentage.
    #[error("invalid LowThresholdPercent {0}, must be in range [0-100]")]
    Low(i32),
    /// The thresholds are the wrong way round.
    #[error("LowThresholdPercent {low} can not be higher than HighThresholdPercent {high}")]
    LowAboveHigh {
        /// As given.
        low: i32,
        /// As given.
        high: i32,
    },
    /// A threshold for inodes is no percentage.
    #[error("invalid {which} inode threshold {percent}: must be in range [0-100]")]
    InodePercent {
        /// Which one.
        which: ThresholdKind,
        /// As given.
        percent: i32,
    },
    /// The thresholds for inodes are the wrong way round.
    #[error("low inode threshold {low} is above high inode threshold {high}; lower it")]
    InodeLowAboveHigh {
        /// As given.
        low: i32,
        /// As given.
        high: i32,
    },
    /// The margin is no percentage.
    #[error("invalid free margin {0}: must be in range [0-100]")]
    Margin(u32),
    /// A keep rule that cannot mean anything.
    #[error("keep rule {}: {problem}", index + 1)]
    Keep {
        /// Its place in the list, from 0.
        index: usize,
        /// What is wrong with it.
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
