//! One HTTP/2 connection to a Unix socket: opened by the first call, shared by all, reopened after a loss.
//!
//! Promises: opening ends within the connect timeout, and only a server that sends an HTTP/2 preface counts as open; a
//! request that was certainly not sent is retried once over a new connection; callers that wait for the same
//! attempt share its failure. There is no back-off between attempts: each one belongs to a call, and a local
//! socket refuses at once.
//!
//! Any gRPC client can use it: [`CriBackend`](crate::CriBackend) does, and so does larder's command line.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use std::{fmt, io};

use futures_util::future::BoxFuture;
use http_body_util::BodyExt as _;
use http_body_util::combinators::MapErr;
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use larder::backend::EndpointFailure;
use larder::trace_context;
use tokio::net::UnixStream;
use tokio::sync::Mutex;
use tokio::time::{self, Instant};
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::{Code, Status};
use tracing::field::Empty;
use tracing::{Instrument as _, Span};

use crate::endpoint::Endpoint;
use crate::preface::{PrefaceStream, ServerPreface};
use crate::status::code_name;

/// Largest set of response headers, in bytes. Error messages travel there, and some are long.
const MAX_HEADER_BYTES: u32 = 1 << 20;

/// How long the check of a new connection may take.
const CHECK_WITHIN: Duration = Duration::from_secs(1);

/// Interval between attempts while the queue of a listening socket is full.
const QUEUE_RETRY: Duration = Duration::from_millis(50);

/// The connection. Clones share it.
#[derive(Clone)]
pub struct CriChannel(Arc<CriChannelInner>);

struct CriChannelInner {
    endpoint: Endpoint,
    connect_timeout: Duration,
    check: Option<ConnectionCheck>,
    state: Mutex<CachedConnection>,
}

/// Looks at the server of a new connection through a channel of its own, and returns why it must not be used.
pub(crate) type ConnectionCheck = fn(CriChannel) -> BoxFuture<'static, Option<EndpointFailure>>;

#[derive(Default)]
struct CachedConnection {
    sender: Option<SendRequest<Body>>,
    /// The last failed attempt and its time.
    failure: Option<(Instant, EndpointFailure)>,
}

impl CriChannel {
    /// A connection that is not established yet.
    pub fn new(endpoint: Endpoint, connect_timeout: Duration) -> CriChannel {
        CriChannel::with(endpoint, connect_timeout, None, CachedConnection::default())
    }

    /// Returns a channel whose new connections are used only if they pass the check.
    pub(crate) fn checked(
        endpoint: Endpoint,
        connect_timeout: Duration,
        check: Option<ConnectionCheck>,
    ) -> CriChannel {
        CriChannel::with(endpoint, connect_timeout, check, CachedConnection::default())
    }

    fn with(
        endpoint: Endpoint,
        connect_timeout: Duration,
        check: Option<ConnectionCheck>,
        connection: CachedConnection,
    ) -> CriChannel {
        let state = Mutex::new(connection);
        CriChannel(Arc::new(CriChannelInner { endpoint, connect_timeout, check, state }))
    }

    /// The endpoint.
    pub fn endpoint(&self) -> &Endpoint {
        &self.0.endpoint
    }

    /// Opens the connection unless it is open.
    pub async fn open_now(&self) -> Result<(), Status> {
        match self.sender().await {
            Ok(_) => Ok(()),
            Err(found) => Err(unreachable_status(&self.0.endpoint, found)),
        }
    }

    /// The open connection, or a new one.
    async fn sender(&self) -> Result<SendRequest<Body>, EndpointFailure> {
        let asked = Instant::now();
        // Lets the connection's task notice that the server closed the connection.
        tokio::task::yield_now().await;
        let mut state = self.0.state.lock().await;
        if let Some(sender) = state.sender.as_ref().filter(|sender| !sender.is_closed()) {
            return Ok(sender.clone());
        }
        if let Some((_, failure)) = state.failure.as_ref().filter(|(failed, _)| *failed > asked) {
            return Err(failure.clone());
        }
        match self.connect().await {
            Ok(sender) => {
                state.sender = Some(sender.clone());
                Ok(sender)
            }
            Err(failure) => {
                state.sender = None;
                state.failure = Some((Instant::now(), failure.clone()));
                Err(failure)
            }
        }
    }

    async fn connect(&self) -> Result<SendRequest<Body>, EndpointFailure> {
        let within = self.0.connect_timeout;
        let sender = match time::timeout(within, self.open()).await {
            Ok(opened) => opened?,
            Err(_) => return Err(EndpointFailure::Silent { after: within }),
        };
        if let Some(check) = self.0.check {
            let connection = CachedConnection { sender: Some(sender.clone()), failure: None };
            let channel = CriChannel::with(self.0.endpoint.clone(), within, None, connection);
            // A server that does not answer soon is not known to be unusable.
            if let Ok(Some(failure)) = time::timeout(CHECK_WITHIN.min(within), check(channel)).await {
                return Err(failure);
            }
        }
        Ok(sender)
    }

