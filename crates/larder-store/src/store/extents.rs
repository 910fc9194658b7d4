//! Which bytes of a blob are on disk, and the file that records them.

use std::ops::Range;

use larder_registry::ByteRanges;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Most ranges that are kept. A file fetched over a few connections has a few; of more, the highest are forgotten and
/// fetched again.
const MAX_RANGES: usize = 256;

/// Adds a range, within the bound on their number.
pub(super) fn add(extents: &mut ByteRanges, range: Range<u64>) {
    extents.insert(range);
    extents.truncate(MAX_RANGES);
}

/// The files `extents` and `extents.latest`: JSON, each range as its first byte and its end.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SavedExtents {
    /// Run of the machine in which it was written.
    pub(super) boot: String,
    /// Size of the whole blob.
    pub(super) size: u64,
    /// Ranges that survive a power cut.
    #[serde(serialize_with = "serialize_ranges", deserialize_with = "deserialize_ranges")]
    pub(super) durable: ByteRanges,
    /// Ranges that survive the end of the process.
    #[serde(serialize_with = "serialize_ranges", deserialize_with = "deserialize_ranges")]
    pub(super) present: ByteRanges,
}

fn serialize_ranges<S: Serializer>(extents: &ByteRanges, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(extents.ranges().map(|range| (range.start, range.end)))
}

fn deserialize_ranges<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ByteRanges, D::Error> {
    let mut extents = ByteRanges::new();
    for (start, end) in Vec::<(u64, u64)>::deserialize(deserializer)? {
        if start >= end {
            return Err(de::Error::custom("empty range"));
        }
        add(&mut extents, start..end);
    }
    Ok(extents)
}

impl SavedExtents {
    /// The content of a file; `None` when it is torn or damaged: then everything is fetched again.
    pub(super) fn parse(text: &[u8]) -> Option<SavedExtents> {
        let saved: SavedExtents = serde_json::from_slice(text).ok()?;
        let end = [&saved.durable, &saved.present]
            .into_iter()
            .flat_map(ByteRanges::ranges)
            .map(|range| range.end)
            .max();
        (end.unwrap_or_default() <= saved.size).then_some(saved)
    }

    /// Returns the ranges that survive a power cut, and those that a fetch resumes with in this run of the machine:
    /// those that can be relied on, or the whole blob if it was there, since then its digest decides before anything is
    /// fetched. `latest` may be torn or lost; in this run it is right.
    pub(super) fn resumable(
        synced: Option<SavedExtents>,
        latest: Option<SavedExtents>,
        boot: &str,
    ) -> (ByteRanges, ByteRanges) {
        let is_reliable = |saved: &SavedExtents| {
            let is_same_run = !boot.is_empty() && saved.boot == boot;
            is_same_run || saved.present.contiguous_len() == saved.size
        };
        let durable = synced.as_ref().map(|synced| synced.durable.clone()).unwrap_or_default();
        let present = [latest, synced].into_iter().flatten().find(is_reliable).map(|saved| saved.present);
        (durable.clone(), present.unwrap_or(durable))
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
        let text = serde_json::to_string(&noted).unwrap();
        assert_eq!(SavedExtents::parse(text.as_bytes()).as_ref(), Some(&noted));
        for end in 0..text.len() {
            assert_eq!(SavedExtents::parse(&text.as_bytes()[..end]), None, "{:?}", &text[..end]);
        }
        for range in ["[0,101]", "[50,50]", "[50,0]"] {
            assert_eq!(SavedExtents::parse(text.replace("[0,50]", range).as_bytes()), None, "{range}");
        }
    }

    #[test]
    fn the_latest_record_counts_in_its_run_and_the_synced_one_after_a_power_cut() {
        let saved = |present: u64, durable: u64| {
            let mut saved = SavedExtents { boot: "b".into(), size: 100, ..SavedExtents::default() };
            saved.present.insert(0..present);
            saved.durable.insert(0..durable);
            Some(saved)
        };
        let resumable = |synced, latest, boot| {
            let (durable, present) = SavedExtents::resumable(synced, latest, boot);
            (durable.contiguous_len(), present.contiguous_len())
        };
        assert_eq!(resumable(saved(30, 20), saved(50, 40), "b"), (20, 50));
        assert_eq!(resumable(saved(30, 20), None, "b"), (20, 30), "the latest was torn");
        for boot in ["other", ""] {
            assert_eq!(resumable(saved(30, 20), saved(50, 40), boot), (20, 20));
            assert_eq!(resumable(None, saved(50, 40), boot), (0, 0), "nothing was synced");
        }
        assert_eq!(resumable(saved(30, 20), saved(100, 40), "other"), (20, 100), "its digest decides");
    }
}
