//! Looks up and removes present images for callers without a pod's request, such as kubelet over CRI.

use std::collections::HashMap;

use async_trait::async_trait;

use super::manager::ImageManager;
use crate::backend::{Backend, BackendError, Image, ImageDetails, ImageSpec, RemoveOptions, Removed};
use crate::detached::run_to_completion;
use crate::gc::DiskSpace;
use crate::reference::ImageId;

/// The purpose of a status call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatusIntent {
    /// A container start follows: a present image is leased.
    Use,
    /// The image is only shown: no lease.
    Show,
}

/// The images that callers see as pinned, in addition to those that the backend has pinned.
#[async_trait]
pub trait ImagePinSource: Send + Sync {
    /// Why these images are pinned, by image ID, such as `kept by rule 1 (name shop/*)`; possibly also for others. Must
    /// fail rather than omit one.
    async fn pins(&self, images: &[Image]) -> Result<HashMap<ImageId, String>, BackendError>;
}

/// Reports the images of this source as pinned; all of them, if it fails. A list that fails would keep containers from
/// starting.
pub async fn mark_pinned(source: &dyn ImagePinSource, images: &mut [Image]) {
    match source.pins(images).await {
        Ok(pins) => {
            for image in images {
                image.pinned |= pins.contains_key(&image.id);
            }
        }
        Err(error) => {
            tracing::warn!("cannot determine pinned images, reporting all as pinned: {error}");
            for image in images {
                image.pinned = true;
            }
        }
    }
}

/// The result of [`ImageManager::remove`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DirectRemoval {
    /// The image as it was before; `None` if it was absent.
    pub image: Option<Image>,
    /// The disk space of the files that this removed; `None` if the backend does not report it.
    pub freed: Option<DiskSpace>,
}

/// Decides behind the closed gate whether a removal is refused, by the image as it is then; `None` if it is absent.
pub type RefuseRemoval = dyn Fn(Option<&Image>) -> Option<BackendError> + Send + Sync;

impl ImageManager {
    /// The backend, for calls that neither pull nor remove.
    pub fn backend(&self) -> &dyn Backend {
        self.images.backend()
    }

    /// The image; `None` when it is absent. Waits for a removal of an image that is to be used, and answers after it.
    ///
    /// Leases need a manager that was built with a [`lease`](super::ImageManager::with_lease).
    pub async fn status(
        &self,
        image: &ImageSpec,
        intent: StatusIntent,
    ) -> Result<Option<Image>, BackendError> {
        match intent {
            StatusIntent::Use => {
                self.leases.lease_found(|| self.backend().usable_status(image), |found| &found.id).await
            }
            StatusIntent::Show => self.backend().status(image).await,
        }
    }

    /// Like [`status`](Self::status) for an image that is to be used, with the backend's verbose details.
    pub async fn inspect(&self, image: &ImageSpec) -> Result<Option<ImageDetails>, BackendError> {
        self.leases.lease_found(|| self.backend().inspect(image), |found| &found.image.id).await
    }

    /// Removes an image under all its names, by ID. Removing an absent image succeeds; an incomplete one, which has no
    /// status, is removed by its name.
    pub async fn remove(&self, image: &ImageSpec) -> Result<DirectRemoval, BackendError> {
        let found = self.backend().status(image).await?;
        let (id, spec) = match &found {
            // By ID: the name may refer to another image later.
            Some(found) => (found.id.clone(), ImageSpec { image: (&found.id).into(), ..image.clone() }),
            None => (ImageId::default(), image.clone()),
        };
        let removed = self.remove_by_id(&id, &spec, &RemoveOptions::default(), None).await?;
        Ok(DirectRemoval { image: found, freed: removed.freed() })
    }

    /// Removes an image, or names of it, on request, unless `refuse` has an error for the image as it is then. The
    /// empty ID is that of an image whose ID the backend does not report.
    ///
    /// One removal at a time for each image: others of that image wait, and then find nothing left. Once begun, it runs
    /// to its end even if the caller is canceled. It ignores leases, which only defer garbage collection; they end with
    /// the image, not with one of its names.
    pub async fn remove_by_id(
        &self,
        id: &ImageId,
        spec: &ImageSpec,
        options: &RemoveOptions,
        refuse: Option<&RefuseRemoval>,
    ) -> Result<Removed, BackendError> {
        let removing = self.leases.removal(id).await;
        if let Some(refuse) = refuse
            && let Some(refusal) = refuse(self.backend().status(spec).await?.as_ref())
        {
            return Err(refusal);
        }
        let (images, spec, options) = (self.images.clone(), spec.clone(), options.clone());
        // The backend may continue the removal after the future is dropped; the gate must stay closed until it ends.
        run_to_completion(async move {
            let removed = images.backend().remove(&spec, &options).await;
            let is_gone = match &removed {
                Ok(removed) => matches!(removed, Removed::Image { .. }),
                // A backend may remove what it did not answer for.
                Err(_) => matches!(images.backend().status(&spec).await, Ok(None)),
            };
            if let Some(removing) = removing.filter(|_| is_gone) {
                removing.end_leases();
            }
            removed
        })
        .await
    }
}
