//! Schedules pulls: serial, bounded or unbounded.

use std::time::Duration;

use tokio::time::Instant;

use super::config::PullConfig;
use super::ensure::BackendAdvice;
use super::priority_semaphore::{PrioritySemaphore, PullPermit, QueuePriority};
use super::status::{PullPhase, PullTrackerEntry};
use super::throttle::{RateExceeded, Throttle};
use crate::backend::{BackendError, CallErrorKind, ImageSpec};
use crate::credentials::Credential;
use crate::image_service::{ImageService, PullAttemptsError, PulledImage};
use crate::pod::SandboxConfig;

/// How many requests wait in the serial puller's queue; further callers wait to enter it.
const MAX_IMAGE_PULL_REQUESTS: usize = 10;

/// One pull with its input.
#[derive(Debug, Clone)]
pub(super) struct PullJob {
    pub(super) spec: ImageSpec,
    pub(super) credentials: Vec<Credential>,
    pub(super) sandbox: Option<SandboxConfig>,
    pub(super) credential_owner: CredentialOwner,
    /// Its priority in the queue.
    pub(super) urgency: QueuePriority,
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
    /// Time of the runtime's pull and of the size query, without waiting.
    pub(super) duration: Duration,
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
    /// The backend's hint.
    pub(super) fn advice(&self) -> Option<BackendAdvice> {
        match self {
            PullerError::Failed(failed) => failed.advice(),
            PullerError::RateExceeded(_) | PullerError::TimedOut(_) => None,
        }
    }

    /// Whether the last attempt failed with "not found".
    pub(super) fn is_not_found(&self) -> bool {
        let PullerError::Failed(failed) = self else { return false };
        matches!(failed.causes().last(), Some(BackendError::Call { kind: CallErrorKind::NotFound, .. }))
    }

    /// Whether the pull has certainly ended. A runtime that timed out or whose connection broke may continue it.
    pub(super) fn is_final(&self) -> bool {
        let is_final = |error: &BackendError| match error {
            BackendError::Call { kind, .. } => !matches!(
                kind,
                CallErrorKind::DeadlineExceeded | CallErrorKind::Canceled | CallErrorKind::Unavailable
            ),
            BackendError::Unreachable { .. } | BackendError::Incomplete(_) => false,
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
                _ => CallErrorKind::Other,
            },
            PullerError::RateExceeded(_) => CallErrorKind::Other,
            PullerError::TimedOut(_) => CallErrorKind::DeadlineExceeded,
        };
        let hint = self.advice().map(|advice| advice.hint);
        BackendError::Call { message: self.to_string(), kind, hint }
    }
}

/// Schedules and runs pulls.
pub(super) struct ImagePuller {
    images: ImageService,
    slots: PullConcurrency,
    throttle: Option<Throttle>,
    timeout: Option<Duration>,
}

/// Limit of concurrent pulls. First in, first out within the same priority.
enum PullConcurrency {
    Serial { queue: PrioritySemaphore, worker: PrioritySemaphore },
    Bounded(PrioritySemaphore),
    Unbounded,
}

impl ImagePuller {
    pub(super) fn new(images: ImageService, config: &PullConfig, now: Instant) -> Self {
        let slots = match (config.serialize_image_pulls, config.max_parallel_image_pulls) {
            (true, _) => PullConcurrency::Serial {
                queue: PrioritySemaphore::new(MAX_IMAGE_PULL_REQUESTS),
                worker: PrioritySemaphore::new(1),
            },
            (false, Some(bound)) => PullConcurrency::Bounded(PrioritySemaphore::new(bound.get() as usize)),
            (false, None) => PullConcurrency::Unbounded,
        };
        ImagePuller { images, slots, throttle: Throttle::new(config, now), timeout: config.pull_timeout }
    }

    /// Waits for a slot, passes the throttle, pulls, and queries the size while it holds the slot.
    pub(super) async fn pull(&self, job: &PullJob, entry: &PullTrackerEntry) -> PullOutcome {
        let _slot = self.slots.take(entry, &job.urgency).await;
        let throttled = || entry.set(PullPhase::Throttled, Some("the pull rate limit (registryPullQPS)"));
        if let Some(throttle) = &self.throttle
            && let Err(refused) = throttle.pass(throttled).await
        {
            return PullOutcome { pulled: Err(refused.into()), size_bytes: 0, duration: Duration::ZERO };
        }
        entry.set(PullPhase::Pulling, None);
        let start = Instant::now();
        let pulled = self.pull_in_time(job, entry).await;
        let size_bytes = match &pulled {
            // A size that cannot be read is no reason to fail a pull that succeeded.
            Ok(pulled) if !pulled.image_ref.is_empty() => {
                self.images.image_size(&job.spec).await.unwrap_or(0)
            }
            _ => 0,
        };
        PullOutcome { pulled, size_bytes, duration: start.elapsed() }
    }

    /// Dropping the backend's pull cancels it.
    async fn pull_in_time(
        &self,
        job: &PullJob,
        entry: &PullTrackerEntry,
    ) -> Result<PulledImage, PullerError> {
        let progress = entry.progress();
        let pull = self.images.pull(&job.spec, &job.credentials, job.sandbox.as_ref(), &progress);
        match self.timeout {
            None => Ok(pull.await?),
            Some(timeout) => match tokio::time::timeout(timeout, pull).await {
                Ok(pulled) => Ok(pulled?),
                Err(_) => Err(PullerError::TimedOut(timeout)),
            },
        }
    }
}

impl PullConcurrency {
    async fn take(&self, entry: &PullTrackerEntry, urgency: &QueuePriority) -> Option<PullPermit<'_>> {
        let (slots, waiting) = match self {
            PullConcurrency::Unbounded => return None,
            PullConcurrency::Bounded(slots) => (slots, "a pull slot (maxParallelImagePulls)"),
            PullConcurrency::Serial { queue, worker } => {
                entry.set(PullPhase::Queued, Some("a slot in the pull queue"));
                let _place = queue.take(urgency).await;
                entry.set(PullPhase::Queued, Some("earlier pulls (serializeImagePulls)"));
                return Some(worker.take(urgency).await);
            }
        };
        entry.set(PullPhase::Queued, Some(waiting));
        Some(slots.take(urgency).await)
    }
}
