//! Fetches one blob into a sink: parallel ranges where the server supports them, each resumed after a failure.
//!
//! Promises: bytes in the sink are not requested again, unless a server ignores ranges; after a failure at most the
//! unwritten bytes of one connection are fetched twice; memory is at most two batches per connection, whatever the
//! blob's size; after a failing host the next one continues at the byte reached; a blob whose ranges a host does not serve
//! correctly is requested whole from then on. The content is **not** verified: the
//! reader of the sink does that, and excludes hosts that sent wrong bytes with [`RepositorySession::without_hosts`].

mod extents;
mod sink;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use larder::hint::Hint;
use larder::reference::Digest;

pub use extents::ByteRanges;
pub use sink::BlobSink;

use self::sink::{ClosableSink, RangeWriter};
use super::body::BlobBody;
use super::error::{FetchError, FetchErrorKind, FetchTarget};
use super::fetch_notice::FetchNotice;
use super::session::{HostCapability, HostWalk, RepositorySession, RequestError};
use crate::manifest::Descriptor;

/// The result of a fetch.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FetchReport {
    /// Hosts that served a part of it, each once.
    pub hosts: Vec<String>,
    /// Bytes received over the network.
    pub received: u64,
}

/// Why a blob is incomplete in its sink. Bytes written so far remain.
#[derive(Debug, thiserror::Error)]
pub enum BlobError {
    /// The registry failed.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// The sink failed.
    #[error("cannot write blob {digest}")]
    Sink {
        /// The blob.
        digest: Digest,
        /// The error of the sink.
        #[source]
        cause: std::io::Error,
    },
}

/// Fetches the missing bytes of a blob into `sink`. `present` are the ranges that an earlier fetch left there.
///
/// Dropping the future stops the fetch; nothing is written after that.
pub async fn fetch_blob(
    session: &RepositorySession,
    descriptor: &Descriptor,
    present: &ByteRanges,
    sink: Arc<dyn BlobSink>,
) -> Result<FetchReport, BlobError> {
    let mut parts = MissingRanges::new(descriptor.size, present, session.shared.config.range_size);
    let Some(first) = parts.next() else { return Ok(FetchReport::default()) };
    let fetch = BlobFetch {
        session,
        descriptor,
        sink: Arc::new(ClosableSink::new(sink)),
        here: Mutex::new(present.clone()),
        done: Mutex::default(),
        first_host: AtomicUsize::new(0),
        ranges_failed: AtomicBool::new(false),
    };
    // The first response shows whether the server supports ranges; further connections open only then.
    let mut walk = fetch.walk()?;
    let whole = match fetch.open(&mut walk, &first).await? {
        Some(body) if body.start() == first.start && (body.is_ranged() || parts.is_empty()) => {
            fetch.in_parallel(parts, first, walk, body).await?
        }
        other => Some((walk, other)),
    };
    if let Some((walk, body)) = whole {
        fetch.sequentially(walk, body).await?;
    }
    Ok(fetch.finish())
}

/// The missing ranges, split at multiples of a size, in order. An iterator, because a manifest may declare any size.
#[derive(Debug)]
struct MissingRanges {
    missing: VecDeque<Range<u64>>,
    range_size: u64,
}

impl MissingRanges {
    fn new(size: u64, present: &ByteRanges, range_size: u64) -> MissingRanges {
        MissingRanges { missing: present.missing(0..size).into(), range_size: range_size.max(1) }
    }

    fn is_empty(&self) -> bool {
        self.missing.is_empty()
    }
}

impl Iterator for MissingRanges {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        let missing = self.missing.front_mut()?;
        let start = missing.start;
        let end =
            (start / self.range_size).saturating_add(1).saturating_mul(self.range_size).min(missing.end);
        missing.start = end;
        if missing.is_empty() {
            self.missing.pop_front();
        }
        Some(start..end)
    }
}

