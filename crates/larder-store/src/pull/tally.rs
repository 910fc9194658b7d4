//! What a pull and each of its layers do, counted as it happens and described when somebody asks.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use larder::backend::{Bytes, Detail, LayerPhase, LayerProgress, Progress, PullStep, Wait};
use larder::reference::Digest;
use tokio::time::Instant;

use super::plan::Plan;
use crate::registry::{Notice, Waiting};
use crate::store::Claim;

/// Over how long a rate is measured.
const WINDOW: Duration = Duration::from_secs(1);

/// One pull.
pub(super) struct Tally {
    progress: Progress,
    /// What it waits for before its layers are known.
    waits: Waits,
    layers: OnceLock<Vec<LayerTally>>,
    done: AtomicU64,
    meter: Meter,
    committing: AtomicBool,
}

/// One layer that was not here.
struct LayerTally {
    digest: Digest,
    /// Of what this pull fetches itself.
    size: Option<u64>,
    phase: Mutex<LayerPhase>,
    waits: Waits,
    done: AtomicU64,
    meter: Meter,
}

impl Tally {
    /// The tally of a pull that begins, which `progress` is described by from now on.
    pub(super) fn begin(progress: &Progress) -> Arc<Tally> {
        let tally = Arc::new(Tally {
            progress: progress.clone(),
            waits: Waits::default(),
            layers: OnceLock::new(),
            done: AtomicU64::new(0),
            meter: Meter::default(),
            committing: AtomicBool::new(false),
        });
        // Whoever keeps the progress must not keep the pull's tally, which has the progress.
        let described = Arc::downgrade(&tally);
        progress.describe_by(move || {
            described.upgrade().map_or_else(Detail::default, |tally| tally.detail(Instant::now()))
        });
        tally
    }

    /// What the pull as a whole waits for.
    pub(super) fn notice(&self, notice: &Notice) {
        self.waits.notice(notice);
    }

    /// Says which layers are missing, and who brings them.
    pub(super) fn layers(&self, plan: &Plan, claims: &[Claim]) {
        let missing = plan.layers.iter().zip(claims).filter_map(|(wanted, claim)| {
            let (phase, size) = match claim {
                Claim::Present(_) => return None,
                Claim::Wait(_) => (LayerPhase::Elsewhere, None),
                Claim::Fetch(_) => (LayerPhase::Queued, Some(wanted.descriptor.size)),
            };
            let digest = wanted.descriptor.digest.clone();
            Some(LayerTally {
                digest,
                size,
                phase: Mutex::new(phase),
                waits: Waits::default(),
                done: AtomicU64::new(0),
                meter: Meter::default(),
            })
        });
        let _ = self.layers.set(missing.collect()); // a pull is planned once
        self.progress.set(self.bytes());
    }

    /// What happens to a layer.
    pub(super) fn set(&self, layer: &Digest, phase: LayerPhase) {
        if let Some(layer) = self.layer(layer) {
            *layer.phase.lock().unwrap_or_else(PoisonError::into_inner) = phase;
            layer.waits.end();
        }
    }

    /// What the fetch of a layer tells.
    pub(super) fn notice_of(&self, layer: &Digest, notice: &Notice) {
        let Some(layer) = self.layer(layer) else { return };
        layer.waits.notice(notice);
        if let Notice::Bytes(count) = notice {
            layer.done.fetch_add(*count, Ordering::Relaxed);
            self.done.fetch_add(*count, Ordering::Relaxed);
            self.progress.set(self.bytes());
        }
    }

    /// Everything is here.
    pub(super) fn commit(&self) {
        self.committing.store(true, Ordering::Relaxed);
    }

    fn layer(&self, digest: &Digest) -> Option<&LayerTally> {
        self.layers.get()?.iter().find(|layer| layer.digest == *digest)
    }

    fn bytes(&self) -> Bytes {
        let sizes = self.layers.get().map(|layers| layers.iter().filter_map(|layer| layer.size).sum());
        Bytes { done: self.done.load(Ordering::Relaxed), total: sizes }
    }

