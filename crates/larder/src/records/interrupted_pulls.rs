//! How a pull is closed that told its caller of no image: the backend is asked what is there, and only that counts.
//!
//! A caller that goes away does not stop what the backend does at that moment: an image may come after all. Until it is
//! known what came, the intent stays, and the image is nobody's.

use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use tokio::runtime::Handle;

use super::running_pulls::RunningPulls;
use super::writer::{PullRecordWriter, RecordChange};
use crate::backend::{Backend, BackendError, ImageSpec};
use crate::reference::{ImageId, ImageName};

/// When to look what became of a pull whose caller left, each after the one before. What did not come by the last does not
/// come.
const LOOKS: [Duration; 5] = [
    Duration::ZERO,
    Duration::from_secs(1),
    Duration::from_secs(10),
    Duration::from_secs(60),
    Duration::from_secs(600),
];

/// Asks the backend.
#[derive(Clone)]
pub(super) struct InterruptedPullResolver {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) in_flight: Arc<RunningPulls>,
    /// Whoever looks later does not keep the records open.
    pub(super) writer: Weak<PullRecordWriter>,
}

/// What a look at the backend says.
enum InterruptedPullResult {
    /// An image that was not there before.
    NewImage(ImageId),
    /// Nothing, or what was there before.
    Nothing,
    /// It did not answer.
    Unknown,
}

impl InterruptedPullResolver {
    /// Notes what has the name before a pull, so that it is not taken for what the pull brought.
    pub(super) async fn record_prior_image(&self, image: &ImageName) {
        // Who cannot be asked leaves that open: then whatever is there later came by us.
        if let Ok(id) = self.look(image).await {
            self.in_flight.note_before(image, id);
        }
    }

    /// Closes a pull at which nothing works any more. Says whether that could be done.
    pub(super) async fn resolve(&self, image: &ImageName) -> bool {
        let seen = self.seen(image).await;
        let is_known = !matches!(seen, InterruptedPullResult::Unknown);
        self.close(image, seen).await;
        is_known
    }

    /// Closes a pull whose caller left, when it is known what came of it. Without a runtime that goes on, the intent
    /// stays for the next start.
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
            let mut seen = InterruptedPullResult::Unknown;
            for wait in LOOKS {
                tokio::time::sleep(wait).await;
                seen = self.seen(image).await;
                if let InterruptedPullResult::NewImage(_) = seen {
                    break;
                }
            }
            // Who left meanwhile began later, and what the backend does for them takes its own time.
            let is_known = !matches!(seen, InterruptedPullResult::Unknown);
            if is_known && self.in_flight.unwatch(image, left) {
                return self.close(image, seen).await;
            }
        }
    }

    async fn close(&self, image: &ImageName, seen: InterruptedPullResult) {
        match seen {
            InterruptedPullResult::NewImage(id) => self.came(image, id).await,
            InterruptedPullResult::Nothing => self.nothing_came(image),
            InterruptedPullResult::Unknown => {}
        }
    }

    async fn came(&self, image: &ImageName, image_ref: ImageId) {
        let Some(writer) = self.writer.upgrade() else { return };
        let (image, now) = (image.clone(), SystemTime::now().into());
        let change = RecordChange::Pulled { image: image.clone(), image_ref, access: None, now };
        if let Err(error) = writer.submit_and_wait(change).await {
            tracing::warn!("cannot record the pull of {image}: {error}; pods must pull it again");
        }
    }

    fn nothing_came(&self, image: &ImageName) {
        let Some(writer) = self.writer.upgrade() else { return };
        if self.in_flight.end(image) {
            writer.submit(RecordChange::Failed { image: image.clone(), absent: true });
        }
    }

    async fn seen(&self, image: &ImageName) -> InterruptedPullResult {
        match self.look(image).await {
            Ok(Some(id)) if !self.in_flight.was_prior_image(image, &id) => {
                InterruptedPullResult::NewImage(id)
            }
            Ok(_) => InterruptedPullResult::Nothing,
            Err(error) => {
                tracing::debug!("cannot determine whether {image} is present: {error}");
                InterruptedPullResult::Unknown
            }
        }
    }

    async fn look(&self, image: &ImageName) -> Result<Option<ImageId>, BackendError> {
        let name = image.with_default_tag().unwrap_or_else(|_| image.clone());
        let found = self.backend.peek_status(&ImageSpec::named(name)).await?;
        Ok(found.map(|found| found.id))
    }
}
