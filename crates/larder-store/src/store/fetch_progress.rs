//! Progress of a layer's fetch, measured for the pulls that wait for the layer or for its slot.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use larder::backend::{MinimumRate, RateWindow};
use larder::scheduler::{Callers, WorkRate};
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use crate::unpack::UnpackProgress;

/// Progress of one fetch.
#[derive(Debug)]
pub(crate) struct FetchProgress {
    minimum: MinimumRate,
    /// The callers of its pull, and of the pulls that wait for the layer.
    callers: Callers,
    /// True while the fetch waits for a slot.
    queued: AtomicBool,
    /// Received bytes, and those unpacked in earlier attempts.
    counted: AtomicU64,
    /// Set once nothing is left to receive.
    unpacking: Mutex<Option<RemainingUnpack>>,
    window: Mutex<RateWindow>,
}

/// The part of a layer's unpacking that follows its last received byte.
#[derive(Debug)]
struct RemainingUnpack {
    progress: Arc<UnpackProgress>,
    /// Compressed bytes that were unpacked before.
    before: u64,
}

impl RemainingUnpack {
    /// Compressed bytes unpacked since; plain ones would let an archive set its own rate.
    fn bytes(&self) -> u64 {
        self.progress.compressed_bytes().saturating_sub(self.before)
    }
}

impl FetchProgress {
    pub(crate) fn new(minimum: MinimumRate, callers: &Callers, now: Instant) -> FetchProgress {
        let mut window = RateWindow::new(minimum.window);
        window.begin(now, 0);
        FetchProgress {
            minimum,
            callers: callers.of_part(),
            queued: AtomicBool::default(),
            counted: AtomicU64::default(),
            unpacking: Mutex::default(),
            window: Mutex::new(window),
        }
    }

    /// The callers that the layer is fetched for.
    pub(crate) fn callers(&self) -> &Callers {
        &self.callers
    }

    /// Notes that it waits for a slot, or that it has one, from when its rate is measured.
    pub(crate) fn set_queued(&self, queued: bool, now: Instant) {
        self.queued.store(queued, Ordering::Relaxed);
        if !queued {
            self.begin_receiving();
            self.window().begin(now, self.total());
        }
    }

    /// Notes that bytes are received from now on.
    pub(crate) fn begin_receiving(&self) {
        if let Some(unpacking) = self.unpacking().take() {
            self.counted.fetch_add(unpacking.bytes(), Ordering::Relaxed);
        }
    }

    /// Notes that all bytes are here, and are only unpacked from now on.
    pub(crate) fn begin_unpacking(&self, progress: Arc<UnpackProgress>) {
        let before = progress.compressed_bytes();
        *self.unpacking() = Some(RemainingUnpack { progress, before });
    }

    /// Counts received bytes.
    pub(crate) fn add_received(&self, bytes: u64, now: Instant) {
        self.counted.fetch_add(bytes, Ordering::Relaxed);
        self.rate(now);
    }

    /// Received bytes, and those unpacked after the last one was received. If bytes that are unpacked while others are
    /// received counted as well, the rate would be twice that of the registry.
    fn total(&self) -> u64 {
        let unpacked = self.unpacking().as_ref().map_or(0, RemainingUnpack::bytes);
        self.counted.load(Ordering::Relaxed).saturating_add(unpacked)
    }

    fn window(&self) -> MutexGuard<'_, RateWindow> {
        self.window.lock()
    }

    fn unpacking(&self) -> MutexGuard<'_, Option<RemainingUnpack>> {
        self.unpacking.lock()
    }

    /// The rate over the last whole window. A fetch is slow after its last received byte if it makes no progress: a
    /// layer that unpacks to a thousand times its bytes takes long for each, through no fault of its registry.
    pub(crate) fn rate(&self, now: Instant) -> WorkRate {
        let total = self.total();
        let (minimum, otherwise) = match *self.unpacking() {
            Some(_) => (1, WorkRate::Received),
            None => (self.minimum.bytes_per_second, WorkRate::Fast),
        };
        WorkRate::of(self.window().observe(now, total), minimum, otherwise)
    }

    /// Returns true if pulls from elsewhere should not wait for this fetch. One that waits for a slot of their registry
    /// is as fast as they are.
    pub(crate) fn is_slow(&self, now: Instant) -> bool {
        !self.queued.load(Ordering::Relaxed) && self.rate(now) == WorkRate::Slow
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Whether a fetch at this rate is slow after each of so many seconds.
    fn slow(rate: u64, seconds: u64) -> Vec<bool> {
        let start = Instant::now();
        let progress = FetchProgress::new(MinimumRate::default(), &Callers::new(""), start);
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
    fn bytes_that_are_received_and_unpacked_count_once() {
        let (start, half) = (Instant::now(), MinimumRate::default().bytes_per_second / 2);
        let at = |seconds| start + Duration::from_secs(seconds);
        let progress = FetchProgress::new(MinimumRate::default(), &Callers::new(""), start);
        let unpacking = Arc::<UnpackProgress>::default();
        for second in 1..=10 {
            progress.add_received(half, at(second));
            unpacking.set_compressed(second * half);
        }
        assert!(progress.is_slow(at(10)), "it receives half of the minimum");
        progress.begin_unpacking(Arc::clone(&unpacking));
        unpacking.set_compressed(30 * half);
        assert!(!progress.is_slow(at(20)));
        assert!(progress.is_slow(at(30)), "it unpacks nothing");
    }

    #[test]
    fn the_time_before_a_slot_does_not_make_a_fetch_slow() {
        let start = Instant::now();
        let progress = FetchProgress::new(MinimumRate::default(), &Callers::new(""), start);
        let at = |seconds| start + Duration::from_secs(seconds);
        progress.set_queued(true, at(0));
        assert!(![0, 300].map(|seconds| progress.is_slow(at(seconds))).contains(&true));
        progress.set_queued(false, at(300));
        assert_eq!([300, 309, 310].map(|seconds| progress.is_slow(at(seconds))), [false, false, true]);
    }

    #[test]
    fn without_a_minimum_no_fetch_is_slow() {
        let (start, none) = (Instant::now(), MinimumRate { bytes_per_second: 0, ..MinimumRate::default() });
        let progress = FetchProgress::new(none, &Callers::new(""), start);
        let slow = |seconds| progress.is_slow(start + Duration::from_secs(seconds));
        assert_eq!([0, 10, 20].map(slow), [false; 3]);
    }
}
