//! Plain HTTP: liveness, readiness, and metrics.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, future};

use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::spawn_blocking;
use tokio::time::{self, Instant};
use tonic::body::Body;
use tonic::codegen::http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};

use super::connections::{ConnectionEntry, Connections};
use super::responses::{LongResponse, page, text};
#[cfg(feature = "dashboard")]
use crate::dashboard::Dashboard;
use crate::node::Node;
use crate::node::health::BackendHealth;
use crate::node::metrics::{self, ExpositionFormat};

/// Answers plain requests, on the socket and on loopback.
#[derive(Clone)]
pub(crate) struct HttpHandler {
    node: Arc<Node>,
    connections: Connections,
    /// Slot of one page of metrics: while a disk hangs, more would take a thread each.
    measuring: Arc<Semaphore>,
    /// Requests for metrics, waiting ones included.
    scrapes: Arc<Semaphore>,
    /// The page for browsers, over TCP alone.
    #[cfg(feature = "dashboard")]
    dashboard: Option<Arc<Dashboard>>,
}

/// How many clients are connected over TCP at once. Clients that have sent no request leave for others.
const AT_ONCE: usize = 64;
/// How many requests for metrics there are at once. Those for health and readiness wait for nothing.
const SCRAPES: usize = 8;
/// How long one of them may take to send the head of its request.
const HEAD_WITHIN: Duration = Duration::from_secs(5);
/// How long one of them may take.
const WITHIN: Duration = Duration::from_secs(10);
/// How long to wait after the system had no room for one more.
const NO_ROOM: Duration = Duration::from_millis(100);

impl HttpHandler {
    /// Answers about this node.
    pub(crate) fn new(node: Arc<Node>, connections: Connections) -> HttpHandler {
        let [measuring, scrapes] = [1, SCRAPES].map(|count| Arc::new(Semaphore::new(count)));
        HttpHandler {
            node,
            connections,
            measuring,
            scrapes,
            #[cfg(feature = "dashboard")]
            dashboard: None,
        }
    }

    /// Serves this dashboard, too.
    #[cfg(feature = "dashboard")]
    pub(crate) fn with_dashboard(self, dashboard: Option<Dashboard>) -> HttpHandler {
        HttpHandler { dashboard: dashboard.map(Arc::new), ..self }
    }

    /// Serves on loopback until dropped; without a listener it only waits.
    pub(crate) async fn serve(&self, listener: Option<TcpListener>) {
        let Some(listener) = listener else { return future::pending().await };
        #[cfg(feature = "dashboard")]
        if let Some(dashboard) = &self.dashboard {
            tokio::join!(self.accept(&listener), dashboard.run());
            return;
        }
        self.accept(&listener).await;
    }

