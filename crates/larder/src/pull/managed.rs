//! A backend that uses the manager, so that all callers share pulls, leases and removals.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;

use super::manager::ImageManager;
use crate::backend::{
    Backend, BackendError, CallErrorKind, ContainerInventory, Filesystems, Image, ImageDetails, ImageSpec,
    ProgressReporter, RuntimeInfo,
};
use crate::credentials::Credential;
use crate::detached::run_to_completion;
use crate::gc::DiskSpace;
use crate::hint::Hint;
use crate::pod::SandboxConfig;
use crate::reference::ImageId;

/// Why callers of a [`ManagedBackend`] may not remove an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImagePin {
    /// The reason, such as `kept by rule 1 (name shop/*)`.
    pub reason: String,
    /// How to lift it.
    pub hint: Hint,
}

/// The images that callers of a [`ManagedBackend`] may not remove, in addition to those that the backend has pinned.
#[async_trait]
pub trait ImagePinSource: Send + Sync {
    /// The pins of these images, by image ID; possibly also those of others. Must fail rather than omit one.
    async fn pins(&self, images: &[Image]) -> Result<HashMap<ImageId, ImagePin>, BackendError>;
}

/// The backend of an [`ImageManager`], for callers that expect a plain backend, such as kubelet over CRI.
///
/// * A pull is one of the manager's: see [`ImageManager::pull_directly`]. Its progress is reported by
///   [`ImageManager::watch`], not by the given reporter.
/// * An image that is found present is leased, because this is the call before a container start. Lists and
///   [`Backend::peek_status`] take no lease.
/// * A removal is by id, and one at a time for each image; others of the same image wait, and then find nothing left.
///   Once begun, it runs to its end even if the caller is canceled. It ignores leases, which only defer garbage
///   collection. Status calls during the removal are answered after it.
/// * Images of the [pin source](Self::with_pins) are reported as pinned, and their removal fails with
///   [`CallErrorKind::FailedPrecondition`].
///
/// Leases and removals need a manager that was built with a [`lease`](super::ImageManagerBuilder::lease).
#[derive(Clone)]
pub struct ManagedBackend {
    manager: Arc<ImageManager>,
    pins: Option<Arc<dyn ImagePinSource>>,
}

impl ManagedBackend {
    /// The manager's backend, behind it. Pins no image.
    pub fn new(manager: Arc<ImageManager>) -> Self {
        ManagedBackend { manager, pins: None }
    }

    /// Also pins the images of this source.
    #[must_use]
    pub fn with_pins(self, pins: Arc<dyn ImagePinSource>) -> Self {
        ManagedBackend { pins: Some(pins), ..self }
    }

    /// The pins of these images.
    async fn pins(&self, images: &[Image]) -> Result<HashMap<ImageId, ImagePin>, BackendError> {
        match &self.pins {
            Some(pins) => pins.pins(images).await,
            None => Ok(HashMap::new()),
        }
    }

    /// These images, pinned where the source says so; all of them, if it cannot. A list that fails would keep containers
    /// from starting.
    async fn with_pinned(&self, mut images: Vec<Image>) -> Vec<Image> {
        match self.pins(&images).await {
            Ok(pins) => {
                for image in &mut images {
                    image.pinned |= pins.contains_key(&image.id);
                }
            }
            Err(error) => {
                tracing::warn!("cannot determine pinned images, reporting all as pinned: {error}");
                for image in &mut images {
                    image.pinned = true;
                }
            }
        }
        images
    }

    /// One image, pinned where the source says so.
    async fn with_pin(&self, image: Option<Image>) -> Option<Image> {
        self.with_pinned(image.into_iter().collect()).await.pop()
    }

    fn backend(&self) -> &dyn Backend {
        self.manager.images.backend()
    }
}

impl fmt::Debug for ManagedBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ManagedBackend")
    }
}

#[async_trait]
impl Backend for ManagedBackend {
    async fn info(&self) -> Result<RuntimeInfo, BackendError> {
        self.backend().info().await
    }

    async fn list(&self) -> Result<Vec<Image>, BackendError> {
        Ok(self.with_pinned(self.backend().list().await?).await)
    }

    async fn status(&self, image: &ImageSpec) -> Result<Option<Image>, BackendError> {
        let leases = &self.manager.leases;
        let found = leases.lease_found(|| self.backend().status(image), |found| &found.id).await?;
        Ok(self.with_pin(found).await)
    }

    async fn peek_status(&self, image: &ImageSpec) -> Result<Option<Image>, BackendError> {
        Ok(self.with_pin(self.backend().peek_status(image).await?).await)
    }

    async fn inspect(&self, image: &ImageSpec) -> Result<Option<ImageDetails>, BackendError> {
        let leases = &self.manager.leases;
        let found = leases.lease_found(|| self.backend().inspect(image), |found| &found.image.id).await?;
        let Some(mut details) = found else { return Ok(None) };
        if let Some(image) = self.with_pin(Some(details.image.clone())).await {
            details.image = image;
        }
        Ok(Some(details))
    }

    async fn pull(
        &self,
        image: &ImageSpec,
        credential: Option<&Credential>,
        sandbox: Option<&SandboxConfig>,
        _progress: &ProgressReporter,
    ) -> Result<ImageId, BackendError> {
        let pulled = self.manager.pull_directly(image.clone(), credential.cloned(), sandbox.cloned()).await?;
        Ok(pulled.image_ref)
    }

    async fn remove(&self, image: &ImageSpec) -> Result<(), BackendError> {
        self.remove_counted(image).await.map(drop)
    }

    async fn remove_counted(&self, image: &ImageSpec) -> Result<Option<DiskSpace>, BackendError> {
        let Some(found) = self.backend().status(image).await? else {
            // An incomplete image, which has no status, can still be removed.
            return self.backend().remove_counted(image).await;
        };
        // Before the removal begins: that ends the image's lease.
        if let Some(pin) = self.pins(std::slice::from_ref(&found)).await?.remove(&found.id) {
            return Err(BackendError::Call {
                message: format!("cannot remove image {}: {}", image.image, pin.reason),
                kind: CallErrorKind::FailedPrecondition,
                hint: Some(pin.hint),
            });
        }
        let removing = self.manager.leases.removal(&found.id).await;
        // By ID: the name may refer to another image now.
        let (own, spec) = (self.clone(), ImageSpec { image: found.id.into(), ..image.clone() });
        // The backend may continue the removal after the future is dropped; the gate must stay closed until it ends.
        run_to_completion(async move {
            let _removing = removing;
            own.backend().remove_counted(&spec).await
        })
        .await
    }

    async fn filesystems(&self) -> Result<Filesystems, BackendError> {
        self.backend().filesystems().await
    }

    async fn container_inventory(&self) -> Result<ContainerInventory, BackendError> {
        self.backend().container_inventory().await
    }
}
