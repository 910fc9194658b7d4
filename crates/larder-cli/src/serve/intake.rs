//! Bounds what requests take in memory, over all connections.
//!
//! A message may have 16 MiB and a client thousands of calls under way, so that a bound for each bounds nothing. What a
//! request has sent counts until its call ends. The first part of each request has a budget of its own: giant ones do not
//! keep out those of usual size.

use std::error::Error;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use hyper::body::{Frame, Incoming, SizeHint};
use tonic::Status;
use tonic::codegen::Bytes;

/// How much of each request counts as its first part, in bytes. What kubelet and people ask for fits in.
const FIRST: usize = 64 << 10;
/// What the first parts of all requests may take, in bytes.
const FIRST_PARTS: usize = 16 << 20;
/// What the rest of all requests may take, in bytes: that of three of the largest.
const REST: usize = 48 << 20;

/// What is left for all.
#[derive(Debug, Clone)]
pub(super) struct Intake(Arc<Left>);

#[derive(Debug)]
struct Left {
    first_parts: AtomicUsize,
    rest: AtomicUsize,
}

impl Default for Intake {
    fn default() -> Intake {
        Intake(Arc::new(Left { first_parts: FIRST_PARTS.into(), rest: REST.into() }))
    }
}

impl Intake {
    /// The share of one request, which has nothing yet.
    pub(super) fn share(&self) -> Share {
        let taken = Taken { left: Arc::clone(&self.0), bytes: AtomicUsize::new(0) };
        Share(Arc::new(taken))
    }
}

/// What one request has taken. It is given back with the last clone.
#[derive(Debug, Clone)]
pub(super) struct Share(Arc<Taken>);

#[derive(Debug)]
struct Taken {
    left: Arc<Left>,
    bytes: AtomicUsize,
}

impl Share {
    /// Takes more; false where that is not left. One at a time: a request comes in order.
    fn take(&self, bytes: usize) -> bool {
        let Taken { left, bytes: taken } = &*self.0;
        let before = taken.load(Ordering::Relaxed);
        let after = before.saturating_add(bytes);
        let (first, rest) = (first_of(after) - first_of(before), rest_of(after) - rest_of(before));
        if !take(&left.first_parts, first) {
            return false;
        }
        if !take(&left.rest, rest) {
            left.first_parts.fetch_add(first, Ordering::Relaxed);
            return false;
        }
        taken.store(after, Ordering::Relaxed);
        true
    }
}

fn first_of(bytes: usize) -> usize {
    bytes.min(FIRST)
}

fn rest_of(bytes: usize) -> usize {
    bytes.saturating_sub(FIRST)
}

fn take(left: &AtomicUsize, bytes: usize) -> bool {
    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes)).is_ok()
}

impl Drop for Taken {
    fn drop(&mut self) {
        let bytes = self.bytes.load(Ordering::Relaxed);
        self.left.first_parts.fetch_add(first_of(bytes), Ordering::Relaxed);
        self.left.rest.fetch_add(rest_of(bytes), Ordering::Relaxed);
    }
}

/// The body of a request, as far as there is room for it.
pub(super) struct Received {
    body: Incoming,
    share: Share,
}

impl Received {
    pub(super) fn new(body: Incoming, share: Share) -> Received {
        Received { body, share }
    }
}

impl hyper::body::Body for Received {
    type Data = Bytes;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &frame
            && let Some(data) = frame.data_ref()
            && !self.share.take(data.len())
        {
            let full = Status::resource_exhausted(
                "too many large requests are being received at once: try again, or send less in one call",
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
        let intake = Intake::default();
        let giants: Vec<_> = (0..3).map(|_| intake.share()).collect();
        assert!(giants.iter().all(|giant| giant.take(16 << 20)));
        let another = intake.share();
        assert!(another.take(FIRST));
        assert!(another.take(3 * FIRST), "each giant left its first part");
        assert!(!another.take(1));
        let usual: Vec<_> = (0..FIRST_PARTS / FIRST - 4).map(|_| intake.share()).collect();
        assert!(usual.iter().all(|usual| usual.take(FIRST)));
        assert!(!intake.share().take(1));
        drop((giants, usual));
        assert!(another.take(16 << 20) && intake.share().take(1));
    }

    #[test]
    fn all_is_given_back_with_the_last_clone() {
        let intake = Intake::default();
        let share = intake.share();
        assert!(share.take(1) && share.take(REST));
        assert!(!share.take(FIRST_PARTS), "what is refused takes nothing");
        let clone = share.clone();
        drop(share);
        assert!(!intake.share().take(REST + FIRST));
        drop(clone);
        assert!(intake.share().take(REST + FIRST));
    }
}
