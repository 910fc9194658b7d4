//! The answer to a request that is refused while the process stops.

use larder::hint::Hint;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response, StatusCode};

use super::responses::{is_grpc, text};
use crate::Error;

/// The answer to a request that is refused.
pub(super) fn refusal<B>(request: &Request<B>) -> Response<Body> {
    if !is_grpc(request) {
        return text(StatusCode::SERVICE_UNAVAILABLE, "larder is shutting down\n");
    }
    let failure = Error::unreachable("larder is shutting down and accepts no new calls").hint(
        Hint::from("retry after it starts: by its systemd unit, if it has one, or ").command(["serve"]),
    );
    Status::from(failure).into_http()
}
