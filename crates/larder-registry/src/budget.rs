//! The budget of one registry, shared by all pulls from it: connections, and waits that the registry requested.
//!
//! A redirect target counts as the registry itself.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{self, Instant};

use super::fetch_notice::{FetchNotice, FetchWait, FetchWatcher};

/// Connections for manifests and configs, besides those for blobs: they are small and must not queue behind layers.
const SMALL_CONNECTIONS: usize = 2;

/// How long an unreachable host is skipped while others are left.
const AVOIDED: Duration = Duration::from_secs(30);

/// The longest time for which a requested wait is obeyed. After it the next request tries: a wait of days would
/// otherwise outlast its reason.
const KEPT: Duration = Duration::from_secs(15 * 60);

/// The kind of request that needs a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequestSize {
    Small,
    Blob,
}

/// The budget of one host.
#[derive(Debug)]
pub(crate) struct HostBudget {
    host: String,
    blobs: Arc<Semaphore>,
    small: Arc<Semaphore>,
    until: Mutex<BudgetPauses>,
    traffic: Arc<HostTraffic>,
    limit: usize,
}

/// The counters and waits of one host.
#[derive(Debug, Default)]
struct HostTraffic {
    requests: AtomicU64,
    bytes: AtomicU64,
    waiting: AtomicUsize,
    waits: AtomicU64,
}

/// The load of one registry or mirror, and the waits it requested.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistryLoad {
    /// Its host, with the port if that is not the default.
    pub host: String,
    /// Connections for blobs in use, of [`limit`](RegistryLoad::limit).
    pub connections: usize,
    /// Connections for blobs that may be in use at once.
    pub limit: usize,
    /// Requests that wait for a connection, or for the end of a requested wait.
    pub waiting: usize,
    /// The rest of the wait that the registry requested.
    pub held_for: Duration,
    /// Requests so far.
    pub requests: u64,
    /// Number of waits that the registry requested.
    pub waits: u64,
    /// Bytes of bodies received so far.
    pub bytes: u64,
}

#[derive(Debug, Default)]
struct BudgetPauses {
    /// No request starts before this.
    held: Option<Instant>,
    /// Requests that have another host skip this one until then.
    avoided: Option<Instant>,
}

/// Permission to use one connection, until dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct ConnectionPermit {
    _permit: Option<OwnedSemaphorePermit>,
    traffic: Arc<HostTraffic>,
}

impl ConnectionPermit {
    /// Counts bytes of a body.
    pub(crate) fn add_received(&self, bytes: usize) {
        self.traffic.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// Counts a waiting request, until dropped.
struct WaitingCount<'a>(&'a HostTraffic);

impl<'a> WaitingCount<'a> {
    fn begin(traffic: &'a HostTraffic) -> WaitingCount<'a> {
        traffic.waiting.fetch_add(1, Ordering::Relaxed);
        WaitingCount(traffic)
    }
}

impl Drop for WaitingCount<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

impl HostBudget {
    pub(crate) fn new(host: impl Into<String>, connections: usize) -> HostBudget {
        HostBudget {
            host: host.into(),
            blobs: Arc::new(Semaphore::new(connections.max(1))),
            small: Arc::new(Semaphore::new(SMALL_CONNECTIONS)),
            until: Mutex::default(),
            traffic: Arc::default(),
            limit: connections.max(1),
        }
    }

    /// Whether no connection is in use.
    pub(crate) fn is_idle(&self) -> bool {
        // Each permit has one.
        Arc::strong_count(&self.traffic) == 1
    }

    /// The current load.
    pub(crate) fn load(&self, now: Instant) -> RegistryLoad {
        let HostTraffic { requests, bytes, waiting, waits } = &*self.traffic;
        let held = self.paused_until(now).map(|until| until.saturating_duration_since(now));
        RegistryLoad {
            host: self.host.clone(),
            connections: self.limit.saturating_sub(self.blobs.available_permits()),
            limit: self.limit,
            waiting: waiting.load(Ordering::Relaxed),
            held_for: held.unwrap_or_default(),
            requests: requests.load(Ordering::Relaxed),
            waits: waits.load(Ordering::Relaxed),
            bytes: bytes.load(Ordering::Relaxed),
        }
    }

    /// Waits for a connection and for the end of a requested wait. If that wait is longer than `longest`, returns the
    /// rest of it as the error and sends nothing.
    pub(crate) async fn acquire(
        &self,
        load: RequestSize,
        longest: Duration,
        watcher: &FetchWatcher,
    ) -> Result<ConnectionPermit, Duration> {
        let connections = match load {
            RequestSize::Small => &self.small,
            RequestSize::Blob => &self.blobs,
        };
        let mut permit = connections.clone().try_acquire_owned().ok();
        if permit.is_none() {
            let _waits = WaitingCount::begin(&self.traffic);
            watcher.notify(FetchNotice::Waiting(FetchWait::Connection { host: self.host.clone() }));
            // It fails only when the semaphore is closed, which never happens.
            permit = connections.clone().acquire_owned().await.ok();
            watcher.notify(FetchNotice::Resumed);
        }
        // The requested wait may grow during the sleep.
        while let Some(until) = self.paused_until(Instant::now()) {
            let left = until.saturating_duration_since(Instant::now());
            if left > longest {
                return Err(left);
            }
            let _waits = WaitingCount::begin(&self.traffic);
            watcher.notify(FetchNotice::Waiting(FetchWait::RateLimited { host: self.host.clone(), until }));
            time::sleep_until(until).await;
            watcher.notify(FetchNotice::Resumed);
        }
        self.traffic.requests.fetch_add(1, Ordering::Relaxed);
        Ok(ConnectionPermit { _permit: permit, traffic: Arc::clone(&self.traffic) })
    }

