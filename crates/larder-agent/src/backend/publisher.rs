//! Publishes the images of larder's own store to the containerd that keeps its snapshots there, and
//! [loads](super::adopt) those that other programs put there.
//!
//! An image is published after its commit and withdrawn before its removal, since the snapshots of containerd retain
//! its layers. The containers of containerd use images like the store's own mounts.
//!
//! Promises: one image is published or withdrawn by one caller at a time; an image counts as published only after
//! containerd was seen to have it under all its names.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use jiff::Timestamp;
use larder::backend::{
    Backend as _, BackendError, CallErrorKind, ContainerInventory, Image, RemoveOptions, Removed,
};
use larder::hidden::HiddenImages;
use larder::reference::{Digest, ImageId, ImageName, Reference, names_platform};
use larder::retention::{Retention, RetentionError, RetentionSource, SourceScope};
use larder_containerd::{
    ContainerdImages, ContainerdPins, ContainerdUses, ForeignName, ImagePublisher, NamesInContainerd,
    PublishedImage, SharedSnapshots,
};
use larder_cri::channel::CriChannel;
use larder_cri::{CriBackend, CriConfig, Endpoint};
use larder_store::backend::{AttachedRuntime, StoreBackend};
use larder_store::store::{ImageLayer, ImageRecord, Store, StoreError};
use parking_lot::Mutex;
use serde_json::json;
use tokio::sync::{Mutex as AsyncMutex, Notify, OwnedMutexGuard, watch};
use tokio::time::{self, Instant};

use super::adopt::{AdoptionFailures, in_store};
use crate::config::Config;

/// First and longest back-off after a failed publication.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// How long a caller waits for the first comparison of the images of the store with those of containerd.
const COMPARED_WITHIN: Duration = Duration::from_secs(5);

/// How long a pull waits for a containerd that is being restarted.
const RESTARTS_WITHIN: Duration = Duration::from_secs(30);