    async fn open(&self) -> Result<SendRequest<Body>, EndpointFailure> {
        let stream = self.dial().await.map_err(|error| self.explain(&error))?;
        let (stream, greeting) = PrefaceStream::new(stream);
        let (sender, connection) = http2::Builder::new(TokioExecutor::new())
            .max_header_list_size(MAX_HEADER_BYTES)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|error| EndpointFailure::ConnectionLost { detail: error.to_string() })?;
        // It ends once all senders are dropped or the server closes; its error also reaches each open call.
        tokio::spawn(async move {
            let _ = connection.await;
        });
        match greeting.await {
            Ok(ServerPreface::Http2) => Ok(sender),
            Ok(ServerPreface::Foreign(detail)) => Err(EndpointFailure::NotGrpc { detail }),
            Ok(ServerPreface::Closed(detail)) => Err(EndpointFailure::ConnectionLost { detail }),
            Err(_) => Err(EndpointFailure::ConnectionLost { detail: "connection closed immediately".into() }),
        }
    }

    /// Connects. A full queue means a slow server, so it retries until the time limit.
    async fn dial(&self) -> io::Result<UnixStream> {
        let (path, _directory) = self.0.endpoint.address()?;
        loop {
            match UnixStream::connect(&path).await {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => time::sleep(QUEUE_RETRY).await,
                done => return done,
            }
        }
    }

    fn explain(&self, error: &io::Error) -> EndpointFailure {
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => EndpointFailure::Missing,
            io::ErrorKind::PermissionDenied => EndpointFailure::Denied,
            io::ErrorKind::ConnectionRefused if self.0.endpoint.is_socket() => EndpointFailure::Refused,
            io::ErrorKind::ConnectionRefused => EndpointFailure::NotASocket,
            _ => EndpointFailure::ConnectionLost { detail: error.to_string() },
        }
    }

    async fn send(self, mut request: http::Request<Body>) -> Result<http::Response<ResponseBody>, Status> {
        let mut retried = false;
        loop {
            let mut sender =
                self.sender().await.map_err(|found| unreachable_status(&self.0.endpoint, found))?;
            match sender.try_send_request(request).await {
                Ok(response) => {
                    return Ok(response.map(|body| body.map_err(lost as fn(hyper::Error) -> Status)));
                }
                Err(mut error) => match error.take_message() {
                    Some(unsent) if !retried => {
                        retried = true;
                        request = unsent;
                    }
                    _ => return Err(lost_at(&self.0.endpoint, &error.into_error())),
                },
            }
        }
    }
}

/// The body of a response; its errors are statuses already.
pub type ResponseBody = MapErr<Incoming, fn(hyper::Error) -> Status>;

impl Service<http::Request<Body>> for CriChannel {
    type Response = http::Response<ResponseBody>;
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Status>> + Send>>;

    /// Always ready: connecting is part of the call.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let span = call_span(request.uri().path().trim_start_matches('/'));
        if span.is_disabled() {
            return Box::pin(self.clone().send(with_trace_context(request)));
        }
        let request = span.in_scope(|| with_trace_context(request));
        let call = self.clone().send(request).instrument(span.clone());
        Box::pin(async move {
            let response = call.await;
            let failure = match &response {
                Ok(response) => Status::from_header_map(response.headers()),
                Err(status) => Some(status.clone()),
            };
            if let Some(status) = failure.filter(|status| status.code() != Code::Ok) {
                trace_context::fail(&span, code_name(status.code()), status.message());
            }
            response
        })
    }
}

/// The span of a call, until the headers of the response; named as the OpenTelemetry instrumentation of gRPC names it.
fn call_span(method: &str) -> Span {
    tracing::trace_span!(
        "call",
        otel.name = method,
        otel.kind = "client",
        otel.status_description = Empty,
        rpc.system.name = "grpc",
        rpc.method = method,
        error.type = Empty,
    )
}

/// The request as part of the current trace.
fn with_trace_context(mut request: http::Request<Body>) -> http::Request<Body> {
    for (name, value) in trace_context::headers() {
        if let Ok(value) = http::HeaderValue::from_str(&value) {
            request.headers_mut().insert(name, value);
        }
    }
    request
}

/// The failure of the endpoint, as the source of a status.
#[derive(Debug)]
pub struct EndpointUnavailable(pub EndpointFailure);

impl fmt::Display for EndpointUnavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for EndpointUnavailable {}

fn unreachable_status(endpoint: &Endpoint, found: EndpointFailure) -> Status {
    let mut status = Status::new(Code::Unavailable, format!("{endpoint}: {found}"));
    status.set_source(Arc::new(EndpointUnavailable(found)));
    status
}

/// The loss of the connection during a call, as the source of a status.
#[derive(Debug)]
pub struct ConnectionBroken(pub String);

impl fmt::Display for ConnectionBroken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ConnectionBroken {}

#[allow(clippy::needless_pass_by_value, reason = "used as a function that maps errors")]
fn lost(error: hyper::Error) -> Status {
    broken(&error, "connection lost")
}

fn lost_at(endpoint: &Endpoint, error: &hyper::Error) -> Status {
    broken(error, &format!("{endpoint}: connection lost"))
}

fn broken(error: &hyper::Error, what: &str) -> Status {
    let mut detail = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        detail = format!("{detail}: {error}");
        cause = error.source();
    }
    let mut status = Status::new(Code::Unavailable, format!("{what}: {detail}"));
    status.set_source(Arc::new(ConnectionBroken(detail)));
    status
}
