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

/// How many are told at once.
const AT_ONCE: usize = 100;
/// How long one of them may stay.
const WITHIN: Duration = Duration::from_secs(5);
/// How long to wait after the system had no room for one more connection.
const NO_ROOM: Duration = Duration::from_millis(100);

/// Tells whoever comes, and before them who came already, until dropped.
pub(super) async fn refuse_new_calls(listener: &UnixListener, came: Option<UnixStream>) {
    let mut told = JoinSet::new();
    if let Some(stream) = came {
        told.spawn(time::timeout(WITHIN, announce_shutdown(stream)));
    }
    loop {
        tokio::select! {
            Some(_) = told.join_next() => {}
            accepted = listener.accept(), if told.len() < AT_ONCE => match accepted {
                Ok((stream, _)) => _ = told.spawn(time::timeout(WITHIN, announce_shutdown(stream))),
                Err(_) => time::sleep(NO_ROOM).await,
            }
        }
    }
}

/// Tells one of them.
pub(super) async fn announce_shutdown(stream: UnixStream) {
    let service = service_fn(|request: Request<hyper::body::Incoming>| {
        let answer = answer(&request);
        async move { Ok::<_, Infallible>(answer) }
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(WITHIN);
    builder.http2().timer(TokioTimer::new());
    if let Err(error) = builder.serve_connection(TokioIo::new(stream), service).await {
        tracing::debug!("a connection ended badly: {error}");
    }
}

/// The answer to any request.
pub(super) fn answer<B>(request: &Request<B>) -> Response<Body> {
    if !is_grpc(request) {
        return text(StatusCode::SERVICE_UNAVAILABLE, "larder is shutting down\n");
    }
    let failure =
        Error::unreachable("larder is shutting down: what is under way may end, nothing new begins").hint(
            Hint::from("retry when it runs again; to start it: systemctl start larder, or ")
                .command(["serve"]),
        );
    Status::from(failure).into_http()
}
