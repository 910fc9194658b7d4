//! Bounds what requests take in memory, over all connections.
//!
//! A message may have 16 MiB and a client thousands of calls under way, so that a bound for each bounds nothing. A
//! message counts until its call ends; in a call that takes a stream, until the next one begins. The first part of each
//! has a budget of its own: giant ones do not keep out those of usual size.

use std::error::Error;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use hyper::body::{Frame, Incoming, SizeHint};
use tonic::Status;
use tonic::codegen::Bytes;

/// How much of each message counts as its first part, in bytes. What kubelet and people ask for fits in.
const FIRST: usize = 64 << 10;
/// Limit of the first parts of all requests, in bytes.
const FIRST_PARTS: usize = 16 << 20;
/// Limit of the rest of all requests, in bytes: that of three of the largest.
const REST: usize = 48 << 20;

/// Memory for all requests.
#[derive(Debug, Clone)]
pub(crate) struct RequestMemoryLimit(Arc<FreeRequestMemory>);

#[derive(Debug)]
struct FreeRequestMemory {
    first_parts: AtomicUsize,
    rest: AtomicUsize,
}

impl Default for RequestMemoryLimit {
    fn default() -> RequestMemoryLimit {
        RequestMemoryLimit(Arc::new(FreeRequestMemory { first_parts: FIRST_PARTS.into(), rest: REST.into() }))
    }
}

impl RequestMemoryLimit {
    /// The share of one request, which has nothing yet.
    pub(super) fn share(&self) -> MemoryReservation {
        let reserved = ReservedBytes { free: Arc::clone(&self.0), bytes: AtomicUsize::new(0) };
        MemoryReservation(Arc::new(reserved))
    }
}

/// Memory that one request has reserved. It is given back with the last clone.
#[derive(Debug, Clone)]
pub(super) struct MemoryReservation(Arc<ReservedBytes>);

#[derive(Debug)]
struct ReservedBytes {
    free: Arc<FreeRequestMemory>,
    bytes: AtomicUsize,
}

impl MemoryReservation {
    /// Reserves more; `false` if the limit is reached. Called by one task: the data of a request arrives in order.
    fn reserve(&self, bytes: usize) -> bool {
        let ReservedBytes { free, bytes: reserved } = &*self.0;
        let before = reserved.load(Ordering::Relaxed);
        let after = before.saturating_add(bytes);
        let (first, rest) = (first_of(after) - first_of(before), rest_of(after) - rest_of(before));
        if !reserve(&free.first_parts, first) {
            return false;
        }
        if !reserve(&free.rest, rest) {
            free.first_parts.fetch_add(first, Ordering::Relaxed);
            return false;
        }
        reserved.store(after, Ordering::Relaxed);
        true
    }
}

impl ReservedBytes {
    /// Releases all bytes.
    fn release(&self) {
        let bytes = self.bytes.swap(0, Ordering::Relaxed);
        self.free.first_parts.fetch_add(first_of(bytes), Ordering::Relaxed);
        self.free.rest.fetch_add(rest_of(bytes), Ordering::Relaxed);
    }
}

fn first_of(bytes: usize) -> usize {
    bytes.min(FIRST)
}

fn rest_of(bytes: usize) -> usize {
    bytes.saturating_sub(FIRST)
}

fn reserve(free: &AtomicUsize, bytes: usize) -> bool {
    free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| free.checked_sub(bytes)).is_ok()
}

impl Drop for ReservedBytes {
    fn drop(&mut self) {
        self.release();
    }
}

/// Kind of a call's request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestKind {
    /// One message, which lives until the call ends. Data after it has no owner.
    One,
    /// A stream: when the next message begins, the reader owns the previous one.
    Stream,
}

/// Where one message of gRPC ends and the next begins: each has a head of five bytes, the last four its length.
#[derive(Debug)]
struct GrpcFrameReader {
    kind: RequestKind,
    head: Vec<u8>,
    /// Bytes of the message that have not arrived.
    missing: usize,
}

impl GrpcFrameReader {
    fn of(kind: RequestKind) -> GrpcFrameReader {
        GrpcFrameReader { kind, head: Vec::new(), missing: 0 }
    }

