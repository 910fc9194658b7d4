//! An image that an ensure answers with is leased before the answer: collection leaves it alone for a while.

use std::sync::Arc;
use std::time::Duration;

use super::puller::{Job, PullResult, Puller};
use super::status::BoardEntry;
use crate::backend::{BackendError, ImageSpec};
use crate::gc::Gate;
use crate::image_service::ImageService;

/// How long who was told that an image is present has to use it; without a gate nobody collects, or nobody asks.
#[derive(Debug, Clone, Default)]
pub(super) struct Leases(Option<(Arc<Gate>, Duration)>);

impl Leases {
    pub(super) fn at(gate: Arc<Gate>, time: Duration) -> Leases {
        Leases(Some((gate, time)))
    }

    /// The id of a present image, leased. Asks again when a removal may have overtaken the answer.
    pub(super) async fn image_ref(
        &self,
        images: &ImageService,
        spec: &ImageSpec,
    ) -> Result<Option<String>, BackendError> {
        let Some((gate, time)) = &self.0 else { return images.image_ref(spec).await };
        loop {
            let look = gate.look();
            let Some(id) = images.image_ref(spec).await? else { return Ok(None) };
            if look.lease(&id, *time).await {
                return Ok(Some(id));
            }
        }
    }

    /// Pulls, and leases what came. Pulls again when a removal may have overtaken that.
    pub(super) async fn pull(&self, puller: &Puller, job: &Job, entry: &BoardEntry) -> PullResult {
        let Some((gate, time)) = &self.0 else { return puller.pull(job, entry).await };
        loop {
            let look = gate.look();
            let result = puller.pull(job, entry).await;
            match &result.pulled {
                Ok(image) if !look.lease(&image.image_ref, *time).await => {}
                _ => return result,
            }
        }
    }
}
