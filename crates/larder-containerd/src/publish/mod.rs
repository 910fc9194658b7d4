//! Makes images of larder's store known to a containerd that has its snapshots in that store.
//!
//! ```text
//! lease -> manifests and config as content -> a snapshot of each layer -> names -> wait until CRI lists it -> end the lease
//! ```
//!
//! Where containerd has all but some names of the image, only those are published: an image may have thousands.
//!
//! No layer is sent: the snapshotter answers that it has each of them. containerd's garbage collector follows the
//! labels of the content, from the names to the snapshots.

mod records;

use std::collections::{BTreeSet, HashMap};
use std::error::Error as _;
use std::time::Duration;

use futures_util::future::try_join_all;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use jiff::Timestamp;
use larder::backend::{Backend as _, BackendError, CallErrorKind, ImageSpec};
use larder_cri::CriBackend;
use parking_lot::Mutex;
use tonic::{Code, Status};

use records::{ContainerdRecords, covers};
pub use records::{NamesInContainerd, PublishedImage};
pub(crate) use records::{is_as_published, is_pulled};

use crate::NAMESPACE;
use crate::client::ContainerdClient;
use crate::graph::{ContentGraph, leads_to};
use crate::images::is_full_name;
use crate::proto::images::Image as ImageRecord;
use crate::proto::snapshots::PrepareSnapshotRequest;

/// The name of the proxy plugin in containerd's configuration.
pub(crate) const SNAPSHOTTER: &str = "larder";

/// The label with the chain ID of the layer that a snapshot is to have.
const REFERENCE: &str = "containerd.io/snapshot.ref";

/// The label of all leases of larder.
const PUBLISHES: &str = "larder.dev/publishes";

/// How long a lease lasts if larder is killed before it ends it, and does not start again.
const LEASE: Duration = Duration::from_secs(600);

/// How often to look whether CRI lists an image, which it learns from an event.
const POLL: Duration = Duration::from_millis(5);

/// How many names are given at once: containerd syncs its database for each.
const NAMES_AT_ONCE: usize = 4;

/// How often, and after how long, to ask a containerd that is not connected to its snapshotter: after a restart of
/// larder its attempts to connect are at most three seconds apart.
const CONNECT_ATTEMPTS: u32 = 50;
const CONNECT_PAUSE: Duration = Duration::from_millis(200);

/// Treatment of a name that containerd has for an image that larder did not publish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForeignName {
    /// It stands for the published image from now on: that was pulled by this name.
    Replace,
    /// It is left alone.
    Keep,
}

/// Publishes images in the namespace of CRI, and withdraws them.
pub struct ImagePublisher {
    client: ContainerdClient,
    cri: CriBackend,
    /// The leases of what is being published.
    leases: Mutex<BTreeSet<String>>,
}

impl ImagePublisher {
    /// To the containerd behind this CRI client.
    pub fn new(cri: CriBackend) -> ImagePublisher {
        ImagePublisher {
            client: ContainerdClient::new(cri.image_channel(), cri.request_timeout()),
            cri,
            leases: Mutex::default(),
        }
    }

    /// The containerd to which images are published.
    pub fn cri(&self) -> &CriBackend {
        &self.cri
    }

    /// Publishes an image. It can be run when this returns. Repeating it changes nothing. Names that containerd is
    /// `known` to have are left as they are, unless it lacks other parts of the image. Returns the names that stand for
    /// another image, which were left alone, too.
    pub async fn publish(
        &self,
        image: &PublishedImage,
        foreign: ForeignName,
        known: &BTreeSet<String>,
    ) -> Result<BTreeSet<String>, BackendError> {
        let published = self.client.within_limit(Box::pin(async {
            let records = image.records(SNAPSHOTTER).map_err(Status::internal)?;
            if !known.is_empty() && self.has_parts(image).await? {
                let is_new = |record: &ImageRecord| !known.contains(&record.name);
                let put = self.put_names(image, records.images.into_iter().filter(is_new), foreign).await?;
                return self.listed(image, put).await;
            }
            self.publish_leased(image, records, foreign).await
        }));
        published.await.map_err(|status| self.client.error(&status))
    }

