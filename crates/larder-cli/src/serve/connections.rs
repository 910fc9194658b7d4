//! Takes connections on the socket, answers what they ask, and lets them end when the daemon stops.
//!
//! Promises: never more than [`LIMIT`] connections, and [`LEAVING`] that were asked to go; when one more comes, the one
//! that was idle for the longest is asked, so that clients that sleep cannot keep others out; what all requests take in
//! memory is [bounded](super::intake); after the stop no request begins, who comes is told so, and those under way end.

use std::collections::HashMap;
use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::body::{Frame, Incoming, SizeHint};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use rustix::net::RecvFlags;
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::{self, Instant};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::Bytes;

use super::closing;
use super::doors::{Doors, takes};
use super::intake::{Intake, Received, Share};

/// How many connections are open at once.
pub(super) const LIMIT: usize = 1000;
/// How many more may be open that were asked to go.
const LEAVING: usize = 200;
/// How long one that was asked to go has to say goodbye, if nothing is under way on it.
const GOODBYE: Duration = Duration::from_millis(200);
/// How many calls one connection may have under way.
const CALLS_PER_CONNECTION: u32 = 2000;
/// How long a client may take for the head of a plain request.
const HEAD_WITHIN: Duration = Duration::from_secs(10);
/// How often an HTTP/2 client is asked whether it is there, and how long it may take to say so.
const ALIVE: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(20));
/// How long to wait after the system had no room for one more connection.
const NO_ROOM: Duration = Duration::from_millis(100);

/// Everything that is open, and every call under way.
#[derive(Clone, Default)]
pub(super) struct Connections(Arc<Shared>);

#[derive(Default)]
struct Shared {
    table: Mutex<Table>,
    /// Told when a connection or a call ends.
    ended: Notify,
    intake: Intake,
}

#[derive(Default)]
struct Table {
    next: u64,
    open: HashMap<u64, Open>,
    calls: HashMap<u64, Call>,
}

struct Open {
    calls: usize,
    idle_since: Instant,
    leave: Arc<Notify>,
    leaving: bool,
}

/// A call under way.
#[derive(Debug, Clone)]
pub(super) struct Call {
    /// Its path, such as `/runtime.v1.ImageService/PullImage`.
    pub(super) path: String,
    /// When it came.
    pub(super) since: Instant,
    connection: u64,
}

impl Connections {
    /// Serves until `stop` says so, and then until the last connection has ended. Dropping it cuts off what is left.
    pub(super) async fn serve(&self, listener: UnixListener, doors: Doors, mut stop: watch::Receiver<bool>) {
        let mut running = JoinSet::new();
        // One that was accepted and waits for room. Kept here: what a branch below holds is dropped when another wins.
        let mut next: Option<UnixStream> = None;
        loop {
            tokio::select! {
                biased;
                () = asked(&mut stop) => break,
                Some(_) = running.join_next() => {}
                () = self.room(), if next.is_some() => {
                    let Some(stream) = next.take() else { continue };
                    let (connections, doors, stop) = (self.clone(), doors.clone(), stop.clone());
                    let entry = self.enter();
                    running.spawn(async move { connections.one(stream, entry, doors, stop).await });
                }
                accepted = listener.accept(), if next.is_none() => match accepted {
                    Ok((stream, _)) => next = Some(stream),
                    Err(error) => {
                        tracing::warn!("a connection could not be taken: {error}");
                        time::sleep(NO_ROOM).await;
                    }
                }
            }
        }
        tokio::select! {
            () = async { while running.join_next().await.is_some() {} } => {}
            () = closing::turn_away(&listener, next) => {}
        }
    }

    /// How many connections are open.
    pub(super) fn open(&self) -> usize {
        self.table().open.len()
    }

    /// The calls under way, oldest first.
    pub(super) fn calls(&self) -> Vec<Call> {
        let mut calls: Vec<_> = self.table().calls.values().cloned().collect();
        calls.sort_by_key(|call| call.since);
        calls
    }

    /// Waits until one more may come.
    async fn room(&self) {
        loop {
            let ended = self.0.ended.notified();
            if self.table().make_room() {
                return;
            }
            ended.await;
        }
    }

    fn enter(&self) -> Entry {
        let leave = Arc::new(Notify::new());
        Entry { id: self.table().enter(Arc::clone(&leave)), leave, shared: Arc::clone(&self.0) }
    }

