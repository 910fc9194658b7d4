//! Publishes the images of larder's own store to the containerd that keeps its snapshots there, and
//! [loads](super::adopt) those that other programs put there.
//!
//! An image is published after its commit and withdrawn before its removal, since the snapshots of containerd retain
//! its layers. The containers of containerd use images like the store's own mounts.
//!
//! Promises: one image is published or withdrawn by one caller at a time; an image counts as published only after
//! containerd was seen to have it under all its names.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use jiff::Timestamp;
use larder::backend::{
    Backend as _, BackendError, CallErrorKind, ContainerInventory, Image, RemoveOptions, Removed,
};
use larder::hidden::HiddenImages;
use larder::reference::{Digest, ImageId, ImageName, Reference, names_platform};
use larder::retention::{Retention, RetentionError, RetentionSource, SourceScope};
use larder::retry::retry_until;
use larder_containerd::{
    ContainerdImages, ContainerdPins, ContainerdUses, ForeignName, ImagePublisher, PublishedImage,
    SharedSnapshots,
};
use larder_cri::channel::CriChannel;
use larder_cri::{CriBackend, CriConfig, Endpoint};
use larder_store::backend::{AttachedRuntime, StoreBackend};
use larder_store::store::{ImageLayer, ImageRecord, Store, StoreError};
use parking_lot::Mutex;
use serde_json::json;
use tokio::sync::{Mutex as AsyncMutex, Notify, OwnedMutexGuard};
use tokio::task::spawn_blocking;
use tokio::time;

use super::adopt::AdoptionFailures;
use crate::config::Config;

/// First and longest back-off after a failed publication.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// How long to wait for further changes of the images of containerd before they are compared with those of the store.
const SETTLE: Duration = Duration::from_secs(1);

/// The socket of the containerd to which these settings publish images, if there is one.
pub(crate) fn socket(config: &Config) -> Option<&str> {
    config.containerd.socket.as_deref().filter(|_| config.containerd.snapshotter)
}

/// Why a process that is no daemon removes no image of such a store.
pub(crate) fn daemon_required(socket: &str) -> String {
    format!("images of this store may be in use by the containerd at {socket}: only the daemon removes them")
}

/// The containers of a containerd that this process does not ask: any image may be in use.
pub(crate) struct UnknownContainers(pub(crate) String);

#[async_trait]
impl RetentionSource for UnknownContainers {
    async fn retentions(&self) -> Result<Vec<Retention>, RetentionError> {
        Err(RetentionError::Other(daemon_required(&self.0)))
    }

    fn scope(&self) -> SourceScope {
        SourceScope::Runtime
    }
}

/// The publisher of these settings, if they name a containerd.
fn publisher_of(config: &Config) -> Option<ImagePublisher> {
    let endpoint = Endpoint::parse(socket(config)?).ok()?; // checked with the settings
    let own = config.images.runtime_request_timeout.to_std();
    let request_timeout = own.unwrap_or(config.runtime.request_timeout);
    let cri = CriConfig { request_timeout, image_endpoint: None, ..config.runtime.clone() };
    Some(ImagePublisher::new(CriBackend::new(endpoint, cri)))
}

/// Reads the images of the containerd to which a publisher publishes.
fn images_of(publisher: &ImagePublisher, config: &Config) -> ContainerdImages {
    let cri = publisher.cri();
    let endpoint = cri.image_channel().endpoint().clone();
    ContainerdImages::new(CriChannel::new(endpoint, config.runtime.connect_timeout), cri.request_timeout())
}

