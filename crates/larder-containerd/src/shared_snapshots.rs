//! The snapshots of larder's store that containerd retains when larder withdraws its images.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use larder::backend::{BackendError, Image};
use larder::gc::DiskSpace;
use larder_cri::channel::CriChannel;
use tonic::Status;

use crate::NAMESPACE;
use crate::client::ContainerdClient;
use crate::graph::{ContentGraph, SnapshotChains};
use crate::holders;
use crate::layers::lease_holders;
use crate::proto::snapshots::Kind;
use crate::publish::SNAPSHOTTER;

/// Queries containerd for what retains snapshots of larder's store beside the images that larder published.
pub struct SharedSnapshots {
    client: ContainerdClient,
}

impl SharedSnapshots {
    /// Over this connection; `timeout` limits each query with all its calls.
    pub fn new(channel: CriChannel, timeout: Duration) -> SharedSnapshots {
        SharedSnapshots { client: ContainerdClient::new(channel, timeout) }
    }

    /// By chain ID, what retains a snapshot beside these images: other names, leases, other namespaces, containers.
    pub async fn holders(&self, images: &[Image]) -> Result<HashMap<String, String>, BackendError> {
        let found = self.client.within_limit(async {
            let mut held = self.of_namespace(images).await?;
            for namespace in self.client.namespaces().await? {
                if namespace != NAMESPACE {
                    for name in self.committed(&namespace).await? {
                        held.entry(name).or_insert_with(|| format!("containerd namespace {namespace}"));
                    }
                }
            }
            Ok(held)
        });
        found.await.map_err(|status| self.client.error(&status))
    }

    /// Finds the snapshots in CRI's namespace that are retained, with the reason.
    async fn of_namespace(&self, images: &[Image]) -> Result<HashMap<String, String>, Status> {
        let all = self.client.snapshots(NAMESPACE, SNAPSHOTTER).await?;
        // Their sizes are the store's.
        let committed = all.iter().filter(|snapshot| snapshot.kind() == Kind::Committed);
        let sizes = committed.map(|snapshot| (snapshot.name.clone(), DiskSpace::ZERO)).collect();
        let mut chains = [SnapshotChains::of(SNAPSHOTTER, &all, sizes)];
        let mut content = ContentGraph::of(self.client.content(NAMESPACE, None).await?);
        let names = images.iter().flat_map(|image| image.repo_tags.iter().chain(&image.repo_digests));
        let ids = images.iter().map(|image| image.id.as_str());
        let names: HashSet<&str> = names.map(String::as_str).chain(ids).collect();
        let mut holders = holders::other_names(&self.client.images(NAMESPACE).await?, &names);
        holders.extend(lease_holders(&self.client, NAMESPACE).await?);
        holders.extend(holders::labelled_roots(&content, &chains));
        holders::mark(&holders, &mut content, &mut chains);
        Ok(chains.into_iter().flat_map(SnapshotChains::into_held).collect())
    }

    async fn committed(&self, namespace: &str) -> Result<Vec<String>, Status> {
        let all = self.client.snapshots(namespace, SNAPSHOTTER).await?;
        let committed = all.into_iter().filter(|snapshot| snapshot.kind() == Kind::Committed);
        Ok(committed.map(|snapshot| snapshot.name).collect())
    }
}