    async fn one(&self, stream: UnixStream, entry: Entry, doors: Doors, mut stop: watch::Receiver<bool>) {
        // Before it says anything hyper would close it without an answer.
        tokio::select! {
            biased;
            () = speaks(&stream) => {}
            () = asked(&mut stop) => return drop(time::timeout(GOODBYE, closing::tell(stream)).await),
            () = entry.leave.notified() => return,
        }
        let stopping = stop.clone();
        let service = service_fn(|request: hyper::Request<Incoming>| {
            let answer = if *stopping.borrow() {
                Err(closing::answer(&request))
            } else {
                let (call, share) = (self.begin(entry.id, request.uri().path()), self.0.intake.share());
                let takes = takes(request.uri().path());
                let request = request.map(|body| Received::new(body, takes, share.clone()));
                Ok((doors.answer(request), call, share))
            };
            async move {
                let (answer, call, share) = match answer {
                    Ok(begun) => begun,
                    Err(refused) => return Ok(refused),
                };
                let response = answer.await?;
                Ok::<_, Infallible>(response.map(|body| Body::new(Held { body, _call: call, _share: share })))
            }
        });
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder.http1().timer(TokioTimer::new()).header_read_timeout(HEAD_WITHIN);
        builder
            .http2()
            .timer(TokioTimer::new())
            .max_concurrent_streams(CALLS_PER_CONNECTION)
            // The count is for the life of a connection, and kubelet's lasts for months: callers that give up are no attack.
            .max_local_error_reset_streams(None)
            .keep_alive_interval(ALIVE.0)
            .keep_alive_timeout(ALIVE.1);
        let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service));
        let served = tokio::select! {
            biased;
            served = connection.as_mut() => served,
            () = async { tokio::select! { () = asked(&mut stop) => {}, () = entry.leave.notified() => {} } } => {
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
            tracing::debug!("a connection ended badly: {error}");
        }
    }

    fn begin(&self, connection: u64, path: &str) -> Under {
        let id = self.table().begin(Call { path: path.to_owned(), since: Instant::now(), connection });
        Under { id, shared: Arc::clone(&self.0) }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.table()
    }

    /// As if there were as many connections as there may be, each with a call under way.
    #[cfg(test)]
    pub(super) fn fill(&self) {
        let mut table = self.table();
        for _ in table.open.len()..LIMIT {
            let connection = table.enter(Arc::default());
            table.begin(Call { path: String::new(), since: Instant::now(), connection });
        }
    }
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn enter(&mut self, leave: Arc<Notify>) -> u64 {
        let id = self.number();
        self.open.insert(id, Open { calls: 0, idle_since: Instant::now(), leave, leaving: false });
        id
    }

    /// Whether one more may come; where there are many, the one that was idle for the longest is asked to leave for it.
    fn make_room(&mut self) -> bool {
        let leaving = self.open.values().filter(|open| open.leaving).count();
        if self.open.len() - leaving < LIMIT {
            return true;
        }
        if leaving >= LEAVING {
            return false;
        }
        let idle = self.open.values_mut().filter(|open| open.calls == 0 && !open.leaving);
        let Some(open) = idle.min_by_key(|open| open.idle_since) else { return false };
        open.leaving = true;
        open.leave.notify_one();
        true
    }

    fn is_idle(&self, id: u64) -> bool {
        self.open.get(&id).is_none_or(|open| open.calls == 0)
    }

    fn begin(&mut self, call: Call) -> u64 {
        let id = self.number();
        if let Some(open) = self.open.get_mut(&call.connection) {
            open.calls += 1;
        }
        self.calls.insert(id, call);
        id
    }

    fn end(&mut self, id: u64) {
        let Some(call) = self.calls.remove(&id) else { return };
        if let Some(open) = self.open.get_mut(&call.connection) {
            open.calls -= 1;
            open.idle_since = Instant::now();
        }
    }
}

/// A connection's place in the table.
struct Entry {
    id: u64,
    /// Told when it is to leave.
    leave: Arc<Notify>,
    shared: Arc<Shared>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.shared.table().open.remove(&self.id);
        self.shared.ended.notify_waiters();
    }
}

/// A call's place in the table.
struct Under {
    id: u64,
    shared: Arc<Shared>,
}

impl Drop for Under {
    fn drop(&mut self) {
        self.shared.table().end(self.id);
        // Its connection may be idle now, and can leave for another.
        self.shared.ended.notify_waiters();
    }
}

/// A body that keeps its call in the table, and what its request takes, until all of it was sent or nobody wants it.
struct Held {
    body: Body,
    _call: Under,
    _share: Share,
}

impl hyper::body::Body for Held {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Done once the client has sent something, or has gone. Takes nothing of it: readiness alone may be a false alarm.
async fn speaks(stream: &UnixStream) {
    let look = || Ok(rustix::net::recv(stream, &mut [0_u8; 1], RecvFlags::PEEK).map(drop)?);
    let looked: std::io::Result<()> = stream.async_io(Interest::READABLE, look).await;
    if let Err(error) = looked {
        tracing::debug!("a connection ended badly: {error}");
    }
}

/// Done once the daemon is to stop.
pub(super) async fn asked(stop: &mut watch::Receiver<bool>) {
    if stop.wait_for(|stop| *stop).await.is_err() {
        std::future::pending::<()>().await;
    }
}
