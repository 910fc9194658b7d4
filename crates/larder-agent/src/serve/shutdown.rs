//! Answers clients while the process stops: reads are served to the end, because a pod that starts at that time looks at its
//! image; everything else is refused at once and with the reason.

use std::convert::Infallible;
use std::pin::pin;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use larder::hint::Hint;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio::time;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response, StatusCode};

use super::request_memory::{LimitedBody, RequestMemoryLimit};
use super::responses::{is_grpc, text};
use super::router::{Router, is_read, request_kind};
use crate::Error;

/// Limit of concurrent connections.
const AT_ONCE: usize = 100;
/// How long one of them may stay before it is asked to end, and after that.
const WITHIN: Duration = Duration::from_secs(5);
/// How long to wait after the system had no room for one more connection.
const NO_ROOM: Duration = Duration::from_millis(100);

/// Serves reads on new and waiting connections while the daemon stops, and refuses everything else, until dropped.
pub(super) async fn serve_reads(listener: &UnixListener, accepted: Option<UnixStream>, reads: &ReadRouter) {
    let mut replies = JoinSet::new();
    if let Some(stream) = accepted {
        replies.spawn(reads.clone().serve(stream));
    }
    loop {
        tokio::select! {
            Some(_) = replies.join_next() => {}
            accepted = listener.accept(), if replies.len() < AT_ONCE => match accepted {
                Ok((stream, _)) => _ = replies.spawn(reads.clone().serve(stream)),
                Err(_) => time::sleep(NO_ROOM).await,
            }
        }
    }
}

/// Answers requests while the daemon stops.
#[derive(Clone)]
pub(super) struct ReadRouter {
    pub(super) router: Router,
    pub(super) memory: RequestMemoryLimit,
}

impl ReadRouter {
    /// Serves one connection.
    pub(super) async fn serve(self, stream: UnixStream) {
        let service = service_fn(move |request: Request<Incoming>| {
            let reads = self.clone();
            async move { reads.answer(request).await }
        });
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder.http1().timer(TokioTimer::new()).header_read_timeout(WITHIN);
        builder.http2().timer(TokioTimer::new());
        let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
        let served = if let Ok(served) = time::timeout(WITHIN, connection.as_mut()).await {
            served
        } else {
            connection.as_mut().graceful_shutdown();
            time::timeout(WITHIN, connection).await.unwrap_or(Ok(()))
        };
        if let Err(error) = served {
            tracing::debug!("connection failed: {error}");
        }
    }

    async fn answer(&self, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
        if !is_read(&request) {
            return Ok(refusal(&request));
        }
        let share = self.memory.share();
        let kind = request_kind(request.uri().path());
        self.router.answer(request.map(|body| LimitedBody::new(body, kind, share))).await
    }
}

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
