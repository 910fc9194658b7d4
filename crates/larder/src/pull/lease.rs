//! Leases an image before reporting it as present, so that garbage collection does not remove it before it is used.

use std::sync::Arc;
use std::time::Duration;

use super::puller::{ImagePuller, PullJob, PullOutcome};
use super::status::PullTrackerEntry;
use crate::backend::{BackendError, ImageSpec};
use crate::image_service::ImageService;
use crate::reference::ImageId;
use crate::retention::{LeasePurpose, RemovalGate, RemovalGuard};

/// Retries of a pull that ended with "not found". An image that is not in the registry fails each time.
const MISSES: u32 = 2;
/// How long such a pull waits for removals in progress before the retry.
const REMOVALS_END_WITHIN: Duration = Duration::from_secs(10);

/// Lease time of images reported as present; `None` without a gate.
#[derive(Debug, Clone, Default)]
pub(super) struct EnsureLeases(Option<(Arc<RemovalGate>, Duration)>);

impl EnsureLeases {
    pub(super) fn at(gate: Arc<RemovalGate>, time: Duration) -> EnsureLeases {
        EnsureLeases(Some((gate, time)))
    }

    /// The id of a present image, leased.
    pub(super) async fn image_ref(
        &self,
        images: &ImageService,
        spec: &ImageSpec,
    ) -> Result<Option<ImageId>, BackendError> {
        self.lease_found(|| images.image_ref(spec), |id| id).await
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

    /// Pulls and leases the image. Pulls again when a removal may have overtaken the pull: the image was removed after
    /// the pull, or the runtime found it present and then missed it.
    pub(super) async fn pull_and_lease(
        &self,
        puller: &ImagePuller,
        job: &PullJob,
        entry: &PullTrackerEntry,
    ) -> PullOutcome {
        let Some((gate, time)) = &self.0 else { return puller.pull(job, entry).await };
        let mut misses_left = MISSES;
        loop {
            let check = gate.begin_presence_check();
            let result = puller.pull(job, entry).await;
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
}
