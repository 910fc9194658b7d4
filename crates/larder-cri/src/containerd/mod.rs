//! Disk usage of image layers, if the runtime is containerd.
//!
//! CRI reports one size for each image, that of its content as fetched. containerd serves its own API on the same
//! socket, which reports the size of each blob and snapshot and their references: the labels that its own garbage
//! collector uses. So the bytes that a removal frees are known in advance.
//!
//! ```text
//! index -> manifest -> config (the image ID) -> top snapshot -> its parents
//!                   -> archives of layers
//! ```

mod graph;

use std::collections::HashMap;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::{self, StreamExt as _, TryStreamExt as _};
use larder::backend::{BackendError, Image};
use larder::gc::{DiskSpace, LayerSource, LayerUsageIndex};
use tokio::sync::Mutex;
use tonic::metadata::MetadataValue;
use tonic::{Request, Status};

use crate::channel::CriChannel;
use crate::client::origin;
use crate::containerd_proto::content::ListContentRequest;
use crate::containerd_proto::content::content_client::ContentClient;
use crate::containerd_proto::snapshots::snapshots_client::SnapshotsClient;
use crate::containerd_proto::snapshots::{Info as Snapshot, Kind, ListSnapshotsRequest, UsageRequest};
use crate::list_streaming::joined;
use crate::{MAX_MESSAGE_BYTES, status};
use graph::{ContentGraph, SnapshotChains, layers};

/// The namespace in which containerd's CRI plugin stores images.
const NAMESPACE: &str = "k8s.io";

/// Number of snapshots queried concurrently.
const CALLS_AT_ONCE: usize = 8;

/// Queries containerd for the disk usage of layers. Other runtimes return an error.
pub struct ContainerdLayers {
    channel: CriChannel,
    timeout: Duration,
    /// By snapshotter and name. Committed snapshots do not change.
    usages: Mutex<HashMap<(String, String), DiskSpace>>,
}

impl ContainerdLayers {
    pub(crate) fn new(channel: CriChannel, timeout: Duration) -> ContainerdLayers {
        ContainerdLayers { channel, timeout, usages: Mutex::default() }
    }

    fn request<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(self.timeout);
        request.metadata_mut().insert("containerd-namespace", MetadataValue::from_static(NAMESPACE));
        request
    }

    fn snapshots(&self) -> SnapshotsClient<CriChannel> {
        SnapshotsClient::with_origin(self.channel.clone(), origin())
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
    }

    async fn look(&self, images: &[Image]) -> Result<LayerUsageIndex, Status> {
        let mut content = ContentClient::with_origin(self.channel.clone(), origin())
            .max_decoding_message_size(MAX_MESSAGE_BYTES);
        let blobs = content.list(self.request(ListContentRequest {}));
        let content = ContentGraph::of(joined(blobs, |part| part.info).await?);
        let mut stacks = Vec::new();
        for snapshotter in content.snapshotters() {
            let message = ListSnapshotsRequest { snapshotter: snapshotter.to_owned() };
            let mut snapshots = self.snapshots();
            let all = joined(snapshots.list(self.request(message)), |part| part.info).await?;
            let usages = self.usages(snapshotter, &all).await?;
            stacks.push(SnapshotChains::of(snapshotter, &all, usages));
        }
        Ok(layers(images, &content, &stacks))
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
            let message = UsageRequest { snapshotter: snapshotter.to_owned(), key: name.clone() };
            match self.snapshots().usage(self.request(message)).await {
                Ok(usage) => Ok(Some((name, usage.into_inner()))),
                Err(status) if status.code() == tonic::Code::NotFound => Ok(None),
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

#[async_trait]
impl LayerSource for ContainerdLayers {
    async fn layers(&self, images: &[Image]) -> Result<LayerUsageIndex, BackendError> {
        let endpoint = self.channel.endpoint();
        match tokio::time::timeout(self.timeout, self.look(images)).await {
            Ok(found) => found.map_err(|status| status::call_error(endpoint, &status)),
            Err(_) => Err(status::call_error(endpoint, &status::deadline())),
        }
    }
}

/// A size as a Go integer.
fn positive(size: i64) -> u64 {
    u64::try_from(size).unwrap_or(0)
}
