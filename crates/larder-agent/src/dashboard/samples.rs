//! Disk usage over the last day, in memory.

use std::collections::VecDeque;

use serde::Serialize;

/// How many samples are kept: a day of them.
const MAX_SAMPLES: usize = 2880;
/// How many points one response has.
pub(super) const POINTS: usize = 240;

/// The image filesystem at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DiskSample {
    /// Seconds since 1970.
    pub(super) at: u64,
    pub(super) used_bytes: u64,
    pub(super) size_bytes: u64,
}

/// The last samples, oldest first.
#[derive(Debug, Default)]
pub(super) struct DiskHistory(VecDeque<DiskSample>);

/// Samples of a response.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DiskDocument {
    pub(super) samples: Vec<DiskSample>,
    /// As `larder df` has it; unset while it cannot be determined.
    pub(super) reclaimable_bytes: Option<u64>,
}

impl DiskHistory {
    /// Adds a sample; the oldest one leaves for it.
    pub(super) fn add(&mut self, sample: DiskSample) {
        if self.0.len() == MAX_SAMPLES {
            self.0.pop_front();
        }
        self.0.push_back(sample);
    }

    /// At most `points` of them.
    pub(super) fn downsampled(&self, points: usize) -> DiskDocument {
        let samples: Vec<DiskSample> = self.0.iter().copied().collect();
        DiskDocument { samples: downsample(&samples, points), reclaimable_bytes: None }
    }
}

/// At most `points` samples that show the same peaks: of each run of samples the one with the highest usage, and always
/// the last one.
fn downsample(samples: &[DiskSample], points: usize) -> Vec<DiskSample> {
    let Some((last, before)) = samples.split_last() else { return Vec::new() };
    if samples.len() <= points {
        return samples.to_vec();
    }
    let run = before.len().div_ceil(points.saturating_sub(1).max(1));
    let peaks = before.chunks(run).filter_map(|run| run.iter().max_by_key(|sample| sample.used_bytes));
    peaks.chain([last]).take(points.max(1)).copied().collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn samples(used: &[u64]) -> Vec<DiskSample> {
        let sample = |(at, &used_bytes)| DiskSample { at, used_bytes, size_bytes: 1000 };
        (0..).zip(used).map(sample).collect()
    }

    proptest! {
        #[test]
        fn downsampling_keeps_the_peak_the_last_sample_and_the_order(
            used in proptest::collection::vec(0..1000_u64, 0..700),
            points in 2..300_usize,
        ) {
            let all = samples(&used);
            let few = downsample(&all, points);
            prop_assert!(few.len() <= points);
            prop_assert_eq!(few.last(), all.last());
            prop_assert!(few.windows(2).all(|pair| pair[0].at < pair[1].at));
            prop_assert!(few.iter().all(|sample| all.contains(sample)));
            let peak = |samples: &[DiskSample]| samples.iter().map(|sample| sample.used_bytes).max();
            prop_assert_eq!(peak(&few), peak(&all));
            if all.len() <= points {
                prop_assert_eq!(few, all);
            }
        }
    }

    #[test]
    fn the_history_is_bounded() {
        let mut history = DiskHistory::default();
        for sample in samples(&vec![1; MAX_SAMPLES + 10]) {
            history.add(sample);
        }
        assert_eq!((history.0.len(), history.0[0].at), (MAX_SAMPLES, 10));
        let shown = history.downsampled(POINTS).samples.len();
        assert!((POINTS / 2..=POINTS).contains(&shown), "{shown}");
    }
}
