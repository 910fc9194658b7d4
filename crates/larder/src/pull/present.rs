//! Looks up and removes present images for callers without a pod's request, such as kubelet over CRI.

use std::collections::HashMap;

use async_trait::async_trait;

use super::manager::ImageManager;
use crate::backend::{
    Backend, BackendError, CallErrorKind, Image, ImageDetails, ImageSpec, RemoveOptions, Removed,
};
use crate::detached::run_to_completion;
use crate::gc::DiskSpace;
use crate::hint::Hint;
use crate::reference::ImageId;

/// The purpose of a status call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatusIntent {
    /// A container start follows: a present image is leased.
    Use,
    /// The image is only shown: no lease.
    Show,
}

/// Why callers may not remove an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImagePin {
    /// The reason, such as `kept by rule 1 (name shop/*)`.
    pub reason: String,
    /// How to lift it.
    pub hint: Hint,
}

/// The images that callers may not remove, in addition to those that the backend has pinned.
#[async_trait]
pub trait ImagePinSource: Send + Sync {
    /// The pins of these images, by image ID; possibly also those of others. Must fail rather than omit one.
    async fn pins(&self, images: &[Image]) -> Result<HashMap<ImageId, ImagePin>, BackendError>;
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
    /// Leases need a manager that was built with a [`lease`](super::ImageManagerBuilder::lease).
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

    /// Removes an image under all its names, by ID, unless one of `pins` is on it:
    /// [`FailedPrecondition`](CallErrorKind::FailedPrecondition). Removing an absent image succeeds.
    pub async fn remove(
        &self,
        image: &ImageSpec,
        pins: &dyn ImagePinSource,
    ) -> Result<DirectRemoval, BackendError> {
        let options = RemoveOptions::default();
        loop {
            let Some(found) = self.backend().status(image).await? else {
                // An incomplete image, which has no status, can still be removed. A pull may complete it until the gate is
                // closed.
                let is_complete = |found: Option<&Image>| found.is_some().then(became_complete);
                match self.remove_by_id(&ImageId::default(), image, &options, Some(&is_complete)).await {
                    Err(error) if error == became_complete() => continue,
                    removed => return Ok(DirectRemoval { image: None, freed: removed?.freed() }),
                }
            };
            // Before the removal begins: that ends the image's lease.
            if let Some(pin) = pins.pins(std::slice::from_ref(&found)).await?.remove(&found.id) {
                let message = format!("cannot remove image {}: {}", image.image, pin.reason);
                return Err(
                    BackendError::call(CallErrorKind::FailedPrecondition, message).with_hint(pin.hint)
                );
            }
            // By ID: the name may refer to another image now.
            let spec = ImageSpec { image: (&found.id).into(), ..image.clone() };
            let removed = self.remove_by_id(&found.id, &spec, &options, None).await?;
            return Ok(DirectRemoval { image: Some(found), freed: removed.freed() });
        }
    }

    /// Removes an image, or names of it, on request, unless `refuse` has an error for the image as it is then. The empty ID is that of an image whose ID the backend does not report.
    ///
    /// One removal at a time for each image: others of that image wait, and then find nothing left. Once begun, it runs
    /// to its end even if the caller is canceled. It ignores leases, which only defer garbage collection.
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
            let _removing = removing;
            images.backend().remove(&spec, &options).await
        })
        .await
    }
}

/// The refusal to remove an image without an ID that has one now.
fn became_complete() -> BackendError {
    BackendError::call(CallErrorKind::Other, "a pull completed the image")
}
