//! Schedules rounds. A round depends only on the current state, so a lost wake-up only delays it.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};

use super::collector::Collector;
use super::error::GcError;
use super::node_status::sorted_for_cache;
use super::plan::is_due;
use super::policy::{GcPolicy, GcStrategy};
use super::pressure_wait::PressureWait;
use super::report::{GcReport, GcRoundResult};
use crate::backend::Image;
use crate::events::EventReason;

/// Intervals of the loops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GcIntervals {
    /// Detect and collect. Default 5 min.
    pub collect: Duration,
    /// Refresh the list of images. Default 30 s.
    pub list: Duration,
    /// Measure the filesystem, and collect at once when it is past a threshold. Default 5 s; `None` is never, as in
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

/// The status of garbage collection.
#[derive(Debug, Clone, Default)]
pub struct GcStatus {
    /// Rounds ended so far.
    pub rounds: u64,
    /// Whether a round is running.
    pub running: bool,
    /// When the last round ended.
    pub ended: Option<SystemTime>,
    /// The result of the last round.
    pub last: Option<Arc<GcRoundResult>>,
    /// How many rounds in a row have failed.
    pub failures: u64,
    /// How many rounds in a row ended with an error other than [`GcError::Insufficient`]: GC itself does not work.
    pub errors: u64,
}

/// The images as of the last listing that succeeded.
#[derive(Debug, Clone, Default)]
pub struct ImageCache {
    /// The images, largest first.
    pub images: Arc<Vec<Image>>,
    /// When they were listed; `None` if never.
    pub listed: Option<SystemTime>,
}

/// Counts consecutive failures, to decide when one is reported as an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FailureCount(u64);

impl FailureCount {
    /// Counts the outcome of a round. Returns whether to report its failure as `ImageGCFailed`: from the second
    /// consecutive one.
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
    /// When disk pressure may start a round again, and the policy of the round before.
    wait: Mutex<(PressureWait, Arc<GcPolicy>)>,
    /// When another collector last removed an image.
    others: watch::Sender<Option<Instant>>,
}

/// How often the uses of images are looked at while one is leased for its first use.
const LOOK: Duration = Duration::from_secs(5);
/// Another collector is done once it has removed nothing for this long.
const QUIET: Duration = Duration::from_secs(5);
/// The longest time that a round waits for another collector.
const QUIET_WITHIN: Duration = Duration::from_secs(60);
/// How often a round starts over because of another collector.
const RESTARTS: usize = 3;

impl GcLoops {
    /// Creates the loops without starting them.
    pub fn new(collector: Arc<Collector>, periods: GcIntervals) -> GcLoops {
        let wait = Mutex::new((PressureWait::until(Instant::now()), collector.policy()));
        GcLoops {
            collector,
            periods,
            kick: Arc::new(Notify::new()),
            status: watch::Sender::default(),
            images: watch::Sender::default(),
            wait,
            others: watch::Sender::default(),
        }
    }

    /// Notes that another collector, such as kubelet's, has removed an image. A round that runs starts over when the
    /// other one is done: the other frees space, too, and two rounds for one shortage free it twice.
    pub fn removed_by_another(&self) {
        self.others.send_replace(Some(Instant::now()));
    }

    /// Watches the status.
    pub fn status(&self) -> watch::Receiver<GcStatus> {
        self.status.subscribe()
    }

    /// Notes a round that was requested beside the loops: the last one is now this.
    pub fn note_requested(&self, round: Arc<GcRoundResult>) {
        self.status.send_modify(|status| {
            status.ended = Some(SystemTime::now());
            status.last = Some(round);
        });
    }

    /// Watches the list of images.
    pub fn images(&self) -> watch::Receiver<ImageCache> {
        self.images.subscribe()
    }

    /// Runs until dropped. Without a threshold that can be exceeded no image is removed, but what nothing can use any
    /// more is reclaimed, and usage records and the image list are updated.
    pub async fn run(&self) {
        // Rounds first: a round that the timer starts at the same moment handles the pressure.
        tokio::join!(biased; self.rounds(), self.listing(), self.watching(), self.following(), self.looking());
    }

    async fn following(&self) {
        if let Some(feed) = &self.collector.parts.feed {
            feed.follow().await;
        }
    }

