//! Schedules pulls: serial, bounded or unbounded. A pulled image is leased before it is reported as present, so that
//! garbage collection does not remove it before it is used.
//!
//! ```text
//! pull_leased        pulls, then leases; again if a removal raced the pull
//! pull               waits for a slot and the rate limit; again if it gave way, or if collection made room
//! pull_and_measure   pulls, then asks for the size
//! pull_hidden        hides the image before it is present, if it was pulled ahead of kubelet
//! pull_in_time       limits the time, and has ImageService::pull try each credential
//! ```

use std::future;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{self, Instant};
use tracing::Instrument as _;

use super::config::PullConfig;
use super::ensure::BackendFailure;
use super::room::{self, RoomMaker, RoomOutcome};
use super::status::{PullActivity, PullPhase, PullTrackerEntry};
use super::throttle::{RateExceeded, Throttle};
use crate::backend::{BackendError, CallErrorKind, ImageFill, ImageSpec, MinimumRate, RateWindow};
use crate::credentials::Credential;
use crate::hidden::{HiddenImages, PrefetchEnd};
use crate::image_service::{ImageService, PullAttemptsError, PulledImage};
use crate::pod::SandboxConfig;
use crate::reference::{ImageId, ImageName, Reference};
use crate::retention::{LeasePurpose, RemovalGate, RemovalGuard};
use crate::scheduler::{ScheduledWork, Scheduler, SlotRecall, WorkDemand, WorkRate, WorkSlot};

/// Retries of a pull that ended with "not found". An image that is not in the registry fails each time.
const MISSES: u32 = 2;
/// How long such a pull waits for removals in progress before the retry.
const REMOVALS_END_WITHIN: Duration = Duration::from_secs(10);

/// One pull with its input.
#[derive(Debug, Clone)]
pub(super) struct PullJob {
    pub(super) spec: ImageSpec,
    pub(super) credentials: Vec<Credential>,
    pub(super) sandbox: Option<SandboxConfig>,
    pub(super) credential_owner: CredentialOwner,
    /// Demand for it, which decides its place in the queue.
    pub(super) demand: WorkDemand,
    /// Where the image is hidden if it is pulled with one of the credentials.
    pub(super) hide_in: Option<Arc<HiddenImages>>,
}

/// The owner of a pull's credentials, which decides which callers its success serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CredentialOwner {
    /// Looked up for a pod: one without a source belongs to the node, and so to every pod on it.
    Pod,
    /// Given by a caller, the only one known to hold them.
    Caller,
}

/// How a pull ended.
#[derive(Debug)]
pub(super) struct PullOutcome {
    pub(super) pulled: Result<PulledImage, PullerError>,
    /// Size of the image in bytes; 0 when the pull failed or the runtime did not say.
    pub(super) size_bytes: u64,
    /// Data of the image that is still to come; `None` if it is complete.
    pub(super) fill: Option<ImageFill>,
    /// Time of the runtime's pull and of the size query, without waiting.
    pub(super) duration: Duration,
    /// Warnings of the backend about the image.
    pub(super) warnings: Vec<String>,
}

impl PullOutcome {
    /// Of a pull that ends because the process stops.
    pub(super) fn stopped() -> PullOutcome {
        let message = "larder is shutting down: the next pull of the image continues this one";
        let error = BackendError::call(CallErrorKind::Unavailable, message);
        PullOutcome::not_begun(PullAttemptsError::from_iter([error]).into())
    }

    fn not_begun(error: PullerError) -> PullOutcome {
        PullOutcome {
            pulled: Err(error),
            size_bytes: 0,
            fill: None,
            duration: Duration::ZERO,
            warnings: Vec::new(),
        }
    }
}

