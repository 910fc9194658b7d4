//! Which chunks of a layer are fetched together: for the reads that wait, and ahead of those that likely follow.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ops::Range;

use crate::lazy::partial_layer::PartialLayer;
use crate::lazy::start_reads::{ChunkName, MOST_CHUNKS};

/// Compressed bytes that are fetched for a read, at most beyond what it needs.
const READ_AROUND: u64 = 256 << 10;
/// Compressed bytes of such a range, at most.
const AHEAD: u64 = 1 << 20;
/// Compressed bytes that are fetched ahead of a read in its file, at most.
const FILE_AHEAD: u64 = 32 << 20;
/// Requests at once for reads that may follow.
const RANGES_AHEAD: usize = 2;
/// Requests at once for the reads of a start.
const START_RANGES: usize = 4;
/// Files that are fetched ahead of reads: the latest ones.
const FILES_AHEAD: usize = 32;

/// Chunks that are likely read soon: what an earlier start has read, or the layer's landmark says, then the rest of
/// each file of which something was read.
#[derive(Debug, Default)]
pub(super) struct ReadAhead {
    /// The first to be read is the last.
    start: Vec<Range<usize>>,
    /// The latest is the last.
    ranges: VecDeque<Range<usize>>,
}

impl ReadAhead {
    /// Chunks that a start has read, in the order of its reads, with what lies between them.
    pub(super) fn of_start(layer: &PartialLayer, read: &[ChunkName]) -> ReadAhead {
        let orders: HashMap<ChunkName, usize> = read.iter().copied().zip(0..).collect();
        let mut start: Vec<(usize, Range<usize>)> = Vec::new();
        for chunk in 0..layer.chunk_count() {
            let Some(&order) = layer.chunk_name(chunk).and_then(|name| orders.get(&name)) else { continue };
            if let Some((first, last)) = start.last_mut()
                && is_near(layer, last, chunk)
            {
                (*first, last.end) = (order.min(*first), chunk + 1);
            } else {
                start.push((order, chunk..chunk + 1));
            }
        }
        start.sort_by_key(|(first, _)| std::cmp::Reverse(*first));
        let start = start.into_iter().map(|(_, range)| range).collect();
        ReadAhead { start, ranges: VecDeque::new() }
    }

    /// Chunks that a start likely reads, as whoever made the layer said.
    pub(super) fn of_landmark(layer: &PartialLayer) -> ReadAhead {
        let is_before = |chunk: &usize| layer.chunk(*chunk).is_before_landmark;
        let before = 0..(0..layer.chunk_count().min(MOST_CHUNKS)).take_while(is_before).count();
        ReadAhead { start: vec![before], ranges: VecDeque::new() }
    }

    /// Requests that may be under way at once.
    pub(super) fn at_once(&self) -> usize {
        if self.start.is_empty() { RANGES_AHEAD } else { START_RANGES }
    }

    /// Adds what follows a read in its file, and a little of the files behind it.
    pub(super) fn note_read(&mut self, layer: &PartialLayer, next: usize) {
        let file_end = (next..layer.chunk_count()).find(|chunk| layer.chunk(*chunk).begins_file);
        let in_file = |chunk| file_end.is_none_or(|end| chunk < end);
        let in_reach = |chunk, bytes| bytes <= if in_file(chunk) { FILE_AHEAD } else { AHEAD };
        let end = grown(layer, next..next, layer.chunk_count(), in_reach).end;
        if self.ranges.len() == FILES_AHEAD {
            self.ranges.pop_front();
        }
        self.ranges.push_back(next..end);
    }

    /// The chunks to fetch next.
    pub(super) fn next(&mut self, layer: &PartialLayer) -> Option<Range<usize>> {
        let is_free = |chunk, bytes| bytes <= AHEAD && layer.claim(chunk);
        loop {
            let is_of_start = !self.start.is_empty();
            let mut range = self.start.pop().or_else(|| self.ranges.pop_back())?;
            let Some(first) = range.find(|chunk| layer.claim(*chunk)) else { continue };
            let batch = grown(layer, first..first + 1, range.end, is_free);
            let rest = batch.end..range.end.max(batch.end);
            if is_of_start {
                self.start.push(rest);
            } else {
                self.ranges.push_back(rest);
            }
            return Some(batch);
        }
    }
}

/// Whether a chunk is fetched with a range of chunks before it.
fn is_near(layer: &PartialLayer, range: &Range<usize>, chunk: usize) -> bool {
    let between = blob_range(layer, range.end - 1..chunk + 1);
    let ends = blob_range(layer, range.end - 1..range.end).zip(blob_range(layer, chunk..chunk + 1));
    let gap = ends.map(|(before, after)| after.start.saturating_sub(before.end));
    between.is_some() && gap.is_some_and(|gap| gap <= READ_AROUND)
}

/// The batch with chunks that follow it in the layer and in the blob, up to a number, while they are wanted: each with
/// the bytes of the blob up to its end.
fn grown(
    layer: &PartialLayer,
    mut batch: Range<usize>,
    end: usize,
    is_wanted: impl Fn(usize, u64) -> bool,
) -> Range<usize> {
    let mut range = blob_range(layer, batch.clone());
    while batch.end < end {
        let before = range.clone();
        range = joined(range, layer, batch.end);
        // What comes with the others costs nothing.
        let bytes =
            |range: &Range<u64>| if before.as_ref() == Some(range) { 0 } else { range.end - range.start };
        if range.as_ref().is_none_or(|range| !is_wanted(batch.end, bytes(range))) {
            break;
        }
        batch.end += 1;
    }
    batch
}

