//! What one registry is asked for at a time, shared by all pulls from it: connections, and the waits it asked for.
//!
//! What a registry redirects to counts as the registry itself.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{self, Instant};

use super::waiting::{Notice, Waiting, Watcher};

/// Connections for manifests and configs, besides those for blobs: they are small, and must not queue behind layers.
const SMALL_CONNECTIONS: usize = 2;

/// How long a host that could not be reached is passed over while others are left.
const AVOIDED: Duration = Duration::from_secs(30);

/// The longest time for which a registry's wish is kept. After it somebody asks and sees: a wish of days would otherwise
/// outlast the reason for it.
const KEPT: Duration = Duration::from_secs(15 * 60);

/// What kind of request a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Load {
    Small,
    Blob,
}

/// The budget of one host.
#[derive(Debug)]
pub(crate) struct Budget {
    host: String,
    blobs: Arc<Semaphore>,
    small: Arc<Semaphore>,
    until: Mutex<Until>,
    traffic: Arc<Traffic>,
    limit: usize,
}

/// What was asked of one host so far.
#[derive(Debug, Default)]
struct Traffic {
    requests: AtomicU64,
    bytes: AtomicU64,
    waiting: AtomicUsize,
    waits: AtomicU64,
}

/// How much one registry, or a mirror of it, is asked for, and how much it asked to wait.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistryLoad {
    /// Its host, with the port if that is not the usual one.
    pub host: String,
    /// Connections for blobs in use, of [`limit`](RegistryLoad::limit).
    pub connections: usize,
    /// Connections for blobs that may be in use at once.
    pub limit: usize,
    /// Requests that wait for a connection, or for the end of what it asked to wait.
    pub waiting: usize,
    /// For how much longer it asked to be left alone.
    pub held_for: Duration,
    /// Requests so far.
    pub requests: u64,
    /// How often it asked to wait.
    pub waits: u64,
    /// Bytes of bodies that came so far.
    pub bytes: u64,
}

#[derive(Debug, Default)]
struct Until {
    /// Nobody asks before this.
    held: Option<Instant>,
    /// Nobody who has another host asks before this.
    avoided: Option<Instant>,
}

/// The right to use one connection, until dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct Permit {
    _permit: Option<OwnedSemaphorePermit>,
    traffic: Arc<Traffic>,
}

