//! Progress of a pull and of each of its layers: counted as it happens, rendered on request.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use larder::backend::{
    ByteProgress, LayerPhase, LayerProgress, ProgressReporter, PullDetail, PullStep, PullWait, RateWindow,
};
use larder::reference::Digest;
use larder::scheduler::Callers;
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use super::plan::PullPlan;
use crate::store::ClaimOutcome;
use crate::unpack::UnpackProgress;
use larder_registry::{FetchNotice, FetchWait};

/// Over how long a rate is measured.
const WINDOW: Duration = Duration::from_secs(1);

/// One pull.
pub(super) struct PullProgress {
    reporter: ProgressReporter,
    /// Why it waits before its layers are known.
    waits: FetchWaitState,
    layers: OnceLock<Vec<LayerPullProgress>>,
    /// Bytes received over the network.
    received: AtomicU64,
    window: Mutex<RateWindow>,
    committing: AtomicBool,
}

/// One layer, at its position in the image.
struct LayerPullProgress {
    digest: Digest,
    /// True if the layer was present before the pull. Then it is not shown.
    present: bool,
    /// Of what this pull fetches itself.
    size: Option<u64>,
    phase: Mutex<LayerPhase>,
    waits: FetchWaitState,
    /// Bytes that are here, those of an earlier pull included.
    done: AtomicU64,
    /// Bytes received over the network.
    received: AtomicU64,
    window: Mutex<RateWindow>,
    /// Of its present unpacking.
    unpacking: Mutex<Option<Arc<UnpackProgress>>>,
}

impl PullProgress {
    /// The progress of a pull that begins, which describes it to `reporter` from now on.
    pub(super) fn begin(reporter: &ProgressReporter) -> Arc<PullProgress> {
        let progress = Arc::new(PullProgress {
            reporter: reporter.clone(),
            waits: FetchWaitState::default(),
            layers: OnceLock::new(),
            received: AtomicU64::new(0),
            window: rate_window(),
            committing: AtomicBool::new(false),
        });
        // A weak reference: the progress owns the reporter.
        let described = Arc::downgrade(&progress);
        reporter.describe_by(move || {
            described.upgrade().map_or_else(PullDetail::default, |progress| progress.detail(Instant::now()))
        });
        progress
    }

    /// Notes why the pull as a whole waits, and what registries warn of.
    pub(super) fn notice(&self, notice: &FetchNotice) {
        match notice {
            FetchNotice::Warning(warning) => self.warn(warning.clone()),
            _ => self.waits.notice(notice),
        }
    }

    /// Tells people something about the image.
    pub(super) fn warn(&self, warning: String) {
        self.reporter.warn(warning);
    }

    /// Sets which layers are missing, and whether this pull fetches them.
    pub(super) fn set_layers(&self, plan: &PullPlan, claims: &[ClaimOutcome]) {
        let ours = |digest: &Digest| {
            let mut layers = plan.layers.iter().zip(claims);
            layers.any(|(planned, claim)| {
                planned.descriptor.digest == *digest && matches!(claim, ClaimOutcome::Fetch(_))
            })
        };
        let layers = plan.layers.iter().zip(claims).map(|(planned, claim)| {
            let digest = planned.descriptor.digest.clone();
            let phase = match claim {
                ClaimOutcome::Present(_) => LayerPhase::Unpacked,
                // An image may have a layer twice: the first one to be fetched serves both.
                ClaimOutcome::Wait(_) if !ours(&digest) => LayerPhase::FetchedByOtherPull,
                ClaimOutcome::Wait(_) | ClaimOutcome::Fetch(_) => LayerPhase::Queued,
            };
            let size = matches!(claim, ClaimOutcome::Fetch(_)).then_some(planned.descriptor.size);
            LayerPullProgress {
                present: matches!(claim, ClaimOutcome::Present(_)),
                ..LayerPullProgress::new(digest, size, phase)
            }
        });
        self.begin_layers(layers.collect());
    }

    fn begin_layers(&self, layers: Vec<LayerPullProgress>) {
        let _ = self.layers.set(layers); // a pull is planned once
        self.reporter.set(self.bytes());
    }

    /// Sets the phase of a layer.
    pub(super) fn set_phase(&self, layer: &Digest, phase: LayerPhase) {
        let layer = match phase {
            // Layers are done from the bottom up, those that were here as well.
            LayerPhase::Done => self.unsettled(layer).next(),
            _ => self.fetched(layer),
        };
        if let Some(layer) = layer {
            *layer.phase() = phase;
            layer.waits.end();
        }
    }

    /// Sets the counters of a layer's unpacking.
    pub(super) fn set_unpacking(&self, layer: &Digest, unpacking: Arc<UnpackProgress>) {
        if let Some(layer) = self.fetched(layer) {
            *layer.unpacking.lock() = Some(unpacking);
        }
    }

