//! A pull over CRI, as events and metrics.

use larder::backend::{BackendError, ImageSpec};
use larder::events::{EventReason, EventType};
use larder::go_format;
use larder::pod::{ObjectRef, Pod, SandboxConfig};
use larder::pull::DirectPull;
use tokio::time::Instant;

use super::Pulls;
use crate::node::health::error_with_hint;
use crate::node::peer::Peer;

/// A pull over CRI in progress. Dropped without an [end](CriPull::end), it was abandoned by its caller.
pub(crate) struct CriPull<'a> {
    pulls: &'a Pulls,
    by: Peer,
    image: String,
    /// The pod, if the caller names one.
    object: ObjectRef,
    start: Instant,
    ended: bool,
}

impl CriPull<'_> {
    pub(crate) fn begin<'a>(
        pulls: &'a Pulls,
        image: &ImageSpec,
        sandbox: Option<&SandboxConfig>,
    ) -> CriPull<'a> {
        let object = sandbox.filter(|sandbox| !sandbox.name.is_empty()).map_or_else(
            || pulls.observability.node().clone(),
            |sandbox| ObjectRef::new(&pod_of(sandbox), ""),
        );
        let image = go_format::quote(image.image.as_str());
        CriPull { pulls, by: Peer::current(), image, object, start: Instant::now(), ended: false }
    }

    /// Records the result.
    pub(crate) async fn end(mut self, pulled: &Result<DirectPull, BackendError>) {
        self.ended = true;
        let CriPull { by, image, .. } = &self;
        let took = self.took();
        let (event_type, reason, message) = match pulled {
            Ok(pulled) => {
                self.pulls.collection.note_ensured(&pulled.image_ref, true).await;
                let size = pulled.size_bytes;
                let message =
                    format!("{by} pulled image {image} over CRI in {took}. Image size: {size} bytes.");
                (EventType::Normal, EventReason::Pulled, message)
            }
            Err(error) => {
                let message = format!(
                    "{by} failed to pull image {image} over CRI after {took}: {}",
                    error_with_hint(error)
                );
                (EventType::Warning, EventReason::Failed, message)
            }
        };
        self.record(event_type, reason, message);
        if let Ok(DirectPull { warnings, .. }) = pulled
            && !warnings.is_empty()
        {
            let message = format!("Image {image}: {}", warnings.join("; "));
            self.record(EventType::Warning, EventReason::ImageWarning, message);
        }
    }

    fn took(&self) -> String {
        go_format::duration(go_format::truncated_to_millis(self.start.elapsed()))
    }

    fn record(&self, event_type: EventType, reason: EventReason, message: String) {
        self.pulls.observability.record_about(self.object.clone(), event_type, reason, message);
    }
}

impl Drop for CriPull<'_> {
    fn drop(&mut self) {
        if !self.ended {
            let message = format!(
                "{} abandoned the pull of image {} over CRI after {}",
                self.by,
                self.image,
                self.took()
            );
            self.record(EventType::Warning, EventReason::Failed, message);
        }
    }
}

fn pod_of(sandbox: &SandboxConfig) -> Pod {
    let SandboxConfig { name, uid, namespace, .. } = sandbox.clone();
    Pod { name, uid, namespace, ..Pod::default() }
}