impl Permit {
    /// Counts bytes of a body.
    pub(crate) fn came(&self, bytes: usize) {
        self.traffic.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// One who waits, until dropped.
struct Waits<'a>(&'a Traffic);

impl<'a> Waits<'a> {
    fn begin(traffic: &'a Traffic) -> Waits<'a> {
        traffic.waiting.fetch_add(1, Ordering::Relaxed);
        Waits(traffic)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Budget {
    pub(crate) fn new(host: impl Into<String>, connections: usize) -> Budget {
        Budget {
            host: host.into(),
            blobs: Arc::new(Semaphore::new(connections.max(1))),
            small: Arc::new(Semaphore::new(SMALL_CONNECTIONS)),
            until: Mutex::default(),
            traffic: Arc::default(),
            limit: connections.max(1),
        }
    }

    /// Whether nobody has a connection of it.
    pub(crate) fn is_idle(&self) -> bool {
        // Each permit has one.
        Arc::strong_count(&self.traffic) == 1
    }

    /// How much it is used now.
    pub(crate) fn load(&self, now: Instant) -> RegistryLoad {
        let Traffic { requests, bytes, waiting, waits } = &*self.traffic;
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
        }
    }

    /// Waits for a connection, and for the end of what the registry asked to wait, unless that is longer than
    /// `longest`: then the error is how long it still is, and nobody asks in vain.
    pub(crate) async fn enter(
        &self,
        load: Load,
        longest: Duration,
        watcher: &Watcher,
    ) -> Result<Permit, Duration> {
        let connections = match load {
            Load::Small => &self.small,
            Load::Blob => &self.blobs,
        };
        let mut permit = connections.clone().try_acquire_owned().ok();
        if permit.is_none() {
            let _waits = Waits::begin(&self.traffic);
            watcher.tell(Notice::Waiting(Waiting::Connection { host: self.host.clone() }));
            // It fails only when the semaphore is closed, which nobody does.
            permit = connections.clone().acquire_owned().await.ok();
            watcher.tell(Notice::Going);
        }
        // The wait may grow while it is waited for.
        while let Some(until) = self.held_until(Instant::now()) {
            let left = until.saturating_duration_since(Instant::now());
            if left > longest {
                return Err(left);
            }
            let _waits = Waits::begin(&self.traffic);
            watcher.tell(Notice::Waiting(Waiting::Asked { host: self.host.clone(), until }));
            time::sleep_until(until).await;
            watcher.tell(Notice::Going);
        }
        self.traffic.requests.fetch_add(1, Ordering::Relaxed);
        Ok(Permit { _permit: permit, traffic: Arc::clone(&self.traffic) })
    }

    /// The registry asked everybody to wait; a shorter wait than the present one changes nothing.
    pub(crate) fn hold(&self, now: Instant, wait: Duration) {
        self.traffic.waits.fetch_add(1, Ordering::Relaxed);
        let until = now + wait.min(KEPT);
        let mut state = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        state.held = state.held.max(Some(until));
    }

    /// The host could not be reached.
    pub(crate) fn avoid(&self, now: Instant) {
        self.until.lock().unwrap_or_else(PoisonError::into_inner).avoided = Some(now + AVOIDED);
    }

    /// The host answered.
    pub(crate) fn reached(&self) {
        self.until.lock().unwrap_or_else(PoisonError::into_inner).avoided = None;
    }

    /// When the wait that the registry asked for ends; `None` when there is none.
    pub(crate) fn held_until(&self, now: Instant) -> Option<Instant> {
        self.until.lock().unwrap_or_else(PoisonError::into_inner).held.filter(|until| *until > now)
    }

    /// Why somebody who has another host should ask that one.
    pub(crate) fn better_avoided(&self, now: Instant) -> Option<&'static str> {
        let state = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        let lasts = |until: Option<Instant>| until.is_some_and(|until| until > now);
        match () {
            () if lasts(state.avoided) => Some("could not be reached a moment ago"),
            () if lasts(state.held) => Some("asked to wait"),
            () => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const MINUTE: Duration = Duration::from_secs(60);

    fn watched() -> (Watcher, Arc<Mutex<Vec<Notice>>>) {
        let notices = Arc::new(Mutex::new(Vec::new()));
        let seen = notices.clone();
        (Watcher::new(move |notice| seen.lock().unwrap().push(notice)), notices)
    }

    #[tokio::test(start_paused = true)]
    async fn everybody_waits_as_long_as_the_registry_asks() {
        let budget = Arc::new(Budget::new("reg.example", 4));
        let start = Instant::now();
        budget.hold(start, 10 * SECOND);
        budget.hold(start, 3 * SECOND);
        let (watcher, notices) = watched();
        let longer = budget.clone();
        tokio::join!(
            async {
                let _permit = budget.enter(Load::Blob, MINUTE, &watcher).await;
                assert_eq!(start.elapsed(), 20 * SECOND, "the wait grew meanwhile");
            },
            async {
                let _permit = budget.enter(Load::Small, MINUTE, &Watcher::default()).await;
                assert_eq!(start.elapsed(), 20 * SECOND);
            },
            async {
                time::sleep(5 * SECOND).await;
                longer.hold(start, 20 * SECOND);
            }
        );
        let asked = |seconds| {
            Notice::Waiting(Waiting::Asked { host: "reg.example".into(), until: start + seconds * SECOND })
        };
        assert_eq!(*notices.lock().unwrap(), [asked(10), Notice::Going, asked(20), Notice::Going]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_that_is_too_long_is_said_and_not_waited_for() {
        let budget = Budget::new("reg.example", 4);
        let start = Instant::now();
        budget.hold(start, 2 * MINUTE);
        let refused = budget.enter(Load::Small, MINUTE, &Watcher::default()).await.map(drop);
        assert_eq!(refused, Err(2 * MINUTE));
        assert_eq!(start.elapsed(), Duration::ZERO);
        budget.hold(start, Duration::MAX);
        assert_eq!(budget.held_until(start), Some(start + KEPT), "and not kept for ever");
    }

    #[tokio::test(start_paused = true)]
    async fn blobs_queue_for_connections_and_manifests_do_not_queue_behind_them() {
        let budget = Budget::new("reg.example", 1);
        let first = budget.enter(Load::Blob, MINUTE, &Watcher::default()).await;
        let _manifest = budget.enter(Load::Small, MINUTE, &Watcher::default()).await;
        let (watcher, notices) = watched();
        let second = time::timeout(SECOND, budget.enter(Load::Blob, MINUTE, &watcher)).await;
        assert!(second.is_err(), "the only connection is taken");
        assert_eq!(
            *notices.lock().unwrap(),
            [Notice::Waiting(Waiting::Connection { host: "reg.example".into() })]
        );
        drop(first);
        let _second = budget.enter(Load::Blob, MINUTE, &watcher).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_host_that_is_gone_is_avoided_until_it_answers_or_a_time_passes() {
        let budget = Budget::new("reg.example", 1);
        let now = Instant::now();
        assert_eq!(budget.better_avoided(now), None);
        budget.avoid(now);
        assert!(budget.better_avoided(now).is_some());
        assert_eq!(budget.better_avoided(now + AVOIDED), None);
        budget.reached();
        assert_eq!(budget.better_avoided(now), None);
    }
}
