//! Routes each request on the socket to its service: CRI, the control API, or plain HTTP.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::FutureExt as _;
use hyper::body::Frame;
use larder_api::v1::control_server::{self, ControlServer};
use larder_cri::proto::image_service_server::{self, ImageServiceServer};
use larder_cri::proto::runtime_service_server::{self, RuntimeServiceServer};
use larder_cri::server::{CriService, NAME, RuntimeProxy, ServerVersion, deadline_of, services, within};
use larder_snapshots::proto::snapshots_server::SnapshotsServer;
use larder_snapshots::{SERVICE_NAME as SNAPSHOTS, SnapshotService};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response, StatusCode};
use tonic::codegen::{Bytes, Service as Answers};

use super::cri_calls::CriCallCount;
use super::http_handler::HttpHandler;
use super::observed_body::{BodyObserver, observed};
use super::request_memory::{LimitedBody, RequestKind};
use super::responses::{is_grpc, text};
use crate::backend::layer_fetcher::NodeLayerFetcher;
use crate::control;
use crate::error::DEFECT;
use crate::node::cri_images::NodeCriImages;
use crate::node::metrics::NodeMetrics;
use crate::node::{Node, Storage};
use crate::traces::server_span::ServerSpan;
use tracing::Instrument as _;

/// Everything that is served on the socket.
#[derive(Clone)]
pub(crate) struct Router {
    plain: HttpHandler,
    storage: Arc<Storage>,
    metrics: Arc<NodeMetrics>,
    images: ImageServiceServer<CriService>,
    runtime: RuntimeServiceServer<CriService>,
    /// Where the backend is a runtime: what answers calls about containers.
    containers: Option<RuntimeProxy>,
    control: ControlServer<control::ControlApi>,
    /// Where containerd has snapshots in the store.
    snapshots: Option<SnapshotsServer<SnapshotService>>,
}

type RouterFuture = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

impl Router {
    /// Beside plain requests. Callers of CRI share the queue, the pulls in flight and the leases of the node.
    pub(crate) fn new(
        node: &Node,
        plain: HttpHandler,
        control: ControlServer<control::ControlApi>,
    ) -> Router {
        let about = ServerVersion { name: NAME.into(), version: env!("CARGO_PKG_VERSION").into() };
        let (images, runtime) = services(Arc::new(NodeCriImages::of(node)), about);
        let containers = node.storage.runtime().map(|runtime| RuntimeProxy::new(runtime.runtime_channel()));
        let store = node.storage.store().filter(|_| node.settings.now().containerd.snapshotter);
        let fetches_layers = node.settings.now().containerd.fetch_layers;
        let snapshots = store.map(|store| {
            let fetcher = NodeLayerFetcher::new(store.clone(), Arc::clone(&node.pulls), fetches_layers);
            larder_snapshots::service(store.store().clone(), Some(Arc::new(fetcher)))
        });
        let (storage, metrics) = (Arc::clone(&node.storage), Arc::clone(node.observability.metrics()));
        Router { plain, storage, metrics, images, runtime, containers, control, snapshots }
    }

    /// Sends a request to the service that its path names.
    pub(super) fn answer(&self, request: Request<LimitedBody>) -> RouterFuture {
        if !is_grpc(&request) {
            let plain = self.plain.clone();
            let (head, _) = request.into_parts();
            let answer = async move { Ok(plain.answer(&head.method, head.uri.path(), &head.headers).await) };
            return Box::pin(catch_panic(answer, || text(StatusCode::INTERNAL_SERVER_ERROR, DEFECT)));
        }
        let traced = ServerSpan::begin(&request);
        let answer = traced.span().in_scope(|| self.dispatch(request));
        let answer = Box::pin(catch_panic(answer, || Status::internal(DEFECT).into_http()));
        if traced.span().is_disabled() {
            return answer;
        }
        let span = traced.span().clone();
        Box::pin(async move { Ok(traced_response(answer.await?, traced)) }.instrument(span))
    }

