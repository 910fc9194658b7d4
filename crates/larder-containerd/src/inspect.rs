//! Whether a containerd keeps its snapshots in larder's store, and which of its images need that.

use larder::backend::BackendError;
use larder_cri::CriBackend;

use crate::NAMESPACE;
use crate::client::ContainerdClient;
use crate::graph::ContentGraph;

/// Reads from a containerd; changes nothing.
pub struct ContainerdInspector {
    client: ContainerdClient,
}

/// The plugin of a snapshotter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotterPlugin {
    /// The directory of its snapshots, if containerd has it from the configuration.
    pub root: Option<String>,
    /// Why it could not be loaded.
    pub error: Option<String>,
}

impl ContainerdInspector {
    /// Of the containerd behind this CRI client.
    pub fn new(cri: &CriBackend) -> ContainerdInspector {
        ContainerdInspector { client: ContainerdClient::new(cri.runtime_channel(), cri.request_timeout()) }
    }

    /// containerd's version, such as `1.6.20~ds1`.
    pub async fn version(&self) -> Result<String, BackendError> {
        self.client.version().await.map_err(|status| self.client.error(&status))
    }

    /// The plugin of a snapshotter; `None` if the configuration with which containerd was started has none.
    pub async fn snapshotter(&self, name: &str) -> Result<Option<SnapshotterPlugin>, BackendError> {
        let filter = format!("type==io.containerd.snapshotter.v1,id=={name}");
        let found = self.client.plugins(&filter).await.map_err(|status| self.client.error(&status))?;
        Ok(found.into_iter().next().map(|plugin| SnapshotterPlugin {
            root: plugin.exports.get("root").cloned(),
            error: plugin.init_err.map(|error| error.message),
        }))
    }

    /// The number of snapshots of a snapshotter in the namespace of CRI. containerd asks the snapshotter for them.
    pub async fn count_snapshots(&self, snapshotter: &str) -> Result<usize, BackendError> {
        let listed = self.client.snapshots(NAMESPACE, snapshotter).await;
        listed.map(|snapshots| snapshots.len()).map_err(|status| self.client.error(&status))
    }

    /// The names of the images of all namespaces that only this snapshotter can run: containerd has none of their
    /// layers, or not all.
    pub async fn images_without_layers(&self, snapshotter: &str) -> Result<Vec<String>, BackendError> {
        let read = self.client.within_limit(async {
            let mut names = Vec::new();
            for namespace in self.client.namespaces().await? {
                let content = ContentGraph::of(self.client.content(&namespace, None).await?);
                let is_lacking = |target: &str| content.lacks_layers(target, snapshotter);
                let images = self.client.images(&namespace).await?.into_iter();
                let lacking = images
                    .filter(|image| image.target.as_ref().is_some_and(|target| is_lacking(&target.digest)));
                names.extend(lacking.map(|image| qualified(&namespace, image.name)));
            }
            names.sort_unstable();
            Ok(names)
        });
        read.await.map_err(|status| self.client.error(&status))
    }

    /// The containers of all namespaces whose root filesystem is a snapshot of this snapshotter.
    pub async fn containers_on(&self, snapshotter: &str) -> Result<Vec<String>, BackendError> {
        let read = self.client.within_limit(async {
            let mut ids = Vec::new();
            for namespace in self.client.namespaces().await? {
                // containerd has no filter for snapshotters.
                let found = self.client.containers(&namespace, "").await?.into_iter();
                let found = found.filter(|container| container.snapshotter == snapshotter);
                ids.extend(found.map(|container| qualified(&namespace, container.id)));
            }
            Ok(ids)
        });
        read.await.map_err(|status| self.client.error(&status))
    }
}

/// A name with its namespace, if that is not CRI's.
fn qualified(namespace: &str, name: String) -> String {
    if namespace == NAMESPACE { name } else { format!("{name} (namespace {namespace})") }
}