/// Keeps the images of a store and those of its containerd equal.
pub(crate) struct StorePublisher {
    pub(super) store: StoreBackend,
    publisher: ImagePublisher,
    pub(super) images: ContainerdImages,
    pub(super) failures: AdoptionFailures,
    /// The images that containerd does not get.
    pub(super) hidden: Option<Arc<HiddenImages>>,
    /// Notified when containerd may lack images of the store.
    changed: Notify,
    /// Notified when the store may lack images of containerd.
    changed_elsewhere: Notify,
    published: Mutex<PublishedNames>,
    comparison: Mutex<Comparison>,
    /// Of the images that are being published or withdrawn, by ID.
    locks: Mutex<HashMap<String, Weak<AsyncMutex<()>>>>,
}

/// The last comparison of the images of the store with those of containerd.
#[derive(Debug, Clone, Default)]
pub(crate) struct Comparison {
    pub(crate) at: Option<Timestamp>,
    /// Of containerd.
    pub(crate) version: Option<String>,
    pub(crate) published: usize,
    /// Images that containerd does not have yet.
    pub(crate) pending: usize,
    pub(crate) problem: Option<String>,
}

/// The images that containerd has, by their IDs.
type PublishedNames = HashMap<String, NamesInContainerd>;

/// The names of a published image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct NamesInContainerd {
    /// All that were to be published.
    all: BTreeSet<String>,
    /// Published names that containerd had for another image, and keeps.
    of_others: BTreeSet<String>,
}

/// Errors of images that cannot be published, by their IDs: each is a warning once.
type PublishErrors = HashMap<String, String>;

impl StorePublisher {
    /// A store with the containerd of these settings, if they name one.
    pub(crate) fn of(
        store: &StoreBackend,
        config: &Config,
        hidden: Option<Arc<HiddenImages>>,
    ) -> Option<StorePublisher> {
        let store = store.clone();
        publisher_of(config).map(|publisher| StorePublisher {
            store,
            images: images_of(&publisher, config),
            publisher,
            failures: AdoptionFailures::default(),
            hidden,
            changed: Notify::new(),
            changed_elsewhere: Notify::new(),
            published: Mutex::default(),
            comparison: Mutex::default(),
            locks: Mutex::default(),
        })
    }

    /// The containers of containerd that CRI omits.
    pub(crate) fn unlisted_containers(&self) -> ContainerdUses {
        let cri = self.publisher.cri();
        ContainerdUses::new(cri.runtime_channel(), cri.request_timeout())
    }

    /// The images that are pinned in containerd.
    pub(crate) fn pins(&self) -> ContainerdPins {
        let cri = self.publisher.cri();
        ContainerdPins::new(cri.image_channel(), cri.request_timeout())
    }

    /// Returns what containerd has of the images of the store, and what it retains of them.
    pub(crate) fn shared_snapshots(&self) -> SharedSnapshots {
        let cri = self.publisher.cri();
        SharedSnapshots::new(cri.image_channel(), cri.request_timeout())
    }

    /// The last comparison.
    pub(crate) fn last_comparison(&self) -> Comparison {
        let mut last = self.comparison.lock().clone();
        last.problem = last.problem.or_else(|| self.failures.first());
        last
    }

    /// Whether containerd has the image under all its names, as far as is known.
    pub(super) fn is_published(&self, image: &Image) -> bool {
        self.published.lock().get(image.id.as_str()).is_some_and(|known| has_all(known, image))
    }

    /// Retains the images that containerd has, as far as is known. Those that it lacks are published soon.
    pub(crate) fn retain_published(&self, images: &mut Vec<Image>) {
        let mut lacks_some = false;
        images.retain(|image| {
            // kubelet removes such an image by its ID; containerd does not get it.
            let is_retained = image.is_for_other_platforms() || self.is_published(image);
            lacks_some |= !is_retained;
            is_retained
        });
        if lacks_some {
            self.changed.notify_one();
        }
    }

    /// Publishes an image that is not; returns whether containerd has it then.
    pub(crate) async fn ensure_published(&self, image: &Image) -> bool {
        if self.is_published(image) {
            return true;
        }
        let published = self.publish_as(&ImageName::from(image.id.as_str()), ForeignName::Keep).await;
        if let Err(error) = &published {
            tracing::warn!(image = %image.id, "image is not known to containerd: {error}");
        }
        published.is_ok()
    }