    /// Returns, for each image, the names under which containerd has it as larder published them.
    pub async fn published_names<'a>(
        &self,
        images: &'a [PublishedImage],
    ) -> Result<impl Iterator<Item = (&'a PublishedImage, NamesInContainerd)>, BackendError> {
        let listed = self.client.within_limit(self.client.images(NAMESPACE)).await;
        let records = listed.map_err(|status| self.client.error(&status))?.into_iter();
        let records: HashMap<String, ImageRecord> =
            records.map(|record| (record.name.clone(), record)).collect();
        Ok(images.iter().map(move |image| (image, image.names_in(&records))))
    }

    /// Ends the leases of publications that were killed, or could not reach containerd to end theirs: it retains for
    /// minutes what they reference.
    pub async fn end_stale_leases(&self) -> Result<(), BackendError> {
        let ended = self.client.within_limit(async {
            for lease in self.client.leases(NAMESPACE).await? {
                if lease.labels.contains_key(PUBLISHES) && !self.leases.lock().contains(&lease.id) {
                    match self.client.delete_lease(NAMESPACE, &lease.id).await {
                        Err(status) if status.code() == Code::NotFound => {} // it has expired
                        ended => ended?,
                    }
                }
            }
            Ok(())
        });
        ended.await.map_err(|status| self.client.error(&status))
    }

    /// Removes these names of an image, and returns after containerd has collected what only they referenced. A name
    /// that stands for another image stays. With its ID go the names that are not in full, since no caller of CRI can
    /// remove those.
    ///
    /// Returns whether containerd had layers of the image: these may take space outside of the store.
    pub async fn withdraw(&self, image: &PublishedImage, names: &[String]) -> Result<bool, BackendError> {
        let withdrawn = self.client.within_limit(async {
            let archives = image.archives();
            let content = self.client.content(NAMESPACE, None).await?;
            let had_layers = content.iter().any(|blob| archives.contains(&blob.digest));
            let content = ContentGraph::of(content);
            let mut owned = Vec::new();
            for name in names {
                let record = self.client.image(NAMESPACE, name).await?;
                owned.extend(record.filter(|record| image.owns(record)).map(|_| name.clone()));
            }
            if names.iter().any(|name| name == image.id.as_str()) {
                let records = self.client.images(NAMESPACE).await?.into_iter();
                let not_full = records.filter(|record| {
                    !is_full_name(&record.name) && leads_to(&content, record, image.id.as_str())
                });
                owned.extend(not_full.map(|record| record.name).filter(|name| name != image.id.as_str()));
            }
            for (at, name) in owned.iter().enumerate() {
                self.client.delete_image(NAMESPACE, name, at + 1 == owned.len()).await?;
            }
            Ok(had_layers)
        });
        withdrawn.await.map_err(|status| self.client.error(&status))
    }

    /// Whether containerd has all of an image but for some names.
    async fn has_parts(&self, image: &PublishedImage) -> Result<bool, Status> {
        let record = self.client.image(NAMESPACE, image.id.as_str()).await?;
        if !record.is_some_and(|record| image.has_target_of(&record)) {
            return Ok(false);
        }
        for digest in image.documents.iter().map(|(digest, _)| digest).chain([&image.id]) {
            if !self.client.has_blob(NAMESPACE, digest.as_str()).await? {
                return Ok(false);
            }
        }
        // The parents of a snapshot are present.
        let Some(top) = image.chains.last() else { return Ok(true) };
        match self.connected(|| self.client.snapshot(NAMESPACE, SNAPSHOTTER, top.as_str())).await {
            Err(status) if status.code() == Code::NotFound => Ok(false),
            found => found.map(|_| true),
        }
    }

    async fn publish_leased(
        &self,
        image: &PublishedImage,
        records: ContainerdRecords,
        foreign: ForeignName,
    ) -> Result<BTreeSet<String>, Status> {
        let now = Timestamp::now();
        let id = format!("larder-{}-{}", std::process::id(), now.as_nanosecond());
        self.leases.lock().insert(id.clone());
        let lease = OpenLease { publisher: self, id };
        let ends = now.checked_add(LEASE).unwrap_or(now);
        let labels = [("containerd.io/gc.expire", ends.to_string()), (PUBLISHES, image.id.to_string())];
        let labels = labels.map(|(label, value)| (label.to_owned(), value)).into();
        self.client.create_lease(NAMESPACE, &lease.id, labels).await?;
        let put = self.publish_under(image, records, &lease.id, foreign).await;
        // The names retain all of it now.
        let end = async {
            // If this fails, a later comparison ends it.
            if let Err(status) = self.client.delete_lease(NAMESPACE, &lease.id).await {
                tracing::debug!("cannot end a lease of containerd: {}", status.message());
            }
        };
        let listed = async { self.listed(image, put?).await };
        tokio::join!(end, listed).1
    }

    async fn publish_under(
        &self,
        image: &PublishedImage,
        records: ContainerdRecords,
        lease: &str,
        foreign: ForeignName,
    ) -> Result<PutNames, Status> {
        // Each waits for a sync of its own.
        let blobs = records.blobs.into_iter().map(|blob| self.client.write_blob(NAMESPACE, lease, blob));
        tokio::try_join!(try_join_all(blobs), self.publish_layers(image, lease))?;
        if self.forget_lost_layers(image).await? {
            self.publish_layers(image, lease).await?;
        }
        self.put_names(image, records.images, foreign).await
    }

    /// Gives the image these names.
    async fn put_names(
        &self,
        image: &PublishedImage,
        records: impl IntoIterator<Item = ImageRecord>,
        foreign: ForeignName,
    ) -> Result<PutNames, Status> {
        let put = records.into_iter().map(|record| async {
            let name = record.name.clone();
            Ok::<_, Status>((self.put_name(image, record, foreign).await?, name))
        });
        let put: Vec<_> = stream::iter(put).buffered(NAMES_AT_ONCE).try_collect().await?;
        let (given, left): (Vec<_>, Vec<_>) = put.into_iter().partition(|(is_given, _)| *is_given);
        for (_, name) in &left {
            tracing::info!(image = %image.id, "containerd has another image with the name {name}");
        }
        let names = |put: Vec<(bool, String)>| put.into_iter().map(|(_, name)| name);
        Ok(PutNames { given: names(given).collect(), left: names(left).collect() })
    }

    /// Returns whether the name stands for the image now.
    async fn put_name(
        &self,
        image: &PublishedImage,
        record: ImageRecord,
        foreign: ForeignName,
    ) -> Result<bool, Status> {
        match self.client.create_image(NAMESPACE, record.clone()).await {
            Err(status) if status.code() == Code::AlreadyExists => {}
            created => return created.map(|()| true),
        }
        let mut record = record;
        if let Some(present) = self.client.image(NAMESPACE, &record.name).await? {
            if foreign == ForeignName::Keep {
                if !image.owns(&present) {
                    return Ok(false);
                }
                record = image.with_present_target(record, &present);
            }
            if covers(&present, &record) {
                return Ok(true);
            }
        }
        self.client.update_image(NAMESPACE, record).await.map(|()| true)
    }

    /// Has the snapshotter commit a snapshot of each layer, from the bottom up.
    async fn publish_layers(&self, image: &PublishedImage, lease: &str) -> Result<(), Status> {
        let mut parent = String::new();
        for chain in &image.chains {
            let chain = chain.to_string();
            let key = format!("{lease} {chain}");
            let request = PrepareSnapshotRequest {
                snapshotter: SNAPSHOTTER.to_owned(),
                key: key.clone(),
                parent,
                labels: [(REFERENCE.to_owned(), chain.clone())].into(),
            };
            match self.connected(|| self.client.prepare_snapshot(NAMESPACE, lease, request.clone())).await {
                Err(status) if status.code() == Code::AlreadyExists => {}
                Err(status) => return Err(status),
                Ok(()) => {
                    self.client.remove_snapshot(NAMESPACE, SNAPSHOTTER, &key).await?;
                    return Err(Status::failed_precondition(format!(
                        "containerd's snapshotter {SNAPSHOTTER:?} does not have layer {chain}: its address must be larder's socket"
                    )));
                }
            }
            parent = chain;
        }
        Ok(())
    }

    /// Repeats a call until containerd is connected to its snapshotter, which is this process.
    async fn connected<T, F>(&self, call: impl Fn() -> F) -> Result<T, Status>
    where
        F: Future<Output = Result<T, Status>>,
    {
        for _ in 0..CONNECT_ATTEMPTS {
            match call().await {
                // An answer of containerd: errors of the connection to containerd itself have a source.
                Err(status) if status.code() == Code::Unavailable && status.source().is_none() => {}
                answer => return answer,
            }
            tokio::time::sleep(CONNECT_PAUSE).await;
        }
        call().await
    }

    /// Removes what containerd alone knows of layers whose snapshots the store has lost: no snapshot could be made in
    /// their place. Returns whether there was one.
    async fn forget_lost_layers(&self, image: &PublishedImage) -> Result<bool, Status> {
        let mut lost = false;
        for chain in image.chains.iter().rev() {
            let chain = chain.to_string();
            match self.connected(|| self.client.snapshot(NAMESPACE, SNAPSHOTTER, &chain)).await {
                Err(status) if status.code() == Code::NotFound => {
                    tracing::warn!(
                        "containerd has layer {chain}, but the store has no snapshot of it: made again"
                    );
                    match self.client.remove_snapshot(NAMESPACE, SNAPSHOTTER, &chain).await {
                        // containerd's own collection was faster.
                        Err(status) if status.code() == Code::NotFound => {}
                        removed => removed.map_err(|status| lost_below(&chain, &status))?,
                    }
                    lost = true;
                }
                // The parents of a snapshot are present.
                found => return found.map(|_| lost),
            }
        }
        Ok(lost)
    }

    /// Waits until CRI has the image under its names. Returns those that stand for another image.
    async fn listed(&self, image: &PublishedImage, put: PutNames) -> Result<BTreeSet<String>, Status> {
        for name in &put.given {
            let spec = ImageSpec::named(name.as_str());
            // Ends with the time limit of all calls.
            loop {
                let found = self.cri.status(&spec).await.map_err(|error| unavailable(&error))?;
                if found.is_some_and(|found| found.id.as_str() == image.id.as_str()) {
                    break;
                }
                tokio::time::sleep(POLL).await;
            }
        }
        Ok(put.left)
    }
}

/// The names of an image that are in containerd.
struct PutNames {
    /// Names that stand for the image.
    given: Vec<String>,
    /// Names that stand for another image, and were left alone.
    left: BTreeSet<String>,
}

/// A lease of what is being published, which may be cancelled.
struct OpenLease<'a> {
    publisher: &'a ImagePublisher,
    id: String,
}

impl Drop for OpenLease<'_> {
    fn drop(&mut self) {
        self.publisher.leases.lock().remove(&self.id);
    }
}

fn lost_below(chain: &str, status: &Status) -> Status {
    Status::failed_precondition(format!(
        "the store has lost snapshot {chain}, which containerd has below others ({}): remove the other images with this layer from containerd",
        status.message()
    ))
}

fn unavailable(error: &BackendError) -> Status {
    let code = match error {
        BackendError::Call { kind: CallErrorKind::DeadlineExceeded, .. } => Code::DeadlineExceeded,
        _ => Code::Unavailable,
    };
    Status::new(code, error.to_string())
}
