//! Routes each request on the socket to its service: CRI, the control API, or plain HTTP.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;

use larder::pull::ManagedBackend;
use larder_api::v1alpha1::control_server::{self, ControlServer};
use larder_cri::proto::image_service_server::{self, ImageServiceServer};
use larder_cri::proto::runtime_service_server::{self, RuntimeServiceServer};
use larder_cri::server::{CriService, ServerVersion, deadline_of, services, within};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::Service as Answers;
use tonic::codegen::http::{Request, Response};

use super::http_handler::HttpHandler;
use super::request_memory::{LimitedBody, RequestKind};
use super::responses::is_grpc;
use crate::control;
use crate::node::cri_pins::CriPins;

/// Everything that is served on the socket.
#[derive(Clone)]
pub(crate) struct Router {
    plain: HttpHandler,
    images: ImageServiceServer<CriService>,
    runtime: RuntimeServiceServer<CriService>,
    control: ControlServer<control::ControlApi>,
}

type RouterFuture = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

impl Router {
    /// Beside plain requests. Callers of CRI share the queue, the pulls in flight and the leases of the node.
    pub(crate) fn new(plain: HttpHandler, control: ControlServer<control::ControlApi>) -> Router {
        let about = ServerVersion { name: "larder".into(), version: env!("CARGO_PKG_VERSION").into() };
        let node = plain.node();
        let pins = Arc::new(CriPins::of(Arc::clone(node)));
        let backend = ManagedBackend::new(Arc::clone(&node.manager)).with_pins(pins);
        let (images, runtime) = services(Arc::new(backend), about);
        Router { plain, images, runtime, control }
    }

    /// Sends a request to the service that its path names.
    pub(super) fn answer(&self, request: Request<LimitedBody>) -> RouterFuture {
        if !is_grpc(&request) {
            let plain = self.plain.clone();
            let (head, _) = request.into_parts();
            return Box::pin(
                async move { Ok(plain.answer(&head.method, head.uri.path(), &head.headers).await) },
            );
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
fn call<S>(service: &S, request: Request<LimitedBody>) -> RouterFuture
where
    S: Answers<Request<LimitedBody>, Response = Response<Body>, Error = Infallible> + Clone,
    S::Future: Send + 'static,
{
    let limit = deadline_of(request.headers());
    let call = service.clone().call(request);
    Box::pin(async move { Ok(within(limit, call).await) })
}

/// What the method of this path takes: a stream, where one loads images, and one message everywhere else.
pub(super) fn takes(path: &str) -> RequestKind {
    match path.strip_prefix('/').and_then(|path| path.strip_prefix(control_server::SERVICE_NAME)) {
        Some("/Load") => RequestKind::Stream,
        _ => RequestKind::One,
    }
}
