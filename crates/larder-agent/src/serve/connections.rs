//! Open connections and calls under way, counted and bounded.
//!
//! Promises: never more than [`LIMIT`] connections, and [`CLOSING_LIMIT`] that were asked to close; when one more
//! arrives, the one that was idle for the longest is asked, so that sleeping clients cannot keep others out.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, watch};
use tokio::time::{self, Instant};

use super::request_memory::RequestMemoryLimit;

/// How many connections are open at once.
pub(super) const LIMIT: usize = 1000;
/// How many more may be open that were asked to go.
const CLOSING_LIMIT: usize = 200;
/// Everything that is open, and every call under way.
#[derive(Clone, Default)]
pub(crate) struct Connections(pub(super) Arc<ConnectionsInner>);

/// How many connections there may be.
#[derive(Clone, Copy)]
struct ConnectionLimits {
    open: usize,
    /// Connections that were asked to end, besides.
    closing: usize,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        ConnectionLimits { open: LIMIT, closing: CLOSING_LIMIT }
    }
}

#[derive(Default)]
pub(super) struct ConnectionsInner {
    table: Mutex<ConnectionTable>,
    /// Notified when a connection or a call ends, and when a call is held.
    pub(super) ended: Notify,
    /// True once the held calls are handed to the next process.
    released: watch::Sender<bool>,
    pub(super) memory: RequestMemoryLimit,
}

#[derive(Default)]
pub(super) struct ConnectionTable {
    next: u64,
    limits: ConnectionLimits,
    open: HashMap<u64, OpenConnection>,
    calls: HashMap<u64, OngoingCall>,
}

struct OpenConnection {
    calls: usize,
    idle_since: Instant,
    leave: Arc<Notify>,
    closing: bool,
}

/// A call under way.
#[derive(Debug, Clone)]
pub(crate) struct OngoingCall {
    /// Its path, such as `/runtime.v1.ImageService/PullImage`.
    pub(crate) path: String,
    /// When it came.
    pub(crate) since: Instant,
    connection: u64,
    /// Whether nothing is done for it any more: the next process answers it.
    held: bool,
}

impl Connections {
    /// A table of its own, with another limit.
    pub(super) fn limited(open: usize) -> Connections {
        let connections = Connections::default();
        connections.table().limits = ConnectionLimits { open, closing: open };
        connections
    }

    /// How many connections are open.
    pub(crate) fn open(&self) -> usize {
        self.table().open.len()
    }

    /// The calls under way, oldest first.
    pub(crate) fn calls(&self) -> Vec<OngoingCall> {
        let mut calls: Vec<_> = self.table().calls.values().cloned().collect();
        calls.sort_by_key(|call| call.since);
        calls
    }

    /// Waits until all of these connections have ended, but for those whose calls are all held.
    pub(super) async fn until_closed(&self, ids: &[u64]) {
        loop {
            let ended = self.0.ended.notified();
            if !self.table().has_any_unheld(ids) {
                return;
            }
            ended.await;
        }
    }

    /// Lets the held calls go to the next process.
    pub(super) fn release(&self) {
        self.0.released.send_replace(true);
    }

    /// Waits until every open connection has a call under way, and `is_meant` is true of the paths of all calls.
    pub(super) async fn until_all_call(&self, is_meant: fn(&str) -> bool) {
        loop {
            let ended = self.0.ended.notified();
            if self.table().all_call(is_meant) {
                return;
            }
            ended.await;
        }
    }

    /// Asks each connection to close that has had no call for this long, until dropped.
    pub(super) async fn close_idle(&self, after: Duration) {
        loop {
            self.table().ask_idle(Instant::now(), after);
            time::sleep(after / 4).await;
        }
    }

    /// How many connections have a call under way.
    pub(crate) fn busy(&self) -> usize {
        self.table().open.values().filter(|open| open.calls > 0).count()
    }

    /// Waits until one more may come.
    pub(super) async fn wait_for_slot(&self) {
        loop {
            let ended = self.0.ended.notified();
            if self.table().make_room() {
                return;
            }
            ended.await;
        }
    }

    pub(super) fn enter(&self) -> ConnectionEntry {
        let leave = Arc::new(Notify::new());
        ConnectionEntry { id: self.table().enter(Arc::clone(&leave)), leave, shared: Arc::clone(&self.0) }
    }

