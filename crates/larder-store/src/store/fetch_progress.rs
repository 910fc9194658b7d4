//! Progress of a layer's fetch, measured for the pulls that wait for the layer or for its slot.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use larder::backend::{MinimumRate, RateWindow};
use larder::reference::Digest;
use larder::scheduler::ScheduledWork;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::unpack::UnpackProgress;

/// The source of a fetch.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct FetchSource {
    /// Registry of the image's name; empty for an archive.
    pub(crate) registry: String,
    /// The repository, with the registry.
    pub(crate) repository: String,
    /// Identity of hosts, repository and credential.
    pub(crate) authorizers: Vec<u64>,
}

impl FetchSource {
    /// The fetch of a layer from here, for the scheduler.
    pub(crate) fn work(&self) -> ScheduledWork {
        ScheduledWork::layer(&self.registry, &self.repository)
    }
}

/// Progress of one fetch.
#[derive(Debug)]
pub(crate) struct FetchProgress {
    /// `None`: another pull never takes the fetch over.
    source: Option<FetchSource>,
    minimum: MinimumRate,
    /// True while the fetch waits for a slot.
    queued: AtomicBool,
    received: AtomicU64,
    unpacking: Mutex<Option<Arc<UnpackProgress>>>,
    window: Mutex<RateWindow>,
    /// Notified when another fetch needs the download of its blob.
    interrupt: Notify,
}

impl Default for FetchProgress {
    fn default() -> Self {
        let minimum = MinimumRate::default();
        FetchProgress {
            source: None,
            minimum,
            queued: AtomicBool::default(),
            received: AtomicU64::default(),
            unpacking: Mutex::default(),
            window: Mutex::new(RateWindow::new(minimum.window)),
            interrupt: Notify::new(),
        }
    }
}

impl FetchProgress {
    pub(crate) fn new(source: FetchSource, minimum: MinimumRate, now: Instant) -> FetchProgress {
        let mut window = RateWindow::new(minimum.window);
        window.begin(now, 0);
        FetchProgress {
            source: Some(source),
            minimum,
            window: Mutex::new(window),
            ..FetchProgress::default()
        }
    }

    pub(crate) fn minimum(&self) -> MinimumRate {
        self.minimum
    }

    /// Notes that it waits for a slot, or that it has one, from when its rate is measured.
    pub(crate) fn set_queued(&self, queued: bool, now: Instant) {
        self.queued.store(queued, Ordering::Relaxed);
        if !queued {
            self.window().begin(now, self.total());
        }
    }

    /// Counts received bytes.
    pub(crate) fn add_received(&self, bytes: u64, now: Instant) {
        self.received.fetch_add(bytes, Ordering::Relaxed);
        self.observe(now);
    }

    /// Sets the unpacking of the present attempt.
    pub(crate) fn set_unpacking(&self, progress: Arc<UnpackProgress>) {
        let before = self.unpacking().replace(progress);
        let unpacked = before.map_or(0, |before| before.compressed_bytes());
        self.received.fetch_add(unpacked, Ordering::Relaxed);
    }

    /// Received bytes and unpacked ones; compressed, since an archive can unpack to any number of bytes.
    fn total(&self) -> u64 {
        let unpacked = self.unpacking().as_ref().map_or(0, |unpacking| unpacking.compressed_bytes());
        self.received.load(Ordering::Relaxed).saturating_add(unpacked)
    }

