//! The budget of one registry, shared by all pulls from it: connections, and waits that the registry requested.
//!
//! A redirect target counts as the registry itself.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{self, Instant};

use super::fetch_notice::{FetchNotice, FetchWait, FetchWatcher};

/// Connections for manifests, configs, and ranges that a reader waits for, besides those for blobs: they are small and
/// must not queue behind layers.
const SMALL_CONNECTIONS: usize = 2;

/// How long an unreachable host is skipped while others are left.
const AVOIDED: Duration = Duration::from_secs(30);

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
    quota: Mutex<Option<RegistryQuota>>,
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
    /// Time until requests of all repositories and credentials are sent again.
    pub held_for: Duration,
    /// Requests so far.
    pub requests: u64,
    /// Number of waits that the registry requested.
    pub waits: u64,
    /// Bytes of bodies received so far.
    pub bytes: u64,
    /// The quota that it reported last, for the credential of that request.
    pub quota: Option<RegistryQuota>,
}

impl RegistryLoad {
    /// Adds the load of the same host under another scheme.
    pub(crate) fn add(&mut self, other: &RegistryLoad) {
        self.connections += other.connections;
        self.limit += other.limit;
        self.waiting += other.waiting;
        self.held_for = self.held_for.max(other.held_for);
        self.requests += other.requests;
        self.waits += other.waits;
        self.bytes += other.bytes;
        self.quota = self.quota.or(other.quota);
    }

    /// Its counts, without what it does now.
    pub(crate) fn counts(self) -> RegistryLoad {
        RegistryLoad { connections: 0, limit: 0, waiting: 0, held_for: Duration::ZERO, quota: None, ..self }
    }
}

/// A quota of requests, as a registry reports it in `RateLimit` headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegistryQuota {
    /// Requests left in the current window.
    pub remaining: u64,
    /// Requests that one window allows, if reported.
    pub limit: Option<u64>,
}

/// The requests that a rate limit applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum RateLimitScope {
    /// All requests: the host is overloaded.
    Host,
    /// Requests of one repository with one credential: what a registry counts.
    Authorizer(u64),
}

/// A wait that the registry requested.
#[derive(Debug, Clone, Copy)]
struct RateLimitHold {
    /// The end of the requested wait.
    requested: Instant,
    /// No request starts before this; never later than `requested`.
    until: Instant,
}

