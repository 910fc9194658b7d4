//! Progress of a pull, from the backend to watchers.
//!
//! Byte counts are pushed. Details are computed on request, so a pull without watchers costs two counters.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::reference::LayerId;
use crate::scheduler::Callers;

/// Progress of a pull in bytes, if the backend reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ByteProgress {
    /// Bytes fetched so far.
    pub done: u64,
    /// Bytes to fetch in all, once known.
    pub total: Option<u64>,
}

/// The rate below which a fetch gives way to waiting pulls. Without waiting pulls it may be slower. A faster one gives
/// way after one window, to those of a caller with fewer slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MinimumRate {
    /// Bytes per second; 0: no fetch gives way.
    pub bytes_per_second: u64,
    /// Time over which the rate is measured, and a time slice.
    pub window: Duration,
}

impl Default for MinimumRate {
    fn default() -> Self {
        MinimumRate { bytes_per_second: 64 << 10, window: Duration::from_secs(10) }
    }
}

/// Measures a rate over whole windows, each of which ends with the first observation after its length.
#[derive(Debug, Clone)]
pub struct RateWindow {
    length: Duration,
    /// Start of the current window, and the total then.
    begun: Option<(Instant, u64)>,
    /// Of the last whole window.
    rate: Option<u64>,
}

impl RateWindow {
    /// A measurement over windows of this length. The first one begins with the first observation.
    pub fn new(length: Duration) -> RateWindow {
        RateWindow { length, begun: None, rate: None }
    }

    /// Restarts the measurement.
    pub fn begin(&mut self, now: Instant, total: u64) {
        *self = RateWindow { begun: Some((now, total)), ..RateWindow::new(self.length) };
    }

    /// Bytes per second over the last whole window, given the total number of bytes until now; `None` before the end of
    /// the first window.
    pub fn observe(&mut self, now: Instant, total: u64) -> Option<u64> {
        let (begun, before) = *self.begun.get_or_insert((now, total));
        let elapsed = now.saturating_duration_since(begun);
        if elapsed >= self.length {
            let bytes = u128::from(total.saturating_sub(before));
            self.rate = u64::try_from(bytes * 1000 / elapsed.as_millis().max(1)).ok();
            self.begun = Some((now, total));
        }
        self.rate
    }
}

/// The current state of a pull, if the backend reports it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PullDetail {
    /// The current step.
    pub step: PullStep,
    /// Wait of the pull as a whole; layers have waits of their own.
    pub waiting: Option<PullWait>,
    /// Recent bytes per second, once known.
    pub rate: Option<u64>,
    /// The layers that were not present, from the bottom up.
    pub layers: Vec<LayerProgress>,
}

/// A step of a pull.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum PullStep {
    /// It resolves the image at the registry.
    #[default]
    Resolving,
    /// It fetches and unpacks layers.
    Layers,
    /// All layers are present; the image is committed.
    Committing,
}

/// One layer of a pull.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerProgress {
    /// The layer, as the manifest names it: `sha256:...`.
    pub digest: LayerId,
    /// Present phase.
    pub phase: LayerPhase,
    /// Bytes fetched by this pull; while the layer is unpacked, bytes that are unpacked.
    pub bytes: ByteProgress,
    /// Recent bytes per second, once known.
    pub rate: Option<u64>,
    /// Present wait.
    pub waiting: Option<PullWait>,
}

/// Phase of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum LayerPhase {
    /// It waits for a slot among all layers.
    #[default]
    Queued,
    /// Another pull fetches it.
    FetchedByOtherPull,
    /// It is fetched, and unpacked behind that.
    Fetching,
    /// It is completely fetched; the rest is unpacked.
    Unpacking,
    /// It is unpacked, and waits for those below it.
    Unpacked,
    /// It is committed.
    Done,
}

/// Reason for a wait. Prints as `rate limited by registry.example, 12s left`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullWait {
    /// The reason, without the time.
    pub reason: String,
    /// When it ends, if that is known.
    pub until: Option<Instant>,
}

