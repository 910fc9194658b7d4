//! Counts calls over CRI by method and code.

use std::sync::Arc;

use hyper::body::Frame;
use larder_cri::code_name;
use larder_cri::server::known_method;
use tonic::body::Body;
use tonic::codegen::Bytes;
use tonic::codegen::http::{HeaderMap, Response};
use tonic::{Code, Status};

use super::observed_body::{BodyObserver, observed};
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
        observed(response, self)
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

/// The trailers have the status of the call.
impl BodyObserver for CriCallCount {
    fn observe(&mut self, part: &Result<Frame<Bytes>, Status>) {
        match part {
            Ok(frame) => {
                if let Some(trailers) = frame.trailers_ref() {
                    self.note(trailers);
                }
            }
            Err(status) => self.code = status.code(),
        }
    }
}
