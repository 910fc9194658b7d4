//! Who answers which request that comes through the socket: CRI, larder's own API, or plain HTTP.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;

use larder::pull::ManagedBackend;
use larder_control::v1alpha1::control_server::{self, ControlServer};
use larder_cri::proto::image_service_server::{self, ImageServiceServer};
use larder_cri::proto::runtime_service_server::{self, RuntimeServiceServer};
use larder_cri::server::{About, Service, deadline_of, services, within};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::Service as Answers;
use tonic::codegen::http::{Request, Response};

use super::control;
use super::intake::{Received, Takes};
use super::plain::Plain;

/// Everything that is served on the socket.
#[derive(Clone)]
pub(super) struct Doors {
    plain: Plain,
    images: ImageServiceServer<Service>,
    runtime: RuntimeServiceServer<Service>,
    control: ControlServer<control::Service>,
}

type Answer = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

impl Doors {
    /// The doors to the node that answers plain requests. Callers of CRI share its turns, flights and leases.
    pub(super) fn beside(plain: Plain, control: ControlServer<control::Service>) -> Doors {
        let about = About { name: "larder".into(), version: env!("CARGO_PKG_VERSION").into() };
        let backend = ManagedBackend::new(Arc::clone(&plain.node.manager));
        let (images, runtime) = services(Arc::new(backend), about);
        Doors { plain, images, runtime, control }
    }

    /// Sends a request to the service that its path names.
    pub(super) fn answer(&self, request: Request<Received>) -> Answer {
        if !is_grpc(&request) {
            let answer = self.plain.answer(request.method(), request.uri().path());
            return Box::pin(async move { Ok(answer) });
        }
        match request.uri().path().split('/').nth(1).unwrap_or_default() {
            image_service_server::SERVICE_NAME => call(&self.images, request),
            runtime_service_server::SERVICE_NAME => call(&self.runtime, request),
            control_server::SERVICE_NAME => call(&self.control, request),
            other => {
                let unknown = Status::unimplemented(format!("unknown service {other}"));
                Box::pin(async move { Ok(unknown.into_http()) })
            }
        }
    }
}

/// Lets a service answer within the time that its caller gives it.
fn call<S>(service: &S, request: Request<Received>) -> Answer
where
    S: Answers<Request<Received>, Response = Response<Body>, Error = Infallible> + Clone,
    S::Future: Send + 'static,
{
    let limit = deadline_of(request.headers());
    let call = service.clone().call(request);
    Box::pin(async move { Ok(within(limit, call).await) })
}

/// What the method of this path takes: a stream, where one loads images, and one message everywhere else.
pub(super) fn takes(path: &str) -> Takes {
    match path.strip_prefix('/').and_then(|path| path.strip_prefix(control_server::SERVICE_NAME)) {
        Some("/Load") => Takes::Stream,
        _ => Takes::One,
    }
}

/// Whether the answer is one of gRPC's.
pub(super) fn is_grpc<B>(request: &Request<B>) -> bool {
    let kind = request.headers().get("content-type").and_then(|kind| kind.to_str().ok());
    kind.is_some_and(|kind| kind.starts_with("application/grpc"))
}