    /// Whether containerd must not have the image.
    fn hides(&self, image: &Image) -> bool {
        self.hidden.as_ref().is_some_and(|hidden| hidden.hides(image))
    }

    /// Publishes an image that was hidden when it was pulled.
    pub(crate) async fn publish_shown(&self, id: &ImageId) -> Result<(), BackendError> {
        if self.published.lock().contains_key(id.as_str()) {
            return Ok(());
        }
        self.publish(&ImageName::from(id.as_str())).await
    }

    /// The runtime service of containerd.
    pub(crate) fn cri(&self) -> &CriBackend {
        self.publisher.cri()
    }

    /// Publishes what the store has and containerd lacks, when it starts, after each change in containerd, after a
    /// publication that failed, and when a list misses an image; and loads what containerd has and the store lacks,
    /// beside that, since a load takes long. Until dropped.
    pub(crate) async fn run(&self) {
        tokio::join!(self.watch(), self.compare(), self.adopt_changes());
    }

    /// Notes when images of containerd change.
    async fn watch(&self) {
        loop {
            match self.images.changes().await {
                Ok(mut changes) => {
                    self.note_changes(); // for changes before the subscription
                    while changes.next().await {
                        self.note_changes();
                    }
                }
                Err(error) => {
                    tracing::debug!("cannot subscribe to changes of the images of containerd: {error}");
                }
            }
            time::sleep(BACKOFF.0).await;
        }
    }

    fn note_changes(&self) {
        self.changed.notify_one();
        self.changed_elsewhere.notify_one();
    }

    async fn adopt_changes(&self) {
        loop {
            let complete = self.adopt_missing().await.unwrap_or_else(|error| {
                tracing::debug!("cannot compare the images of containerd with those of the store: {error}");
                false
            });
            let change = self.changed_elsewhere.notified();
            if complete {
                change.await;
            } else {
                let _ = time::timeout(BACKOFF.1, change).await; // it may have been down, or the disk full
            }
            time::sleep(SETTLE).await;
        }
    }

    async fn compare(&self) {
        let errors = AsyncMutex::new(PublishErrors::new());
        loop {
            retry_until(BACKOFF, || async { self.reconcile(&mut *errors.lock().await).await }).await;
            self.changed.notified().await;
            time::sleep(SETTLE).await;
        }
    }

    /// Publishes the images that containerd does not have: those of other commands, those that could not be published,
    /// and those that it has lost. Returns whether it has all then.
    async fn reconcile(&self, errors: &mut PublishErrors) -> bool {
        if let Err(error) = self.publisher.end_stale_leases().await {
            tracing::debug!("cannot end stale leases in containerd: {error}");
        }
        let cri = self.publisher.cri();
        let lists = async {
            Ok::<_, BackendError>((self.store.list().await?, cri.list().await?, cri.info().await?.version))
        };
        let (mut own, listed, version) = match lists.await {
            Ok(lists) => lists,
            Err(error) => {
                tracing::debug!("cannot compare the images of the store with those of containerd: {error}");
                self.comparison.lock().problem = Some(error.to_string());
                return false;
            }
        };
        own.retain(|image| !self.hides(image) && !image.is_for_other_platforms());
        let complete = self.publish_missing(&own, &listed, errors).await;
        let published = own.iter().filter(|image| self.is_published(image)).count();
        *self.comparison.lock() = Comparison {
            at: Some(Timestamp::now()),
            version: Some(version),
            published,
            pending: own.len() - published,
            problem: errors.values().next().cloned(),
        };
        complete
    }

