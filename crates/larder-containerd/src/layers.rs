//! Disk usage of image layers.
//!
//! CRI reports one size for each image, that of its content as fetched. containerd reports the size of each blob and
//! snapshot and their references: the labels that its own garbage collector uses. So the bytes that a removal frees are
//! known in advance, except those that leases, other namespaces or images unknown to CRI retain.
//!
//! ```text
//! index -> manifest -> config (the image ID) -> top snapshot -> its parents
//!                   -> archives of layers
//! ```

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use jiff::Timestamp;
use larder::backend::{BackendError, Image};
use larder::gc::{DiskSpace, LayerSource, LayerUsageIndex};
use larder_cri::Endpoint;
use larder_cri::channel::CriChannel;
use tokio::sync::Mutex;
use tonic::{Code, Status};

use crate::NAMESPACE;
use crate::client::ContainerdClient;
use crate::graph::{ContentGraph, ImageIdKind, SnapshotChains, layers, positive};
use crate::holders::{self, Holder};
use crate::proto::images::Image as ImageRecord;
use crate::proto::snapshots::{Info as Snapshot, Kind};

/// Number of snapshots or leases queried concurrently.
const CALLS_AT_ONCE: usize = 8;

/// The layers that containerd has.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PresentLayers {
    /// Digests of its blobs.
    pub blobs: HashSet<String>,
    /// Names of its committed snapshots: of layers, their chain IDs.
    pub snapshots: HashSet<String>,
}

/// Queries containerd for the disk usage of layers. Other runtimes return an error.
pub struct ContainerdLayers {
    client: ContainerdClient,
    /// The namespace of the images.
    namespace: String,
    id_kind: ImageIdKind,
    /// By snapshotter and name. Committed snapshots do not change.
    usages: Mutex<HashMap<(String, String), DiskSpace>>,
    /// True once it was logged that sizes are estimated.
    warned: AtomicBool,
}

impl ContainerdLayers {
    /// Of the images of CRI, over this connection; `timeout` limits each query with all its calls.
    pub fn new(channel: CriChannel, timeout: Duration) -> ContainerdLayers {
        ContainerdLayers::of_namespace(NAMESPACE, ImageIdKind::Config, channel, timeout)
    }

    /// Of the images that a Docker Engine has in a namespace of the containerd at this socket.
    pub fn of_docker(
        socket: &Path,
        namespace: &str,
        connect_timeout: Duration,
        timeout: Duration,
    ) -> ContainerdLayers {
        let channel = CriChannel::new(Endpoint::at(socket), connect_timeout);
        ContainerdLayers::of_namespace(namespace, ImageIdKind::Target, channel, timeout)
    }

    fn of_namespace(
        namespace: &str,
        id_kind: ImageIdKind,
        channel: CriChannel,
        timeout: Duration,
    ) -> ContainerdLayers {
        ContainerdLayers {
            client: ContainerdClient::new(channel, timeout),
            namespace: namespace.to_owned(),
            id_kind,
            usages: Mutex::default(),
            warned: AtomicBool::new(false),
        }
    }

    /// The directory of the snapshots of this snapshotter; the one around it, if the blobs are there, too. `None` if
    /// containerd does not report it.
    pub async fn root(&self, snapshotter: &str) -> Result<Option<PathBuf>, BackendError> {
        let root = async |filter: String| {
            let found = self.client.within_limit(self.client.plugins(&filter)).await;
            let found = found.map_err(|status| self.client.error(&status))?;
            let root = found.into_iter().find_map(|plugin| plugin.exports.get("root").map(PathBuf::from));
            Ok(root)
        };
        let Some(snapshots) = root(format!("type==io.containerd.snapshotter.v1,id=={snapshotter}")).await?
        else {
            return Ok(None);
        };
        let blobs = root("type==io.containerd.content.v1".to_owned()).await?;
        let around = snapshots.parent().filter(|dir| blobs.is_some_and(|blobs| blobs.parent() == Some(dir)));
        Ok(Some(around.map(Path::to_owned).unwrap_or(snapshots)))
    }

    /// The layers that containerd has, fetched or unpacked with this snapshotter.
    pub async fn present(&self, snapshotter: &str) -> Result<PresentLayers, BackendError> {
        let found = self.client.within_limit(async {
            let blobs = self.client.content(&self.namespace, None).await?;
            let snapshots = self.client.snapshots(&self.namespace, snapshotter).await?;
            let committed = snapshots.into_iter().filter(|snapshot| snapshot.kind() == Kind::Committed);
            Ok(PresentLayers {
                blobs: blobs.into_iter().map(|blob| blob.digest).collect(),
                snapshots: committed.map(|snapshot| snapshot.name).collect(),
            })
        });
        found.await.map_err(|status| self.client.error(&status))
    }

    /// Disk usage of a snapshot, such as the writable one of a container, without its parents.
    pub async fn written(&self, snapshotter: &str, snapshot: &str) -> Result<DiskSpace, BackendError> {
        let usage = self.client.usage(&self.namespace, snapshotter, snapshot);
        match self.client.within_limit(usage).await {
            Ok(usage) => Ok(DiskSpace { bytes: positive(usage.size), inodes: positive(usage.inodes) }),
            Err(status) if status.code() == Code::NotFound => Ok(DiskSpace::ZERO),
            Err(status) => Err(self.client.error(&status)),
        }
    }

