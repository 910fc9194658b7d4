//! Makes images of larder's store known to a containerd that has its snapshots in that store.
//!
//! ```text
//! lease -> manifests and config as content -> a snapshot of each layer -> names -> wait until CRI lists it -> end the lease
//! ```
//!
//! No layer is sent: the snapshotter answers that it has each of them. containerd's garbage collector follows the labels of
//! the content, from the names to the snapshots.

mod records;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use larder::backend::{Backend as _, BackendError, CallErrorKind, ImageSpec};
use larder_cri::CriBackend;
use tonic::{Code, Status};

pub use records::PublishedImage;

use crate::NAMESPACE;
use crate::client::ContainerdClient;
use crate::proto::images::Image as ImageRecord;
use crate::proto::snapshots::PrepareSnapshotRequest;

/// The name of the proxy plugin in containerd's configuration.
const SNAPSHOTTER: &str = "larder";

/// The label with the chain ID of the layer that a snapshot is to have.
const REFERENCE: &str = "containerd.io/snapshot.ref";

/// How the names of all leases of larder start.
const LEASE_PREFIX: &str = "larder-";

/// How long a lease lasts if larder dies before it ends it, and does not start again.
const LEASE: Duration = Duration::from_secs(600);

/// How often to look whether CRI lists an image, which it learns from an event.
const POLL: Duration = Duration::from_millis(5);

/// What becomes of a name that containerd has for an image that larder did not publish.
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
    /// How the names of this publisher's leases start.
    lease_prefix: String,
    leases: AtomicU64,
    /// Whether the leases of publishers before this one have been ended.
    earlier_ended: AtomicBool,
}

impl ImagePublisher {
    /// To the containerd behind this CRI client.
    pub fn new(cri: CriBackend) -> ImagePublisher {
        ImagePublisher {
            client: ContainerdClient::new(cri.image_channel(), cri.request_timeout()),
            cri,
            lease_prefix: format!("{LEASE_PREFIX}{}-", Timestamp::now().as_nanosecond()),
            leases: AtomicU64::new(0),
            earlier_ended: AtomicBool::new(false),
        }
    }

    /// The containerd to which images are published.
    pub fn cri(&self) -> &CriBackend {
        &self.cri
    }

    /// Publishes an image. It can be run when this returns. Repeating it changes nothing.
    pub async fn publish(&self, image: &PublishedImage, foreign: ForeignName) -> Result<(), BackendError> {
        let published = self.client.within_limit(self.publish_leased(image, foreign)).await;
        published.map_err(|status| self.client.error(&status))
    }

    /// Ends the leases that larder left when it was killed: containerd retains for minutes what they reference.
    pub async fn end_earlier_leases(&self) -> Result<(), BackendError> {
        if self.earlier_ended.load(Ordering::Relaxed) {
            return Ok(());
        }
        let ended = self.client.within_limit(async {
            for lease in self.client.leases(NAMESPACE).await? {
                if lease.id.starts_with(LEASE_PREFIX) && !lease.id.starts_with(&self.lease_prefix) {
                    self.client.delete_lease(NAMESPACE, &lease.id).await?;
                }
            }
            Ok(())
        });
        ended.await.map_err(|status| self.client.error(&status))?;
        self.earlier_ended.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Removes these names of an image, and returns after containerd has collected what only they referenced. A name that stands
    /// for another image stays.
    pub async fn withdraw(&self, image: &PublishedImage, names: &[String]) -> Result<(), BackendError> {
        let withdrawn = self.client.within_limit(async {
            let mut owned = Vec::new();
            for name in names {
                let record = self.client.image(NAMESPACE, name).await?;
                owned.extend(record.filter(|record| image.owns(record)).map(|_| name));
            }
            for (at, name) in owned.iter().enumerate() {
                self.client.delete_image(NAMESPACE, name, at + 1 == owned.len()).await?;
            }
            Ok(())
        });
        withdrawn.await.map_err(|status| self.client.error(&status))
    }

    async fn publish_leased(&self, image: &PublishedImage, foreign: ForeignName) -> Result<(), Status> {
        let now = Timestamp::now();
        let lease = format!("{}{}", self.lease_prefix, self.leases.fetch_add(1, Ordering::Relaxed));
        let ends = now.checked_add(LEASE).unwrap_or(now);
        let labels = [("containerd.io/gc.expire".to_owned(), ends.to_string())].into();
        self.client.create_lease(NAMESPACE, &lease, labels).await?;
        let published = self.publish_under(image, &lease, foreign).await;
        // It expires by itself.
        if let Err(status) = self.client.delete_lease(NAMESPACE, &lease).await {
            tracing::debug!("cannot end a lease of containerd: {}", status.message());
        }
        published
    }

    async fn publish_under(
        &self,
        image: &PublishedImage,
        lease: &str,
        foreign: ForeignName,
    ) -> Result<(), Status> {
        let records = image.records(SNAPSHOTTER).map_err(Status::internal)?;
        for blob in records.blobs {
            self.client.write_blob(NAMESPACE, lease, blob).await?;
        }
        self.publish_layers(image, lease).await?;
        if self.forget_lost_layers(image).await? {
            self.publish_layers(image, lease).await?;
        }
        let mut names = Vec::new();
        for record in records.images {
            let name = record.name.clone();
            if self.put_name(image, record, foreign).await? {
                names.push(name);
            } else {
                tracing::info!(image = %image.id, "containerd has another image with the name {name}");
            }
        }
        self.wait_for_cri(image, &names).await
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
        if foreign == ForeignName::Keep
            && let Some(present) = self.client.image(NAMESPACE, &record.name).await?
            && !image.owns(&present)
        {
            return Ok(false);
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
            match self.client.prepare_snapshot(NAMESPACE, lease, request).await {
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

    /// Removes what containerd alone knows of layers whose snapshots the store has lost: no snapshot could be made in their place.
    /// Returns whether there was one.
    async fn forget_lost_layers(&self, image: &PublishedImage) -> Result<bool, Status> {
        let mut lost = false;
        for chain in image.chains.iter().rev() {
            let chain = chain.to_string();
            match self.client.snapshot(NAMESPACE, SNAPSHOTTER, &chain).await {
                Err(status) if status.code() == Code::NotFound => {
                    tracing::warn!(
                        "containerd has layer {chain}, but the store has no snapshot of it: made again"
                    );
                    self.client
                        .remove_snapshot(NAMESPACE, SNAPSHOTTER, &chain)
                        .await
                        .map_err(|status| lost_below(&chain, &status))?;
                    lost = true;
                }
                // The parents of a snapshot are present.
                found => return found.map(|_| lost),
            }
        }
        Ok(lost)
    }

    async fn wait_for_cri(&self, image: &PublishedImage, names: &[String]) -> Result<(), Status> {
        for name in names {
            let spec = ImageSpec::named(name.as_str());
            // Ends with the time limit of all calls.
            loop {
                let found = self.cri.peek_status(&spec).await.map_err(|error| unavailable(&error))?;
                if found.is_some_and(|found| found.id.as_str() == image.id.as_str()) {
                    break;
                }
                tokio::time::sleep(POLL).await;
            }
        }
        Ok(())
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