impl PullWait {
    /// The reason, and how long it still takes.
    pub fn at(&self, now: Instant) -> String {
        match self.until.map(|until| until.saturating_duration_since(now)) {
            Some(left) if !left.is_zero() => {
                let seconds = left.as_secs() + u64::from(left.subsec_nanos() > 0);
                format!("{}, {} left", self.reason, crate::go_format::duration(Duration::from_secs(seconds)))
            }
            _ => self.reason.clone(),
        }
    }
}

impl fmt::Display for PullStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            PullStep::Resolving => "resolving",
            PullStep::Layers => "pulling",
            PullStep::Committing => "committing",
        })
    }
}

impl fmt::Display for LayerPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            LayerPhase::Queued => "queued",
            LayerPhase::FetchedByOtherPull => "fetched by another pull",
            LayerPhase::Fetching => "fetching",
            LayerPhase::Unpacking => "unpacking",
            LayerPhase::Unpacked => "unpacked",
            LayerPhase::Done => "done",
        })
    }
}

/// Returns the current state of a pull.
pub(crate) type DetailProvider = Arc<dyn Fn() -> PullDetail + Send + Sync>;

/// The backend's handle for reporting progress to the callers of a pull. Optional: CRI has no such field.
#[derive(Clone)]
pub struct ProgressReporter {
    listener: Arc<dyn ProgressListener>,
    callers: Callers,
}

/// The receiver of what a backend reports about one pull. Its methods must be quick.
pub(crate) trait ProgressListener: Send + Sync {
    /// Byte counts, which replace those before.
    fn bytes(&self, _bytes: ByteProgress) {}

    /// The provider of details.
    fn describe_by(&self, _provider: DetailProvider) {}

    /// A finding about an image that is pulled all the same.
    fn warn(&self, _warning: String) {}
}

impl ProgressReporter {
    /// A reporter to this listener.
    pub(crate) fn to(listener: impl ProgressListener + 'static) -> ProgressReporter {
        ProgressReporter { listener: Arc::new(listener), callers: Callers::new("") }
    }

    /// The reporter of a pull for these callers, among whom a backend shares its slots. The default is no pod.
    #[must_use]
    pub fn for_callers(self, callers: &Callers) -> ProgressReporter {
        ProgressReporter { callers: callers.clone(), ..self }
    }

    /// The callers that wait for the pull.
    pub fn callers(&self) -> &Callers {
        &self.callers
    }

    /// A reporter without watchers.
    pub fn unwatched() -> ProgressReporter {
        struct Nobody;
        impl ProgressListener for Nobody {}
        ProgressReporter::to(Nobody)
    }

    /// Reports the byte counts.
    pub fn set(&self, bytes: ByteProgress) {
        self.listener.bytes(bytes);
    }

    /// Sets the provider of details. It must be quick, and may be called after the pull.
    pub fn describe_by(&self, describe: impl Fn() -> PullDetail + Send + Sync + 'static) {
        self.listener.describe_by(Arc::new(describe));
    }

    /// Reports what people should know of an image that is pulled all the same, in one sentence without a full stop.
    pub fn warn(&self, warning: String) {
        self.listener.warn(warning);
    }
}

impl fmt::Debug for ProgressReporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Progress")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_rate_is_of_the_last_whole_window_and_unknown_before() {
        let (mut window, start) = (RateWindow::new(Duration::from_secs(1)), Instant::now());
        let mut rate = |millis, total| window.observe(start + Duration::from_millis(millis), total);
        assert_eq!(rate(0, 500), None);
        assert_eq!(rate(900, 900), None);
        assert_eq!(rate(2000, 4500), Some(2000));
        assert_eq!(rate(2900, 9000), Some(2000));
        assert_eq!(rate(3000, 4500), Some(0), "nothing was received");
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_shows_its_remaining_time() {
        let now = Instant::now();
        let wait = PullWait {
            reason: "rate limited by r.example".into(),
            until: Some(now + Duration::from_secs(12)),
        };
        assert_eq!(wait.at(now), "rate limited by r.example, 12s left");
        assert_eq!(wait.at(now + Duration::from_millis(11_500)), "rate limited by r.example, 1s left");
        assert_eq!(wait.at(now + Duration::from_secs(20)), "rate limited by r.example");
    }
}