    fn window(&self) -> MutexGuard<'_, RateWindow> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unpacking(&self) -> MutexGuard<'_, Option<Arc<UnpackProgress>>> {
        self.unpacking.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if the fetch was slower than the minimum over the last whole window; `None` before the end of the
    /// first one.
    pub(crate) fn observe(&self, now: Instant) -> Option<bool> {
        let total = self.total();
        self.window().observe(now, total).map(|rate| rate < self.minimum.bytes_per_second)
    }

    fn is_slow(&self, now: Instant) -> bool {
        self.observe(now).unwrap_or(false)
    }

    /// Ends when another fetch needs the download of this blob.
    pub(crate) async fn interrupted(&self) {
        self.interrupt.notified().await;
    }

    /// Stops this fetch if it is stuck for `waiter`, which needs the download of the same blob.
    pub(crate) fn interrupt_for(&self, waiter: &FetchSource, now: Instant) {
        if self.is_stuck_for(waiter, now) {
            self.interrupt.notify_one();
        }
    }

    /// Returns true if a pull from `waiter` that waits for this fetch should fetch the layer itself. A queue of the same registry,
    /// and the same repository with the same credential, would be as slow.
    pub(crate) fn is_stuck_for(&self, waiter: &FetchSource, now: Instant) -> bool {
        let slow = self.is_slow(now);
        let Some(source) = &self.source else { return false };
        let same_queue = source.registry == waiter.registry && self.queued.load(Ordering::Relaxed);
        slow && !same_queue && source.authorizers != waiter.authorizers
    }
}

/// The fetch that has each download. Clones share the list.
#[derive(Debug, Clone, Default)]
pub(crate) struct BlobDownloads(Arc<Mutex<HashMap<Digest, Weak<FetchProgress>>>>);

impl BlobDownloads {
    fn list(&self) -> MutexGuard<'_, HashMap<Digest, Weak<FetchProgress>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a fetch that has this download from now on.
    pub(crate) fn begin(&self, download: &Digest, progress: &Arc<FetchProgress>) {
        let mut list = self.list();
        list.retain(|_, progress| progress.strong_count() > 0);
        list.insert(download.clone(), Arc::downgrade(progress));
    }

    /// Stops the fetch that has this download if it is stuck for `waiter`.
    pub(crate) fn interrupt_stuck(&self, download: &Digest, waiter: &FetchSource, now: Instant) {
        let progress = self.list().get(download).and_then(Weak::upgrade);
        if let Some(progress) = progress {
            progress.interrupt_for(waiter, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn source(registry: &str, authorizer: u64) -> FetchSource {
        let repository = format!("{registry}/app");
        FetchSource { registry: registry.to_owned(), repository, authorizers: vec![authorizer] }
    }

    /// Whether a fetch at this rate is slow after each of so many seconds.
    fn slow(rate: u64, seconds: u64) -> Vec<bool> {
        let (progress, start) = (FetchProgress::default(), Instant::now());
        let observed = (0..=seconds).map(|second| {
            let now = start + Duration::from_secs(second);
            let slow = progress.is_slow(now);
            progress.add_received(rate, now);
            slow
        });
        observed.collect()
    }

    #[test]
    fn a_fetch_is_slow_only_after_a_whole_window_below_the_minimum() {
        let minimum = MinimumRate::default();
        assert_eq!(slow(minimum.bytes_per_second, 30), [false; 31]);
        let below = slow(minimum.bytes_per_second - 1, 30);
        assert_eq!(below.iter().position(|slow| *slow), Some(10));
        assert!(below[10..].iter().all(|slow| *slow));
    }

    #[test]
    fn the_time_before_a_slot_does_not_make_a_fetch_slow() {
        let (progress, start) = (FetchProgress::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        progress.set_queued(true, at(0));
        assert!(!progress.is_slow(at(0)));
        assert!(progress.is_slow(at(300)), "a pull that waits for the layer may take it over");
        progress.set_queued(false, at(300));
        assert_eq!([300, 309, 310].map(|seconds| progress.is_slow(at(seconds))), [false, false, true]);
    }

    #[test]
    fn a_fetch_is_taken_over_only_from_a_source_that_may_be_faster() {
        let (owner, start) = (source("slow.example", 1), Instant::now());
        let progress = FetchProgress::new(owner.clone(), MinimumRate::default(), start);
        let other_repository = FetchSource { authorizers: vec![2], ..owner.clone() };
        let elsewhere = source("fast.example", 3);
        let later = start + Duration::from_secs(10);
        assert!(!progress.is_stuck_for(&elsewhere, start));
        assert!(progress.is_stuck_for(&elsewhere, later));
        assert!(progress.is_stuck_for(&other_repository, later));
        assert!(!progress.is_stuck_for(&owner, later));
        progress.set_queued(true, later);
        assert!(progress.is_stuck_for(&elsewhere, later));
        assert!(!progress.is_stuck_for(&other_repository, later), "it would wait in the same queue");
    }

    #[test]
    fn without_a_source_or_a_minimum_no_fetch_is_taken_over() {
        let start = Instant::now();
        let none = MinimumRate { bytes_per_second: 0, ..MinimumRate::default() };
        for progress in [FetchProgress::default(), FetchProgress::new(source("slow.example", 1), none, start)]
        {
            let stuck =
                |seconds| progress.is_stuck_for(&source("b", 2), start + Duration::from_secs(seconds));
            assert_eq!([0, 10, 20].map(stuck), [false; 3]);
        }
    }
}
