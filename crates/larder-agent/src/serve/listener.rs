//! Accepts connections on a socket, serves their requests, and lets them end when the process stops.
//!
//! Promises: what all requests take in memory is [bounded](super::request_memory); after the stop, reads and calls
//! about snapshots are answered to the end, also those of new clients, other requests are refused, and calls under way
//! end. Every client that was accepted is answered. Where the socket outlives the process, pulls and removals over CRI
//! are not refused: they wait until all else has ended, and their clients send them again, to the next process.

use std::pin::pin;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use rustix::net::RecvFlags;
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time;

use super::connections::{CallEntry, ConnectionEntry, Connections, stop_requested};
use super::observed_body::{BodyObserver, observed};
use super::request_memory::{LimitedBody, MemoryReservation};
use super::responses::is_failure;
use super::router::{Router, can_be_sent_again, is_served_to_the_end, request_kind};
use super::shutdown;
use crate::node::peer::Peer;

/// How long one that was asked to go has to say goodbye, if nothing is under way on it; and how long one that came
/// after the stop has for its first call.
const GOODBYE: Duration = Duration::from_millis(100);
/// How long to wait for another client in the queue of a socket that has no path any more.
const QUEUED: Duration = Duration::from_millis(20);
/// How long a command that joined another one may take from one call to the next once that one has done its own work.
const JOINED_IDLE: Duration = Duration::from_secs(1);
/// How many calls one connection may have under way.
const CALLS_PER_CONNECTION: u32 = 2000;
/// How long a client may take for the head of a plain request.
const HEAD_WITHIN: Duration = Duration::from_secs(10);
/// How often an HTTP/2 client is asked whether it is there, and how long it may take to say so.
const ALIVE: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(20));
/// How long to wait after the system had no room for one more connection.
const NO_ROOM: Duration = Duration::from_millis(100);

/// Context of accepting connections.
struct AcceptLoop {
    running: JoinSet<()>,
    /// One that was accepted and waits for room. Kept here: what a branch of a `select!` holds is dropped when another
    /// one wins.
    next: Option<UnixStream>,
    router: Router,
    /// Signals connections to end.
    stop: watch::Receiver<bool>,
    /// Whether another process will listen on the same socket.
    has_successor: bool,
}

impl Connections {
    /// Serves until `stop` is set, and then until those connections have ended that were open. New clients then wait
    /// for the next process in the queue of a socket that was passed; one that this process made is removed with `own`.
    /// Dropping this closes the rest.
    pub(crate) async fn serve<T>(
        &self,
        listener: UnixListener,
        own: Option<T>,
        router: Router,
        stop: watch::Receiver<bool>,
    ) {
        let mut accepting = AcceptLoop {
            running: JoinSet::new(),
            next: None,
            router,
            stop: stop.clone(),
            has_successor: own.is_none(),
        };
        self.accept_until(&listener, &mut accepting, self.until_drained(stop)).await;
        if let Some(own) = own {
            drop(own);
            let queued_ended = async { time::sleep(QUEUED).await };
            self.accept_until(&listener, &mut accepting, queued_ended).await;
        }
        // Their clients connect again, and nothing accepts them here.
        self.release();
        let AcceptLoop { mut running, next, router, stop, has_successor } = accepting;
        if let Some(stream) = next {
            self.one(stream, self.enter(), router, stop, has_successor).await;
        }
        while running.join_next().await.is_some() {}
    }

    /// Waits for the stop, and then until the connections have ended that are open at that time.
    async fn until_drained(&self, mut stop: watch::Receiver<bool>) {
        stop_requested(&mut stop).await;
        let open = self.table().ids();
        self.until_closed(&open).await;
    }

    /// Serves until `stop` is set, and then until those connections have ended that were open; `close` is called, and
    /// connections that were accepted while waiting for them end, too. Connections without calls are asked to end once
    /// they are idle for [`JOINED_IDLE`], those with calls are not.
    pub(crate) async fn serve_joined(
        &self,
        listener: UnixListener,
        router: Router,
        stop: watch::Receiver<bool>,
        close: impl FnOnce(),
    ) {
        let (_never, unstopped) = watch::channel(false);
        let mut accepting =
            AcceptLoop { running: JoinSet::new(), next: None, router, stop: unstopped, has_successor: false };
        let mut stopped = stop.clone();
        let serving = async {
            self.accept_until(&listener, &mut accepting, self.until_drained(stop)).await;
            close();
            drop(listener);
            while accepting.running.join_next().await.is_some() {}
        };
        let closing = async {
            stop_requested(&mut stopped).await;
            self.close_idle(JOINED_IDLE).await;
        };
        tokio::select! {
            () = serving => {}
            () = closing => {}
        }
    }