    /// Applies a notice of a layer's fetch.
    pub(super) fn notice_of(&self, layer: &Digest, notice: &FetchNotice) {
        let Some(layer) = self.fetched(layer) else { return };
        layer.waits.notice(notice);
        match notice {
            FetchNotice::Present(count) => layer.done.store(*count, Ordering::Relaxed),
            FetchNotice::Bytes(count) => {
                for counter in [&layer.done, &layer.received, &self.received] {
                    counter.fetch_add(*count, Ordering::Relaxed);
                }
            }
            FetchNotice::Warning(warning) => return self.warn(warning.clone()),
            FetchNotice::Host(_) | FetchNotice::Waiting(_) | FetchNotice::Resumed => return,
        }
        self.reporter.set(self.bytes());
    }

    /// The callers that wait for the pull.
    pub(super) fn callers(&self) -> &Callers {
        self.reporter.callers()
    }

    /// Sets that all layers are present.
    pub(super) fn set_committing(&self) {
        self.committing.store(true, Ordering::Relaxed);
    }

    /// Bytes received over the network.
    pub(super) fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Returns true if the pull waits for the registry, and not only for the disk or for other pulls.
    pub(super) fn awaits_registry(&self, now: Instant) -> bool {
        let detail = self.detail(now);
        let is_fetching = |layer: &LayerProgress| layer.phase == LayerPhase::Fetching;
        detail.step == PullStep::Resolving || detail.layers.iter().any(is_fetching)
    }

    /// The layers of this digest that are not done yet, from the bottom up.
    fn unsettled(&self, digest: &Digest) -> impl Iterator<Item = &LayerPullProgress> {
        let layers = self.layers.get().into_iter().flatten();
        layers.filter(move |layer| layer.digest == *digest && *layer.phase() != LayerPhase::Done)
    }

    /// The layer of this digest that is being fetched: one that this pull planned to fetch, else one that another
    /// pull gave up, or whose existing copy does not fit. Of several with one digest only one is fetched at a time.
    fn fetched(&self, digest: &Digest) -> Option<&LayerPullProgress> {
        let ours = self.unsettled(digest).find(|layer| layer.size.is_some());
        ours.or_else(|| self.unsettled(digest).next())
    }

    fn bytes(&self) -> ByteProgress {
        let Some(layers) = self.layers.get() else { return ByteProgress { done: 0, total: None } };
        let done = layers.iter().map(|layer| layer.done.load(Ordering::Relaxed)).sum();
        ByteProgress { done, total: Some(layers.iter().filter_map(|layer| layer.size).sum()) }
    }

    fn detail(&self, now: Instant) -> PullDetail {
        let layers = self.layers.get();
        let step = match layers {
            None => PullStep::Resolving,
            Some(_) if self.committing.load(Ordering::Relaxed) => PullStep::Committing,
            Some(_) => PullStep::Layers,
        };
        let missing = layers.into_iter().flatten().filter(|layer| !layer.present);
        PullDetail {
            step,
            waiting: self.waits.now(),
            rate: observe(&self.window, now, self.received()),
            layers: missing.map(|layer| layer.progress(now)).collect(),
        }
    }
}

impl LayerPullProgress {
    fn new(digest: Digest, size: Option<u64>, phase: LayerPhase) -> LayerPullProgress {
        LayerPullProgress {
            digest,
            present: false,
            size,
            phase: Mutex::new(phase),
            waits: FetchWaitState::default(),
            done: AtomicU64::new(0),
            received: AtomicU64::new(0),
            window: rate_window(),
            unpacking: Mutex::default(),
        }
    }

    fn phase(&self) -> MutexGuard<'_, LayerPhase> {
        self.phase.lock()
    }

    fn progress(&self, now: Instant) -> LayerProgress {
        let done = self.done.load(Ordering::Relaxed);
        let phase = *self.phase();
        let all_received = self.size.is_some_and(|size| done >= size);
        let phase_now =
            if phase == LayerPhase::Fetching && all_received { LayerPhase::Unpacking } else { phase };
        let unpacked = match &*self.unpacking.lock() {
            Some(unpacking) if phase_now == LayerPhase::Unpacking => Some(unpacking.compressed_bytes()),
            _ => None,
        };
        LayerProgress {
            digest: (&self.digest).into(),
            phase: phase_now,
            bytes: ByteProgress { done: unpacked.unwrap_or(done), total: self.size },
            rate: observe(&self.window, now, self.received.load(Ordering::Relaxed))
                .filter(|_| phase == LayerPhase::Fetching && !all_received),
            waiting: self.waits.now(),
        }
    }
}

/// The reason that a fetch waits. Its ranges are parallel: it waits while none of them progresses.
#[derive(Default)]
struct FetchWaitState {
    /// Whether there is anything in `wait`: bytes are received more often than a wait begins.
    any: AtomicBool,
    wait: Mutex<Option<FetchWait>>,
}