    pub(super) fn begin(&self, connection: u64, path: &str) -> CallEntry {
        let call = OngoingCall { path: path.to_owned(), since: Instant::now(), connection, held: false };
        let id = self.table().begin(call);
        CallEntry { id, shared: Arc::clone(&self.0) }
    }

    pub(super) fn table(&self) -> MutexGuard<'_, ConnectionTable> {
        self.0.table()
    }

    /// As if there were as many connections as there may be, each with a call under way.
    #[cfg(test)]
    pub(crate) fn fill(&self) {
        let mut table = self.table();
        for _ in table.open.len()..LIMIT {
            let connection = table.enter(Arc::default());
            let (path, since) = (String::new(), Instant::now());
            table.begin(OngoingCall { path, since, connection, held: false });
        }
    }
}

impl ConnectionsInner {
    fn table(&self) -> MutexGuard<'_, ConnectionTable> {
        self.table.lock()
    }
}

impl ConnectionTable {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(super) fn enter(&mut self, leave: Arc<Notify>) -> u64 {
        let id = self.number();
        self.open.insert(id, OpenConnection { calls: 0, idle_since: Instant::now(), leave, closing: false });
        id
    }

    /// Whether one more may come; where there are many, the one that was idle for the longest is asked to leave for it.
    pub(super) fn make_room(&mut self) -> bool {
        let closing = self.open.values().filter(|open| open.closing).count();
        if self.open.len() - closing < self.limits.open {
            return true;
        }
        if closing >= self.limits.closing {
            return false;
        }
        let idle = self.open.values_mut().filter(|open| open.calls == 0 && !open.closing);
        let Some(open) = idle.min_by_key(|open| open.idle_since) else { return false };
        open.closing = true;
        open.leave.notify_one();
        true
    }

    /// Asks those to leave that have had no call for this long.
    fn ask_idle(&mut self, now: Instant, after: Duration) {
        for open in self.open.values_mut() {
            if open.calls == 0 && now.saturating_duration_since(open.idle_since) >= after {
                open.closing = true;
                open.leave.notify_one();
            }
        }
    }

    /// The open connections.
    pub(super) fn ids(&self) -> Vec<u64> {
        self.open.keys().copied().collect()
    }

    fn has_any_unheld(&self, ids: &[u64]) -> bool {
        let held = |id: &u64| self.calls.values().filter(|call| call.held && call.connection == *id).count();
        ids.iter().any(|id| self.open.get(id).is_some_and(|open| open.calls == 0 || open.calls > held(id)))
    }

    fn all_call(&self, is_meant: fn(&str) -> bool) -> bool {
        self.open.values().all(|open| open.calls > 0) && self.calls.values().all(|call| is_meant(&call.path))
    }

    pub(super) fn is_idle(&self, id: u64) -> bool {
        self.open.get(&id).is_none_or(|open| open.calls == 0)
    }

    pub(super) fn begin(&mut self, call: OngoingCall) -> u64 {
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
pub(super) struct ConnectionEntry {
    pub(super) id: u64,
    /// Notified when the connection must end.
    pub(super) leave: Arc<Notify>,
    shared: Arc<ConnectionsInner>,
}

impl Drop for ConnectionEntry {
    fn drop(&mut self) {
        self.shared.table().open.remove(&self.id);
        self.shared.ended.notify_waiters();
    }
}

/// A call's place in the table.
pub(super) struct CallEntry {
    id: u64,
    shared: Arc<ConnectionsInner>,
}

impl CallEntry {
    /// Holds the call until the next process can answer it.
    pub(super) async fn hold(&self) {
        if let Some(call) = self.shared.table().calls.get_mut(&self.id) {
            call.held = true;
        }
        self.shared.ended.notify_waiters();
        // The sender lives as long as this.
        let _ = self.shared.released.subscribe().wait_for(|released| *released).await;
    }
}

impl Drop for CallEntry {
    fn drop(&mut self) {
        self.shared.table().end(self.id);
        // Its connection may be idle now, and can leave for another.
        self.shared.ended.notify_waiters();
    }
}

/// Done once the daemon is to stop.
pub(crate) async fn stop_requested(stop: &mut watch::Receiver<bool>) {
    if stop.wait_for(|stop| *stop).await.is_err() {
        std::future::pending::<()>().await;
    }
}
