//! Resolves interrupted pulls: queries the backend for the image, and closes the intent accordingly.
//!
//! Canceling a caller does not stop the backend: the image may still become present. Until the outcome is known, the
//! intent remains, and the image is accessible to no pod. A backend that knows when its pulls have ended decides at
//! once.

use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use tokio::runtime::Handle;

use super::running_pulls::RunningPulls;
use super::writer::{PullRecordWriter, RecordChange};
use crate::backend::{Backend, BackendError, ImageSpec};
use crate::reference::{ImageId, ImageName};

/// Delays between checks of an interrupted pull. An image that is absent at the last check counts as not pulled.
const LOOKS: [Duration; 5] = [
    Duration::ZERO,
    Duration::from_secs(1),
    Duration::from_secs(10),
    Duration::from_secs(60),
    Duration::from_secs(600),
];

/// Resolves interrupted pulls by querying the backend.
#[derive(Clone)]
pub(super) struct InterruptedPullResolver {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) in_flight: Arc<RunningPulls>,
    /// Weak, so that a pending check does not keep the records open.
    pub(super) writer: Weak<PullRecordWriter>,
}

/// The result of a check.
enum InterruptedPullResult {
    /// An image that was not present before.
    NewImage(ImageId),
    /// No image, or the one that was present before.
    Nothing,
    /// It did not answer.
    Unknown,
}

impl InterruptedPullResolver {
    /// Records the image that has the name before a pull, so that it is not mistaken for the pulled one.
    pub(super) async fn record_prior_image(&self, image: &ImageName) {
        // If the backend fails, any image found later counts as pulled by this process.
        if let Ok(id) = self.look(image).await {
            self.in_flight.note_before(image, id);
        }
    }

    /// Closes a pull that has ended at the backend. Returns whether that was possible.
    pub(super) async fn resolve(&self, image: &ImageName) -> bool {
        let seen = self.seen(image).await;
        let is_known = !matches!(seen, InterruptedPullResult::Unknown);
        self.close(image, seen).await;
        is_known
    }

    /// Closes a pull whose caller was canceled, once its outcome is known. If the tokio runtime ends first, the intent
    /// remains for the next start.
    pub(super) fn resolve_later(self, image: &ImageName) {
        let Ok(runtime) = Handle::try_current() else { return };
        if self.in_flight.abandon(image) {
            let image = image.clone();
            runtime.spawn(async move { self.watch(&image).await });
        }
    }

    async fn watch(&self, image: &ImageName) {
        while self.writer.strong_count() > 0 {
            let left = self.in_flight.abandoned_count(image);
            let seen = self.outcome(image).await;
            // A caller that was canceled since then began later, and needs checks of its own.
            let is_known = !matches!(seen, InterruptedPullResult::Unknown);
            if is_known && self.in_flight.unwatch(image, left) {
                return self.close(image, seen).await;
            }
        }
    }

    /// The outcome of a pull whose caller was canceled.
    async fn outcome(&self, image: &ImageName) -> InterruptedPullResult {
        if let Some(origins) = self.backend.origins() {
            origins.wait_for_ending_pulls().await;
            let seen = self.seen(image).await;
            if !matches!(seen, InterruptedPullResult::Unknown) {
                return seen;
            }
        }
        let mut seen = InterruptedPullResult::Unknown;
        for wait in LOOKS {
            tokio::time::sleep(wait).await;
            seen = self.seen(image).await;
            if let InterruptedPullResult::NewImage(_) = seen {
                break;
            }
        }
        seen
    }

    async fn close(&self, image: &ImageName, seen: InterruptedPullResult) {
        match seen {
            InterruptedPullResult::NewImage(id) => self.record_new_image(image, id).await,
            InterruptedPullResult::Nothing => self.no_new_image(image),
            InterruptedPullResult::Unknown => {}
        }
    }

    async fn record_new_image(&self, image: &ImageName, image_ref: ImageId) {
        let Some(writer) = self.writer.upgrade() else { return };
        let (image, now) = (image.clone(), SystemTime::now().into());
        let change = RecordChange::Pulled { image: image.clone(), image_ref, access: None, now };
        if let Err(error) = writer.submit_and_wait(change).await {
            tracing::warn!("cannot record the pull of {image}: {error}; pods must pull it again");
        }
    }

    fn no_new_image(&self, image: &ImageName) {
        let Some(writer) = self.writer.upgrade() else { return };
        if self.in_flight.end(image) {
            writer.submit(RecordChange::Failed { image: image.clone(), absent: true });
        }
    }

    async fn seen(&self, image: &ImageName) -> InterruptedPullResult {
        match self.look(image).await {
            Ok(Some(id)) if !self.in_flight.was_prior_image(image, &id) => match self.is_preloaded(&id).await
            {
                Ok(Some(true)) => InterruptedPullResult::Nothing,
                Ok(_) => InterruptedPullResult::NewImage(id),
                Err(error) => {
                    tracing::debug!("cannot determine whether {image} was preloaded: {error}");
                    InterruptedPullResult::Unknown
                }
            },
            Ok(_) => InterruptedPullResult::Nothing,
            Err(error) => {
                tracing::debug!("cannot determine whether {image} is present: {error}");
                InterruptedPullResult::Unknown
            }
        }
    }

    /// Whether an image was loaded from an archive, if the backend records it.
    pub(super) async fn is_preloaded(&self, id: &ImageId) -> Result<Option<bool>, BackendError> {
        match self.backend.origins() {
            Some(origins) => origins.is_preloaded(id).await.map(Some),
            None => Ok(None),
        }
    }

    async fn look(&self, image: &ImageName) -> Result<Option<ImageId>, BackendError> {
        let name = image.with_default_tag().unwrap_or_else(|_| image.clone());
        let found = self.backend.status(&ImageSpec::named(name)).await?;
        Ok(found.map(|found| found.id))
    }
}
