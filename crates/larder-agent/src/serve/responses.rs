//! Plain HTTP responses, and how gRPC requests are recognised.

use std::time::Duration;

use tonic::body::Body;
use tonic::codegen::http::{HeaderValue, Request, Response, StatusCode, header};

const TEXT: HeaderValue = HeaderValue::from_static("text/plain; charset=utf-8");

/// Whether the response must be one of gRPC.
pub(super) fn is_grpc<B>(request: &Request<B>) -> bool {
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    kind.is_some_and(|kind| kind.starts_with("application/grpc"))
}

/// Whether a response of gRPC is an error.
pub(super) fn is_failure(response: &Response<Body>) -> bool {
    response.headers().get("grpc-status").is_some_and(|status| status != "0")
}

/// An extension of a response over TCP whose connection may last longer than those of other responses.
#[derive(Clone)]
pub(crate) struct LongResponse(pub(crate) Duration);

/// A response of plain text.
pub(crate) fn text(status: StatusCode, text: &str) -> Response<Body> {
    page(status, text.to_owned(), TEXT)
}

/// A response of this content type.
pub(crate) fn page(status: StatusCode, page: String, kind: HeaderValue) -> Response<Body> {
    let mut response = Response::new(Body::new(page));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}
