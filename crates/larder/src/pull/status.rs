//! Status of the pulls in flight, for watchers.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::backend::{ByteProgress, LayerPhase, ProgressReporter, PullDetail, PullStep};
use crate::progress::{DetailProvider, ProgressListener};
use crate::reference::ImageName;

/// The phase of a pull.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PullPhase {
    /// It waits in the queue.
    Queued,
    /// It has a slot and waits for the rate limit.
    Throttled,
    /// The runtime pulls.
    Pulling,
}

impl fmt::Display for PullPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            PullPhase::Queued => "queued",
            PullPhase::Throttled => "throttled",
            PullPhase::Pulling => "pulling",
        })
    }
}

/// One pull in flight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullStatus {
    /// The image, with its tag.
    pub image: ImageName,
    /// Its phase.
    pub phase: PullPhase,
    /// Reason of the wait, as a sentence part: "waits for ...".
    pub waiting: Option<Cow<'static, str>>,
    /// Its progress, if the backend reports it.
    pub bytes: Option<ByteProgress>,
    /// Its current state, if the backend reports it. Set when pulls are listed, not for watchers of one pull.
    pub detail: Option<PullDetail>,
    /// When it was first requested.
    pub since: Instant,
}

/// All pulls in flight. Cloning shares it.
#[derive(Debug, Clone, Default)]
pub(super) struct PullTracker {
    pulls: Arc<Mutex<BTreeMap<u64, TrackedPull>>>,
}

/// When a pull last entered a phase or received bytes.
type SharedInstant = Arc<Mutex<Instant>>;

/// Warnings of one pull that are shown; more are left out.
const MAX_WARNINGS: usize = 20;

/// The detail provider of a pull, once set.
type SharedDetailProvider = Arc<Mutex<Option<DetailProvider>>>;

struct TrackedPull {
    status: watch::Receiver<PullStatus>,
    progressed: SharedInstant,
    describe: SharedDetailProvider,
}

impl TrackedPull {
    fn snapshot(&self) -> PullStatus {
        let describe = self.describe.lock().clone();
        let mut status = self.status.borrow().clone();
        status.detail = describe.map(|describe| describe());
        status
    }
}

impl fmt::Debug for TrackedPull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.status.fmt(f)
    }
}

impl PullTracker {
    /// Tracks a new pull until the entry is dropped.
    pub(super) fn track(&self, image: &ImageName, now: Instant) -> PullTrackerEntry {
        let (sender, receiver) = watch::channel(PullStatus {
            image: image.clone(),
            phase: PullPhase::Queued,
            waiting: None,
            bytes: None,
            detail: None,
            since: now,
        });
        let (describe, progressed) = (Arc::default(), Arc::new(Mutex::new(now)));
        let mut pulls = self.pulls.lock();
        let id = pulls.last_key_value().map_or(0, |(last, _)| last + 1);
        let (of_pull, at) = (Arc::clone(&describe), Arc::clone(&progressed));
        pulls.insert(id, TrackedPull { status: receiver, progressed: at, describe: of_pull });
        let warnings = Arc::default();
        PullTrackerEntry { tracker: self.clone(), id, status: sender, progressed, describe, warnings }
    }

    /// The tracked pulls, oldest first.
    pub(super) fn snapshot(&self) -> Vec<PullStatus> {
        let pulls = self.pulls.lock();
        pulls.values().map(TrackedPull::snapshot).collect()
    }

    /// How long a pull in progress has received nothing: the longest time of all. Waiting pulls do not count.
    pub(super) fn longest_stall(&self, now: Instant) -> Option<Duration> {
        let pulls = self.pulls.lock();
        let pulling = pulls.values().filter(|pull| pull.status.borrow().phase == PullPhase::Pulling);
        let stalls = pulling.map(|pull| now.saturating_duration_since(*lock(&pull.progressed)));
        stalls.max()
    }