    async fn accept(&self, listener: &TcpListener) {
        let clients = Connections::limited(AT_ONCE);
        loop {
            let stream = match listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::debug!("cannot accept a metrics connection: {error}");
                    time::sleep(NO_ROOM).await;
                    continue;
                }
            };
            clients.wait_for_slot().await;
            let (plain, client) = (self.clone(), clients.enter());
            let clients = clients.clone();
            tokio::spawn(async move { plain.serve_one(stream, &clients, client).await });
        }
    }

    async fn serve_one(&self, stream: TcpStream, clients: &Connections, client: ConnectionEntry) {
        let Ok(local) = stream.local_addr() else { return };
        let (lifetime, more_time) = watch::channel(WITHIN);
        let service = service_fn(|request: Request<Incoming>| {
            let call = clients.begin(client.id, request.uri().path());
            let lifetime = &lifetime;
            async move {
                let _call = call;
                let response = self.answer_over_tcp(&request, local.ip()).await;
                if let Some(LongResponse(within)) = response.extensions().get() {
                    lifetime.send_replace(*within);
                }
                Ok::<_, Infallible>(response)
            }
        });
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(HEAD_WITHIN).keep_alive(false);
        tokio::select! {
            served = http.serve_connection(TokioIo::new(stream), service) => if let Err(error) = served {
                tracing::debug!("metrics connection failed: {error}");
            },
            () = ended(more_time) => {}
            () = client.leave.notified() => {}
        }
    }

    #[cfg(feature = "dashboard")]
    async fn answer_over_tcp(&self, request: &Request<Incoming>, local: IpAddr) -> Response<Body> {
        match &self.dashboard {
            Some(dashboard) if Dashboard::serves_path(request.uri().path()) => {
                dashboard.answer(request, local).await
            }
            _ => self.answer(request.method(), request.uri().path(), request.headers()).await,
        }
    }

    #[cfg(not(feature = "dashboard"))]
    async fn answer_over_tcp(&self, request: &Request<Incoming>, _: IpAddr) -> Response<Body> {
        self.answer(request.method(), request.uri().path(), request.headers()).await
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
        let Ok(_place) = self.scrapes.try_acquire() else {
            return text(StatusCode::SERVICE_UNAVAILABLE, "too many requests for metrics at once\n");
        };
        // The semaphore is never closed.
        let slot = Arc::clone(&self.measuring).acquire_owned().await.ok();
        let HttpHandler { node, connections, .. } = self.clone();
        let disks = node.collection.filesystems().await;
        let exposed = spawn_blocking(move || {
            let _slot = slot;
            metrics::exposition(&node, &connections, &disks, format)
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
        match &*self.node.storage.health().state() {
            BackendHealth::Up(_) => match self.node.settings.degraded() {
                // A rollout of such settings must not go on.
                Some(why) => text(StatusCode::SERVICE_UNAVAILABLE, &format!("degraded: {why}\n")),
                None => text(StatusCode::OK, "ok\n"),
            },
            BackendHealth::Unknown => {
                text(StatusCode::SERVICE_UNAVAILABLE, "the backend is not checked yet\n")
            }
            BackendHealth::Down { why, .. } => {
                text(StatusCode::SERVICE_UNAVAILABLE, &format!("the backend is unavailable: {why}\n"))
            }
        }
    }
}

/// Done once the connection has lasted for as long as it may, which can be extended.
async fn ended(mut lifetime: watch::Receiver<Duration>) {
    let began = Instant::now();
    loop {
        let within = *lifetime.borrow_and_update();
        tokio::select! {
            () = time::sleep_until(began + within) => return,
            Ok(()) = lifetime.changed() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use larder_testkit::fake_backend::FakeBackend;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;
    use crate::node::testing;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn silent_clients_and_scrapes_that_hang_do_not_block_health() {
        let dir = tempfile::tempdir().unwrap();
        let node = testing::node(&FakeBackend::new(), dir.path(), None, |_| {});
        let handler = HttpHandler::new(Arc::new(node), Connections::default());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = handler.clone();
        let server = tokio::spawn(async move { serving.serve(Some(listener)).await });
        // As if a disk hangs while metrics are collected.
        let _hangs = Arc::clone(&handler.measuring).acquire_owned().await.unwrap();
        let mut clients = Vec::new();
        for number in 0..4 * AT_ONCE {
            let mut client = TcpStream::connect(address).await.unwrap();
            match number {
                0..SCRAPES => client.write_all(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap(),
                _ if number % 2 == 0 => client.write_all(b"GET /hea").await.unwrap(),
                _ => {}
            }
            clients.push(client);
        }
        for (path, status) in [("/healthz", "200"), ("/readyz", "503"), ("/metrics", "503")] {
            let mut client = TcpStream::connect(address).await.unwrap();
            let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n");
            client.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            let read = time::timeout(HEAD_WITHIN / 2, client.read_to_string(&mut answer)).await;
            read.unwrap_or_else(|_| panic!("{path} waits for other clients")).unwrap();
            assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{path}: {answer}");
        }
        server.abort();
    }
}
