//! The image manager of a node as CRI has it, with a record of each pull and removal.

use std::sync::Arc;

use async_trait::async_trait;
use larder::backend::{BackendError, Filesystems, Image, ImageDetails, ImageSpec, RuntimeInfo};
use larder::credentials::Credential;
use larder::detached::run_to_completion;
use larder::pod::SandboxConfig;
use larder::pull::{DirectPull, DirectRemoval, ImageManager, ImagePinSource as _, StatusIntent, mark_pinned};
use larder::reference::ImageId;
use larder_cri::server::CriImages;

use super::collection::{Collection, RequestApi};
use super::cri_pins::CriPins;
use super::health::error_with_hint;
use super::peer::Peer;
use super::pulls::{CriPull, Pulls};
use super::{Node, Storage};

/// The images of a node for callers of CRI.
///
/// * An image that another program put into that containerd is loaded when a caller wants to use it, if it was not
///   before.
/// * Hidden images, and those that the containerd of the settings does not have, are absent.
/// * Images with a [pin](CriPins) are reported as pinned. A removal by name obliges all the same, as CRI demands, and
///   its record names the pin.
/// * Pulls and removals are recorded.
/// * While the backend is known to hang, calls fail at once instead of at their callers' deadlines.
#[derive(Clone)]
pub(crate) struct NodeCriImages {
    storage: Arc<Storage>,
    collection: Arc<Collection>,
    pulls: Arc<Pulls>,
    pins: Arc<CriPins>,
}

impl NodeCriImages {
    pub(crate) fn of(node: &Node) -> NodeCriImages {
        NodeCriImages {
            storage: Arc::clone(&node.storage),
            collection: Arc::clone(&node.collection),
            pulls: Arc::clone(&node.pulls),
            pins: Arc::new(CriPins::of(node)),
        }
    }

    async fn remove_and_record(&self, image: &ImageSpec) -> Result<(), BackendError> {
        match self.remove_despite_pin(image).await {
            Ok((removal, pin)) => {
                if let Some(found) = removal.image {
                    self.collection.record_removal(RequestApi::Cri, &found, removal.freed, pin).await;
                }
                Ok(())
            }
            Err(error) => {
                self.collection.record_failed_removal(
                    RequestApi::Cri,
                    image.image.as_str(),
                    &error_with_hint(&error),
                );
                Err(error)
            }
        }
    }

    /// Removes the image. Returns with it what pinned it.
    async fn remove_despite_pin(
        &self,
        image: &ImageSpec,
    ) -> Result<(DirectRemoval, Option<String>), BackendError> {
        let manager = self.manager()?;
        let found = manager.status(image, StatusIntent::Show).await?;
        let pin = match &found {
            // The record can do without a pin that is unknown.
            Some(found) => {
                self.pins.pins(std::slice::from_ref(found)).await.unwrap_or_default().remove(&found.id)
            }
            None => None,
        };
        Ok((manager.remove(image).await?, pin))
    }

    /// Whether the containerd to which images are published has an image: kubelet pulls it otherwise, and that
    /// publishes it.
    async fn can_run(&self, image: &Image) -> bool {
        match self.storage.publisher() {
            Some(publisher) => publisher.ensure_published(image).await,
            None => true,
        }
    }

    /// The image, pinned where a pin is on it.
    async fn with_pin(&self, mut image: Image) -> Image {
        mark_pinned(&*self.pins, std::slice::from_mut(&mut image)).await;
        image
    }

    /// A pull whose image may have been hidden until now: containerd gets it before the caller uses it.
    async fn published(&self, pulled: Result<DirectPull, BackendError>) -> Result<DirectPull, BackendError> {
        if let (Some(publisher), Ok(pulled)) = (self.storage.publisher(), &pulled) {
            publisher.publish_shown(&pulled.image_ref).await?;
        }
        pulled
    }

    /// The manager, unless the backend hangs.
    fn manager(&self) -> Result<&ImageManager, BackendError> {
        self.storage.unusable().map_or(Ok(self.pulls.manager()), Err)
    }
}

#[async_trait]
impl CriImages for NodeCriImages {
    async fn info(&self) -> Result<RuntimeInfo, BackendError> {
        self.manager()?.backend().info().await
    }

    async fn list(&self) -> Result<Vec<Image>, BackendError> {
        let backend = self.manager()?.backend();
        let mut images = match self.pulls.hidden() {
            Some(hidden) => hidden.list(backend).await?,
            None => backend.list().await?,
        };
        mark_pinned(&*self.pins, &mut images).await;
        images.retain(|image| !self.pulls.hides(image));
        if let Some(publisher) = self.storage.publisher() {
            publisher.retain_published(&mut images).await?;
        }
        Ok(images)
    }

    async fn status(&self, image: &ImageSpec, intent: StatusIntent) -> Result<Option<Image>, BackendError> {
        let manager = self.manager()?;
        let mut found = manager.status(image, intent).await?;
        if found.is_none()
            && let Some(publisher) = self.storage.publisher().filter(|_| intent == StatusIntent::Use)
            && publisher.adopt_named(&image.image).await
        {
            found = manager.status(image, intent).await?;
        }
        let Some(found) = found.filter(|image| !self.pulls.hides(image)) else { return Ok(None) };
        if intent == StatusIntent::Use && !self.can_run(&found).await {
            return Ok(None);
        }
        Ok(Some(self.with_pin(found).await))
    }

    async fn inspect(&self, image: &ImageSpec) -> Result<Option<ImageDetails>, BackendError> {
        let found = self.manager()?.inspect(image).await?;
        let Some(found) = found.filter(|found| !self.pulls.hides(&found.image)) else { return Ok(None) };
        if !self.can_run(&found.image).await {
            return Ok(None);
        }
        Ok(Some(ImageDetails { image: self.with_pin(found.image).await, ..found }))
    }

    async fn pull(
        &self,
        image: ImageSpec,
        credential: Option<Credential>,
        sandbox: Option<SandboxConfig>,
    ) -> Result<ImageId, BackendError> {
        let request = CriPull::begin(&self.pulls, &image, sandbox.as_ref());
        let pulled = match self.manager() {
            Ok(manager) => self.published(manager.pull_directly(image, credential, sandbox).await).await,
            Err(error) => Err(error),
        };
        request.end(&pulled).await;
        pulled.map(|pulled| pulled.image_ref)
    }

    async fn remove(&self, image: &ImageSpec) -> Result<(), BackendError> {
        let (own, image) = (self.clone(), image.clone());
        let removal = async move { own.remove_and_record(&image).await };
        // A removal that is not canceled with its caller is recorded without it, too.
        run_to_completion(Peer::current().scope(removal)).await
    }

    async fn filesystems(&self) -> Result<Filesystems, BackendError> {
        self.manager()?.backend().filesystems().await
    }
}
