//! Answers clients that connect while the process stops: at once, and with the reason. Otherwise they would wait until
//! their own time-out.

use std::convert::Infallible;
use std::time::Duration;

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

use super::responses::{is_grpc, text};
use crate::Error;

/// Limit of concurrent replies.
const AT_ONCE: usize = 100;
/// How long one of them may stay.
const WITHIN: Duration = Duration::from_secs(5);
/// How long to wait after the system had no room for one more connection.
const NO_ROOM: Duration = Duration::from_millis(100);

/// Replies to new and waiting connections that the daemon is shutting down, until dropped.
pub(super) async fn refuse_new_calls(listener: &UnixListener, came: Option<UnixStream>) {
    let mut replies = JoinSet::new();
    if let Some(stream) = came {
        replies.spawn(time::timeout(WITHIN, announce_shutdown(stream)));
    }
    loop {
        tokio::select! {
            Some(_) = replies.join_next() => {}
            accepted = listener.accept(), if replies.len() < AT_ONCE => match accepted {
                Ok((stream, _)) => _ = replies.spawn(time::timeout(WITHIN, announce_shutdown(stream))),
                Err(_) => time::sleep(NO_ROOM).await,
            }
        }
    }
}

/// Replies to one connection.
pub(super) async fn announce_shutdown(stream: UnixStream) {
    let service = service_fn(|request: Request<hyper::body::Incoming>| {
        let answer = answer(&request);
        async move { Ok::<_, Infallible>(answer) }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(WITHIN);
    builder.http2().timer(TokioTimer::new());
    if let Err(error) = builder.serve_connection(TokioIo::new(stream), service).await {
        tracing::debug!("connection failed: {error}");
    }
}

/// The answer to any request.
pub(super) fn answer<B>(request: &Request<B>) -> Response<Body> {
    if !is_grpc(request) {
        return text(StatusCode::SERVICE_UNAVAILABLE, "larder is shutting down\n");
    }
    let failure = Error::unreachable("larder is shutting down and accepts no new calls").hint(
        Hint::from("retry after it starts; to start it: systemctl start larder, or ").command(["serve"]),
    );
    Status::from(failure).into_http()
}