impl FetchWaitState {
    fn notice(&self, notice: &FetchNotice) {
        match notice {
            FetchNotice::Waiting(waiting) => {
                *self.lock() = Some(waiting.clone());
                self.any.store(true, Ordering::Release);
            }
            FetchNotice::Warning(_) => {}
            FetchNotice::Resumed | FetchNotice::Present(_) | FetchNotice::Bytes(_) | FetchNotice::Host(_) => {
                self.end();
            }
        }
    }

    fn end(&self) {
        if self.any.swap(false, Ordering::AcqRel) {
            *self.lock() = None;
        }
    }

    fn now(&self) -> Option<PullWait> {
        self.lock().as_ref().map(FetchWait::to_pull_wait)
    }

    fn lock(&self) -> MutexGuard<'_, Option<FetchWait>> {
        self.wait.lock()
    }
}

fn rate_window() -> Mutex<RateWindow> {
    Mutex::new(RateWindow::new(WINDOW))
}

fn observe(window: &Mutex<RateWindow>, now: Instant, received: u64) -> Option<u64> {
    window.lock().observe(now, received)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pull of these layers: digit of the digest, size of what it fetches itself, phase.
    fn pull(layers: &[(char, Option<u64>, LayerPhase)]) -> (Arc<PullProgress>, Vec<Digest>) {
        let digest =
            |digit: char| Digest::parse(&format!("sha256:{}", digit.to_string().repeat(64))).unwrap();
        let progress = PullProgress::begin(&ProgressReporter::unwatched());
        let progresses =
            layers.iter().map(|(digit, size, phase)| LayerPullProgress::new(digest(*digit), *size, *phase));
        progress.begin_layers(progresses.collect());
        (progress, layers.iter().map(|(digit, ..)| digest(*digit)).collect())
    }

    fn phases(progress: &PullProgress) -> Vec<LayerPhase> {
        progress.detail(Instant::now()).layers.iter().map(|layer| layer.phase).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn of_two_layers_with_one_digest_each_has_a_phase_of_its_own() {
        use LayerPhase::{Done, Fetching, Queued};
        let (progress, digests) =
            pull(&[('a', Some(10), Queued), ('b', Some(5), Queued), ('a', None, Queued)]);
        progress.set_phase(&digests[0], Fetching);
        progress.notice_of(&digests[0], &FetchNotice::Bytes(4));
        assert_eq!(phases(&progress), [Fetching, Queued, Queued]);
        for (at, expected) in
            [[Done, Queued, Queued], [Done, Done, Queued], [Done; 3]].into_iter().enumerate()
        {
            progress.set_phase(&digests[at], Done);
            assert_eq!(phases(&progress), expected);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn blobs_of_an_earlier_pull_count_and_forgotten_ones_do_not() {
        let (progress, digests) = pull(&[('a', Some(1000), LayerPhase::Fetching)]);
        let start = Instant::now();
        let rate = |millis| progress.detail(start + Duration::from_millis(millis)).rate;
        assert_eq!(rate(0), None);
        progress.notice_of(&digests[0], &FetchNotice::Present(700));
        progress.notice_of(&digests[0], &FetchNotice::Bytes(200));
        assert_eq!(progress.bytes(), ByteProgress { done: 900, total: Some(1000) });
        assert_eq!(rate(1000), Some(200), "bytes that were present were not received");
        progress.notice_of(&digests[0], &FetchNotice::Bytes(100));
        assert_eq!(phases(&progress), [LayerPhase::Unpacking], "all of it is here");
        let unpacking = Arc::new(UnpackProgress::default());
        progress.set_unpacking(&digests[0], Arc::clone(&unpacking));
        unpacking.set_compressed(400);
        let layer = &progress.detail(start).layers[0];
        assert_eq!(layer.bytes, ByteProgress { done: 400, total: Some(1000) }, "of the unpacking");
        progress.notice_of(&digests[0], &FetchNotice::Present(0));
        assert_eq!(progress.bytes(), ByteProgress { done: 0, total: Some(1000) });
        assert_eq!(phases(&progress), [LayerPhase::Fetching]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_lasts_until_anything_else_happens() {
        let waits = FetchWaitState::default();
        let until = Instant::now() + Duration::from_secs(12);
        let asked = FetchNotice::Waiting(FetchWait::RateLimited { host: "r.example".into(), until });
        for end in [FetchNotice::Resumed, FetchNotice::Bytes(1), FetchNotice::Host("r.example".into())] {
            waits.notice(&asked);
            let wait = waits.now().expect("it waits");
            assert_eq!(wait.at(Instant::now()), "rate limited by r.example, 12s left");
            waits.notice(&end);
            assert_eq!(waits.now(), None, "{end:?}");
        }
    }
}