/// How the fetch of one part ended.
enum PartOutcome<'s> {
    Done,
    /// The host ignores ranges and sends the whole blob, or does not serve them correctly.
    RangesFailed(Box<(HostWalk<'s>, Option<BlobBody>)>),
}

/// The state of one blob's fetch.
struct BlobFetch<'s> {
    session: &'s RepositorySession,
    descriptor: &'s Descriptor,
    sink: Arc<ClosableSink>,
    here: Mutex<ByteRanges>,
    done: Mutex<FetchReport>,
    /// Hosts before this index failed for this blob.
    first_host: AtomicUsize,
    /// A host served a wrong range, or none: from now on the blob is requested whole.
    ranges_failed: AtomicBool,
}

impl<'s> BlobFetch<'s> {
    fn walk(&self) -> Result<HostWalk<'s>, FetchError> {
        let what = FetchTarget::Blob(self.descriptor.digest.clone());
        self.session.walk(what, HostCapability::Pull, self.first_host.load(Ordering::Relaxed))
    }

    /// Opens a part at the first host that serves it, or the whole blob if a range failed before. `None` if this range fails.
    async fn open(&self, walk: &mut HostWalk<'s>, part: &Range<u64>) -> Result<Option<BlobBody>, FetchError> {
        loop {
            let link = walk.link();
            let whole = 0..self.descriptor.size;
            let part = if self.ranges_failed.load(Ordering::Relaxed) { &whole } else { part };
            match self.session.open_at(link, self.descriptor, part.start, part.end).await {
                Ok(body) => {
                    self.session.watcher.notify(FetchNotice::Host(body.host().to_owned()));
                    let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
                    if !done.hosts.iter().any(|host| host == body.host()) {
                        done.hosts.push(body.host().to_owned());
                    }
                    return Ok(Some(body));
                }
                Err(failed) if matches!(failed.kind, FetchErrorKind::BadRange(_)) && *part != whole => {
                    tracing::debug!(host = failed.host, error = %failed.kind, "fetching the blob whole");
                    self.ranges_failed.store(true, Ordering::Relaxed);
                    return Ok(None);
                }
                Err(failed) => self.failed(walk, failed).await?,
            }
        }
    }

    async fn failed(&self, walk: &mut HostWalk<'s>, failed: RequestError) -> Result<(), FetchError> {
        walk.failed(failed).await?;
        self.first_host.fetch_max(walk.at(), Ordering::Relaxed);
        Ok(())
    }

    /// Fetches the parts in parallel; `first` is open already, as `body`. If ranges fail, stops and returns the connection for the rest,
    /// if there is one.
    async fn in_parallel(
        &self,
        mut parts: MissingRanges,
        first: Range<u64>,
        walk: HostWalk<'s>,
        body: BlobBody,
    ) -> Result<Option<(HostWalk<'s>, Option<BlobBody>)>, BlobError> {
        let mut workers = FuturesUnordered::new();
        workers.push(self.part(walk, first, Some(body)));
        while workers.len() < self.session.shared.config.connections_per_blob.max(1)
            && let Some(part) = parts.next()
        {
            workers.push(self.part(self.walk()?, part, None));
        }
        while let Some(outcome) = workers.next().await {
            match outcome? {
                PartOutcome::Done => {
                    if let Some(part) = parts.next() {
                        workers.push(self.part(self.walk()?, part, None));
                    }
                }
                PartOutcome::RangesFailed(opened) => return Ok(Some(*opened)),
            }
        }
        Ok(None)
    }

    /// Fetches one part, with fallback to other hosts.
    async fn part(
        &self,
        mut walk: HostWalk<'s>,
        part: Range<u64>,
        mut opened: Option<BlobBody>,
    ) -> Result<PartOutcome<'s>, BlobError> {
        let mut at = part.start;
        while at < part.end {
            let body = match opened.take() {
                Some(body) => Some(body),
                None => self.open(&mut walk, &(at..part.end)).await?,
            };
            match body {
                Some(body) if body.start() == at && body.end() <= part.end => {
                    at = self.copy(&mut walk, body).await?;
                }
                other => return Ok(PartOutcome::RangesFailed(Box::new((walk, other)))),
            }
        }
        Ok(PartOutcome::Done)
    }

    /// Fetches all missing bytes over one connection and skips those present.
    async fn sequentially(
        &self,
        mut walk: HostWalk<'s>,
        mut opened: Option<BlobBody>,
    ) -> Result<(), BlobError> {
        let size = self.descriptor.size;
        while let Some(at) = self.first_missing() {
            let body = match opened.take() {
                Some(body) => Some(body),
                None => self.open(&mut walk, &(at..size)).await?,
            };
            if let Some(body) = body {
                self.copy(&mut walk, body).await?;
            }
        }
        Ok(())
    }

    fn first_missing(&self) -> Option<u64> {
        let here = self.here.lock().unwrap_or_else(PoisonError::into_inner);
        here.missing(0..self.descriptor.size).first().map(|missing| missing.start)
    }

    /// Writes the missing bytes of a body until it ends or fails; returns the offset reached, after the back-off that
    /// the failure requires.
    async fn copy(&self, walk: &mut HostWalk<'s>, mut body: BlobBody) -> Result<u64, BlobError> {
        let mut writer = RangeWriter::new(self.sink.clone());
        let mut at = body.start();
        let mut new_bytes = 0;
        let ended = loop {
            let chunk = match body.next().await {
                Ok(Some(chunk)) => chunk,
                Ok(None) => break None,
                Err(kind) => break Some(kind),
            };
            let end = at + chunk.len() as u64;
            self.done.lock().unwrap_or_else(PoisonError::into_inner).received += chunk.len() as u64;
            let missing = self.here.lock().unwrap_or_else(PoisonError::into_inner).missing(at..end);
            for range in missing {
                let offset = |position: u64| usize::try_from(position - at).unwrap_or(usize::MAX);
                let data = chunk.slice(offset(range.start)..offset(range.end));
                new_bytes += range.end - range.start;
                self.written(writer.write(range.start, data).await)?;
            }
            at = end;
        };
        self.written(writer.flush().await)?;
        if new_bytes >= self.session.shared.config.stall_bytes {
            walk.progressed();
        }
        if let Some(kind) = ended {
            let host = body.host().to_owned();
            drop(body); // its connection is free during the wait
            self.failed(walk, RequestError { host, kind, token: false }).await?;
        }
        Ok(at)
    }

    /// Counts bytes that are in the sink.
    fn written(&self, outcome: std::io::Result<Vec<Range<u64>>>) -> Result<(), BlobError> {
        let ranges =
            outcome.map_err(|cause| BlobError::Sink { digest: self.descriptor.digest.clone(), cause })?;
        for range in ranges {
            let bytes = range.end - range.start;
            self.here.lock().unwrap_or_else(PoisonError::into_inner).insert(range);
            self.session.watcher.notify(FetchNotice::Bytes(bytes));
        }
        Ok(())
    }

    fn finish(&self) -> FetchReport {
        self.done.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for BlobFetch<'_> {
    fn drop(&mut self) {
        self.sink.close();
    }
}