    /// Makes all requests wait, as the registry requested. A shorter wait than the present one changes nothing.
    pub(crate) fn pause(&self, now: Instant, wait: Duration) {
        self.traffic.waits.fetch_add(1, Ordering::Relaxed);
        let until = now + wait.min(KEPT);
        let mut state = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        state.held = state.held.max(Some(until));
    }

    /// Records that the host was unreachable.
    pub(crate) fn avoid(&self, now: Instant) {
        self.until.lock().unwrap_or_else(PoisonError::into_inner).avoided = Some(now + AVOIDED);
    }

    /// Records a response of the host.
    pub(crate) fn reached(&self) {
        self.until.lock().unwrap_or_else(PoisonError::into_inner).avoided = None;
    }

    /// When the requested wait ends; `None` without one.
    pub(crate) fn paused_until(&self, now: Instant) -> Option<Instant> {
        self.until.lock().unwrap_or_else(PoisonError::into_inner).held.filter(|until| *until > now)
    }

    /// Why a request that has another host should use that one.
    pub(crate) fn avoid_reason(&self, now: Instant) -> Option<&'static str> {
        let state = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        let lasts = |until: Option<Instant>| until.is_some_and(|until| until > now);
        match () {
            () if lasts(state.avoided) => Some("recently unreachable"),
            () if lasts(state.held) => Some("rate limited"),
            () => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const MINUTE: Duration = Duration::from_secs(60);

    fn watched() -> (FetchWatcher, Arc<Mutex<Vec<FetchNotice>>>) {
        let notices = Arc::new(Mutex::new(Vec::new()));
        let seen = notices.clone();
        (FetchWatcher::new(move |notice| seen.lock().unwrap().push(notice)), notices)
    }

    #[tokio::test(start_paused = true)]
    async fn all_requests_wait_as_long_as_the_registry_requests() {
        let budget = Arc::new(HostBudget::new("reg.example", 4));
        let start = Instant::now();
        budget.pause(start, 10 * SECOND);
        budget.pause(start, 3 * SECOND);
        let (watcher, notices) = watched();
        let longer = budget.clone();
        tokio::join!(
            async {
                let _permit = budget.acquire(RequestSize::Blob, MINUTE, &watcher).await;
                assert_eq!(start.elapsed(), 20 * SECOND, "the wait grew during the sleep");
            },
            async {
                let _permit = budget.acquire(RequestSize::Small, MINUTE, &FetchWatcher::default()).await;
                assert_eq!(start.elapsed(), 20 * SECOND);
            },
            async {
                time::sleep(5 * SECOND).await;
                longer.pause(start, 20 * SECOND);
            }
        );
        let asked = |seconds| {
            FetchNotice::Waiting(FetchWait::RateLimited {
                host: "reg.example".into(),
                until: start + seconds * SECOND,
            })
        };
        assert_eq!(
            *notices.lock().unwrap(),
            [asked(10), FetchNotice::Resumed, asked(20), FetchNotice::Resumed]
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_beyond_the_limit_is_returned_as_an_error() {
        let budget = HostBudget::new("reg.example", 4);
        let start = Instant::now();
        budget.pause(start, 2 * MINUTE);
        let refused = budget.acquire(RequestSize::Small, MINUTE, &FetchWatcher::default()).await.map(drop);
        assert_eq!(refused, Err(2 * MINUTE));
        assert_eq!(start.elapsed(), Duration::ZERO);
        budget.pause(start, Duration::MAX);
        assert_eq!(budget.paused_until(start), Some(start + KEPT), "and not kept for ever");
    }

    #[tokio::test(start_paused = true)]
    async fn blobs_queue_for_connections_and_manifests_do_not_queue_behind_them() {
        let budget = HostBudget::new("reg.example", 1);
        let first = budget.acquire(RequestSize::Blob, MINUTE, &FetchWatcher::default()).await;
        let _manifest = budget.acquire(RequestSize::Small, MINUTE, &FetchWatcher::default()).await;
        let (watcher, notices) = watched();
        let second = time::timeout(SECOND, budget.acquire(RequestSize::Blob, MINUTE, &watcher)).await;
        assert!(second.is_err(), "the only connection is taken");
        assert_eq!(
            *notices.lock().unwrap(),
            [FetchNotice::Waiting(FetchWait::Connection { host: "reg.example".into() })]
        );
        drop(first);
        let _second = budget.acquire(RequestSize::Blob, MINUTE, &watcher).await;
    }

    #[tokio::test(start_paused = true)]
    async fn an_unreachable_host_is_avoided_until_it_answers_or_a_time_passes() {
        let budget = HostBudget::new("reg.example", 1);
        let now = Instant::now();
        assert_eq!(budget.avoid_reason(now), None);
        budget.avoid(now);
        assert!(budget.avoid_reason(now).is_some());
        assert_eq!(budget.avoid_reason(now + AVOIDED), None);
        budget.reached();
        assert_eq!(budget.avoid_reason(now), None);
    }
}