    /// Looks for the first uses of leased images.
    async fn looking(&self) {
        let mut timer = interval(LOOK);
        timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            timer.tick().await;
            let images = Arc::clone(&self.images.borrow().images);
            self.collector.end_used_leases(&images).await;
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
            let policy = self.collector.policy();
            let round = self.undisturbed_round().await;
            let wait = self.wait_after(&policy, &round.report, round.error.as_ref()).await;
            *self.wait.lock() = (wait, policy);
            let outcome = round.error.as_ref().map_or(Ok(()), Err);
            if failures.count(&outcome)
                && let Err(error) = &outcome
            {
                self.collector.event(EventReason::ImageGcFailed, &error.to_string());
            } else if let Err(error) = &outcome
                && !error.has_own_event()
            {
                tracing::warn!("image garbage collection failed: {error}");
            }
            let is_error = round.error.as_ref().is_some_and(|error| !error.is_shortage());
            self.status.send_modify(|status| {
                status.errors = if is_error { status.errors + 1 } else { 0 };
                status.rounds += 1;
                status.running = false;
                status.ended = Some(SystemTime::now());
                status.last = Some(Arc::new(round));
                status.failures = failures.0;
            });
        }
    }

    /// One round at a time when no other collector removes images.
    async fn undisturbed_round(&self) -> GcRoundResult {
        let mut others = self.others.subscribe();
        for _ in 0..RESTARTS {
            // A collector that removes images all the time puts no round off for good.
            let _ = timeout(QUIET_WITHIN, quiet(&mut others)).await;
            tokio::select! {
                Ok(()) = others.changed() => tracing::info!("another process removes images: the round starts over"),
                result = self.round() => return result,
            }
        }
        self.round().await
    }

    async fn round(&self) -> GcRoundResult {
        let policy = self.collector.policy();
        self.collector.round(policy.scheduled_goal(), &policy).await
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
                // The previous list remains valid enough.
                Err(error) => tracing::warn!("cannot list images: {error}"),
            }
        }
    }

    /// Starts a round as soon as the filesystem is past a threshold, except while a round runs or before the first one.
    /// After a round that did not free enough, the next start [waits](PressureWait) until another round may free more.
    async fn watching(&self) {
        let Some(period) = self.periods.pressure else { return };
        let mut timer = interval(period);
        timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut status = self.status.subscribe();
        loop {
            timer.tick().await;
            // The timer starts the first round; another start would only report the same failure twice.
            if status.wait_for(|status| status.rounds > 0 && !status.running).await.is_err() {
                return;
            }
            let policy = self.collector.policy();
            if !policy.is_enabled() {
                continue;
            }
            let rounds = status.borrow().rounds;
            let Ok(disk) = self.collector.parts.disk.measure_after_deletion().await else { continue };
            let is_due = disk.capacity > 0 && is_due(disk, &policy) && self.may_start(&policy).await;
            let round_began = status.borrow().running || status.borrow().rounds > rounds;
            if is_due && !round_began {
                self.kick.notify_one();
                if status.wait_for(|status| status.rounds > rounds && !status.running).await.is_err() {
                    return;
                }
            }
        }
    }

    /// Whether the wait after the last round has ended.
    async fn may_start(&self, policy: &Arc<GcPolicy>) -> bool {
        let (wait, waited_by) = self.wait.lock().clone();
        let now = Instant::now();
        if wait.is_over(now, None) || !Arc::ptr_eq(policy, &waited_by) {
            return true;
        }
        wait.needs_basis(now) && wait.is_over(now, self.collector.round_basis().await.as_ref())
    }

    /// How long disk pressure starts no other round after this one.
    async fn wait_after(
        &self,
        policy: &GcPolicy,
        report: &GcReport,
        error: Option<&GcError>,
    ) -> PressureWait {
        let soon = PressureWait::until(Instant::now());
        match (error, report.before) {
            // By nominal sizes it may have freed enough although the filesystem is still full.
            (None, Some(before)) if policy.strategy == GcStrategy::Kubelet && is_due(before, policy) => {
                let disk = self.collector.parts.disk.measure_after_deletion().await;
                let helped = disk.is_ok_and(|disk| !is_due(disk, policy));
                if helped { soon } else { PressureWait::until(Instant::now() + self.periods.collect) }
            }
            (None, _) => soon,
            // The runtime may not be running yet; it may be running at the next list of images.
            (Some(error), _) if error.is_before_the_disk() => {
                PressureWait::until(Instant::now() + self.periods.list)
            }
            (Some(_), _) => {
                let basis = self.collector.round_basis().await;
                PressureWait::after(Instant::now(), &self.periods, report.plans.last(), basis)
            }
        }
    }
}

/// Waits until the other collector has removed nothing for a while.
async fn quiet(others: &mut watch::Receiver<Option<Instant>>) {
    loop {
        let last = *others.borrow_and_update();
        match last {
            Some(last) if last.elapsed() < QUIET => sleep_until(last + QUIET).await,
            _ => return,
        }
    }
}