impl BlobError {
    /// The error of the registry, if that failed.
    pub fn fetch_kind(&self) -> Option<&FetchErrorKind> {
        match self {
            BlobError::Fetch(error) => Some(&*error.kind),
            BlobError::Sink { .. } => None,
        }
    }

    /// The next step for the user.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            BlobError::Fetch(error) => error.hint(),
            BlobError::Sink { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(size: u64, present: &[Range<u64>], range_size: u64) -> Vec<Range<u64>> {
        MissingRanges::new(size, &present.iter().cloned().collect(), range_size).take(10).collect()
    }

    #[test]
    fn missing_ranges_are_split_at_fixed_offsets() {
        assert_eq!(parts(45, &[0..5, 12..30], 10), [5..10, 10..12, 30..40, 40..45]);
        assert_eq!(parts(20, &[0..5, 5..20], 10), []);
        assert_eq!(parts(0, &[], 10), []);
        assert_eq!(parts(9, &[], u64::MAX).first(), Some(&(0..9)));
        assert_eq!(parts(9, &[], 0).len(), 9);
    }

    #[test]
    fn a_blob_that_claims_to_be_endless_takes_no_memory() {
        assert_eq!(parts(u64::MAX, &[], 16).last(), Some(&(144..160)));
        assert_eq!(
            MissingRanges::new(u64::MAX, &ByteRanges::new(), u64::MAX - 1).last(),
            Some(u64::MAX - 1..u64::MAX)
        );
    }
}
