//! Which bytes of a blob are on disk, and the text file that records them.

use std::fmt::Write as _;
use std::ops::Range;

use larder_registry::ByteRanges;

/// Most ranges that are kept. A file fetched over a few connections has a few; of more, the highest are forgotten and
/// fetched again.
const MAX_RANGES: usize = 256;

const TITLE: &str = "larder extents 1";

/// Adds a range, within the bound on their number.
pub(super) fn add(extents: &mut ByteRanges, range: Range<u64>) {
    extents.insert(range);
    extents.truncate(MAX_RANGES);
}

/// The text of the file `extents`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct SavedExtents {
    /// Run of the machine in which it was written.
    pub(super) boot: String,
    /// Size of the whole blob.
    pub(super) size: u64,
    /// What survives a power cut.
    pub(super) durable: ByteRanges,
    /// What survives the end of the process.
    pub(super) present: ByteRanges,
}

impl SavedExtents {
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
    pub(super) fn parse(text: &str) -> Option<SavedExtents> {
        let mut lines = text.strip_suffix("end\n")?.lines();
        if lines.next()? != TITLE {
            return None;
        }
        let boot = lines.next()?.strip_prefix("boot ")?.to_owned();
        let size = lines.next()?.strip_prefix("size ")?.parse().ok()?;
        let mut noted = SavedExtents { boot, size, ..SavedExtents::default() };
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
            add(extents, range);
        }
        Some(noted)
    }

    /// What can be relied on in this run of the machine.
    pub(super) fn trusted(self, boot: &str) -> ByteRanges {
        if !boot.is_empty() && self.boot == boot { self.present } else { self.durable }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_note_is_no_note() {
        let mut noted = SavedExtents { boot: "b".into(), size: 100, ..SavedExtents::default() };
        noted.present.insert(0..50);
        noted.durable.insert(0..20);
        let text = noted.to_text();
        assert_eq!(SavedExtents::parse(&text).as_ref(), Some(&noted));
        for end in 0..text.len() {
            assert_eq!(SavedExtents::parse(&text[..end]), None, "{:?}", &text[..end]);
        }
        assert_eq!(SavedExtents::parse(&text.replace("0 50", "0 101")), None);
        assert_eq!(noted.clone().trusted("b").contiguous_len(), 50);
        assert_eq!(noted.clone().trusted("other").contiguous_len(), 20);
        assert_eq!(noted.trusted("").contiguous_len(), 20);
    }
}
