//! What is asked over plain HTTP: whether the daemon lives, whether it is ready, and its metrics.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, future};

use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time;
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};

use super::connections::Connections;
use super::responses::{page, text};
use crate::node::Node;
use crate::node::health::BackendHealth;
use crate::node::metrics::{self, ExpositionFormat};

/// Answers plain requests, on the socket and on loopback.
#[derive(Clone)]
pub(crate) struct HttpHandler {
    node: Arc<Node>,
    connections: Connections,
    /// The turn of one page of metrics: while a disk hangs, more would take a thread each.
    measuring: Arc<Semaphore>,
}

/// How many clients are served over TCP at once.
const AT_ONCE: usize = 16;
/// How long one of them may take.
const WITHIN: Duration = Duration::from_secs(10);
/// How long to wait after the system had no room for one more.
const NO_ROOM: Duration = Duration::from_millis(100);

impl HttpHandler {
    /// Answers about this node.
    pub(crate) fn new(node: Arc<Node>, connections: Connections) -> HttpHandler {
        HttpHandler { node, connections, measuring: Arc::new(Semaphore::new(1)) }
    }

    /// The node.
    pub(super) fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// Serves on loopback until dropped; without a listener it only waits.
    pub(super) async fn serve(&self, listener: Option<TcpListener>) {
        let Some(listener) = listener else { return future::pending().await };
        let room = Arc::new(Semaphore::new(AT_ONCE));
        loop {
            // The semaphore is never closed.
            let Ok(place) = Arc::clone(&room).acquire_owned().await else { return };
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::debug!("cannot accept a metrics connection: {error}");
                    time::sleep(NO_ROOM).await;
                    continue;
                }
            };
            let plain = self.clone();
            tokio::spawn(async move {
                let service = service_fn(|request: Request<Incoming>| {
                    let plain = plain.clone();
                    async move {
                        let (method, path) = (request.method(), request.uri().path());
                        Ok::<_, Infallible>(plain.answer(method, path, request.headers()).await)
                    }
                });
                let mut http = http1::Builder::new();
                http.timer(TokioTimer::new()).header_read_timeout(WITHIN).keep_alive(false);
                let served = time::timeout(WITHIN, http.serve_connection(TokioIo::new(stream), service));
                if let Ok(Err(error)) = served.await {
                    tracing::debug!("metrics connection failed: {error}");
                }
                drop(place);
            });
        }
    }

    /// Answers `/healthz`, `/livez`, `/readyz` and `/metrics`; 404 for other paths.
    pub(super) async fn answer(&self, method: &Method, path: &str, headers: &HeaderMap) -> Response<Body> {
        if method != Method::GET && method != Method::HEAD {
            return text(StatusCode::METHOD_NOT_ALLOWED, "only GET is supported\n");
        }
        match path {
            "/healthz" | "/livez" => text(StatusCode::OK, "ok\n"),
            "/readyz" => self.ready(),
            "/metrics" => self.metrics(ExpositionFormat::accepted(headers)).await,
            _ => text(StatusCode::NOT_FOUND, "not found; use /healthz, /readyz or /metrics\n"),
        }
    }

    async fn metrics(&self, format: ExpositionFormat) -> Response<Body> {
        // The semaphore is never closed.
        let turn = Arc::clone(&self.measuring).acquire_owned().await.ok();
        let HttpHandler { node, connections, .. } = self.clone();
        let disk = node.image_filesystem().await;
        let exposed = spawn_blocking(move || {
            let _turn = turn;
            metrics::exposition(&node, &connections, disk, format)
        });
        let failed = |error: &dyn fmt::Display| {
            text(StatusCode::INTERNAL_SERVER_ERROR, &format!("cannot collect metrics: {error}\n"))
        };
        match exposed.await {
            Ok(Ok(metrics)) => page(StatusCode::OK, metrics, HeaderValue::from_static(format.content_type())),
            Ok(Err(error)) => failed(&error),
            Err(error) => failed(&error),
        }
    }

    fn ready(&self) -> Response<Body> {
        match &*self.node.health.borrow() {
            BackendHealth::Up(_) => text(StatusCode::OK, "ok\n"),
            BackendHealth::Unknown => {
                text(StatusCode::SERVICE_UNAVAILABLE, "the backend is not checked yet\n")
            }
            BackendHealth::Down { why, .. } => {
                text(StatusCode::SERVICE_UNAVAILABLE, &format!("the backend is unavailable: {why}\n"))
            }
        }
    }
}