    async fn publish_missing(&self, own: &[Image], listed: &[Image], errors: &mut PublishErrors) -> bool {
        retain_listed(&mut self.published.lock(), listed);
        errors.retain(|id, _| own.iter().any(|image| image.id.as_str() == id));
        for image in own.iter().filter(|image| !self.is_published(image)) {
            let id = image.id.as_str();
            match self.publish_as(&ImageName::from(id), ForeignName::Keep).await {
                Ok(()) => drop(errors.remove(id)),
                Err(error) => {
                    let text = error.to_string();
                    if errors.insert(id.to_owned(), text.clone()).is_none_or(|known| known != text) {
                        tracing::warn!(image = id, "cannot publish an image to containerd: {text}");
                    }
                    if matches!(error, BackendError::Unreachable { .. }) {
                        return false; // the others would take as long to fail
                    }
                }
            }
        }
        errors.is_empty()
    }

    /// Waits until no other caller publishes or withdraws an image.
    pub(super) async fn lock(&self, id: &str) -> OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.locks.lock();
            locks.retain(|_, lock| lock.strong_count() > 0);
            locks.get(id).and_then(Weak::upgrade).unwrap_or_else(|| {
                let lock = Arc::default();
                locks.insert(id.to_owned(), Arc::downgrade(&lock));
                lock
            })
        };
        lock.lock_owned().await
    }

    /// An image as the store has it while no other caller publishes or withdraws it; `None` if the store does not have
    /// it.
    pub(super) async fn locked(
        &self,
        image: &ImageName,
    ) -> Result<Option<(OwnedMutexGuard<()>, PublishedImage)>, BackendError> {
        let Some(found) = self.published(image).await? else { return Ok(None) };
        let lock = self.lock(found.id.as_str()).await;
        let found = self.published(&ImageName::from(found.id.as_str())).await?;
        Ok(found.map(|found| (lock, found)))
    }

    /// An image as containerd gets it; `None` if the store does not have it.
    pub(super) async fn published(&self, image: &ImageName) -> Result<Option<PublishedImage>, BackendError> {
        let (store, image) = (self.store.store().clone(), image.clone());
        let read = move || store.image(image)?.map(|record| published(&store, record)).transpose();
        match spawn_blocking(read).await {
            Ok(read) => {
                read.map_err(|error: StoreError| BackendError::caused_by(CallErrorKind::Other, error))
            }
            Err(error) => Err(BackendError::caused_by(CallErrorKind::Canceled, error)),
        }
    }

    /// Publishes an image, unless the store does not have it.
    pub(crate) async fn publish(&self, image: &ImageName) -> Result<(), BackendError> {
        self.publish_as(image, ForeignName::Replace).await
    }

    async fn publish_as(&self, image: &ImageName, foreign: ForeignName) -> Result<(), BackendError> {
        match self.locked(image).await? {
            Some((_lock, image)) => self.publish_locked(&image, foreign).await,
            None => Ok(()),
        }
    }

    pub(super) async fn publish_locked(
        &self,
        image: &PublishedImage,
        foreign: ForeignName,
    ) -> Result<(), BackendError> {
        let repo_tags = image.names.iter().map(|(name, _)| name.clone()).collect();
        let hidden = self.hides(&Image { id: image.id.clone().into(), repo_tags, ..Image::default() });
        if hidden || image.for_other_platforms {
            return Ok(());
        }
        let mut unfinished = UnfinishedPublication(Some(&self.changed));
        let published = self.publisher.publish(image, foreign).await;
        let mut known = self.published.lock();
        match published {
            Ok(of_others) => {
                unfinished.0 = None;
                let all = image.record_names().into_iter().collect();
                known.insert(image.id.to_string(), NamesInContainerd { all, of_others });
                Ok(())
            }
            Err(error) => {
                known.remove(image.id.as_str());
                Err(error)
            }
        }
    }

    /// Withdraws names of an image, and publishes what is left of it if that fails. Returns whether containerd had
    /// layers of it.
    async fn withdraw(&self, image: &PublishedImage, names: &[String]) -> Result<bool, BackendError> {
        self.published.lock().remove(image.id.as_str());
        let withdrawn = self.publisher.withdraw(image, names).await;
        if withdrawn.is_err() {
            self.republish(image).await;
        }
        withdrawn
    }

    /// Publishes an image again of which not all was removed.
    async fn republish(&self, image: &PublishedImage) {
        if let Err(error) = self.publish_locked(image, ForeignName::Keep).await {
            tracing::warn!(image = %image.id, "cannot publish an image again that was not removed: {error}");
        }
    }
}

