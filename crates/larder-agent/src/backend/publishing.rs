//! larder's own store, whose images a containerd has as well: it keeps its snapshots in the store.
//!
//! An image is pulled into the store and then published; it is withdrawn before it is removed, since the snapshots of
//! containerd retain its layers. The containers of containerd are users of images like the store's own mounts.

use async_trait::async_trait;
use larder::backend::{
    Backend, BackendError, CallErrorKind, ContainerInventory, Filesystems, Image, ImageDetails, ImageNames,
    ImageSpec, MinimumRate, NameRemoval, ProgressReporter, RuntimeInfo,
};
use larder::credentials::Credential;
use larder::error_chain;
use larder::gc::DiskSpace;
use larder::pod::SandboxConfig;
use larder::reference::{Digest, ImageId, ImageName, Reference};
use larder_containerd::{ImagePublisher, PublishedImage};
use larder_cri::{CriBackend, CriConfig, Endpoint};
use larder_store::backend::StoreBackend;
use larder_store::store::{ImageRecord, Store, StoreError};
use tokio::task::spawn_blocking;

use crate::config::Config;

/// The publisher of these settings, if they name a containerd.
fn publisher_of(config: &Config) -> Option<ImagePublisher> {
    let socket = config.containerd.socket.as_ref().filter(|_| config.containerd.snapshotter)?;
    let endpoint = Endpoint::parse(socket).ok()?; // checked with the settings
    let own = config.images.runtime_request_timeout.to_std();
    let request_timeout = own.unwrap_or(config.runtime.request_timeout);
    let cri = CriConfig { request_timeout, image_endpoint: None, ..config.runtime.clone() };
    Some(ImagePublisher::new(CriBackend::new(endpoint, cri)))
}

/// The store and its containerd.
pub(crate) struct PublishingBackend {
    store: StoreBackend,
    publisher: ImagePublisher,
}

impl PublishingBackend {
    /// A store with the containerd of these settings, if they name one.
    pub(crate) fn of(store: &StoreBackend, config: &Config) -> Option<PublishingBackend> {
        publisher_of(config).map(|publisher| PublishingBackend { store: store.clone(), publisher })
    }

    /// The containerd to which images are published.
    pub(crate) fn cri(&self) -> &CriBackend {
        self.publisher.cri()
    }

    /// Publishes all images that can be; fails with the first error.
    pub(crate) async fn publish_all(&self) -> Result<(), BackendError> {
        let mut outcome = Ok(());
        for image in self.store.list().await? {
            let published = self.publish(&ImageName::from(image.id.as_str())).await;
            match published {
                // The others would take as long to fail.
                Err(error @ BackendError::Unreachable { .. }) => return Err(error),
                published => outcome = outcome.and(published),
            }
        }
        outcome
    }

    /// An image as containerd gets it; `None` if the store does not have it.
    async fn published(&self, image: &ImageName) -> Result<Option<PublishedImage>, BackendError> {
        let (store, image) = (self.store.store().clone(), image.clone());
        let read = move || store.image(image)?.map(|record| published(&store, record)).transpose();
        let failed = |error: &dyn std::error::Error| BackendError::Call {
            message: error_chain(error),
            kind: CallErrorKind::Other,
            hint: None,
        };
        match spawn_blocking(read).await {
            Ok(read) => read.map_err(|error: StoreError| failed(&error)),
            Err(error) => Err(failed(&error)),
        }
    }

    /// Publishes an image, unless the store does not have it.
    pub(crate) async fn publish(&self, image: &ImageName) -> Result<(), BackendError> {
        match self.published(image).await? {
            Some(image) => self.publisher.publish(&image).await,
            None => Ok(()),
        }
    }

    /// Withdraws an image before it is removed, and publishes it again if it is not.
    async fn withdraw_and<T>(
        &self,
        image: &ImageName,
        remove: impl Future<Output = Result<T, BackendError>>,
    ) -> Result<T, BackendError> {
        let Some(withdrawn) = self.published(image).await? else { return remove.await };
        self.publisher.withdraw(&withdrawn.record_names()).await?;
        let removed = remove.await;
        if removed.is_err()
            && let Err(error) = self.publisher.publish(&withdrawn).await
        {
            tracing::warn!(image = %withdrawn.id, "cannot publish an image again that was not removed: {error}");
        }
        removed
    }
}

