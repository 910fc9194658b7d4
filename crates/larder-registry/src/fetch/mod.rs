//! Fetches one blob into a sink: parallel ranges where the server supports them, each resumed after a failure.
//!
//! Promises: bytes in the sink are not requested again, unless a server ignores ranges; after a failure at most the
//! unwritten bytes of one connection are fetched twice; memory is at most two batches per connection, whatever the
//! blob's size; after a failing host the next one continues at the byte reached; a blob whose ranges a host does not
//! serve correctly is requested whole from then on. The content is **not** verified: the reader of the sink does that,
//! and excludes hosts that sent wrong bytes with [`RepositorySession::without_hosts`].

mod extents;
mod sink;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use larder::hint::Hint;
use larder::reference::Digest;
use parking_lot::{Mutex, MutexGuard};

pub use extents::ByteRanges;
pub use sink::BlobSink;

use self::sink::{ClosableSink, RangeWriter};
use super::body::BlobBody;
use super::budget::RequestSize;
use super::error::{FetchError, FetchErrorKind, FetchTarget};
use super::fetch_notice::FetchNotice;
use super::session::{
    AttemptFailure, HostCapability, HostRequest, RepositorySession, RequestError, SessionHost,
};
use crate::manifest::Descriptor;

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
    /// A range was requested, and the registry sends whole blobs only.
    #[error("the registry does not serve ranges of blob {digest}")]
    NoRanges {
        /// The blob.
        digest: Digest,
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
) -> Result<(), BlobError> {
    let mut parts = MissingRanges::new(descriptor.size, present, session.shared.config.range_size);
    let Some(first) = parts.next() else { return Ok(()) };
    let target = FetchTarget::Blob(descriptor.digest.clone());
    let fetch = BlobFetch {
        hosts: session.host_request(target, HostCapability::Pull)?,
        session,
        descriptor,
        sink: Arc::new(ClosableSink::new(sink)),
        here: Mutex::new(present.clone()),
        ranges_failed: AtomicBool::new(false),
    };
    // The first response shows whether the server supports ranges; further connections open only then.
    let (blob, part) = (&fetch, &first);
    let opened = fetch.hosts.send(|host| async move { Ok(blob.open(host, part).await?) }).await?;
    let whole = match opened {
        Some(body) if body.start == first.start && (body.ranged || parts.is_empty()) => {
            fetch.in_parallel(parts, first, body).await?
        }
        other => Some(other),
    };
    match whole {
        Some(body) => fetch.sequentially(body).await,
        None => Ok(()),
    }
}

/// Fetches one range of a blob into memory. A reader waits for it: it does not queue behind whole blobs. The content is
/// **not** verified.
pub async fn fetch_range(
    session: &RepositorySession,
    descriptor: &Descriptor,
    range: Range<u64>,
) -> Result<Vec<u8>, BlobError> {
    let target = FetchTarget::Blob(descriptor.digest.clone());
    let hosts = session.host_request(target, HostCapability::Pull)?;
    let length = usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(usize::MAX);
    let range = &range;
    let attempt = |host| async move {
        let opened = session.open_at(host, descriptor, range.start, range.end, RequestSize::Small).await;
        let mut body = match opened {
            Ok(body) if body.start == range.start && body.end == range.end => body,
            Ok(_) => return Ok(None),
            Err(failed) if matches!(failed.kind, FetchErrorKind::BadRange(_)) => return Ok(None),
            Err(failed) => return Err(AttemptFailure::from(failed)),
        };
        let mut bytes = Vec::new();
        let failed = |host: &str, kind| RequestError { host: host.to_owned(), kind, token: false };
        while let Some(piece) = body.next().await.map_err(|kind| failed(&body.host, kind))? {
            bytes.extend_from_slice(&piece);
        }
        session.watcher.notify(FetchNotice::Bytes(bytes.len() as u64));
        Ok(Some(bytes))
    };
    let bytes = hosts.send(attempt).await?;
    bytes
        .filter(|bytes| bytes.len() == length)
        .ok_or_else(|| BlobError::NoRanges { digest: descriptor.digest.clone() })
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
enum PartOutcome {
    Done,
    /// The host ignores ranges and sends the whole blob, or does not serve them correctly.
    RangesFailed(Option<Box<BlobBody>>),
    /// The sink failed.
    Failed(BlobError),
}

/// The state of one blob's fetch.
struct BlobFetch<'s> {
    /// The hosts that have not failed for this blob.
    hosts: HostRequest<'s>,
    session: &'s RepositorySession,
    descriptor: &'s Descriptor,
    sink: Arc<ClosableSink>,
    here: Mutex<ByteRanges>,
    /// A host served a wrong range, or none: from now on the blob is requested whole.
    ranges_failed: AtomicBool,
}

impl<'s> BlobFetch<'s> {
    /// Opens a part at a host, or the whole blob if a range failed before. `None` if this range fails.
    async fn open(&self, host: &'s SessionHost, part: &Range<u64>) -> Result<Option<BlobBody>, RequestError> {
        let whole = 0..self.descriptor.size;
        let part = if self.ranges_failed.load(Ordering::Relaxed) { &whole } else { part };
        match self.session.open_at(host, self.descriptor, part.start, part.end, RequestSize::Blob).await {
            Ok(body) => {
                self.session.watcher.notify(FetchNotice::Host(body.host.clone()));
                Ok(Some(body))
            }
            Err(failed) if matches!(failed.kind, FetchErrorKind::BadRange(_)) && *part != whole => {
                tracing::debug!(host = failed.host, error = %failed.kind, "fetching the blob whole");
                self.ranges_failed.store(true, Ordering::Relaxed);
                Ok(None)
            }
            Err(failed) => Err(failed),
        }
    }

