//! Counts calls over CRI by method and code.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use hyper::body::{Frame, SizeHint};
use larder_cri::code_name;
use larder_cri::server::known_method;
use tonic::body::Body;
use tonic::codegen::Bytes;
use tonic::codegen::http::{HeaderMap, Response};
use tonic::{Code, Status};

use crate::node::metrics::NodeMetrics;

/// One call, counted when it ends. Dropped before, it counts as canceled by its caller.
pub(super) struct CriCallCount {
    metrics: Arc<NodeMetrics>,
    method: &'static str,
    code: Code,
}

impl CriCallCount {
    /// The call of the method at this path. Methods that CRI does not have share one label.
    pub(super) fn begin(metrics: Arc<NodeMetrics>, path: &str) -> CriCallCount {
        CriCallCount { metrics, method: known_method(path).unwrap_or("other"), code: Code::Cancelled }
    }

    /// The response, which counts the call when its last part has been sent.
    pub(super) fn ends_with(mut self, response: Response<Body>) -> Response<Body> {
        if self.note(response.headers()) {
            return response;
        }
        response.map(|body| Body::new(CountedBody { body, call: self }))
    }

    /// Reads the status of the call, if it is among these fields.
    fn note(&mut self, fields: &HeaderMap) -> bool {
        let status = Status::from_header_map(fields);
        self.code = status.as_ref().map_or(self.code, Status::code);
        status.is_some()
    }
}

impl Drop for CriCallCount {
    fn drop(&mut self) {
        self.metrics.cri_called(self.method, code_name(self.code));
    }
}

/// A body whose trailers have the status of its call.
struct CountedBody {
    body: Body,
    call: CriCallCount,
}

impl hyper::body::Body for CountedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        match &frame {
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(trailers) = frame.trailers_ref() {
                    self.call.note(trailers);
                }
            }
            Poll::Ready(Some(Err(status))) => self.call.code = status.code(),
            Poll::Ready(None) | Poll::Pending => {}
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
