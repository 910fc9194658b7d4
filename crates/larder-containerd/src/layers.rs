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

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use jiff::Timestamp;
use larder::backend::{BackendError, Image};
use larder::gc::{DiskSpace, LayerSource, LayerUsageIndex};
use larder_cri::channel::CriChannel;
use tokio::sync::Mutex;
use tonic::{Code, Status};

use crate::NAMESPACE;
use crate::client::ContainerdClient;
use crate::graph::{ContentGraph, SnapshotChains, layers, positive};
use crate::holders::{self, Holder};
use crate::proto::images::Image as ImageRecord;
use crate::proto::snapshots::{Info as Snapshot, Kind};

/// Number of snapshots or leases queried concurrently.
const CALLS_AT_ONCE: usize = 8;

/// Queries containerd for the disk usage of layers. Other runtimes return an error.
pub struct ContainerdLayers {
    client: ContainerdClient,
    /// By snapshotter and name. Committed snapshots do not change.
    usages: Mutex<HashMap<(String, String), DiskSpace>>,
    /// True once it was logged that sizes are estimated.
    warned: AtomicBool,
}

impl ContainerdLayers {
    /// Over this connection; `timeout` limits each query with all its calls.
    pub fn new(channel: CriChannel, timeout: Duration) -> ContainerdLayers {
        let client = ContainerdClient::new(channel, timeout);
        ContainerdLayers { client, usages: Mutex::default(), warned: AtomicBool::new(false) }
    }

    async fn look(&self, images: &[Image]) -> Result<LayerUsageIndex, Status> {
        let mut content = ContentGraph::of(self.client.content(NAMESPACE, None).await?);
        let mut chains = Vec::new();
        for snapshotter in content.snapshotters() {
            let all = self.client.snapshots(NAMESPACE, snapshotter).await?;
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
        Ok(layers(images, &content, &chains, records.as_deref()))
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
        let records = self.client.images(NAMESPACE).await?;
        let mut holders = holders::unlisted(&records, images, content);
        for namespace in self.client.namespaces().await? {
            if namespace != NAMESPACE {
                let blobs = self.client.content(&namespace, None).await?;
                let blobs = blobs.into_iter().map(|blob| blob.digest).collect();
                holders.push(Holder::namespace(&namespace, blobs));
            }
        }
        holders.extend(lease_holders(&self.client, NAMESPACE).await?);
        Ok((records, holders))
    }

    /// Disk usage of each committed snapshot alone. One that was removed since is skipped.
    async fn usages(
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
            match self.client.usage(NAMESPACE, snapshotter, &name).await {
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