/// An image with its documents. Reads files.
fn published(store: &Store, record: ImageRecord) -> Result<PublishedImage, StoreError> {
    let mut documents = Vec::with_capacity(record.manifests.len());
    for digest in &record.manifests {
        documents.extend(store.blob(digest)?.map(|bytes| (digest.clone(), bytes)));
    }
    let config = store.blob(&record.id)?.unwrap_or_default();
    let (names, chains) = (named_documents(&record), record.chain_ids());
    Ok(PublishedImage { id: record.id, config, documents, names, chains })
}

/// The names of an image, each with the document that it stands for: of a tag, the one that its repository served last.
fn named_documents(record: &ImageRecord) -> Vec<(String, Digest)> {
    let of_repository = |repository: &str| {
        let mut served = record.manifests.iter().rev();
        served.find(|digest| record.digests.contains(&format!("{repository}@{digest}")))
    };
    let of_name = |name: &String| {
        let target = if let Some((_, digest)) = name.split_once('@') {
            Digest::parse(digest).ok()
        } else {
            let repository = name.rsplit_once(':').map_or(name.as_str(), |(repository, _)| repository);
            of_repository(repository).or(record.manifests.last()).cloned()
        };
        target.map(|target| (name.clone(), target))
    };
    record.names().filter_map(of_name).collect()
}

#[async_trait]
impl Backend for PublishingBackend {
    async fn info(&self) -> Result<RuntimeInfo, BackendError> {
        self.store.info().await
    }

    async fn list(&self) -> Result<Vec<Image>, BackendError> {
        self.store.list().await
    }

    async fn status(&self, image: &ImageSpec) -> Result<Option<Image>, BackendError> {
        self.store.status(image).await
    }

    async fn peek_status(&self, image: &ImageSpec) -> Result<Option<Image>, BackendError> {
        self.store.peek_status(image).await
    }

    async fn inspect(&self, image: &ImageSpec) -> Result<Option<ImageDetails>, BackendError> {
        self.store.inspect(image).await
    }

    async fn pull(
        &self,
        image: &ImageSpec,
        credential: Option<&Credential>,
        sandbox: Option<&SandboxConfig>,
        progress: &ProgressReporter,
    ) -> Result<ImageId, BackendError> {
        let id = self.store.pull(image, credential, sandbox, progress).await?;
        self.publish(&ImageName::from(id.as_str())).await?;
        Ok(id)
    }

    fn minimum_rate(&self) -> Option<MinimumRate> {
        self.store.minimum_rate()
    }

    async fn remove(&self, image: &ImageSpec) -> Result<(), BackendError> {
        self.withdraw_and(&image.image, self.store.remove(image)).await
    }

    async fn remove_counted(&self, image: &ImageSpec) -> Result<Option<DiskSpace>, BackendError> {
        self.withdraw_and(&image.image, self.store.remove_counted(image)).await
    }

    async fn remove_unused(&self, image: &ImageSpec) -> Result<Option<DiskSpace>, BackendError> {
        self.withdraw_and(&image.image, self.store.remove_unused(image)).await
    }

    async fn filesystems(&self) -> Result<Filesystems, BackendError> {
        self.store.filesystems().await
    }

    async fn container_inventory(&self) -> Result<ContainerInventory, BackendError> {
        let mut all = self.publisher.cri().container_inventory().await?;
        let ContainerInventory { containers, sandboxes } = self.store.container_inventory().await?;
        all.containers.extend(containers);
        all.sandboxes.extend(sandboxes);
        Ok(all)
    }

    fn names(&self) -> Option<&dyn ImageNames> {
        Some(self)
    }
}

#[async_trait]
impl ImageNames for PublishingBackend {
    async fn remove_names(
        &self,
        id: &ImageId,
        names: &[String],
        force: bool,
    ) -> Result<NameRemoval, BackendError> {
        let image = ImageName::from(id.as_str());
        let Some(withdrawn) = self.published(&image).await? else {
            return self.store.remove_names(id, names, force).await;
        };
        let is_all = withdrawn.names.iter().all(|(name, _)| names.contains(name));
        if is_all {
            return self.withdraw_and(&image, self.store.remove_names(id, names, force)).await;
        }
        let removed = self.store.remove_names(id, names, force).await?;
        self.publisher.withdraw(names).await?;
        Ok(removed)
    }

    async fn add_name(&self, id: &ImageId, name: &Reference) -> Result<bool, BackendError> {
        let added = self.store.add_name(id, name).await?;
        self.publish(&ImageName::from(id.as_str())).await?;
        Ok(added)
    }
}
