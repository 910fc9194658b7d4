//! What callers of CRI work on: the node's manager, with a trail of who requested what.

use std::sync::Arc;

use async_trait::async_trait;
use larder::backend::{
    Backend, BackendError, CallErrorKind, ContainerInventory, Filesystems, Image, ImageDetails, ImageSpec,
    ProgressReporter, RuntimeInfo,
};
use larder::credentials::Credential;
use larder::detached::run_to_completion;
use larder::gc::DiskSpace;
use larder::pod::SandboxConfig;
use larder::pull::{DirectPull, ManagedBackend};
use larder::reference::ImageId;

use super::Node;
use super::cri_pins::CriPins;
use super::health::{BackendHealth, error_with_hint};
use super::peer::Peer;
use super::requests::{CriPull, RequestApi};

/// The images of a node as CRI has them. Pulls and removals are recorded; while the backend is known to hang, calls fail
/// at once instead of at their callers' deadlines.
#[derive(Clone)]
pub(crate) struct CriImages {
    node: Arc<Node>,
    images: ManagedBackend,
}

impl CriImages {
    pub(crate) fn of(node: Arc<Node>) -> CriImages {
        let pins = Arc::new(CriPins::of(Arc::clone(&node)));
        CriImages { images: ManagedBackend::new(Arc::clone(&node.manager)).with_pins(pins), node }
    }

    async fn remove_and_record(&self, image: &ImageSpec) -> Result<Option<DiskSpace>, BackendError> {
        let removed = async {
            let images = self.responding()?;
            let found = images.peek_status(image).await?;
            Ok((found, images.remove_counted(image).await?))
        };
        match removed.await {
            Ok((found, freed)) => {
                if let Some(found) = found {
                    self.node.record_removal(RequestApi::Cri, &found, freed).await;
                }
                Ok(freed)
            }
            Err(error) => {
                self.node.record_failed_removal(
                    RequestApi::Cri,
                    image.image.as_str(),
                    &error_with_hint(&error),
                );
                Err(error)
            }
        }
    }

    /// Whether the containerd to which images are published has an image: kubelet pulls it otherwise, and that publishes it.
    async fn can_run(&self, image: Option<&Image>) -> bool {
        match (self.node.publishing(), image) {
            (Some(publishing), Some(image)) => publishing.ensure_published(image).await,
            _ => true,
        }
    }

    /// Whether kubelet has to pull the image with credentials of its own first.
    fn hides(&self, image: &Image) -> bool {
        self.node.hidden.as_ref().is_some_and(|hidden| hidden.hides(image))
    }

    /// A pull whose image may have been hidden until now: containerd gets it before the caller uses it.
    async fn published(&self, pulled: Result<DirectPull, BackendError>) -> Result<DirectPull, BackendError> {
        if let (Some(publishing), Ok(pulled)) = (self.node.publishing(), &pulled) {
            publishing.publish_shown(&pulled.image_ref).await?;
        }
        pulled
    }

    /// The images, unless the backend hangs.
    fn responding(&self) -> Result<&ManagedBackend, BackendError> {
        unusable(&self.node).map_or(Ok(&self.images), Err)
    }
}

/// The error of calls while the backend is known to hang, or is another larder.
pub(crate) fn unusable(node: &Node) -> Option<BackendError> {
    match &*node.health.borrow() {
        BackendHealth::Down { why, unusable: true, .. } => Some(BackendError::Call {
            message: format!("the image backend is unavailable: {why}"),
            kind: CallErrorKind::Unavailable,
            hint: None,
        }),
        _ => None,
    }
}

#[async_trait]
impl Backend for CriImages {
    async fn info(&self) -> Result<RuntimeInfo, BackendError> {
        self.responding()?.info().await
    }

    async fn list(&self) -> Result<Vec<Image>, BackendError> {
        let images = self.responding()?;
        let mut images = match &self.node.hidden {
            Some(hidden) => hidden.list(images).await?,
            None => images.list().await?,
        };
        images.retain(|image| !self.hides(image));
        if let Some(publishing) = self.node.publishing() {
            images.retain(|image| publishing.is_published(image));
        }
        Ok(images)
    }

    async fn status(&self, image: &ImageSpec) -> Result<Option<Image>, BackendError> {
        let found = self.responding()?.status(image).await?.filter(|image| !self.hides(image));
        Ok(if self.can_run(found.as_ref()).await { found } else { None })
    }

    async fn peek_status(&self, image: &ImageSpec) -> Result<Option<Image>, BackendError> {
        Ok(self.responding()?.peek_status(image).await?.filter(|image| !self.hides(image)))
    }

    async fn inspect(&self, image: &ImageSpec) -> Result<Option<ImageDetails>, BackendError> {
        let found = self.responding()?.inspect(image).await?;
        let found = found.filter(|details| !self.hides(&details.image));
        let image = found.as_ref().map(|details| &details.image);
        Ok(if self.can_run(image).await { found } else { None })
    }

    async fn pull(
        &self,
        image: &ImageSpec,
        credential: Option<&Credential>,
        sandbox: Option<&SandboxConfig>,
        _progress: &ProgressReporter,
    ) -> Result<ImageId, BackendError> {
        let request = CriPull::begin(&self.node, image, sandbox);
        let pulled = if let Some(error) = unusable(&self.node) {
            Err(error)
        } else {
            let manager = &self.node.manager;
            let pulled = manager.pull_directly(image.clone(), credential.cloned(), sandbox.cloned()).await;
            self.published(pulled).await
        };
        request.end(&pulled).await;
        pulled.map(|pulled| pulled.image_ref)
    }

    async fn remove(&self, image: &ImageSpec) -> Result<(), BackendError> {
        self.remove_counted(image).await.map(drop)
    }

    async fn remove_counted(&self, image: &ImageSpec) -> Result<Option<DiskSpace>, BackendError> {
        let (own, image) = (self.clone(), image.clone());
        let removal = async move { own.remove_and_record(&image).await };
        // A removal that is not canceled with its caller is recorded without it, too.
        run_to_completion(Peer::current().scope(removal)).await
    }

    async fn filesystems(&self) -> Result<Filesystems, BackendError> {
        self.responding()?.filesystems().await
    }

    async fn container_inventory(&self) -> Result<ContainerInventory, BackendError> {
        self.responding()?.container_inventory().await
    }
}