#[derive(Debug, Default)]
struct BudgetPauses {
    held: HashMap<RateLimitScope, RateLimitHold>,
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
            quota: Mutex::default(),
            traffic: Arc::default(),
            limit: connections.max(1),
        }
    }

    /// Its host, with the port if that is not the default.
    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    /// Whether no connection is in use.
    pub(crate) fn is_idle(&self) -> bool {
        // Each permit has one.
        Arc::strong_count(&self.traffic) == 1
    }

    /// The current load.
    pub(crate) fn load(&self, now: Instant) -> RegistryLoad {
        let HostTraffic { requests, bytes, waiting, waits } = &*self.traffic;
        let held = self.held_until(now).map(|until| until.saturating_duration_since(now));
        RegistryLoad {
            host: self.host.clone(),
            connections: self.limit.saturating_sub(self.blobs.available_permits()),
            limit: self.limit,
            waiting: waiting.load(Ordering::Relaxed),
            held_for: held.unwrap_or_default(),
            requests: requests.load(Ordering::Relaxed),
            waits: waits.load(Ordering::Relaxed),
            bytes: bytes.load(Ordering::Relaxed),
            quota: *self.quota.lock(),
        }
    }

    /// Waits for a connection and for the end of a requested wait. If that wait is longer than `longest`, returns the
    /// rest of it as the error and sends nothing.
    pub(crate) async fn acquire(
        &self,
        load: RequestSize,
        authorizer: u64,
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
        while let Some(RateLimitHold { requested, until }) = self.hold(authorizer, Instant::now()) {
            let left = requested.saturating_duration_since(Instant::now());
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

    /// Makes the requests of a scope wait, as the registry requested, but no longer than `longest`: after it the next
    /// request tries, since a wait of days may outlast its reason. A shorter wait than the present one changes nothing.
    pub(crate) fn pause(&self, scope: RateLimitScope, now: Instant, wait: Duration, longest: Duration) {
        self.traffic.waits.fetch_add(1, Ordering::Relaxed);
        let mut state = self.until.lock();
        state.held.retain(|_, hold| hold.until > now);
        let new = RateLimitHold { requested: now + wait, until: now + wait.min(longest) };
        let hold = state.held.entry(scope).or_insert(new);
        hold.requested = hold.requested.max(new.requested);
        hold.until = hold.until.max(new.until);
    }

    /// Records the quota that a response reported.
    pub(crate) fn note_quota(&self, quota: RegistryQuota) {
        *self.quota.lock() = Some(quota);
    }

    /// Records that the host was unreachable.
    pub(crate) fn avoid(&self, now: Instant) {
        self.until.lock().avoided = Some(now + AVOIDED);
    }

    /// Records a response of the host.
    pub(crate) fn reached(&self) {
        self.until.lock().avoided = None;
    }

    /// The wait that applies to requests of an authorizer.
    fn hold(&self, authorizer: u64, now: Instant) -> Option<RateLimitHold> {
        let state = self.until.lock();
        let scopes = [RateLimitScope::Host, RateLimitScope::Authorizer(authorizer)];
        let holds = scopes.iter().filter_map(|scope| state.held.get(scope));
        holds.filter(|hold| hold.until > now).max_by_key(|hold| hold.until).copied()
    }

    /// When the last requested wait ends; `None` without one.
    pub(crate) fn held_until(&self, now: Instant) -> Option<Instant> {
        let state = self.until.lock();
        state.held.values().map(|hold| hold.until).filter(|until| *until > now).max()
    }

    /// Why a request that has another host should use that one.
    pub(crate) fn avoid_reason(&self, authorizer: u64, now: Instant) -> Option<&'static str> {
        let avoided = self.until.lock().avoided;
        if avoided.is_some_and(|until| until > now) {
            return Some("recently unreachable");
        }
        self.hold(authorizer, now).map(|_| "rate limited")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const MINUTE: Duration = Duration::from_secs(60);
    const ONE: u64 = 1;
    const HOST: RateLimitScope = RateLimitScope::Host;

    fn watched() -> (FetchWatcher, Arc<Mutex<Vec<FetchNotice>>>) {
        let notices = Arc::new(Mutex::new(Vec::new()));
        let seen = notices.clone();
        (FetchWatcher::new(move |notice| seen.lock().push(notice)), notices)
    }

    #[tokio::test(start_paused = true)]
    async fn all_requests_wait_as_long_as_the_registry_requests() {
        let budget = Arc::new(HostBudget::new("reg.example", 4));
        let start = Instant::now();
        budget.pause(HOST, start, 10 * SECOND, MINUTE);
        budget.pause(HOST, start, 3 * SECOND, MINUTE);
        let (watcher, notices) = watched();
        let longer = budget.clone();
        tokio::join!(
            async {
                let _permit = budget.acquire(RequestSize::Blob, ONE, MINUTE, &watcher).await;
                assert_eq!(start.elapsed(), 20 * SECOND, "the wait grew during the sleep");
            },
            async {
                let _permit = budget.acquire(RequestSize::Small, ONE, MINUTE, &FetchWatcher::default()).await;
                assert_eq!(start.elapsed(), 20 * SECOND);
            },
            async {
                time::sleep(5 * SECOND).await;
                longer.pause(HOST, start, 20 * SECOND, MINUTE);
            }
        );
        let asked = |seconds| {
            FetchNotice::Waiting(FetchWait::RateLimited {
                host: "reg.example".into(),
                until: start + seconds * SECOND,
            })
        };
        assert_eq!(*notices.lock(), [asked(10), FetchNotice::Resumed, asked(20), FetchNotice::Resumed]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_beyond_the_limit_is_returned_as_an_error() {
        let budget = HostBudget::new("reg.example", 4);
        let start = Instant::now();
        budget.pause(HOST, start, 2 * MINUTE, MINUTE);
        let refused =
            budget.acquire(RequestSize::Small, ONE, MINUTE, &FetchWatcher::default()).await.map(drop);
        assert_eq!(refused, Err(2 * MINUTE));
        assert_eq!(start.elapsed(), Duration::ZERO);
        budget.pause(HOST, start, 3650 * 24 * 60 * MINUTE, MINUTE);
        assert_eq!(budget.held_until(start), Some(start + MINUTE), "and not kept for ever");
    }

    #[tokio::test(start_paused = true)]
    async fn blobs_queue_for_connections_and_manifests_do_not_queue_behind_them() {
        let budget = HostBudget::new("reg.example", 1);
        let first = budget.acquire(RequestSize::Blob, ONE, MINUTE, &FetchWatcher::default()).await;
        let _manifest = budget.acquire(RequestSize::Small, ONE, MINUTE, &FetchWatcher::default()).await;
        let (watcher, notices) = watched();
        let second = time::timeout(SECOND, budget.acquire(RequestSize::Blob, ONE, MINUTE, &watcher)).await;
        assert!(second.is_err(), "the only connection is taken");
        assert_eq!(
            *notices.lock(),
            [FetchNotice::Waiting(FetchWait::Connection { host: "reg.example".into() })]
        );
        drop(first);
        let _second = budget.acquire(RequestSize::Blob, ONE, MINUTE, &watcher).await;
    }

    #[tokio::test(start_paused = true)]
    async fn an_unreachable_host_is_avoided_until_it_answers_or_a_time_passes() {
        let budget = HostBudget::new("reg.example", 1);
        let now = Instant::now();
        assert_eq!(budget.avoid_reason(ONE, now), None);
        budget.avoid(now);
        assert!(budget.avoid_reason(ONE, now).is_some());
        assert_eq!(budget.avoid_reason(ONE, now + AVOIDED), None);
        budget.reached();
        assert_eq!(budget.avoid_reason(ONE, now), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_limit_of_one_repository_and_credential_holds_no_other() {
        let budget = HostBudget::new("reg.example", 4);
        let start = Instant::now();
        budget.pause(RateLimitScope::Authorizer(ONE), start, 1440 * MINUTE, MINUTE);
        let watcher = FetchWatcher::default();
        let limited = budget.acquire(RequestSize::Small, ONE, MINUTE, &watcher).await.map(drop);
        assert_eq!(limited, Err(1440 * MINUTE), "no request is sent");
        assert!(budget.acquire(RequestSize::Small, 2, MINUTE, &watcher).await.is_ok());
        assert_eq!(
            (budget.avoid_reason(ONE, start), budget.avoid_reason(2, start)),
            (Some("rate limited"), None)
        );
        time::advance(MINUTE).await;
        assert!(budget.acquire(RequestSize::Small, ONE, MINUTE, &watcher).await.is_ok(), "it tries again");
        assert_eq!(start.elapsed(), MINUTE);
    }
}