    fn detail(&self, now: Instant) -> Detail {
        let layers = self.layers.get();
        let step = match layers {
            None => PullStep::Resolving,
            Some(_) if self.committing.load(Ordering::Relaxed) => PullStep::Committing,
            Some(_) => PullStep::Layers,
        };
        Detail {
            step,
            waiting: self.waits.now(),
            rate: self.meter.rate(now, self.done.load(Ordering::Relaxed)),
            layers: layers.into_iter().flatten().map(|layer| layer.progress(now)).collect(),
        }
    }
}

impl LayerTally {
    fn progress(&self, now: Instant) -> LayerProgress {
        let done = self.done.load(Ordering::Relaxed);
        let phase = *self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        let all_came = self.size.is_some_and(|size| done >= size);
        LayerProgress {
            digest: self.digest.to_string(),
            phase: if phase == LayerPhase::Fetching && all_came { LayerPhase::Unpacking } else { phase },
            bytes: Bytes { done, total: self.size },
            rate: self.meter.rate(now, done).filter(|_| phase == LayerPhase::Fetching && !all_came),
            waiting: self.waits.now(),
        }
    }
}

/// What a fetch waits for. Its ranges come side by side: it waits as long as none of them goes on.
#[derive(Default)]
struct Waits {
    /// Whether there is anything in `wait`: bytes come more often than waits.
    any: AtomicBool,
    wait: Mutex<Option<Waiting>>,
}

impl Waits {
    fn notice(&self, notice: &Notice) {
        match notice {
            Notice::Waiting(waiting) => {
                *self.lock() = Some(waiting.clone());
                self.any.store(true, Ordering::Release);
            }
            Notice::Going | Notice::Bytes(_) | Notice::Host(_) => self.end(),
        }
    }

    fn end(&self) {
        if self.any.swap(false, Ordering::AcqRel) {
            *self.lock() = None;
        }
    }

    fn now(&self) -> Option<Wait> {
        self.lock().as_ref().map(Waiting::to_wait)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Waiting>> {
        self.wait.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Measures a rate between the times that it is asked for it.
#[derive(Default)]
struct Meter(Mutex<Option<Window>>);

#[derive(Clone, Copy)]
struct Window {
    since: Instant,
    done: u64,
    /// Of the window before.
    rate: Option<u64>,
}

impl Meter {
    /// Bytes per second over the last whole window.
    fn rate(&self, now: Instant, done: u64) -> Option<u64> {
        let mut window = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let last = *window.get_or_insert(Window { since: now, done, rate: None });
        let time = now.saturating_duration_since(last.since);
        if time < WINDOW {
            return last.rate;
        }
        let bytes = u128::from(done.saturating_sub(last.done));
        let rate = u64::try_from(bytes * 1000 / time.as_millis().max(1)).ok();
        *window = Some(Window { since: now, done, rate });
        rate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_rate_is_of_the_last_second_and_unknown_before() {
        let (meter, start) = (Meter::default(), Instant::now());
        let at = |millis| start + Duration::from_millis(millis);
        assert_eq!(meter.rate(at(0), 500), None);
        assert_eq!(meter.rate(at(900), 900), None);
        assert_eq!(meter.rate(at(2000), 4500), Some(2000));
        assert_eq!(meter.rate(at(2900), 9000), Some(2000));
        assert_eq!(meter.rate(at(3000), 4500), Some(0), "nothing came");
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_lasts_until_anything_else_happens() {
        let waits = Waits::default();
        let until = Instant::now() + Duration::from_secs(12);
        let asked = Notice::Waiting(Waiting::Asked { host: "r.example".into(), until });
        for end in [Notice::Going, Notice::Bytes(1), Notice::Host("r.example".into())] {
            waits.notice(&asked);
            let wait = waits.now().expect("it waits");
            assert_eq!(wait.at(Instant::now()), "r.example asked to wait, 12s left");
            waits.notice(&end);
            assert_eq!(waits.now(), None, "{end:?}");
        }
    }
}