    /// Reserves memory for data that arrived; `false` if the limit is reached.
    fn reserve(&mut self, mut data: &[u8], share: &MemoryReservation) -> bool {
        while let [byte, rest @ ..] = data {
            if self.missing == 0 {
                if self.head.is_empty() && self.kind == RequestKind::Stream {
                    share.0.release();
                }
                self.head.push(*byte);
                data = rest;
                if let [_, a, b, c, d] = self.head[..] {
                    self.missing = u32::from_be_bytes([a, b, c, d]) as usize;
                    self.head.clear();
                }
                continue;
            }
            let now = self.missing.min(data.len());
            if !share.reserve(now) {
                return false;
            }
            (self.missing, data) = (self.missing - now, &data[now..]);
        }
        true
    }
}

/// The body of a request, within the limit of memory.
pub(super) struct LimitedBody {
    body: Incoming,
    framing: GrpcFrameReader,
    share: MemoryReservation,
}

impl LimitedBody {
    pub(super) fn new(body: Incoming, kind: RequestKind, share: MemoryReservation) -> LimitedBody {
        LimitedBody { body, framing: GrpcFrameReader::of(kind), share }
    }
}

impl hyper::body::Body for LimitedBody {
    type Data = Bytes;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = &mut *self;
        let frame = Pin::new(&mut this.body).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &frame
            && let Some(data) = frame.data_ref()
            && !this.framing.reserve(data, &this.share)
        {
            let full = Status::resource_exhausted(
                "too many concurrent large requests: retry, or send less in one call",
            );
            return Poll::Ready(Some(Err(full.into())));
        }
        frame.map_err(Into::into)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn giants_share_a_bound_and_do_not_keep_out_what_is_of_usual_size() {
        let intake = RequestMemoryLimit::default();
        let giants: Vec<_> = (0..3).map(|_| intake.share()).collect();
        assert!(giants.iter().all(|giant| giant.reserve(16 << 20)));
        let another = intake.share();
        assert!(another.reserve(FIRST));
        assert!(another.reserve(3 * FIRST), "each giant left its first part");
        assert!(!another.reserve(1));
        let usual: Vec<_> = (0..FIRST_PARTS / FIRST - 4).map(|_| intake.share()).collect();
        assert!(usual.iter().all(|usual| usual.reserve(FIRST)));
        assert!(!intake.share().reserve(1));
        drop((giants, usual));
        assert!(another.reserve(16 << 20) && intake.share().reserve(1));
    }

    fn message(bytes: usize) -> Vec<u8> {
        let length = u32::try_from(bytes).unwrap().to_be_bytes();
        [&[0][..], &length, &vec![7; bytes]].concat()
    }

    #[test]
    fn the_one_message_of_a_call_counts_whatever_follows() {
        let (intake, mut framing) = (RequestMemoryLimit::default(), GrpcFrameReader::of(RequestKind::One));
        let share = intake.share();
        assert!(framing.reserve(&[message(3 * FIRST), message(0), message(1)].concat(), &share));
        assert_eq!(share.0.bytes.load(Ordering::Relaxed), 3 * FIRST + 1);
        assert!(
            !framing.reserve(&message(REST + FIRST), &share),
            "data without an owner counts until it is dropped"
        );
    }

    #[test]
    fn a_streamed_message_is_limited_however_it_is_split() {
        let all = [message(0), message(3 * FIRST), message(1), message(20 << 20), message(5)].concat();
        for cut in [1 << 20, 4099, all.len()] {
            let intake = RequestMemoryLimit::default();
            let (share, mut framing) = (intake.share(), GrpcFrameReader::of(RequestKind::Stream));
            for _ in 0..3 {
                assert!(
                    all.chunks(cut).all(|data| framing.reserve(data, &share)),
                    "more than there is, in all"
                );
            }
            assert_eq!(share.0.bytes.load(Ordering::Relaxed), 5);
        }
        let (intake, mut framing) = (RequestMemoryLimit::default(), GrpcFrameReader::of(RequestKind::Stream));
        let share = intake.share();
        assert!(!framing.reserve(&message(REST + FIRST + 1), &share), "a single one that is too large");
    }

    #[test]
    fn all_is_given_back_with_the_last_clone() {
        let intake = RequestMemoryLimit::default();
        let share = intake.share();
        assert!(share.reserve(1) && share.reserve(REST));
        assert!(!share.reserve(FIRST_PARTS), "what is refused takes nothing");
        let clone = share.clone();
        drop(share);
        assert!(!intake.share().reserve(REST + FIRST));
        drop(clone);
        assert!(intake.share().reserve(REST + FIRST));
    }
}
