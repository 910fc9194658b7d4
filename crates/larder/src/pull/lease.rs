//! An image that is said to be present is leased before that is said: collection leaves it alone for a while.

use std::sync::Arc;
use std::time::Duration;

use super::puller::{ImagePuller, PullJob, PullOutcome};
use super::status::PullTrackerEntry;
use crate::backend::{BackendError, ImageSpec};
use crate::gc::{RemovalGate, RemovalGuard};
use crate::image_service::ImageService;
use crate::reference::ImageId;

/// How often a pull that missed an image is tried again. What is not in the registry is missed each time.
const MISSES: u32 = 2;
/// How long such a pull waits for removals under way before it is tried again.
const REMOVALS_END_WITHIN: Duration = Duration::from_secs(10);

/// How long who was told that an image is present has to use it; without a gate nobody collects, or nobody asks.
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

    /// What `ask` finds of a present image, leased. Asks again when a removal may have overtaken the answer.
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
            let look = gate.begin_presence_check();
            let Some(found) = ask().await? else { return Ok(None) };
            if look.lease(id(&found), *time).await {
                return Ok(Some(found));
            }
        }
    }

    /// To be held while an image is removed because somebody asked for just that. `None` without a gate.
    pub(super) async fn removal(&self, id: &ImageId) -> Option<RemovalGuard> {
        match &self.0 {
            Some((gate, _)) => Some(gate.wait_begin_removal(id).await),
            None => None,
        }
    }

    /// Pulls, and leases what came. Pulls again when a removal may have overtaken that: the image went after it came, or a
    /// runtime found it present and then missed it.
    pub(super) async fn pull(
        &self,
        puller: &ImagePuller,
        job: &PullJob,
        entry: &PullTrackerEntry,
    ) -> PullOutcome {
        let Some((gate, time)) = &self.0 else { return puller.pull(job, entry).await };
        let mut misses_left = MISSES;
        loop {
            let look = gate.begin_presence_check();
            let result = puller.pull(job, entry).await;
            let again = match &result.pulled {
                Ok(image) => !look.lease(&image.image_ref, *time).await,
                Err(error) => misses_left > 0 && error.is_not_found() && look.has_raced_removal(),
            };
            if !again {
                return result;
            }
            if result.pulled.is_err() {
                misses_left -= 1;
                gate.wait_for_removals(REMOVALS_END_WITHIN).await;
            }
        }
    }
}
