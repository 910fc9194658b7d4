//! A backend behind a manager: what is shared by everybody who wants images on a node.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;

use super::manager::Manager;
use crate::backend::{
    Backend, BackendError, Filesystems, Image, ImageDetails, ImageSpec, InUse, Progress, RuntimeInfo,
};
use crate::credentials::Credential;
use crate::outlive::to_its_end;
use crate::pod::SandboxConfig;
use crate::reference::ImageId;

/// The backend of a [`Manager`], for callers that know nothing of it, such as kubelet over CRI.
///
/// * A pull is one of the manager's: see [`Manager::pull_through`]. How far it has come is told by
///   [`Manager::watch`], not by the progress given.
/// * An image that is found present is leased, since that is what is asked before a container is started. Lists and
///   [looks](Backend::look) lease nothing.
/// * A removal is by id, and one at a time for each image; others of the same image wait, and then find nothing left.
///   Once it has begun it goes on to its end, also when the caller goes away.
///   It takes no notice of leases, which are there for collection. Who looks meanwhile is answered after it.
///
/// Leases and removals need a manager that was built with a [`lease`](super::ManagerBuilder::lease).
#[derive(Clone)]
pub struct ManagedBackend {
    manager: Arc<Manager>,
}

impl ManagedBackend {
    /// The manager's backend, behind it.
    pub fn new(manager: Arc<Manager>) -> Self {
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
        self.manager.leases.found(|| self.backend().status(image), |found| &found.id).await
    }

    async fn look(&self, image: &ImageSpec) -> Result<Option<Image>, BackendError> {
        self.backend().look(image).await
    }

    async fn inspect(&self, image: &ImageSpec) -> Result<Option<ImageDetails>, BackendError> {
        self.manager.leases.found(|| self.backend().inspect(image), |found| &found.image.id).await
    }

    async fn pull(
        &self,
        image: &ImageSpec,
        credential: Option<&Credential>,
        sandbox: Option<&SandboxConfig>,
        _progress: &Progress,
    ) -> Result<ImageId, BackendError> {
        self.manager.pull_through(image.clone(), credential.cloned(), sandbox.cloned()).await
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
        to_its_end(async move {
            let _removing = removing;
            own.backend().remove(&spec).await
        })
        .await
    }

    async fn filesystems(&self) -> Result<Filesystems, BackendError> {
        self.backend().filesystems().await
    }

    async fn in_use(&self) -> Result<InUse, BackendError> {
        self.backend().in_use().await
    }
}
