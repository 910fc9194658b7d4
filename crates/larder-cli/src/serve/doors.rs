//! Who answers which request that comes through the socket: CRI, larder's own API, or plain HTTP.

use std::convert::Infallible;
use std::pin::Pin;

use hyper::body::Incoming;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};

use super::plain::Plain;

/// Everything that is served on the socket.
#[derive(Clone)]
pub(super) struct Doors {
    pub(super) plain: Plain,
}

type Answer = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

impl Doors {
    /// Sends a request to the service that its path names.
    #[allow(clippy::needless_pass_by_value, reason = "the services, which come next, take it")]
    pub(super) fn answer(&self, request: Request<Incoming>) -> Answer {
        let service = request.uri().path().split('/').nth(1).unwrap_or_default();
        if is_grpc(&request) {
            let unknown = Status::unimplemented(format!("unknown service {service}"));
            return Box::pin(async move { Ok(unknown.into_http()) });
        }
        let answer = self.plain.answer(request.method(), request.uri().path());
        Box::pin(async move { Ok(answer) })
    }
}

fn is_grpc(request: &Request<Incoming>) -> bool {
    let kind = request.headers().get("content-type").and_then(|kind| kind.to_str().ok());
    kind.is_some_and(|kind| kind.starts_with("application/grpc"))
}