    /// Fetches the parts in parallel; `first` is open already. If ranges fail, stops and returns the connection for the
    /// rest, if there is one.
    async fn in_parallel(
        &self,
        mut parts: MissingRanges,
        first: Range<u64>,
        opened: BlobBody,
    ) -> Result<Option<Option<BlobBody>>, BlobError> {
        let mut workers = FuturesUnordered::new();
        workers.push(self.part(first, Some(opened)));
        while workers.len() < self.session.shared.config.connections_per_blob.max(1)
            && let Some(part) = parts.next()
        {
            workers.push(self.part(part, None));
        }
        while let Some(outcome) = workers.next().await {
            match outcome? {
                PartOutcome::Done => {
                    if let Some(part) = parts.next() {
                        workers.push(self.part(part, None));
                    }
                }
                PartOutcome::RangesFailed(opened) => return Ok(Some(opened.map(|opened| *opened))),
                PartOutcome::Failed(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Fetches one part, with fallback to other hosts.
    async fn part(&self, part: Range<u64>, opened: Option<BlobBody>) -> Result<PartOutcome, FetchError> {
        let (part, opened) = (&part, &Mutex::new(opened));
        self.hosts.send(|host| async move { self.part_from(host, part, take(opened)).await }).await
    }

    async fn part_from(
        &self,
        host: &'s SessionHost,
        part: &Range<u64>,
        mut opened: Option<BlobBody>,
    ) -> Result<PartOutcome, AttemptFailure> {
        while let Some(at) = self.first_missing(part) {
            let body = match opened.take() {
                Some(body) => Some(body),
                None => self.open(host, &(at..part.end)).await?,
            };
            match body {
                Some(body) if body.start == at && body.end <= part.end => {
                    if let Err(error) = self.copy(body).await? {
                        return Ok(PartOutcome::Failed(error));
                    }
                }
                other => return Ok(PartOutcome::RangesFailed(other.map(Box::new))),
            }
        }
        Ok(PartOutcome::Done)
    }

    /// Fetches all missing bytes over one connection and skips those present.
    async fn sequentially(&self, opened: Option<BlobBody>) -> Result<(), BlobError> {
        let opened = &Mutex::new(opened);
        self.hosts.send(|host| async move { self.rest_from(host, take(opened)).await }).await?
    }

    async fn rest_from(
        &self,
        host: &'s SessionHost,
        mut opened: Option<BlobBody>,
    ) -> Result<Result<(), BlobError>, AttemptFailure> {
        let whole = 0..self.descriptor.size;
        while let Some(at) = self.first_missing(&whole) {
            let body = match opened.take() {
                Some(body) => Some(body),
                None => self.open(host, &(at..whole.end)).await?,
            };
            if let Some(body) = body
                && let Err(error) = self.copy(body).await?
            {
                return Ok(Err(error));
            }
        }
        Ok(Ok(()))
    }

    fn first_missing(&self, part: &Range<u64>) -> Option<u64> {
        self.here().missing(part.clone()).first().map(|missing| missing.start)
    }

    /// Writes the missing bytes of a body until it ends or fails. The inner error is one of the sink.
    async fn copy(&self, mut body: BlobBody) -> Result<Result<(), BlobError>, AttemptFailure> {
        let mut writer = RangeWriter::new(self.sink.clone());
        let mut at = body.start;
        let mut added = 0;
        let ended = loop {
            let chunk = match body.next().await {
                Ok(Some(chunk)) => chunk,
                Ok(None) => break None,
                Err(kind) => break Some(kind),
            };
            let end = at + chunk.len() as u64;
            let missing = self.here().missing(at..end);
            for range in missing {
                let offset = |position: u64| usize::try_from(position - at).unwrap_or(usize::MAX);
                let data = chunk.slice(offset(range.start)..offset(range.end));
                added += range.end - range.start;
                if let Err(error) = self.written(writer.write(range.start, data).await) {
                    return Ok(Err(error));
                }
            }
            at = end;
        };
        if let Err(error) = self.written(writer.flush().await) {
            return Ok(Err(error));
        }
        let Some(kind) = ended else { return Ok(Ok(())) };
        let error = RequestError { host: body.host.clone(), kind, token: false };
        // The connection is free during the back-off.
        drop(body);
        Err(AttemptFailure { error, progressed: added >= self.session.shared.config.stall_bytes })
    }

    /// Counts bytes that are in the sink.
    fn written(&self, outcome: std::io::Result<Vec<Range<u64>>>) -> Result<(), BlobError> {
        let ranges =
            outcome.map_err(|cause| BlobError::Sink { digest: self.descriptor.digest.clone(), cause })?;
        for range in ranges {
            let bytes = range.end - range.start;
            self.here().insert(range);
            self.session.watcher.notify(FetchNotice::Bytes(bytes));
        }
        Ok(())
    }

    fn here(&self) -> MutexGuard<'_, ByteRanges> {
        self.here.lock()
    }
}

/// The opened connection, for the first attempt.
fn take(opened: &Mutex<Option<BlobBody>>) -> Option<BlobBody> {
    opened.lock().take()
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
            BlobError::Sink { .. } | BlobError::NoRanges { .. } => None,
        }
    }

    /// The next step for the user.
    pub fn hint(&self) -> Option<Hint> {
        match self {
            BlobError::Fetch(error) => error.hint(),
            BlobError::Sink { .. } | BlobError::NoRanges { .. } => None,
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