    /// Watches the oldest tracked pull of an image.
    pub(super) fn watch(&self, image: &str) -> Option<watch::Receiver<PullStatus>> {
        let pulls = self.pulls.lock();
        pulls.values().map(|row| &row.status).find(|status| status.borrow().image == image).cloned()
    }
}

/// The entry of a tracked pull.
pub(super) struct PullTrackerEntry {
    tracker: PullTracker,
    id: u64,
    status: watch::Sender<PullStatus>,
    progressed: SharedInstant,
    describe: SharedDetailProvider,
    warnings: Arc<Mutex<Vec<String>>>,
}

fn lock(at: &SharedInstant) -> MutexGuard<'_, Instant> {
    at.lock()
}

impl fmt::Debug for PullTrackerEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.status.fmt(f)
    }
}

/// Activity of a running pull, which decides how its rate is judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PullActivity {
    /// It receives manifests or layers.
    Receiving,
    /// It receives layers, and unpacks one that is here.
    ReceivingAndUnpacking,
    /// It waits for slots of layers, or for layers that other pulls fetch.
    Waiting,
    /// It has received all its bytes, as far as it may, and unpacks or commits them.
    Unpacking,
}

impl PullTrackerEntry {
    pub(super) fn set(&self, phase: PullPhase, waiting: Option<&'static str>) {
        *lock(&self.progressed) = Instant::now();
        self.status.send_modify(|status| {
            status.phase = phase;
            status.waiting = waiting.map(Cow::Borrowed);
        });
    }

    /// Its progress; zero until the backend reports it.
    pub(super) fn bytes(&self) -> ByteProgress {
        self.status.borrow().bytes.unwrap_or_default()
    }

    /// Activity of the pull, as far as the backend reports it.
    pub(super) fn activity(&self) -> PullActivity {
        let describe = self.describe.lock().clone();
        let Some(detail) = describe.map(|describe| describe()) else {
            let ByteProgress { done, total } = self.bytes();
            let is_received = total.is_some_and(|total| done >= total);
            return if is_received { PullActivity::Unpacking } else { PullActivity::Receiving };
        };
        let has = |phase: LayerPhase| detail.layers.iter().any(|layer| layer.phase == phase);
        match detail.step {
            PullStep::Resolving => PullActivity::Receiving,
            PullStep::Layers if has(LayerPhase::Fetching) && has(LayerPhase::Unpacking) => {
                PullActivity::ReceivingAndUnpacking
            }
            PullStep::Layers if has(LayerPhase::Fetching) => PullActivity::Receiving,
            PullStep::Layers if has(LayerPhase::Unpacking) => PullActivity::Unpacking,
            PullStep::Layers if has(LayerPhase::Queued) || has(LayerPhase::FetchedByOtherPull) => {
                PullActivity::Waiting
            }
            PullStep::Layers | PullStep::Committing => PullActivity::Unpacking,
        }
    }

    /// A reporter that updates this entry. A later one replaces the first.
    pub(super) fn progress(&self) -> ProgressReporter {
        ProgressReporter::to(EntryUpdater {
            status: self.status.clone(),
            progressed: Arc::clone(&self.progressed),
            describe: Arc::clone(&self.describe),
            warnings: Arc::clone(&self.warnings),
        })
    }

    /// Warnings of the backend about the image so far.
    pub(super) fn warnings(&self) -> Vec<String> {
        self.warnings.lock().clone()
    }
}

/// Updates an entry by what a backend reports.
struct EntryUpdater {
    status: watch::Sender<PullStatus>,
    progressed: SharedInstant,
    describe: SharedDetailProvider,
    warnings: Arc<Mutex<Vec<String>>>,
}

impl ProgressListener for EntryUpdater {
    fn bytes(&self, bytes: ByteProgress) {
        self.status.send_modify(|status| {
            if status.bytes.replace(bytes).map(|before| before.done) != Some(bytes.done) {
                *lock(&self.progressed) = Instant::now();
            }
        });
    }