    async fn look(&self, images: &[Image]) -> Result<LayerUsageIndex, Status> {
        let mut content = ContentGraph::of(self.client.content(&self.namespace, None).await?);
        let mut chains = Vec::new();
        for snapshotter in content.snapshotters() {
            let all = self.client.snapshots(&self.namespace, snapshotter).await?;
            let usages = self.usages(snapshotter, &all).await?;
            chains.push(SnapshotChains::of(snapshotter, &all, usages));
        }
        let records = match self.holders(images, &content).await {
            Ok((records, mut holders)) => {
                holders.extend(holders::labelled_roots(&content, &chains));
                holders::mark(&holders, &mut content, &mut chains);
                self.warned.store(false, Ordering::Relaxed);
                Some(records)
            }
            Err(status) => {
                self.warn_estimated(&status);
                None
            }
        };
        Ok(layers(images, self.id_kind, &content, &chains, records.as_deref()))
    }

    /// Logs once that sizes are estimated, until they are known again.
    fn warn_estimated(&self, status: &Status) {
        if !self.warned.swap(true, Ordering::Relaxed) {
            let error = self.client.error(status);
            tracing::warn!(
                "freed bytes are estimated: cannot determine which leases and namespaces of containerd share layers: {error}"
            );
        }
    }

    /// The image records, and what retains content and snapshots beside the images that CRI lists.
    async fn holders(
        &self,
        images: &[Image],
        content: &ContentGraph,
    ) -> Result<(Vec<ImageRecord>, Vec<Holder>), Status> {
        let records = self.client.images(&self.namespace).await?;
        let mut holders = holders::unlisted(&records, images, content);
        for namespace in self.client.namespaces().await? {
            if namespace != self.namespace {
                let blobs = self.client.content(&namespace, None).await?;
                let blobs = blobs.into_iter().map(|blob| blob.digest).collect();
                holders.push(Holder::namespace(&namespace, blobs));
            }
        }
        holders.extend(lease_holders(&self.client, &self.namespace).await?);
        Ok((records, holders))
    }

    /// Disk usage of each committed snapshot alone. One that was removed since is skipped.
    pub(crate) async fn usages(
        &self,
        snapshotter: &str,
        all: &[Snapshot],
    ) -> Result<HashMap<String, DiskSpace>, Status> {
        let mut known = self.usages.lock().await;
        let committed = || all.iter().filter(|snapshot| snapshot.kind() == Kind::Committed);
        let key = |name: &str| (snapshotter.to_owned(), name.to_owned());
        let new: Vec<String> = committed()
            .filter(|snapshot| !known.contains_key(&key(&snapshot.name)))
            .map(|snapshot| snapshot.name.clone())
            .collect();
        let calls = new.into_iter().map(|name| async move {
            match self.client.usage(&self.namespace, snapshotter, &name).await {
                Ok(usage) => Ok(Some((name, usage))),
                Err(status) if status.code() == Code::NotFound => Ok(None),
                Err(status) => Err(status),
            }
        });
        let mut answers = stream::iter(calls.collect::<Vec<_>>()).buffer_unordered(CALLS_AT_ONCE);
        while let Some(answer) = answers.try_next().await? {
            let Some((name, usage)) = answer else { continue };
            let amount = DiskSpace { bytes: positive(usage.size), inodes: positive(usage.inodes) };
            known.insert(key(&name), amount);
        }
        let present = committed()
            .filter_map(|snapshot| Some((snapshot.name.clone(), *known.get(&key(&snapshot.name))?)));
        let present: HashMap<String, DiskSpace> = present.collect();
        known.retain(|(of, name), _| of != snapshotter || present.contains_key(name));
        Ok(present)
    }
}

/// The leases of a namespace that have not expired, with what they retain.
pub(crate) async fn lease_holders(client: &ContainerdClient, namespace: &str) -> Result<Vec<Holder>, Status> {
    let leases = client.leases(namespace).await?;
    let calls = leases.into_iter().map(|lease| async move {
        match client.lease_resources(namespace, &lease.id).await {
            Ok(resources) => Ok(Some((lease, resources))),
            // Ended since.
            Err(status) if status.code() == Code::NotFound => Ok(None),
            Err(status) => Err(status),
        }
    });
    let mut answers = stream::iter(calls.collect::<Vec<_>>()).buffer_unordered(CALLS_AT_ONCE);
    let (mut holders, now) = (Vec::new(), Timestamp::now());
    while let Some(answer) = answers.try_next().await? {
        holders.extend(answer.and_then(|(lease, resources)| Holder::lease(&lease, resources, now)));
    }
    Ok(holders)
}

#[async_trait]
impl LayerSource for ContainerdLayers {
    async fn layers(&self, images: &[Image]) -> Result<LayerUsageIndex, BackendError> {
        let found = self.client.within_limit(self.look(images)).await;
        found.map_err(|status| self.client.error(&status))
    }
}