/// Has the images compared, with the leases of publications, if a publication fails or its caller gives up.
struct UnfinishedPublication<'a>(Option<&'a Notify>);

impl Drop for UnfinishedPublication<'_> {
    fn drop(&mut self) {
        if let Some(changed) = self.0 {
            changed.notify_one();
        }
    }
}

/// The names to withdraw before a removal: with its last name, the image goes under its ID as well.
fn withdrawn_names(image: &PublishedImage, options: &RemoveOptions) -> Vec<String> {
    match &options.names {
        Some(names) if image.names.iter().any(|(name, _)| !names.contains(name)) => names.clone(),
        Some(_) | None => image.record_names(),
    }
}

/// Whether all names of an image are among these.
fn has_all(known: &NamesInContainerd, image: &Image) -> bool {
    let mut names = image.repo_tags.iter().chain(&image.repo_digests);
    names.all(|name| names_platform(name) || known.all.contains(name))
}

/// Drops images that containerd does not list, or not under one of their names. It lists none for another image that it
/// cannot run.
fn retain_listed(published: &mut PublishedNames, listed: &[Image]) {
    let ids = listed.iter().map(|image| image.id.as_str());
    let names = listed.iter().flat_map(|image| image.repo_tags.iter().chain(&image.repo_digests));
    let listed: BTreeSet<&str> = ids.chain(names.map(String::as_str)).collect();
    published.retain(|id, names| {
        let mut put = names.all.difference(&names.of_others);
        listed.contains(id.as_str()) && put.all(|name| listed.contains(name.as_str()))
    });
}

/// An image with its documents. Reads files. containerd gets an artifact as an image: with a manifest that is made for
/// it, since it could not read the artifact's.
fn published(store: &Store, record: ImageRecord) -> Result<PublishedImage, StoreError> {
    let config = store.blob(&record.id)?.unwrap_or_default();
    let (mut documents, mut names) = (Vec::with_capacity(record.manifests.len()), named_documents(&record));
    if record.artifact_type.is_empty() {
        for digest in &record.manifests {
            documents.extend(store.blob(digest)?.map(|bytes| (digest.clone(), bytes)));
        }
    } else {
        let manifest = manifest_of_artifact(&record, config.len());
        let digest = Digest::sha256(&manifest);
        for (_, target) in &mut names {
            target.clone_from(&digest);
        }
        documents.push((digest, manifest));
    }
    let chains = record.chain_ids();
    let for_other_platforms = store.to_image(&record).is_for_other_platforms();
    let (id, preloaded) = (record.id, record.preloaded);
    Ok(PublishedImage { id, config, documents, names, chains, preloaded, for_other_platforms })
}

/// The manifest of an artifact as an image, with its layers as larder unpacked them. containerd finds their snapshots,
/// and fetches none of them.
fn manifest_of_artifact(record: &ImageRecord, config_bytes: usize) -> Vec<u8> {
    let layer = |layer: &ImageLayer| {
        let (digest, size) = (layer.diff_id.as_str(), layer.size);
        json!({ "mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": digest, "size": size })
    };
    let (media_type, id) = ("application/vnd.oci.image.config.v1+json", record.id.as_str());
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": { "mediaType": media_type, "digest": id, "size": config_bytes },
        "layers": record.layers.iter().map(layer).collect::<Vec<_>>(),
        "annotations": { "dev.larder.artifact.type": record.artifact_type },
    });
    manifest.to_string().into_bytes()
}

