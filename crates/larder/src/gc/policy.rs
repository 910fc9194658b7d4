//! Settings of garbage collection: when to start, when to stop, which images to retain. Names are kubelet's where it
//! has them.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use super::goal::GcGoal;
use crate::retention::{KeepRule, Selector};

/// Whose rules a collection follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GcStrategy {
    /// A layer counts once, for the image that is removed last, and the filesystem is measured after each removal. An
    /// image that was never used is as old as its first observation. A container or mount protects the image that it
    /// names in any form. Ages do not change when the wall clock is set.
    #[default]
    Larder,
    /// Kubelet's algorithm, accidents included: image sizes as the runtime reports them add up, an image that was never
    /// used is older than any maximum age, containers protect images by ID only, and ages follow the wall clock. Only
    /// the percentages of bytes and the ages start a round.
    Kubelet,
}

/// When images are collected, and which.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GcPolicy {
    /// Whose rules decide. With [`GcStrategy::Kubelet`], `min_free_bytes`, `inodes` and `when_unreachable` do not
    /// apply.
    pub strategy: GcStrategy,
    /// Start when this percentage of the filesystem is used. 0 to 100, default 85; 100 is never (for kubelet, when the
    /// filesystem is full). Other limits still apply.
    pub high_threshold_percent: i32,
    /// Free until this percentage is used. 0 to 100, not above the high threshold, default 80.
    pub low_threshold_percent: i32,
    /// An image first seen more recently is not removed for space. Default 2 min.
    pub minimum_age: Duration,
    /// Whether the minimum age retains images that were used since they were first seen, too. Default true; rounds for
    /// pulls remove them.
    pub minimum_age_of_used: bool,
    /// An image unused for longer is removed even if no space is needed. Default 0: never.
    pub maximum_age: Duration,
    /// Start when fewer bytes are free, and free until they are. Default 0: only percentages count.
    pub min_free_bytes: u64,
    /// The thresholds for inodes. Default 90 and 85.
    pub inodes: Option<InodeThresholds>,
    /// Percentage freed on demand in addition to the request. 0 to 100, default 5.
    pub free_margin_percent: u32,
    /// The images to remove when the goal cannot be reached. Default [`WhenUnreachable::Worthwhile`].
    pub when_unreachable: WhenUnreachable,
    /// The most recently used candidates are not removed for space, up to this many bytes on disk. Default 0: none.
    pub keep_bytes: u64,
    /// Keep rules. Default none.
    pub keep: Vec<KeepRule>,
}

/// The thresholds for inodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InodeThresholds {
    /// Start when this percentage of the inodes is used.
    pub high_percent: i32,
    /// Free until this percentage is used.
    pub low_percent: i32,
}

/// The images to remove when removing all candidates would not reach the goal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhenUnreachable {
    /// Every candidate that frees something.
    All,
    /// As few images as bring usage below the high threshold, if that is possible; else all candidates, if together
    /// they free at least half of what is missing; else only those that each free at least a tenth of it.
    Worthwhile,
    /// Nothing.
    Nothing,
}

impl WhenUnreachable {
    /// Its value in the settings.
    pub const fn as_str(self) -> &'static str {
        match self {
            WhenUnreachable::All => "all",
            WhenUnreachable::Worthwhile => "worthwhile",
            WhenUnreachable::Nothing => "nothing",
        }
    }
}

impl Default for GcPolicy {
    fn default() -> Self {
        GcPolicy {
            strategy: GcStrategy::Larder,
            high_threshold_percent: 85,
            low_threshold_percent: 80,
            minimum_age: Duration::from_secs(120),
            minimum_age_of_used: true,
            maximum_age: Duration::ZERO,
            min_free_bytes: 0,
            inodes: Some(InodeThresholds { high_percent: 90, low_percent: 85 }),
            free_margin_percent: 5,
            when_unreachable: WhenUnreachable::Worthwhile,
            keep_bytes: 0,
            keep: Vec::new(),
        }
    }
}

impl GcPolicy {
    /// Kubelet's own behaviour, with kubelet's defaults.
    pub fn kubelet() -> Self {
        GcPolicy { strategy: GcStrategy::Kubelet, ..GcPolicy::default() }
    }

    /// The goal of scheduled rounds: nothing to free without a threshold that can be exceeded.
    pub fn scheduled_goal(&self) -> GcGoal {
        if self.is_enabled() { GcGoal::Thresholds } else { GcGoal::Detect }
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

    /// The keys of the labels that keep rules select by.
    pub(crate) fn label_keys(&self) -> BTreeSet<String> {
        let key = |rule: &KeepRule| match &rule.select {
            Selector::Label(key, _) => Some(key.clone()),
            Selector::Name(_) | Selector::Digest(_) | Selector::Type(_) | Selector::Newest { .. } => None,
        };
        self.keep.iter().filter_map(key).collect()
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
        let larder_limits =
            self.min_free_bytes > 0 || self.inodes.is_some_and(|inodes| inodes.high_percent != 100);
        self.high_threshold_percent != 100
            || !self.maximum_age.is_zero()
            || (self.strategy == GcStrategy::Larder && larder_limits)
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