/// The chunks to fetch for those that are wanted: successive ones in one request, with some that follow.
pub(super) fn batches(layer: &PartialLayer, wanted: &BTreeSet<usize>) -> Vec<Range<usize>> {
    let mut batches: Vec<Range<usize>> = Vec::new();
    for &first in wanted {
        if layer.is_filled(first) || batches.last().is_some_and(|batch| batch.contains(&first)) {
            continue;
        }
        let is_wanted = |chunk, bytes| {
            bytes <= READ_AROUND && (wanted.contains(&chunk) && !layer.is_filled(chunk) || layer.claim(chunk))
        };
        let mut batch = grown(layer, first..first + 1, layer.chunk_count(), is_wanted);
        let blob = |chunk: usize| layer.chunk(chunk).chunk.content.blob();
        while batch.start > 0 && blob(batch.start - 1) == blob(first) && layer.claim(batch.start - 1) {
            batch.start -= 1;
        }
        batches.push(batch);
    }
    batches
}

/// The range of the blob that has these chunks; `None` if they do not follow each other there.
pub(super) fn blob_range(layer: &PartialLayer, mut chunks: Range<usize>) -> Option<Range<u64>> {
    let first = joined(None, layer, chunks.next()?);
    chunks.try_fold(first?, |range, chunk| joined(Some(range), layer, chunk))
}

/// The range of the blob with that of one more chunk; `None` if it does not follow there.
fn joined(range: Option<Range<u64>>, layer: &PartialLayer, chunk: usize) -> Option<Range<u64>> {
    let blob = layer.chunk(chunk).chunk.content.blob()?;
    let Some(range) = range else { return Some(blob.clone()) };
    let follows = range.start <= blob.start && blob.start <= range.end.saturating_add(READ_AROUND);
    follows.then(|| range.start..range.end.max(blob.end))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::mpsc;

    use super::*;
    use crate::lazy::skeleton::PlacedChunk;
    use crate::lazy::toc::{ChunkCompression, ChunkContent, CompressedChunk, TocChunk};

    const CHUNK: u64 = 100 << 10;

    /// Files of these numbers of chunks, one after the other, also in the blob.
    fn layer(files: &[usize]) -> PartialLayer {
        let begins = files.iter().flat_map(|chunks| (0..*chunks).map(|chunk| chunk == 0));
        let chunks = begins.zip(0_u64..).map(|(begins_file, number)| PlacedChunk {
            offset: number * 2 * CHUNK,
            chunk: TocChunk {
                size: 2 * CHUNK,
                content: ChunkContent::Compressed(CompressedChunk {
                    compression: ChunkCompression::Zstd,
                    blob: number * CHUNK..(number + 1) * CHUNK,
                    skip: 0,
                    sha256: [u8::try_from(number % 256).unwrap(); 32],
                }),
            },
            begins_file,
            is_before_landmark: false,
        });
        let (demand, _) = mpsc::unbounded_channel();
        PartialLayer::new(tempfile::tempfile().unwrap(), 0, chunks.collect(), demand, Arc::default())
    }

    #[test]
    fn a_read_waits_for_little_more_than_it_needs() {
        let layer = layer(&[400]);
        assert!([10, 20, 21].into_iter().all(|chunk| layer.claim(chunk)), "reads request them");
        assert_eq!(batches(&layer, &BTreeSet::from([10, 20, 21])), [10..12, 20..22]);
        assert!(!layer.claim(11), "it is fetched already");
        assert_eq!(batches(&layer, &BTreeSet::from([9]))[0], 9..10, "the next one is fetched already");
    }

    #[test]
    fn what_a_start_has_read_is_fetched_first_in_its_order() {
        let layer = layer(&[1; 60]);
        let name = |chunk| layer.chunk_name(chunk).unwrap();
        let mut ahead = ReadAhead::of_start(&layer, &[name(40), name(3), name(5), name(9), name(41)]);
        ahead.note_read(&layer, 20);
        let fetched: Vec<_> = std::iter::from_fn(|| ahead.next(&layer)).collect();
        assert_eq!(fetched, [40..42, 3..6, 9..10, 20..30], "two chunks between others are fetched with them");
    }

    #[test]
    fn the_rest_of_a_file_is_fetched_ahead_and_a_little_of_the_next_ones() {
        let layer = layer(&[40, 4, 400]);
        let mut ahead = ReadAhead::default();
        ahead.note_read(&layer, 12);
        let fetched: Vec<_> = std::iter::from_fn(|| ahead.next(&layer)).collect();
        assert_eq!(fetched, [12..22, 22..32, 32..40], "the next file is further away than a request");
        ahead.note_read(&layer, 38);
        assert_eq!(ahead.next(&layer), Some(40..48), "the rest of the file is there");
        ahead.note_read(&layer, 50);
        let fetched: Vec<_> = std::iter::from_fn(|| ahead.next(&layer)).collect();
        assert_eq!(fetched.last().unwrap().end - 50, usize::try_from(FILE_AHEAD / CHUNK).unwrap());
    }
}