    async fn accept_until(
        &self,
        listener: &UnixListener,
        accepting: &mut AcceptLoop,
        done: impl Future<Output = ()>,
    ) {
        let AcceptLoop { running, next, router, stop, has_successor } = accepting;
        let has_successor = *has_successor;
        let mut done = pin!(done);
        loop {
            tokio::select! {
                biased;
                () = &mut done => return,
                Some(_) = running.join_next() => {}
                () = self.wait_for_slot(), if next.is_some() => {
                    let Some(stream) = next.take() else { continue };
                    let (connections, router, stop) = (self.clone(), router.clone(), stop.clone());
                    let entry = self.enter();
                    running.spawn(async move { connections.one(stream, entry, router, stop, has_successor).await });
                }
                accepted = listener.accept(), if next.is_none() => match accepted {
                    Ok((stream, _)) => *next = Some(stream),
                    Err(error) => {
                        tracing::warn!("cannot accept a connection: {error}");
                        time::sleep(NO_ROOM).await;
                    }
                }
            }
        }
    }

    async fn one(
        &self,
        stream: UnixStream,
        entry: ConnectionEntry,
        router: Router,
        mut stop: watch::Receiver<bool>,
        has_successor: bool,
    ) {
        let peer = Peer::of(&stream);
        // Before it says anything hyper would close it without an answer.
        tokio::select! {
            biased;
            () = wait_readable(&stream) => {}
            () = async { stop_requested(&mut stop).await; time::sleep(GOODBYE).await } => return,
            () = entry.leave.notified() => return,
        }
        // Its first call may follow at once.
        let first_call = if *stop.borrow() { GOODBYE } else { Duration::ZERO };
        let stopping = stop.clone();
        let service = service_fn(|request: hyper::Request<Incoming>| {
            let can_wait = has_successor && can_be_sent_again(&request);
            let path = request.uri().path();
            let answer = if *stopping.borrow() && !is_served_to_the_end(&request) {
                Err((shutdown::refusal(&request), self.begin(entry.id, path)))
            } else {
                let (call, share, kind) =
                    (self.begin(entry.id, path), self.0.memory.share(), request_kind(path));
                let request = request.map(|body| LimitedBody::new(body, kind, share.clone()));
                Ok((peer.clone().scope(router.answer(request)), call, share))
            };
            let stopping = stopping.clone();
            async move {
                match answer {
                    Err((_, call)) if can_wait => call.hold().await,
                    Err((refused, _)) => return Ok(refused),
                    Ok((answer, call, share)) => {
                        let Ok(answer) = answer.await;
                        if !(can_wait && *stopping.borrow() && is_failure(&answer)) {
                            return Ok(observed(answer, (call, share)));
                        }
                        call.hold().await;
                    }
                }
                // gRPC's clients send a refused call again, if nothing of it was answered.
                Err(h2::Error::from(h2::Reason::REFUSED_STREAM))
            }
        });
        let builder = http();
        let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
        let served = tokio::select! {
            biased;
            served = connection.as_mut() => served,
            () = async {
                tokio::select! {
                    () = async { stop_requested(&mut stop).await; time::sleep(first_call).await } => {}
                    () = entry.leave.notified() => {}
                }
            } => {
                connection.as_mut().graceful_shutdown();
                loop {
                    match time::timeout(GOODBYE, connection.as_mut()).await {
                        Ok(served) => break served,
                        // Who sleeps does not answer a goodbye.
                        Err(_) if self.table().is_idle(entry.id) => break Ok(()),
                        Err(_) => {}
                    }
                }
            }
        };
        if let Err(error) = served {
            tracing::debug!("connection failed: {error}");
        }
    }
}

/// How one connection is spoken to.
fn http() -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_WITHIN);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(CALLS_PER_CONNECTION)
        // The count is for the life of a connection, and kubelet's lasts for months: callers that give up are no
        // attack.
        .max_local_error_reset_streams(None)
        .keep_alive_interval(ALIVE.0)
        .keep_alive_timeout(ALIVE.1);
    builder
}

/// Keeps a call in the table, and what its request takes.
impl BodyObserver for (CallEntry, MemoryReservation) {}

/// Waits until the client has sent something or has disconnected. Consumes nothing: readiness alone may be a false
/// alarm.
async fn wait_readable(stream: &UnixStream) {
    let look = || Ok(rustix::net::recv(stream, &mut [0_u8; 1], RecvFlags::PEEK).map(drop)?);
    let looked: std::io::Result<()> = stream.async_io(Interest::READABLE, look).await;
    if let Err(error) = looked {
        tracing::debug!("connection failed: {error}");
    }
}
