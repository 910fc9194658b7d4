//! When rounds run. A round takes no input but the present state, so a lost kick costs time and nothing else.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::sync::{Notify, watch};
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::collector::{Collector, is_due};
use super::error::GcError;
use super::node_status::sorted_for_cache;
use super::policy::Accounting;
use super::report::GcReport;
use crate::backend::Image;
use crate::events::EventReason;

/// How often things are done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GcIntervals {
    /// Detect and collect. Default 5 min.
    pub collect: Duration,
    /// Refresh the list of images. Default 30 s.
    pub list: Duration,
    /// Look how full the disk is, and collect at once when it is past a limit. Default 5 s; `None` is never, as in
    /// kubelet.
    pub pressure: Option<Duration>,
}

impl Default for GcIntervals {
    fn default() -> Self {
        GcIntervals { pressure: Some(Duration::from_secs(5)), ..GcIntervals::kubelet() }
    }
}

impl GcIntervals {
    /// Kubelet's own.
    pub fn kubelet() -> Self {
        GcIntervals { collect: Duration::from_secs(300), list: Duration::from_secs(30), pressure: None }
    }
}

/// Where collection stands.
#[derive(Debug, Clone, Default)]
pub struct GcStatus {
    /// Rounds ended so far.
    pub rounds: u64,
    /// Whether a round is running.
    pub running: bool,
    /// When the last round ended.
    pub ended: Option<SystemTime>,
    /// What the last round did, or why it failed.
    pub last: Option<Result<Arc<GcReport>, GcError>>,
    /// How many rounds in a row have failed.
    pub failures: u64,
}

/// The images as of the last listing that succeeded.
#[derive(Debug, Clone, Default)]
pub struct ImageCache {
    /// The biggest first.
    pub images: Arc<Vec<Image>>,
    /// When they were listed; `None` if never.
    pub listed: Option<SystemTime>,
}

/// Counts failures in a row, to tell when one is worth an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FailureCount(u64);

impl FailureCount {
    /// Takes the outcome of a round. True if its failure is to be reported as `ImageGCFailed`: from the second in a row
    /// on.
    pub fn count<T, E>(&mut self, outcome: &Result<T, E>) -> bool {
        self.0 = if outcome.is_ok() { 0 } else { self.0 + 1 };
        self.0 > 1
    }
}

/// The loops of one collector.
pub struct GcLoops {
    collector: Arc<Collector>,
    periods: GcIntervals,
    kick: Arc<Notify>,
    status: watch::Sender<GcStatus>,
    images: watch::Sender<ImageCache>,
    /// Until then pressure starts no round.
    not_before: Mutex<Instant>,
}

impl GcLoops {
    /// Loops that do not run yet.
    pub fn new(collector: Arc<Collector>, periods: GcIntervals) -> GcLoops {
        GcLoops {
            collector,
            periods,
            kick: Arc::new(Notify::new()),
            status: watch::Sender::default(),
            images: watch::Sender::default(),
            not_before: Mutex::new(Instant::now()),
        }
    }

    /// Starts a round soon, as the timer does.
    pub fn collect_now(&self) {
        self.kick.notify_one();
    }

    /// Watches where collection stands.
    pub fn status(&self) -> watch::Receiver<GcStatus> {
        self.status.subscribe()
    }

    /// Watches the list of images.
    pub fn images(&self) -> watch::Receiver<ImageCache> {
        self.images.subscribe()
    }

    /// Runs until dropped. Without a limit that could ever be passed nothing is collected; ages and the list are kept up
    /// to date all the same.
    pub async fn run(&self) {
        // Rounds first: pressure found in the moment in which the timer starts a round is that round's to see to.
        tokio::join!(biased; self.rounds(), self.listing(), self.watching(), self.following());
    }

    async fn following(&self) {
        if let Some(feed) = &self.collector.parts.feed {
            feed.follow().await;
        }
    }

