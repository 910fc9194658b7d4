//! A backend that uses the manager, so that all callers share pulls, leases and removals.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;

use super::manager::ImageManager;
use crate::backend::{
    Backend, BackendError, ContainerInventory, Filesystems, Image, ImageDetails, ImageSpec, ProgressReporter,
    RuntimeInfo,
};
use crate::credentials::Credential;
use crate::detached::run_to_completion;
use crate::pod::SandboxConfig;
use crate::reference::ImageId;

/// The backend of an [`ImageManager`], for callers that expect a plain backend, such as kubelet over CRI.
///
/// * A pull is one of the manager's: see [`ImageManager::pull_directly`]. Its progress is reported by
///   [`ImageManager::watch`], not by the given reporter.
/// * An image that is found present is leased, because this is the call before a container start. Lists and
///   [`Backend::peek_status`] take no lease.
/// * A removal is by id, and one at a time for each image; others of the same image wait, and then find nothing left.
///   Once begun, it runs to its end even if the caller is canceled. It ignores leases, which only defer garbage
///   collection. Status calls during the removal are answered after it.
///
/// Leases and removals need a manager that was built with a [`lease`](super::ImageManagerBuilder::lease).
#[derive(Clone)]
pub struct ManagedBackend {
    manager: Arc<ImageManager>,
}

impl ManagedBackend {
    /// The manager's backend, behind it.
    pub fn new(manager: Arc<ImageManager>) -> Self {
        ManagedBackend { manager }
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
        self.backend().list().await
    }

    async fn status(&self, image: &ImageSpec) -> Result<Option<Image>, BackendError> {
        self.manager.leases.lease_found(|| self.backend().status(image), |found| &found.id).await
    }

    async fn peek_status(&self, image: &ImageSpec) -> Result<Option<Image>, BackendError> {
        self.backend().peek_status(image).await
    }

    async fn inspect(&self, image: &ImageSpec) -> Result<Option<ImageDetails>, BackendError> {
        self.manager.leases.lease_found(|| self.backend().inspect(image), |found| &found.image.id).await
    }

    async fn pull(
        &self,
        image: &ImageSpec,
        credential: Option<&Credential>,
        sandbox: Option<&SandboxConfig>,
        _progress: &ProgressReporter,
    ) -> Result<ImageId, BackendError> {
        self.manager.pull_directly(image.clone(), credential.cloned(), sandbox.cloned()).await
    }

    async fn remove(&self, image: &ImageSpec) -> Result<(), BackendError> {
        let Some(found) = self.backend().status(image).await? else {
            // An image whose status fails, such as one that lacks a layer, can still be removed.
            return self.backend().remove(image).await;
        };
        let removing = self.manager.leases.removal(&found.id).await;
        // By ID: the name may refer to another image now.
        let (own, spec) = (self.clone(), ImageSpec { image: found.id.into(), ..image.clone() });
        // The backend may continue the removal after the future is dropped; the gate must stay closed until it ends.
        run_to_completion(async move {
            let _removing = removing;
            own.backend().remove(&spec).await
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