/// Why a pull failed. The text is kubelet's.
#[derive(Debug, thiserror::Error)]
pub(super) enum PullerError {
    #[error(transparent)]
    RateExceeded(#[from] RateExceeded),
    #[error(transparent)]
    Failed(#[from] PullAttemptsError),
    /// larder's own; kubelet has no such limit.
    #[error("pull timed out after {} and was canceled", crate::go_format::duration(*.0))]
    TimedOut(Duration),
}

impl PullerError {
    /// The backend's details, if the backend failed.
    pub(super) fn failure(&self) -> Option<BackendFailure> {
        match self {
            PullerError::Failed(failed) => failed.failure(),
            PullerError::RateExceeded(_) | PullerError::TimedOut(_) => None,
        }
    }

    /// Whether the last attempt failed with "not found".
    pub(super) fn is_not_found(&self) -> bool {
        let PullerError::Failed(failed) = self else { return false };
        failed.causes().last().and_then(BackendError::kind) == Some(CallErrorKind::NotFound)
    }

    /// Whether the pull has certainly ended. A runtime that timed out or whose connection broke may continue it.
    pub(super) fn is_final(&self) -> bool {
        let is_final = |error: &BackendError| match error.kind() {
            Some(CallErrorKind::DeadlineExceeded | CallErrorKind::Canceled | CallErrorKind::Unavailable)
            | None => false,
            Some(_) => true,
        };
        match self {
            PullerError::RateExceeded(_) => true,
            PullerError::Failed(failed) => failed.causes().iter().all(is_final),
            PullerError::TimedOut(_) => false,
        }
    }

    /// The backend's error, for a caller with one credential or none.
    pub(super) fn as_of_backend(&self) -> BackendError {
        let kind = match self {
            PullerError::Failed(failed) => match failed.causes() {
                [only] => return only.clone(),
                _ => failed.failure().map_or(CallErrorKind::Other, |failure| failure.kind),
            },
            PullerError::RateExceeded(_) => CallErrorKind::Other,
            PullerError::TimedOut(_) => CallErrorKind::DeadlineExceeded,
        };
        let hint = self.failure().and_then(|failure| failure.hint);
        BackendError::call(kind, self.to_string()).with_hint(hint)
    }
}

/// Lease time of images reported as present; `None` without a gate.
#[derive(Debug, Clone, Default)]
pub(super) struct EnsureLeases(Option<(Arc<RemovalGate>, Duration)>);

impl EnsureLeases {
    pub(super) fn at(gate: Arc<RemovalGate>, time: Duration) -> EnsureLeases {
        EnsureLeases(Some((gate, time)))
    }

    /// The result of `ask` for a present image, leased. Asks again when a removal may have overtaken the answer.
    pub(super) async fn lease_found<T, F>(
        &self,
        ask: impl Fn() -> F,
        id: fn(&T) -> &ImageId,
    ) -> Result<Option<T>, BackendError>
    where
        F: Future<Output = Result<Option<T>, BackendError>>,
    {
        let Some((gate, time)) = &self.0 else { return ask().await };
        loop {
            let check = gate.begin_presence_check();
            let Some(found) = ask().await? else { return Ok(None) };
            if check.lease(id(&found), LeasePurpose::Ensure, *time).await {
                return Ok(Some(found));
            }
        }
    }

    /// The guard of an explicitly requested removal. `None` without a gate.
    pub(super) async fn removal(&self, id: &ImageId) -> Option<RemovalGuard> {
        match &self.0 {
            Some((gate, _)) => Some(gate.wait_begin_removal(id).await),
            None => None,
        }
    }
}

/// Schedules and runs pulls.
pub(super) struct ImagePuller {
    images: ImageService,
    slots: Option<PullSlots>,
    throttle: Option<Throttle>,
    timeout: Option<Duration>,
    /// `None` if the backend does not continue canceled pulls.
    minimum: Option<MinimumRate>,
}

/// The bound on concurrent pulls.
struct PullSlots {
    scheduler: Scheduler,
    /// The setting that a queued pull waits for.
    setting: &'static str,
}

impl ImagePuller {
    pub(super) fn new(images: ImageService, config: &PullConfig, now: Instant) -> Self {
        let minimum = images.backend().minimum_rate();
        // A stopped pull would start from the beginning where the backend does not continue it.
        let recall = minimum.map_or(SlotRecall::Never, |_| SlotRecall::LargestShare);
        let slots = match (config.serialize_image_pulls, config.max_parallel_image_pulls) {
            (true, _) => Some(PullSlots {
                scheduler: Scheduler::new(1, recall),
                setting: "earlier pulls (serializeImagePulls)",
            }),
            (false, Some(bound)) => {
                let scheduler = Scheduler::new(bound.get() as usize, recall);
                Some(PullSlots { scheduler, setting: "a pull slot (maxParallelImagePulls)" })
            }
            (false, None) => None,
        };
        let throttle = Throttle::new(config, now);
        ImagePuller { images, slots, throttle, timeout: config.pull_timeout, minimum }
    }

    /// Returns a puller of the same images with other settings and a queue of its own.
    pub(super) fn with_config(&self, config: &PullConfig, now: Instant) -> Self {
        ImagePuller::new(self.images.clone(), config, now)
    }

    /// Pulls and leases the image. Pulls again when a removal may have overtaken the pull: the image was removed after
    /// the pull, or the runtime found it present and then missed it.
    pub(super) async fn pull_leased(
        &self,
        job: &PullJob,
        entry: &PullTrackerEntry,
        leases: &EnsureLeases,
        room: Option<&dyn RoomMaker>,
    ) -> PullOutcome {
        let Some((gate, time)) = &leases.0 else { return self.pull(job, entry, room).await };
        let mut misses_left = MISSES;
        loop {
            let check = gate.begin_presence_check();
            let result = self.pull(job, entry, room).await;
            let has_raced_removal = match &result.pulled {
                Ok(image) => !check.lease(&image.image_ref, LeasePurpose::Ensure, *time).await,
                Err(error) => misses_left > 0 && error.is_not_found() && check.has_raced_removal(),
            };
            if !has_raced_removal {
                return result;
            }
            if result.pulled.is_err() {
                misses_left -= 1;
                gate.wait_for_removals(REMOVALS_END_WITHIN).await;
            }
        }
    }

    /// Waits for a slot, passes the throttle, pulls, and queries the size while it holds the slot. It holds none while
    /// room is made for it.
    async fn pull(
        &self,
        job: &PullJob,
        entry: &PullTrackerEntry,
        room: Option<&dyn RoomMaker>,
    ) -> PullOutcome {
        let wait = |reason| tracing::trace_span!("pull.Wait", larder.wait.reason = reason);
        let mut slot = self.acquire_slot(job, entry, None).instrument(wait("queue")).await;
        let throttled = || entry.set(PullPhase::Throttled, Some("the pull rate limit (registryPullQPS)"));
        if let Some(throttle) = &self.throttle
            && let Err(refused) = throttle.pass(throttled).instrument(wait("rate limit")).await
        {
            return PullOutcome::not_begun(refused.into());
        }
        let mut duration = Duration::ZERO;
        let mut rounds_left = room::ROUNDS;
        loop {
            // A pull that waited for room goes on before those that came later: they would use the room.
            let mut arrival = None;
            entry.set(PullPhase::Pulling, None);
            let start = Instant::now();
            let outcome = tokio::select! {
                biased;
                outcome = self.pull_and_measure(job, entry, duration) => Some(outcome),
                () = self.gives_way(slot.as_ref(), entry) => None,
            };
            duration += start.elapsed();
            if let Some((pulled, (size_bytes, fill))) = outcome {
                let lacking = pulled.as_ref().err().and_then(room::missing_bytes);
                let Some((room, bytes)) = room.zip(lacking) else {
                    if let (Ok(_), Some(slot)) = (&pulled, &slot) {
                        slot.set_slow(false);
                    }
                    return PullOutcome { pulled, size_bytes, fill, duration, warnings: entry.warnings() };
                };
                // A round lasts as long as its removals, and others may need no room.
                arrival = slot.as_ref().map(WorkSlot::arrival);
                drop(slot);
                entry.set(PullPhase::Queued, Some("garbage collection that makes room for it"));
                let outcome = if rounds_left > 0 {
                    room.make_room(bytes).await
                } else {
                    RoomOutcome::NotEnough { reclaimable: None }
                };
                if outcome != RoomOutcome::Made {
                    let pulled = pulled.map_err(|error| room::without_room(error, outcome));
                    return PullOutcome { pulled, size_bytes, fill, duration, warnings: entry.warnings() };
                }
                rounds_left -= 1;
            } else {
                tracing::info!("gives its pull slot to another pull, and continues after it");
                drop(slot);
            }
            slot = self.acquire_slot(job, entry, arrival).instrument(wait("queue")).await;
        }
    }

    async fn pull_and_measure(
        &self,
        job: &PullJob,
        entry: &PullTrackerEntry,
        spent: Duration,
    ) -> (Result<PulledImage, PullerError>, (u64, Option<ImageFill>)) {
        let pulled = self.pull_hidden(job, entry, spent).await;
        let size = match &pulled {
            // A size that cannot be read is no reason to fail a pull that succeeded.
            Ok(pulled) if !pulled.image_ref.is_empty() => {
                let mut spec = job.spec.clone();
                if spec.options.accept_only_platform {
                    spec.image = ImageName::from(&pulled.image_ref); // it may have another name
                }
                self.images.image_size(&spec).await.unwrap_or_default()
            }
            _ => (0, None),
        };
        (pulled, size)
    }

    /// Hides the image before it is present, where that is wanted.
    async fn pull_hidden(
        &self,
        job: &PullJob,
        entry: &PullTrackerEntry,
        spent: Duration,
    ) -> Result<PulledImage, PullerError> {
        let Some(hidden) = &job.hide_in else { return self.pull_in_time(job, entry, spent).await };
        let begun = hidden.begin(&job.spec.image, self.images.backend()).await;
        let pull = begun.map_err(|error| PullAttemptsError::from_iter([error]))?;
        let pulled = self.pull_in_time(job, entry, spent).await;
        match &pulled {
            Ok(pulled) => pull.end(PrefetchEnd::Pulled(&pulled.image_ref)).await,
            Err(error) if error.is_final() => pull.fail(self.images.backend()).await,
            Err(_) => pull.end(PrefetchEnd::Unknown).await,
        }
        pulled
    }

    /// Waits for a pull slot, at its old place in the queue if it has an arrival; `None` without a bound.
    async fn acquire_slot(
        &self,
        job: &PullJob,
        entry: &PullTrackerEntry,
        arrival: Option<u64>,
    ) -> Option<WorkSlot> {
        let PullSlots { scheduler, setting } = self.slots.as_ref()?;
        entry.set(PullPhase::Queued, Some(setting));
        // Names without a registry, such as IDs, share one.
        let name = Reference::parse(job.spec.image.as_str()).ok();
        let registry = name.as_ref().map_or("", Reference::registry);
        let repository = name.as_ref().map_or("", Reference::name);
        let work = ScheduledWork::pull(registry, repository, &job.demand);
        Some(scheduler.acquire_from(&work, arrival).await)
    }

    /// Ends when another pull needs the slot more. Never ends if the backend does not continue canceled pulls.
    async fn gives_way(&self, slot: Option<&WorkSlot>, entry: &PullTrackerEntry) {
        let (Some(slot), Some(minimum)) = (slot, self.minimum) else { return future::pending().await };
        let mut window = RateWindow::new(minimum.window);
        let rate = |now| {
            let (minimum, otherwise) = match entry.activity() {
                PullActivity::Receiving => (minimum.bytes_per_second, WorkRate::Fast),
                PullActivity::ReceivingAndUnpacking => (minimum.bytes_per_second, WorkRate::Received),
                PullActivity::Waiting => (0, WorkRate::Fast),
                PullActivity::Unpacking => (0, WorkRate::Received),
            };
            WorkRate::of(window.observe(now, entry.bytes().done), minimum, otherwise)
        };
        slot.gives_way(minimum, rate).await;
    }

    /// Dropping the backend's pull cancels it. `spent` is the time before the pull gave way.
    async fn pull_in_time(
        &self,
        job: &PullJob,
        entry: &PullTrackerEntry,
        spent: Duration,
    ) -> Result<PulledImage, PullerError> {
        let progress = entry.progress().for_callers(job.demand.callers());
        let pull = self.images.pull(&job.spec, &job.credentials, job.sandbox.as_ref(), &progress);
        match self.timeout {
            None => Ok(pull.await?),
            Some(timeout) => match time::timeout(timeout.saturating_sub(spent), pull).await {
                Ok(pulled) => Ok(pulled?),
                Err(_) => Err(PullerError::TimedOut(timeout)),
            },
        }
    }
}
