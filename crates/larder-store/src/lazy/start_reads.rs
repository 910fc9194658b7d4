//! Start-up reads: the data that containers of a repository's images read when they start. The next incomplete layer
//! with the same data gets it first.
//!
//! Data is known by its digest, so that it is found again in the next version of an image, wherever it is there.

use std::ops::Range;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

/// Time from the first read of a layer in which its reads are those of a start.
pub(crate) const START: Duration = Duration::from_secs(10);
/// Chunks that are recorded of a repository, at most.
pub(crate) const MOST_CHUNKS: usize = 2048;
/// Repositories that have a record, at most: the latest.
const MOST_REPOSITORIES: usize = 64;

/// The beginning of a chunk's SHA-256. A wrong chunk of the same name is fetched in vain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct ChunkName(u32);

impl From<&[u8; 32]> for ChunkName {
    fn from([a, b, c, d, ..]: &[u8; 32]) -> ChunkName {
        ChunkName(u32::from_be_bytes([*a, *b, *c, *d]))
    }
}

/// Start-up reads of a repository's images.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StartReads {
    /// Registry and repository.
    repository: String,
    /// Number of the latest change, counted over all repositories.
    change: u64,
    /// Chunks that were read: those of the latest start first, each start's in the order of its reads.
    pub(crate) chunks: Vec<ChunkName>,
}

impl StartReads {
    /// Adds the reads of a start. Returns the record of its repository, and the repositories whose records are to be
    /// removed.
    pub(crate) fn add(
        mut records: Vec<StartReads>,
        repository: &str,
        read: &[ChunkName],
    ) -> (StartReads, Vec<String>) {
        let change = records.iter().map(|record| record.change).max().map_or(0, |latest| latest + 1);
        let before = records.extract_if(.., |record| record.repository == repository).next();
        let before = before.map(|record| record.chunks).unwrap_or_default();
        let older = before.iter().filter(|chunk| !read.contains(chunk));
        let chunks = read.iter().chain(older).take(MOST_CHUNKS).copied().collect();
        records.sort_by_key(|record| record.change);
        let excess = (records.len() + 1).saturating_sub(MOST_REPOSITORIES);
        let removed = records.drain(..excess).map(|record| record.repository).collect();
        (StartReads { repository: repository.to_owned(), change, chunks }, removed)
    }
}

/// Records which chunks of a layer are read at a start.
#[derive(Debug, Default)]
pub(super) struct StartRecorder {
    began: Option<Instant>,
    has_ended: bool,
    /// In the order of the reads.
    chunks: Vec<usize>,
}

impl StartRecorder {
    /// Notes a read. Returns whether it is one of a start. One without chunks is none: of layers that are here, larder
    /// reads the metadata for those above them.
    pub(super) fn note(&mut self, chunks: Range<usize>, now: Instant) -> bool {
        if chunks.is_empty() {
            return false;
        }
        self.began.get_or_insert(now);
        if self.is_over(now) {
            return false;
        }
        for chunk in chunks {
            if self.chunks.len() < MOST_CHUNKS && !self.chunks.contains(&chunk) {
                self.chunks.push(chunk);
            }
        }
        true
    }

    /// Whether reads are no longer those of a start.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        self.has_ended || self.began.is_some_and(|began| now.duration_since(began) >= START)
    }

    /// Ends the start: what is read from now on is no part of it.
    pub(super) fn end(&mut self) {
        self.has_ended = true;
    }

    /// Takes what was noted.
    pub(super) fn take(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.chunks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: impl IntoIterator<Item = u32>) -> Vec<ChunkName> {
        names.into_iter().map(ChunkName).collect()
    }

    #[test]
    fn the_latest_start_comes_first_and_records_are_bounded() {
        let (first, removed) = StartReads::add(Vec::new(), "r/app", &names([1, 2, 3]));
        assert!(removed.is_empty());
        let (second, _) = StartReads::add(vec![first], "r/app", &names([9, 2]));
        assert_eq!(second.chunks, names([9, 2, 1, 3]));
        let (full, _) = StartReads::add(vec![second], "r/app", &names(10..5000));
        assert_eq!(full.chunks, names(10..10 + u32::try_from(MOST_CHUNKS).unwrap()));
    }

    #[test]
    fn the_repositories_that_started_last_are_kept() {
        let mut records: Vec<StartReads> = Vec::new();
        for number in 0..MOST_REPOSITORIES + 2 {
            if number == MOST_REPOSITORIES {
                let (again, _) = StartReads::add(records.clone(), "r/0", &names([7]));
                records[0] = again;
            }
            let (record, removed) = StartReads::add(records.clone(), &format!("r/{number}"), &names([1]));
            records.retain(|record| !removed.contains(&record.repository));
            records.push(record);
        }
        let kept: Vec<&str> = records.iter().map(|record| &*record.repository).collect();
        assert_eq!(kept.len(), MOST_REPOSITORIES);
        assert_eq!((kept[0], kept[1]), ("r/0", "r/3"));
    }

    #[test]
    fn reads_of_the_first_seconds_are_noted_once_in_their_order() {
        let (mut recorder, now) = (StartRecorder::default(), Instant::now());
        assert!(!recorder.note(7..7, now - START), "metadata");
        assert!(!recorder.is_over(now + START), "nothing was read");
        assert!(recorder.note(5..7, now) && recorder.note(2..6, now + START / 2));
        assert!(!recorder.note(9..10, now + START));
        assert!(!recorder.is_over(now + START / 2) && recorder.is_over(now + START));
        assert_eq!(recorder.take(), [5, 6, 2, 3, 4]);
        let mut resumed = StartRecorder::default();
        resumed.end();
        assert!(!resumed.note(5..7, now) && resumed.is_over(now) && resumed.take().is_empty());
    }
}
