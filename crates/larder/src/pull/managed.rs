//! A backend behind a manager: what is shared by everybody who wants images on a node.

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

/// The backend of a [`ImageManager`], for callers that know nothing of it, such as kubelet over CRI.
///
/// * A pull is one of the manager's: see [`ImageManager::pull_directly`]. How far it has come is told by
///   [`ImageManager::watch`], not by the progress given.
/// * An image that is found present is leased, since that is what is asked before a container is started. Lists and
///   [`Backend::peek_status`] takes no lease.
/// * A removal is by id, and one at a time for each image; others of the same image wait, and then find nothing left.
///   Once it has begun it goes on to its end, also when the caller goes away.
///   It takes no notice of leases, which are there for collection. Who looks meanwhile is answered after it.
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
            // What cannot be shown may be removed still: an image that lacks a layer.
            return self.backend().remove(image).await;
        };
        let removing = self.manager.leases.removal(&found.id).await;
        // By id: its name may stand for another image by now.
        let (own, spec) = (self.clone(), ImageSpec { image: found.id.into(), ..image.clone() });
        // The backend may go on removing after it was dropped; the gate has to stay closed until then.
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
