//! The set of a blob's bytes that are present.

use std::collections::BTreeMap;
use std::ops::Range;

/// A set of byte offsets, stored as ranges that neither overlap nor touch.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ByteRanges {
    /// Start to end (exclusive).
    ranges: BTreeMap<u64, u64>,
}

impl ByteRanges {
    /// Whether the set is empty.
    pub fn new() -> ByteRanges {
        ByteRanges::default()
    }

    /// Adds `range`; overlaps are merged.
    pub fn insert(&mut self, range: Range<u64>) {
        let Range { mut start, mut end } = range;
        if start >= end {
            return;
        }
        // Merge with each range that overlaps or touches.
        while let Some((&other_start, &other_end)) = self.ranges.range(..=end).next_back() {
            if other_end < start {
                break;
            }
            self.ranges.remove(&other_start);
            start = start.min(other_start);
            end = end.max(other_end);
        }
        self.ranges.insert(start, end);
    }

    /// Drops all but the lowest `count` ranges.
    pub fn truncate(&mut self, count: usize) {
        if let Some((&start, _)) = self.ranges.iter().nth(count) {
            self.ranges.split_off(&start);
        }
    }

    /// The ranges, in order.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.ranges.iter().map(|(&start, &end)| start..end)
    }

    /// The missing parts of `within`, in order.
    pub fn missing(&self, within: Range<u64>) -> Vec<Range<u64>> {
        let mut missing = Vec::new();
        let mut at = within.start;
        let before = self.ranges.range(..=within.start).next_back();
        for (&start, &end) in before.into_iter().chain(self.ranges.range(within.start.saturating_add(1)..)) {
            if start >= within.end {
                break;
            }
            if start > at {
                missing.push(at..start);
            }
            at = at.max(end);
        }
        if at < within.end {
            missing.push(at..within.end);
        }
        missing
    }

    /// Number of bytes present.
    pub fn bytes(&self) -> u64 {
        self.ranges().map(|range| range.end - range.start).sum()
    }

    /// Number of bytes present from the start without a gap.
    pub fn contiguous_len(&self) -> u64 {
        self.ranges.get(&0).copied().unwrap_or(0)
    }
}

impl FromIterator<Range<u64>> for ByteRanges {
    fn from_iter<I: IntoIterator<Item = Range<u64>>>(ranges: I) -> Self {
        let mut extents = ByteRanges::new();
        for range in ranges {
            extents.insert(range);
        }
        extents
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn neighbours_become_one() {
        let extents: ByteRanges = [5..10, 0..3, 10..12, 20..21, 3..5].into_iter().collect();
        assert_eq!(extents.ranges().collect::<Vec<_>>(), [0..12, 20..21]);
        assert_eq!((extents.bytes(), extents.contiguous_len()), (13, 12));
        assert_eq!(extents.missing(0..30), [12..20, 21..30]);
        assert_eq!(extents.missing(4..8), []);
    }

    #[test]
    fn the_highest_ranges_are_forgotten_first() {
        let mut extents: ByteRanges = [0..3, 5..10, 20..21].into_iter().collect();
        for (count, left) in [(3, 9), (2, 8), (1, 3), (0, 0)] {
            extents.truncate(count);
            assert_eq!(extents.bytes(), left, "{count}");
        }
    }

    fn at_index(at: u64) -> usize {
        usize::try_from(at).unwrap()
    }

    proptest! {
        #[test]
        fn extents_are_the_set_of_their_bytes(ranges in prop::collection::vec((0u64..60, 0u64..20), 0..12), from in 0u64..60, len in 0u64..30) {
            let mut bytes = [false; 100];
            let mut extents = ByteRanges::new();
            for (start, len) in ranges {
                extents.insert(start..start + len);
                (start..start + len).for_each(|at| bytes[at_index(at)] = true);
            }
            prop_assert_eq!(extents.bytes(), bytes.iter().filter(|here| **here).count() as u64);
            prop_assert_eq!(extents.contiguous_len(), bytes.iter().take_while(|here| **here).count() as u64);
            let missing: Vec<u64> = extents.missing(from..from + len).into_iter().flatten().collect();
            let expected: Vec<u64> = (from..from + len).filter(|at| !bytes[at_index(*at)]).collect();
            prop_assert_eq!(missing, expected);
            let ranges: Vec<_> = extents.ranges().collect();
            prop_assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start));
        }
    }
}
