//! A body of a response that keeps what belongs to its call until it is sent or dropped.

use std::pin::Pin;
use std::task::{Context, Poll};

use hyper::body::{Frame, SizeHint};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::Bytes;
use tonic::codegen::http::Response;

/// Observer that is kept with a body.
pub(super) trait BodyObserver: Send + Unpin + 'static {
    /// A part of the body is about to be sent, or failed.
    fn observe(&mut self, _part: &Result<Frame<Bytes>, Status>) {}
}

/// Keeps `observer` with the body of a response.
pub(super) fn observed(response: Response<Body>, observer: impl BodyObserver) -> Response<Body> {
    response.map(|body| Body::new(ObservedBody { body, observer }))
}

struct ObservedBody<O> {
    body: Body,
    observer: O,
}

impl<O: BodyObserver> hyper::body::Body for ObservedBody<O> {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let part = Pin::new(&mut self.body).poll_frame(context);
        if let Poll::Ready(Some(part)) = &part {
            self.observer.observe(part);
        }
        part
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
