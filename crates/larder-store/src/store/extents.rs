//! Which bytes of a file are there: sorted, disjoint ranges, and the text that keeps them.

use std::fmt::Write as _;
use std::ops::Range;

/// Most ranges that are kept. A file fetched over a few connections has a few; of more, the highest are forgotten and
/// fetched again.
const MAX_RANGES: usize = 256;

const TITLE: &str = "larder extents 1";

/// Ranges of bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Extents(Vec<Range<u64>>);

impl Extents {
    /// Adds a range, and joins it with those that it touches.
    pub(super) fn add(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let from = self.0.partition_point(|other| other.end < range.start);
        let to = self.0.partition_point(|other| other.start <= range.end);
        let joined = self.0[from..to]
            .iter()
            .fold(range, |joined, other| joined.start.min(other.start)..joined.end.max(other.end));
        self.0.splice(from..to, [joined]);
        self.0.truncate(MAX_RANGES);
    }

    pub(super) fn ranges(&self) -> &[Range<u64>] {
        &self.0
    }

    /// Where the bytes end that are there from the start on.
    pub(super) fn frontier(&self) -> u64 {
        self.0.first().filter(|first| first.start == 0).map_or(0, |first| first.end)
    }

    /// How many bytes there are.
    pub(super) fn total(&self) -> u64 {
        self.0.iter().map(|range| range.end - range.start).sum()
    }

    /// What is not there of the first `size` bytes.
    pub(super) fn missing(&self, size: u64) -> Vec<Range<u64>> {
        let mut missing = Vec::new();
        let mut at = 0;
        for range in &self.0 {
            if range.start > at {
                missing.push(at..range.start);
            }
            at = range.end;
        }
        if at < size {
            missing.push(at..size);
        }
        missing
    }
}

/// The text of the file `extents`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Noted {
    /// Run of the machine in which it was written.
    pub(super) boot: String,
    /// Size of the whole blob.
    pub(super) size: u64,
    /// What survives a power cut.
    pub(super) durable: Extents,
    /// What survives the end of the process.
    pub(super) present: Extents,
}

impl Noted {
    pub(super) fn to_text(&self) -> String {
        let mut text = format!("{TITLE}\nboot {}\nsize {}\n", self.boot, self.size);
        for (word, extents) in [("durable", &self.durable), ("present", &self.present)] {
            for range in extents.ranges() {
                let _ = writeln!(text, "{word} {} {}", range.start, range.end); // to a string: cannot fail
            }
        }
        text.push_str("end\n");
        text
    }

    /// `None` when the text is torn or not ours: then everything is fetched again.
    pub(super) fn parse(text: &str) -> Option<Noted> {
        let mut lines = text.strip_suffix("end\n")?.lines();
        if lines.next()? != TITLE {
            return None;
        }
        let boot = lines.next()?.strip_prefix("boot ")?.to_owned();
        let size = lines.next()?.strip_prefix("size ")?.parse().ok()?;
        let mut noted = Noted { boot, size, ..Noted::default() };
        for line in lines {
            let mut words = line.split(' ');
            let extents = match words.next()? {
                "durable" => &mut noted.durable,
                "present" => &mut noted.present,
                _ => return None,
            };
            let range: Range<u64> = words.next()?.parse().ok()?..words.next()?.parse().ok()?;
            if range.is_empty() || range.end > size || words.next().is_some() {
                return None;
            }
            extents.add(range);
        }
        Some(noted)
    }

    /// What can be relied on in this run of the machine.
    pub(super) fn trusted(self, boot: &str) -> Extents {
        if !boot.is_empty() && self.boot == boot { self.present } else { self.durable }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ranges_join_where_they_touch() {
        let mut extents = Extents::default();
        for range in [10..20, 30..40, 0..5, 20..30, 5..5] {
            extents.add(range);
        }
        assert_eq!(extents.ranges(), [0..5, 10..40]);
        assert_eq!((extents.frontier(), extents.total()), (5, 35));
        assert_eq!(extents.missing(50), [5..10, 40..50]);
        assert_eq!(Extents::default().missing(3), vec![0..3]);
        assert!(Extents::default().missing(0).is_empty());
    }

    #[test]
    fn a_torn_note_is_no_note() {
        let mut noted = Noted { boot: "b".into(), size: 100, ..Noted::default() };
        noted.present.add(0..50);
        noted.durable.add(0..20);
        let text = noted.to_text();
        assert_eq!(Noted::parse(&text).as_ref(), Some(&noted));
        for end in 0..text.len() {
            assert_eq!(Noted::parse(&text[..end]), None, "{:?}", &text[..end]);
        }
        assert_eq!(Noted::parse(&text.replace("0 50", "0 101")), None);
        assert_eq!(noted.clone().trusted("b").frontier(), 50);
        assert_eq!(noted.clone().trusted("other").frontier(), 20);
        assert_eq!(noted.trusted("").frontier(), 20);
    }

    proptest! {
        #[test]
        fn extents_agree_with_a_bitmap(ranges in prop::collection::vec((0_u64..64, 0_u64..16), 0..20)) {
            let mut extents = Extents::default();
            let mut bitmap = [false; 80];
            for (start, length) in ranges {
                extents.add(start..start + length);
                bitmap[usize::try_from(start).unwrap()..usize::try_from(start + length).unwrap()].fill(true);
            }
            let mut seen = [false; 80];
            for range in extents.ranges() {
                for at in range.clone() {
                    seen[usize::try_from(at).unwrap()] = true;
                }
            }
            prop_assert_eq!(bitmap, seen);
            prop_assert!(extents.ranges().windows(2).all(|pair| pair[0].end < pair[1].start));
            let there: u64 = extents.total();
            let missing: u64 = extents.missing(80).iter().map(|range| range.end - range.start).sum();
            prop_assert_eq!(there + missing, 80);
        }
    }
}