    fn dispatch(&self, request: Request<LimitedBody>) -> RouterFuture {
        let name = request.uri().path().split('/').nth(1).unwrap_or_default();
        match (name, &self.snapshots) {
            (image_service_server::SERVICE_NAME, _) => {
                self.counted(request, |request| call(&self.images, request))
            }
            (runtime_service_server::SERVICE_NAME, _) => {
                self.counted(request, |request| self.containers(request))
            }
            (control_server::SERVICE_NAME, _) => call(&self.control, request),
            (SNAPSHOTS, Some(snapshots)) => call(snapshots, request),
            (other, _) => {
                let unknown = Status::unimplemented(format!("unknown service {other}"));
                Box::pin(async move { Ok(unknown.into_http()) })
            }
        }
    }
}

impl Router {
    /// A call over CRI, counted.
    fn counted(
        &self,
        request: Request<LimitedBody>,
        answer: impl FnOnce(Request<LimitedBody>) -> RouterFuture,
    ) -> RouterFuture {
        let count = CriCallCount::begin(Arc::clone(&self.metrics), request.uri().path());
        let answer = answer(request);
        Box::pin(async move { Ok(count.ends_with(answer.await?)) })
    }

    /// A call about containers: forwarded to the runtime, if it changes nothing.
    fn containers(&self, request: Request<LimitedBody>) -> RouterFuture {
        let proxy = self.containers.clone().filter(|_| RuntimeProxy::takes(request.uri().path()));
        let Some(proxy) = proxy else { return call(&self.runtime, request) };
        let (limit, unusable) = (deadline_of(request.headers()), self.storage.unusable());
        Box::pin(async move {
            if let Some(error) = unusable {
                return Ok(Status::unavailable(error.to_string()).into_http());
            }
            Ok(within(limit, async { Ok(proxy.forward(request.map(Body::new)).await) }).await)
        })
    }
}

/// Answers a request whose handler panics with an error of that request. A [state owner](larder::threads::spawn_owner)
/// that panics ends the process instead.
async fn catch_panic(
    answer: impl Future<Output = Result<Response<Body>, Infallible>>,
    failure: fn() -> Response<Body>,
) -> Result<Response<Body>, Infallible> {
    AssertUnwindSafe(answer).catch_unwind().await.unwrap_or_else(|_reported| Ok(failure()))
}

/// Ends the span of the call with the last part of the response.
fn traced_response(response: Response<Body>, mut span: ServerSpan) -> Response<Body> {
    if span.is_complete(&response) { response } else { observed(response, span) }
}

impl BodyObserver for ServerSpan {
    fn observe(&mut self, part: &Result<Frame<Bytes>, Status>) {
        self.note_part(part);
    }
}

/// Whether the call of this request is served while the process stops: it changes nothing, or a container of a present
/// image needs it to start or end.
pub(super) fn is_served_to_the_end<B>(request: &Request<B>) -> bool {
    const READS: [&str; 4] = ["ListImages", "StreamImages", "ImageStatus", "ImageFsInfo"];
    if !is_grpc(request) {
        return request.uri().path() == "/metrics";
    }
    let mut parts = request.uri().path().split('/').skip(1);
    match (parts.next(), parts.next()) {
        (Some(image_service_server::SERVICE_NAME), Some(method)) => READS.contains(&method),
        (Some(runtime_service_server::SERVICE_NAME | SNAPSHOTS), Some(_)) => true,
        _ => false,
    }
}

/// Whether the next process may do what this request asks for: a pull or a removal over CRI.
pub(super) fn can_be_sent_again<B>(request: &Request<B>) -> bool {
    let path = request.uri().path();
    let method =
        path.strip_prefix('/').and_then(|path| path.strip_prefix(image_service_server::SERVICE_NAME));
    is_grpc(request) && matches!(method, Some("/PullImage" | "/RemoveImage"))
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

/// Returns the kind of request that the method of this path has: a stream, where one loads images, and one message
/// everywhere else.
pub(super) fn request_kind(path: &str) -> RequestKind {
    match control_method(path) {
        Some("/Load") => RequestKind::Stream,
        _ => RequestKind::One,
    }
}

/// Returns true for the path of ensures.
pub(super) fn is_ensure(path: &str) -> bool {
    control_method(path) == Some("/Ensure")
}

/// The method of the control API that a path names, with its slash.
fn control_method(path: &str) -> Option<&str> {
    path.strip_prefix('/')?.strip_prefix(control_server::SERVICE_NAME)
}
