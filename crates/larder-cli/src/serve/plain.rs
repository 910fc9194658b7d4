//! What is asked over plain HTTP: whether the daemon lives, whether it is ready, and its metrics.

use std::sync::Arc;

use tonic::body::Body;
use tonic::codegen::http::{HeaderValue, Method, Response, StatusCode, header};

use super::health::Health;
use super::node::Node;

/// Answers plain requests, on the socket and on loopback.
#[derive(Clone)]
pub(super) struct Plain(pub(super) Arc<Node>);

const TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");

impl Plain {
    /// `/healthz`, `/readyz`, or what does not exist.
    pub(super) fn answer(&self, method: &Method, path: &str) -> Response<Body> {
        if method != Method::GET && method != Method::HEAD {
            return text(StatusCode::METHOD_NOT_ALLOWED, "only GET is answered here\n");
        }
        match path {
            "/healthz" | "/livez" => text(StatusCode::OK, "ok\n"),
            "/readyz" => self.ready(),
            _ => text(StatusCode::NOT_FOUND, "there are /healthz, /readyz and /metrics\n"),
        }
    }

    fn ready(&self) -> Response<Body> {
        match &*self.0.health.borrow() {
            Health::Answers(_) => text(StatusCode::OK, "ok\n"),
            Health::Unknown => text(StatusCode::SERVICE_UNAVAILABLE, "the backend was not asked yet\n"),
            Health::Down { why, .. } => {
                text(StatusCode::SERVICE_UNAVAILABLE, &format!("the backend does not answer: {why}\n"))
            }
        }
    }
}

fn text(status: StatusCode, text: &str) -> Response<Body> {
    let mut response = Response::new(Body::new(text.to_owned()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, TEXT);
    response
}
