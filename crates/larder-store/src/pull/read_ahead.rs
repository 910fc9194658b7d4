//! Which chunks of a layer are fetched together: for the reads that wait, and ahead of those that likely follow.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

use crate::lazy::partial_layer::PartialLayer;
use crate::lazy::toc::{ChunkContent, CompressedChunk};

/// Compressed bytes that are fetched for a read, at most beyond what it needs.
const READ_AROUND: u64 = 256 << 10;
/// Compressed bytes of such a range, at most.
const AHEAD: u64 = 1 << 20;
/// Compressed bytes that are fetched ahead of a read in its file, at most.
const FILE_AHEAD: u64 = 32 << 20;
/// Files that are fetched ahead of reads: the latest ones.
const FILES_AHEAD: usize = 32;

/// Chunks that are likely read soon: the rest of each file of which something was read.
#[derive(Debug, Default)]
pub(super) struct ReadAhead {
    /// The latest is the last.
    ranges: VecDeque<Range<usize>>,
}

impl ReadAhead {
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
        while let Some(mut range) = self.ranges.pop_back() {
            let Some(first) = range.find(|chunk| layer.claim(*chunk)) else { continue };
            let is_free = |chunk, bytes| bytes <= AHEAD && layer.claim(chunk);
            let batch = grown(layer, first..first + 1, range.end, is_free);
            self.ranges.push_back(batch.end..range.end.max(batch.end));
            return Some(batch);
        }
        None
    }
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
        range = joined(range, layer, batch.end);
        if range.as_ref().is_none_or(|range| !is_wanted(batch.end, range.end - range.start)) {
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
        batches.push(grown(layer, first..first + 1, layer.chunk_count(), is_wanted));
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
    let ChunkContent::Compressed(CompressedChunk { blob, .. }) = &layer.chunk(chunk).chunk.content else {
        return None;
    };
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
    use crate::lazy::toc::TocChunk;

    const CHUNK: u64 = 100 << 10;

    /// Files of these numbers of chunks, one after the other, also in the blob.
    fn layer(files: &[usize]) -> PartialLayer {
        let begins = files.iter().flat_map(|chunks| (0..*chunks).map(|chunk| chunk == 0));
        let chunks = begins.zip(0_u64..).map(|(begins_file, number)| PlacedChunk {
            offset: number * 2 * CHUNK,
            chunk: TocChunk {
                size: 2 * CHUNK,
                content: ChunkContent::Compressed(CompressedChunk {
                    blob: number * CHUNK..(number + 1) * CHUNK,
                    skip: 0,
                    sha256: [0; 32],
                }),
            },
            begins_file,
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