/// The names of an image that containerd gets, each with the document that it stands for: of a tag, the one that its
/// repository served last, else the outermost.
fn named_documents(record: &ImageRecord) -> Vec<(String, Digest)> {
    let of_name = |name: &String| {
        let parsed = Reference::parse(name).ok().filter(|parsed| parsed.platform().is_none())?;
        let served = || record.served_digest(&parsed).or(record.manifests.first());
        Some((name.clone(), parsed.digest().or_else(served)?.clone()))
    };
    record.names().filter_map(of_name).collect()
}

#[async_trait]
impl AttachedRuntime for StorePublisher {
    async fn after_commit(&self, image: &ImageName) -> Result<(), BackendError> {
        self.publish(image).await
    }

    async fn around_removal(
        &self,
        image: &ImageName,
        options: &RemoveOptions,
        removal: BoxFuture<'_, Result<Removed, BackendError>>,
    ) -> Result<Removed, BackendError> {
        let Some((_lock, published)) = self.locked(image).await? else { return removal.await };
        let had_layers = self.withdraw(&published, &withdrawn_names(&published, options)).await?;
        let removed = match removal.await {
            // The store does not know what that has freed in containerd: the change of the filesystem does.
            Ok(Removed::Image { .. }) if had_layers => Ok(Removed::Image { freed: None }),
            removed => removed,
        };
        // It may have other names, and containerd its ID for one that is gone.
        if !matches!(removed, Ok(Removed::Image { .. })) {
            match self.published(&ImageName::from(published.id.as_str())).await {
                Ok(Some(left)) => self.republish(&left).await,
                Ok(None) => {}
                // The outcome of the removal counts; the images are compared with containerd's later.
                Err(error) => {
                    tracing::warn!(%error, "cannot read the record of an image to publish it again");
                }
            }
        }
        removed
    }

    async fn container_inventory(&self) -> Result<ContainerInventory, BackendError> {
        self.publisher.cri().container_inventory().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_or_a_name_that_containerd_does_not_list_is_not_published() {
        let image = |id: &str, tags: &[&str]| Image {
            id: id.into(),
            repo_tags: tags.iter().map(|&tag| tag.to_owned()).collect(),
            ..Image::default()
        };
        let names = |id: &str, tags: &[&str]| {
            let all = tags.iter().chain([&id]).map(|&name| name.to_owned()).collect();
            (id.to_owned(), NamesInContainerd { all, ..NamesInContainerd::default() })
        };
        let mut published: PublishedNames =
            [names("sha256:1", &["a:1", "b:1"]), names("sha256:2", &["c:1"])].into();
        assert!(has_all(&published["sha256:1"], &image("sha256:1", &["b:1"])));
        assert!(!has_all(&published["sha256:1"], &image("sha256:1", &["a:1", "new:1"])));
        assert!(has_all(&published["sha256:1"], &image("sha256:1", &["a:1", "new:1#linux/s390x"])));

        // Another image has a name: that is its user's will.
        let listed = [image("sha256:1", &["a:1"]), image("sha256:2", &["c:1"]), image("sha256:9", &["b:1"])];
        let before = published.clone();
        retain_listed(&mut published, &listed);
        assert_eq!(published, before);
        let mut keeps = published.clone();
        if let Some(names) = keeps.get_mut("sha256:1") {
            names.of_others.insert("b:1".to_owned());
        }
        retain_listed(&mut keeps, &listed[..2]);
        assert_eq!(keeps.len(), 2, "the name is of another image, which is not listed");
        retain_listed(&mut published, &listed[..2]);
        assert_eq!(published.keys().collect::<Vec<_>>(), ["sha256:2"], "it lost a name");
        retain_listed(&mut published, &[]);
        assert!(published.is_empty());
    }
}
