//! Containers that CRI does not list, which are those of `ctr run` and `nerdctl` in the namespace of CRI, and pod
//! sandboxes; and images that are pinned in containerd.
//!
//! A container names its image, but the name may point at another image now. So the images with the layers that its
//! snapshot lies on are in use, too.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use larder::reference::ImageId;
use larder::retention::{Retention, RetentionError, RetentionPurpose, RetentionSource, SourceScope};
use larder_cri::channel::CriChannel;
use tokio::sync::Mutex;
use tonic::{Code, Status};

use crate::NAMESPACE;
use crate::client::ContainerdClient;
use crate::graph::NEEDS_SNAPSHOT;
use crate::proto::containers::Container;
use crate::proto::images::Image as ImageRecord;

/// All but the containers that CRI lists.
const NOT_LISTED: &str = "labels.\"io.cri-containerd.kind\"!=container";

/// The label of containers and sandboxes of CRI.
const KIND: &str = "io.cri-containerd.kind";

/// Number of containers queried concurrently.
const CALLS_AT_ONCE: usize = 8;

/// Queries containerd for containers that CRI does not list. Other runtimes have none.
pub struct ContainerdUses {
    client: ContainerdClient,
    /// The images below the snapshot of each container; they do not change during its life.
    known: Mutex<HashMap<ContainerIdentity, Vec<ImageId>>>,
}

/// A container from its creation to its removal. Another one may have the same ID later, and another image.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct ContainerIdentity {
    id: String,
    image: String,
    snapshotter: String,
    snapshot_key: String,
    /// Seconds and nanoseconds.
    created_at: Option<(i64, i32)>,
}

impl ContainerIdentity {
    fn of(container: &Container) -> ContainerIdentity {
        let Container { id, image, snapshotter, snapshot_key, created_at, .. } = container.clone();
        let created_at = created_at.map(|time| (time.seconds, time.nanos));
        ContainerIdentity { id, image, snapshotter, snapshot_key, created_at }
    }
}

impl ContainerdUses {
    /// Over this connection; `timeout` limits each query with all its calls.
    pub fn new(channel: CriChannel, timeout: Duration) -> ContainerdUses {
        ContainerdUses { client: ContainerdClient::new(channel, timeout), known: Mutex::default() }
    }

    async fn list(&self) -> Result<Vec<Retention>, Status> {
        let containers = match self.client.containers(NAMESPACE, NOT_LISTED).await {
            Err(status) if status.code() == Code::Unimplemented => return Ok(Vec::new()),
            listed => listed?,
        };
        let mut known = self.known.lock().await;
        let containers: Vec<_> =
            containers.into_iter().map(|container| (ContainerIdentity::of(&container), container)).collect();
        let present: HashSet<&ContainerIdentity> = containers.iter().map(|(identity, _)| identity).collect();
        known.retain(|identity, _| present.contains(identity));
        let new = containers.iter().filter(|(identity, _)| !known.contains_key(identity));
        let calls = new.map(|(identity, container)| async move {
            self.images_below(container).await.map(|images| (identity.clone(), images))
        });
        let mut answers = stream::iter(calls.collect::<Vec<_>>()).buffer_unordered(CALLS_AT_ONCE);
        while let Some((identity, images)) = answers.try_next().await? {
            known.insert(identity, images);
        }
        let uses = |(identity, container): &(ContainerIdentity, Container)| {
            let named = (!container.image.is_empty()).then(|| ImageId::from(container.image.as_str()));
            let below = known.get(identity).cloned().unwrap_or_default();
            let by = purpose_of(container);
            let reported = move |image| Retention::new(image, by.clone());
            named.into_iter().chain(below).map(reported).collect::<Vec<_>>()
        };
        Ok(containers.iter().flat_map(uses).collect())
    }

    /// The images that were unpacked into the snapshot below that of a container.
    async fn images_below(&self, container: &Container) -> Result<Vec<ImageId>, Status> {
        let Container { snapshotter, snapshot_key, .. } = container;
        if snapshot_key.is_empty() {
            return Ok(Vec::new());
        }
        let snapshot = match self.client.snapshot(NAMESPACE, snapshotter, snapshot_key).await {
            Err(status) if status.code() == Code::NotFound => return Ok(Vec::new()),
            found => found?,
        };
        if snapshot.parent.is_empty() {
            return Ok(Vec::new());
        }
        let filter = format!("labels.\"{NEEDS_SNAPSHOT}{snapshotter}\"==\"{}\"", snapshot.parent);
        let configs = self.client.content(NAMESPACE, Some(filter)).await?;
        Ok(configs.into_iter().map(|config| config.digest.into()).collect())
    }
}

/// The label of images that containerd pins.
const PINNED: &str = "io.cri-containerd.pinned";

/// Queries containerd for the images that it, or a user of it, has pinned.
pub struct ContainerdPins {
    client: ContainerdClient,
}

impl ContainerdPins {
    /// Over this connection; `timeout` limits each query.
    pub fn new(channel: CriChannel, timeout: Duration) -> ContainerdPins {
        ContainerdPins { client: ContainerdClient::new(channel, timeout) }
    }
}

#[async_trait]
impl RetentionSource for ContainerdPins {
    async fn retentions(&self) -> Result<Vec<Retention>, RetentionError> {
        let records = self.client.within_limit(self.client.images(NAMESPACE)).await;
        let records = records.map_err(|status| self.client.error(&status))?;
        let is_pinned =
            |record: &ImageRecord| record.labels.get(PINNED).is_some_and(|value| value == "pinned");
        let pinned = records.into_iter().filter(is_pinned);
        Ok(pinned.map(|record| Retention::new(record.name.as_str(), RetentionPurpose::Pinned)).collect())
    }

    fn scope(&self) -> SourceScope {
        SourceScope::Backend
    }
}

fn purpose_of(container: &Container) -> RetentionPurpose {
    let label = |name: &str| container.labels.get(name).map(String::as_str);
    let pod = (label("io.kubernetes.pod.namespace"), label("io.kubernetes.pod.name"));
    match (label(KIND), pod) {
        (Some("sandbox"), (Some(namespace), Some(name))) => {
            RetentionPurpose::Sandbox { pod: format!("{namespace}/{name}") }
        }
        _ => {
            RetentionPurpose::UnlistedContainer { id: container.id.clone(), namespace: NAMESPACE.to_owned() }
        }
    }
}

#[async_trait]
impl RetentionSource for ContainerdUses {
    async fn retentions(&self) -> Result<Vec<Retention>, RetentionError> {
        let found = self.client.within_limit(self.list()).await;
        found.map_err(|status| self.client.error(&status).into())
    }

    fn scope(&self) -> SourceScope {
        SourceScope::Runtime
    }
}