    async fn rounds(&self) {
        let mut timer = interval(self.periods.collect);
        timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut failures = FailureCount::default();
        loop {
            tokio::select! {
                _ = timer.tick() => {}
                () = self.kick.notified() => {}
            }
            self.status.send_modify(|status| status.running = true);
            let outcome = self.round().await;
            self.set_not_before(Instant::now() + self.pause_after(&outcome).await);
            let outcome = outcome.map(Arc::new);
            if failures.count(&outcome)
                && let Err(error) = &outcome
            {
                self.collector.event(EventReason::ImageGcFailed, &error.to_string());
            } else if let Err(error) = &outcome
                && !error.has_own_event()
            {
                tracing::warn!("image garbage collection failed: {error}");
            }
            self.status.send_modify(|status| {
                status.rounds += 1;
                status.running = false;
                status.ended = Some(SystemTime::now());
                status.last = Some(outcome);
                status.failures = failures.0;
            });
        }
    }

    async fn round(&self) -> Result<GcReport, GcError> {
        if self.collector.policy().is_enabled() {
            return self.collector.collect().await;
        }
        self.collector.detect().await.map(|()| GcReport::default())
    }

    async fn listing(&self) {
        let mut timer = interval(self.periods.list);
        timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            timer.tick().await;
            match self.collector.parts.backend.list().await {
                Ok(images) => {
                    let images = Arc::new(sorted_for_cache(images));
                    self.images.send_replace(ImageCache { images, listed: Some(SystemTime::now()) });
                }
                // What was listed before still says more than nothing.
                Err(error) => tracing::warn!("cannot list images: {error}"),
            }
        }
    }

    /// Kicks a round as soon as the disk is past a limit, unless one runs anyway or is the first one. After a round that
    /// did not help, the next kick [waits](Self::pause_after) as long as the timer would: what a round could not free it
    /// will not free five seconds later.
    async fn watching(&self) {
        let Some(period) = self.periods.pressure else { return };
        let mut timer = interval(period);
        timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut status = self.status.subscribe();
        loop {
            timer.tick().await;
            // The timer starts the first round; a kick beside it would only tell the same failure twice.
            if status.wait_for(|status| status.rounds > 0 && !status.running).await.is_err() {
                return;
            }
            let policy = self.collector.policy();
            if !policy.is_enabled() {
                continue;
            }
            let rounds = status.borrow().rounds;
            if Instant::now() < self.not_before() {
                continue;
            }
            let Ok(disk) = self.collector.parts.disk.measure_after_deletion().await else { continue };
            let round_began = status.borrow().running || status.borrow().rounds > rounds;
            if disk.capacity > 0 && is_due(disk, &policy) && !round_began {
                self.collect_now();
                if status.wait_for(|status| status.rounds > rounds && !status.running).await.is_err() {
                    return;
                }
            }
        }
    }

    /// How long pressure starts no other round after this one.
    async fn pause_after(&self, round: &Result<GcReport, GcError>) -> Duration {
        let policy = self.collector.policy();
        match round {
            // By kubelet's sums it may have freed enough although nothing is free.
            Ok(GcReport { before: Some(before), .. })
                if policy.accounting == Accounting::Nominal && is_due(*before, &policy) =>
            {
                let disk = self.collector.parts.disk.measure_after_deletion().await;
                let helped = disk.is_ok_and(|disk| !is_due(disk, &policy));
                if helped { Duration::ZERO } else { self.periods.collect }
            }
            Ok(_) => Duration::ZERO,
            // A runtime that is not up yet says nothing of the disk; it may be up when images are listed next.
            Err(error) if error.is_before_the_disk() => self.periods.list,
            Err(_) => self.periods.collect,
        }
    }

    fn not_before(&self) -> Instant {
        *self.not_before.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_not_before(&self, at: Instant) {
        *self.not_before.lock().unwrap_or_else(PoisonError::into_inner) = at;
    }
}