    fn describe_by(&self, provider: DetailProvider) {
        *self.describe.lock() = Some(provider);
    }

    fn warn(&self, warning: String) {
        let mut warnings = self.warnings.lock();
        if warnings.len() < MAX_WARNINGS && !warnings.contains(&warning) {
            warnings.push(warning);
        }
    }
}

impl Drop for PullTrackerEntry {
    fn drop(&mut self) {
        self.tracker.pulls.lock().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::LayerProgress;
    use crate::reference::LayerId;

    #[tokio::test(start_paused = true)]
    async fn a_pull_that_receives_nothing_is_stalled_beside_one_that_does() {
        let tracker = PullTracker::default();
        let stall = || tracker.longest_stall(Instant::now()).map(|stall| stall.as_secs());
        let entries = ["a:1", "b:1", "c:1"].map(|image| tracker.track(&image.into(), Instant::now()));
        assert_eq!(stall(), None, "all wait");
        for entry in &entries[..2] {
            entry.set(PullPhase::Pulling, None);
        }
        let progress = [entries[0].progress(), entries[1].progress()];
        let at = |done| ByteProgress { done, total: None };
        for minute in 1..=30 {
            tokio::time::advance(Duration::from_secs(60)).await;
            progress[0].set(at(minute));
            progress[1].set(at(minute.min(5)));
        }
        assert_eq!(stall(), Some(25 * 60));
        drop(entries);
        assert_eq!(stall(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_pull_receives_until_no_layer_is_left_to_fetch() {
        use LayerPhase::{Done, FetchedByOtherPull, Fetching, Queued, Unpacked, Unpacking};
        use PullActivity as Activity;
        let tracker = PullTracker::default();
        let entry = tracker.track(&"a:1".into(), Instant::now());
        let progress = entry.progress();
        progress.set(ByteProgress { done: 10, total: None });
        assert_eq!(entry.activity(), Activity::Receiving);
        progress.set(ByteProgress { done: 10, total: Some(10) });
        assert_eq!(entry.activity(), Activity::Unpacking);
        // Those of other pulls do not count in its bytes.
        for (phases, expected) in [
            ([Done, FetchedByOtherPull], Activity::Waiting),
            ([Unpacked, Queued], Activity::Waiting),
            ([Fetching, FetchedByOtherPull], Activity::Receiving),
            ([Fetching, Unpacking], Activity::ReceivingAndUnpacking),
            ([Queued, Unpacking], Activity::Unpacking),
            ([Done, Unpacked], Activity::Unpacking),
        ] {
            progress.describe_by(move || {
                let (digest, bytes) = (LayerId::from("sha256:a"), ByteProgress::default());
                let layer = LayerProgress { digest, phase: Queued, bytes, rate: None, waiting: None };
                let layers = phases.map(|phase| LayerProgress { phase, ..layer.clone() }).to_vec();
                PullDetail { step: PullStep::Layers, layers, ..PullDetail::default() }
            });
            assert_eq!(entry.activity(), expected, "{phases:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_pull_is_described_by_its_last_caller_and_only_when_listed() {
        let tracker = PullTracker::default();
        let entry = tracker.track(&"a:1".into(), Instant::now());
        assert_eq!(tracker.snapshot()[0].detail, None);
        let asked = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        for step in [PullStep::Layers, PullStep::Committing] {
            let asked = Arc::clone(&asked);
            entry.progress().describe_by(move || {
                asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                PullDetail { step, ..PullDetail::default() }
            });
        }
        assert_eq!(asked.load(std::sync::atomic::Ordering::Relaxed), 0);
        assert_eq!(
            tracker.snapshot()[0].detail.as_ref().map(|detail| detail.step),
            Some(PullStep::Committing)
        );
        assert_eq!(asked.load(std::sync::atomic::Ordering::Relaxed), 1);
        drop(entry);
        assert_eq!(tracker.snapshot(), []);
    }
}
