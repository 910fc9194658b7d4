//! What is asked over plain HTTP: whether the daemon lives, whether it is ready, and its metrics.

use std::sync::Arc;

use tonic::body::Body;
use tonic::codegen::http::{HeaderValue, Method, Response, StatusCode, header};

use super::connections::Connections;
use super::health::Health;
use super::metrics::CONTENT_TYPE;
use super::node::Node;

/// Answers plain requests, on the socket and on loopback.
#[derive(Clone)]
pub(super) struct Plain {
    pub(super) node: Arc<Node>,
    pub(super) connections: Connections,
}

const TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");

impl Plain {
    /// `/healthz`, `/readyz`, `/metrics`, or what does not exist.
    pub(super) fn answer(&self, method: &Method, path: &str) -> Response<Body> {
        if method != Method::GET && method != Method::HEAD {
            return text(StatusCode::METHOD_NOT_ALLOWED, "only GET is answered here\n");
        }
        match path {
            "/healthz" | "/livez" => text(StatusCode::OK, "ok\n"),
            "/readyz" => self.ready(),
            "/metrics" => self.metrics(),
            _ => text(StatusCode::NOT_FOUND, "there are /healthz, /readyz and /metrics\n"),
        }
    }

    fn metrics(&self) -> Response<Body> {
        match self.node.metrics.text(&self.node, &self.connections) {
            Ok(page) => page_of(StatusCode::OK, page, HeaderValue::from_static(CONTENT_TYPE)),
            Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, &format!("no metrics: {error}\n")),
        }
    }

    fn ready(&self) -> Response<Body> {
        match &*self.node.health.borrow() {
            Health::Answers(_) => text(StatusCode::OK, "ok\n"),
            Health::Unknown => text(StatusCode::SERVICE_UNAVAILABLE, "the backend was not asked yet\n"),
            Health::Down { why, .. } => {
                text(StatusCode::SERVICE_UNAVAILABLE, &format!("the backend does not answer: {why}\n"))
            }
        }
    }
}

fn text(status: StatusCode, text: &str) -> Response<Body> {
    page_of(status, text.to_owned(), TEXT)
}

fn page_of(status: StatusCode, page: String, kind: HeaderValue) -> Response<Body> {
    let mut response = Response::new(Body::new(page));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}