/// How long to wait for further changes of the images of containerd before they are compared with those of the store,
/// and for a subscription to them to begin.
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
    /// True since the first comparison: what an earlier process published is known.
    is_compared: watch::Sender<bool>,
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
            is_compared: watch::Sender::new(false),
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

    /// Waits until it is known what an earlier process published; for a bounded time.
    async fn first_comparison(&self) {
        let mut compared = self.is_compared.subscribe();
        let _ = time::timeout(COMPARED_WITHIN, compared.wait_for(|compared| *compared)).await;
    }

    /// Retains the images that containerd has. Those that it lacks are published soon. Fails if it is not known what it
    /// has: an image that is left out is absent for kubelet.
    pub(crate) async fn retain_published(&self, images: &mut Vec<Image>) -> Result<(), BackendError> {
        self.first_comparison().await;
        if !*self.is_compared.borrow() {
            let problem = self.comparison.lock().problem.clone();
            let problem = problem.unwrap_or_else(|| "not compared yet".to_owned());
            let message = format!("the images that containerd has are not known: {problem}");
            return Err(BackendError::call(CallErrorKind::Unavailable, message));
        }
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
        Ok(())
    }

    /// Publishes an image that is not; returns whether containerd has it then.
    pub(crate) async fn ensure_published(&self, image: &Image) -> bool {
        self.first_comparison().await;
        if self.is_published(image) {
            return true;
        }
        let published = self.publish_lacking(&image.id).await;
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
        self.publish(id).await
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
            let mut changes = self.images.changes();
            let mut subscribed = pin!(time::sleep(SETTLE).fuse());
            loop {
                tokio::select! {
                    is_connected = changes.next() => {
                        if !is_connected {
                            break;
                        }
                        self.note_changes();
                    }
                    // For changes before the subscription: containerd does not say when it has begun.
                    () = &mut subscribed => self.note_changes(),
                }
            }
            tracing::debug!("containerd does not send changes of its images");
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
        let (mut errors, mut backoff) = (PublishErrors::new(), BACKOFF.0);
        loop {
            let compared = self.reconcile(&mut errors).await;
            match compared {
                Ok(true) => {
                    backoff = BACKOFF.0;
                    self.changed.notified().await;
                    time::sleep(SETTLE).await;
                }
                Ok(false) => {
                    time::sleep(backoff).await;
                    backoff = BACKOFF.1.min(2 * backoff);
                }
                // It may start at any time, and needs these images for its first pods.
                Err(error) => {
                    tracing::debug!("cannot list the images of containerd: {error}");
                    self.comparison.lock().problem = Some(error.to_string());
                    time::sleep(BACKOFF.0).await;
                }
            }
        }
    }

    /// Publishes the images that containerd does not have: those of other commands, those that could not be published,
    /// and those that it has lost. Returns whether it has all then; fails if it cannot be asked.
    async fn reconcile(&self, errors: &mut PublishErrors) -> Result<bool, BackendError> {
        let cri = self.publisher.cri();
        let before = self.published.lock().clone();
        let (listed, version) = (cri.list().await?, cri.info().await?.version);
        let mut own = self.store.list().await?;
        own.retain(|image| !self.hides(image) && !image.is_for_other_platforms());
        forget_unlisted(&mut self.published.lock(), &before, &listed);
        self.recall_published(&own, &listed).await?;
        self.is_compared.send_replace(true);
        if let Err(error) = self.publisher.end_stale_leases().await {
            tracing::debug!("cannot end stale leases in containerd: {error}");
        }
        let complete = self.publish_missing(&own, errors).await;
        let published = own.iter().filter(|image| self.is_published(image)).count();
        *self.comparison.lock() = Comparison {
            at: Some(Timestamp::now()),
            version: Some(version),
            published,
            pending: own.len() - published,
            problem: errors.values().next().cloned(),
        };
        Ok(complete)
    }

    /// Notes which images containerd lists that an earlier process has published.
    async fn recall_published(&self, own: &[Image], listed: &[Image]) -> Result<(), BackendError> {
        let listed: BTreeSet<&str> = listed.iter().map(|image| image.id.as_str()).collect();
        let is_unknown = |id: &str| listed.contains(id) && !self.published.lock().contains_key(id);
        let ids = own.iter().map(|image| image.id.as_str()).filter(|id| is_unknown(id));
        let ids: Vec<ImageName> = ids.map(ImageName::from).collect();
        if ids.is_empty() {
            return Ok(());
        }
        let images = in_store(self.store.store(), move |store| {
            // Without these, a layer would be in containerd's records only.
            let present: HashSet<String> =
                store.layer_snapshots()?.into_iter().map(|(_, chain)| chain).collect();
            let mut images = Vec::with_capacity(ids.len());
            for id in &ids {
                match store.image(id.clone())?.map(|record| published(store, record)).transpose() {
                    Ok(image) => images.extend(image),
                    // Its publication fails in the same way, and says so; the others are there all the same.
                    Err(error) => tracing::debug!(image = %id, %error, "cannot read a published image"),
                }
            }
            images.retain(|image| image.chains.last().is_none_or(|top| present.contains(top.as_str())));
            Ok(images)
        });
        let images: Vec<PublishedImage> = images.await?;
        for (image, names) in self.publisher.published_names(&images).await? {
            // The caller that has the lock notes the image itself.
            let Some(_lock) = self.lock(image.id.as_str()).now_or_never() else { continue };
            if names.all.contains(image.id.as_str()) {
                self.published.lock().entry(image.id.to_string()).or_insert(names);
            }
        }
        Ok(())
    }

    async fn publish_missing(&self, own: &[Image], errors: &mut PublishErrors) -> bool {
        errors.retain(|id, _| own.iter().any(|image| image.id.as_str() == id));
        for image in own.iter().filter(|image| !self.is_published(image)) {
            let id = image.id.as_str();
            match self.publish_lacking(&image.id).await {
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
        let id = if let Ok(id) = Digest::parse(image.as_str()) {
            id
        } else {
            let image = image.clone();
            let record = in_store(self.store.store(), move |store| store.image(image)).await?;
            let Some(record) = record else { return Ok(None) };
            record.id
        };
        let lock = self.lock(id.as_str()).await;
        let found = self.published(&ImageName::from(id.as_str())).await?;
        Ok(found.map(|found| (lock, found)))
    }

    /// An image as containerd gets it; `None` if the store does not have it.
    pub(super) async fn published(&self, image: &ImageName) -> Result<Option<PublishedImage>, BackendError> {
        let image = image.clone();
        let read =
            move |store: &Store| store.image(image)?.map(|record| published(store, record)).transpose();
        in_store(self.store.store(), read).await
    }

    /// Publishes an image with all its names, unless the store does not have it.
    pub(crate) async fn publish(&self, id: &ImageId) -> Result<(), BackendError> {
        let Some((_lock, image)) = self.locked(&ImageName::from(id)).await? else { return Ok(()) };
        let names = image.record_names();
        self.publish_locked(&image, ForeignName::Replace, &names).await
    }

    /// Publishes what containerd lacks of an image.
    async fn publish_lacking(&self, id: &ImageId) -> Result<(), BackendError> {
        match self.locked(&ImageName::from(id)).await? {
            Some((_lock, image)) => self.publish_locked(&image, ForeignName::Keep, &[]).await,
            None => Ok(()),
        }
    }

    /// Publishes what containerd lacks of an image, and these of its names.
    pub(super) async fn publish_locked(
        &self,
        image: &PublishedImage,
        foreign: ForeignName,
        names: &[String],
    ) -> Result<(), BackendError> {
        let repo_tags = image.names.iter().map(|(name, _)| name.clone()).collect();
        let hidden = self.hides(&Image { id: image.id.clone().into(), repo_tags, ..Image::default() });
        if hidden || image.for_other_platforms {
            return Ok(());
        }
        let mut known = self.published.lock().get(image.id.as_str()).cloned().unwrap_or_default();
        for name in names {
            known.all.remove(name);
            known.of_others.remove(name);
        }
        let mut unfinished = UnfinishedPublication(Some(&self.changed));
        let published = self.publisher.publish(image, foreign, &known.all).await;
        let mut all = self.published.lock();
        match published {
            Ok(of_others) => {
                unfinished.0 = None;
                known.all = image.record_names().into_iter().collect();
                known.of_others.extend(of_others);
                all.insert(image.id.to_string(), known);
                Ok(())
            }
            Err(error) => {
                all.remove(image.id.as_str());
                Err(error)
            }
        }
    }

    /// Withdraws names of an image, and publishes what is left of it if that fails. Returns whether containerd had
    /// layers of it.
    async fn withdraw(&self, image: &PublishedImage, names: &[String]) -> Result<bool, BackendError> {
        let known = self.published.lock().remove(image.id.as_str());
        let withdrawn = self.publisher.withdraw(image, names).await;
        if withdrawn.is_err() {
            self.republish(image).await;
        } else if let Some(mut known) = known {
            known.all.retain(|name| !names.contains(name));
            if !known.all.is_empty() {
                self.published.lock().insert(image.id.to_string(), known);
            }
        }
        withdrawn
    }

    /// Publishes an image again of which not all was removed.
    async fn republish(&self, image: &PublishedImage) {
        if let Err(error) = self.publish_locked(image, ForeignName::Keep, &[]).await {
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

/// Whether containerd was not reached, or ended before it answered.
fn is_down(error: &BackendError) -> bool {
    matches!(error, BackendError::Unreachable { .. })
        || matches!(error.kind(), Some(CallErrorKind::Unavailable | CallErrorKind::Canceled))
}

/// Whether all names of an image are among these.
fn has_all(known: &NamesInContainerd, image: &Image) -> bool {
    let mut names = image.repo_tags.iter().chain(&image.repo_digests);
    names.all(|name| names_platform(name) || known.all.contains(name))
}

/// Drops images and names that were published `before` containerd listed its images, and that it does not list. It
/// lists none for another image that it cannot run.
fn forget_unlisted(published: &mut PublishedNames, before: &PublishedNames, listed: &[Image]) {
    let ids = listed.iter().map(|image| image.id.as_str());
    let names = listed.iter().flat_map(|image| image.repo_tags.iter().chain(&image.repo_digests));
    let listed: HashSet<&str> = ids.chain(names.map(String::as_str)).collect();
    for (id, before) in before {
        if !listed.contains(id.as_str()) {
            published.remove(id);
        } else if let Some(known) = published.get_mut(id) {
            for lost in
                before.all.difference(&before.of_others).filter(|name| !listed.contains(name.as_str()))
            {
                known.all.remove(lost);
            }
        }
    }
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
    // An image may have thousands of names in a few repositories. The first manifest counts.
    let mut served: HashMap<&str, &Digest> = HashMap::new();
    for digest in record.manifests.iter().rev() {
        let names = record.digests.iter().filter_map(|name| name.strip_suffix(digest.as_str()));
        served.extend(names.filter_map(|name| Some((name.strip_suffix('@')?, digest))));
    }
    let of_name = |name: &String| {
        if names_platform(name) {
            return None;
        }
        let digest = if let Some((_, digest)) = name.rsplit_once('@') {
            Digest::parse(digest).ok()?
        } else {
            let (repository, _) = name.rsplit_once(':')?;
            served.get(repository).copied().or(record.manifests.first())?.clone()
        };
        Some((name.clone(), digest))
    };
    record.names().filter_map(of_name).collect()
}

#[async_trait]
impl AttachedRuntime for StorePublisher {
    async fn after_commit(&self, id: &ImageId, name: &Reference) -> Result<(), BackendError> {
        let latest = Instant::now() + RESTARTS_WITHIN;
        loop {
            let published = match self.locked(&ImageName::from(id)).await? {
                Some((_lock, image)) => {
                    self.publish_locked(&image, ForeignName::Replace, &[name.to_string()]).await
                }
                None => return Ok(()),
            };
            match published {
                Err(error) if is_down(&error) && Instant::now() < latest => {
                    tracing::debug!(image = %id, "publication waits for containerd: {error}");
                }
                published => return published,
            }
            time::sleep(BACKOFF.0).await;
        }
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
        forget_unlisted(&mut published, &before, &listed);
        assert_eq!(published, before);
        let mut keeps = published.clone();
        if let Some(names) = keeps.get_mut("sha256:1") {
            names.of_others.insert("b:1".to_owned());
        }
        let kept = keeps.clone();
        forget_unlisted(&mut keeps, &kept, &listed[..2]);
        assert_eq!(keeps, kept, "the name is of another image, which is not listed");
        forget_unlisted(&mut published, &before, &listed[..2]);
        assert!(!has_all(&published["sha256:1"], &image("sha256:1", &["a:1", "b:1"])), "it lost a name");
        assert!(has_all(&published["sha256:1"], &image("sha256:1", &["a:1"])));
        forget_unlisted(&mut published, &PublishedNames::new(), &[]);
        assert_eq!(published.len(), 2, "they were published since");
        forget_unlisted(&mut published, &before, &[]);
        assert!(published.is_empty());
    }
}
