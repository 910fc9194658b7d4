//! What containerd has of images of larder's store: snapshots that it retains when larder withdraws the images, and copies of
//! its own.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::Duration;

use larder::backend::{BackendError, Image};
use larder::gc::{DiskSpace, LayerUsageIndex};
use larder_cri::channel::CriChannel;
use tonic::Status;

use crate::NAMESPACE;
use crate::client::ContainerdClient;
use crate::graph::{self, ContentGraph, ImageIdKind, SnapshotChains};
use crate::holders::{self, Holder};
use crate::images::is_full_name;
use crate::layers::{ContainerdLayers, lease_holders};
use crate::proto::images::Image as ImageRecord;
use crate::proto::snapshots::Kind;
use crate::publish::SNAPSHOTTER;

/// Queries containerd for what it has of images of larder's store.
pub struct SharedSnapshots {
    client: ContainerdClient,
    layers: ContainerdLayers,
}

/// What containerd has of images of larder's store.
#[derive(Debug, Default)]
pub struct ContainerdShare {
    /// By chain ID, what retains a snapshot beside these images: other names, leases, other namespaces, containers.
    pub holders: HashMap<String, String>,
    /// containerd's own content of the images, and snapshots that it unpacked with another snapshotter.
    pub copies: LayerUsageIndex,
}

impl SharedSnapshots {
    /// Over this connection; `timeout` limits each query with all its calls.
    pub fn new(channel: CriChannel, timeout: Duration) -> SharedSnapshots {
        let layers = ContainerdLayers::new(channel.clone(), timeout);
        SharedSnapshots { client: ContainerdClient::new(channel, timeout), layers }
    }

    /// Returns what containerd has of these images.
    pub async fn of(&self, images: &[Image]) -> Result<ContainerdShare, BackendError> {
        let found = self.client.within_limit(self.query(images)).await;
        found.map_err(|status| self.client.error(&status))
    }

    /// The directory of containerd's content, if containerd says where it is.
    pub async fn content_root(&self) -> Result<Option<String>, BackendError> {
        let found = self.client.plugins("type==io.containerd.content.v1,id==content").await;
        let found = found.map_err(|status| self.client.error(&status))?;
        Ok(found.into_iter().next().and_then(|plugin| plugin.exports.get("root").cloned()))
    }

    async fn query(&self, images: &[Image]) -> Result<ContainerdShare, Status> {
        let mut content = ContentGraph::of(self.client.content(NAMESPACE, None).await?);
        let mut chains = Vec::new();
        let snapshotters: BTreeSet<&str> = content.snapshotters().into_iter().chain([SNAPSHOTTER]).collect();
        for snapshotter in snapshotters {
            chains.extend(self.chains(snapshotter).await?);
        }
        let records = self.client.images(NAMESPACE).await?;
        let mut holders = foreign_names(&records, images, &content);
        holders.extend(lease_holders(&self.client, NAMESPACE).await?);
        holders.extend(holders::labelled_roots(&content, &chains));
        let mut elsewhere = HashMap::new();
        for namespace in self.client.namespaces().await? {
            if namespace != NAMESPACE {
                let blobs = self.client.content(&namespace, None).await?;
                holders
                    .push(Holder::namespace(&namespace, blobs.into_iter().map(|blob| blob.digest).collect()));
                for name in self.committed(&namespace).await? {
                    elsewhere.entry(name).or_insert_with(|| format!("containerd namespace {namespace}"));
                }
            }
        }
        holders::mark(&holders, &mut content, &mut chains);
        let copies = graph::layers(images, ImageIdKind::Config, &content, &chains, Some(&records));
        let own = chains.into_iter().filter(|chains| chains.is_of(SNAPSHOTTER));
        let mut holders: HashMap<String, String> = own.flat_map(SnapshotChains::into_held).collect();
        for (name, by) in elsewhere {
            holders.entry(name).or_insert(by);
        }
        Ok(ContainerdShare { holders, copies: without_snapshots_of_store(images, &copies) })
    }

    /// The snapshots of a snapshotter; `None` for one that containerd does not have any more.
    async fn chains(&self, snapshotter: &str) -> Result<Option<SnapshotChains>, Status> {
        let all = match self.client.snapshots(NAMESPACE, snapshotter).await {
            Err(_) if snapshotter != SNAPSHOTTER => return Ok(None),
            all => all?,
        };
        let usages = if snapshotter == SNAPSHOTTER {
            // Their sizes are the store's.
            let committed = all.iter().filter(|snapshot| snapshot.kind() == Kind::Committed);
            committed.map(|snapshot| (snapshot.name.clone(), DiskSpace::ZERO)).collect()
        } else {
            self.layers.usages(snapshotter, &all).await?
        };
        Ok(Some(SnapshotChains::of(snapshotter, &all, usages)))
    }

    async fn committed(&self, namespace: &str) -> Result<Vec<String>, Status> {
        let all = self.client.snapshots(namespace, SNAPSHOTTER).await?;
        let committed = all.into_iter().filter(|snapshot| snapshot.kind() == Kind::Committed);
        Ok(committed.map(|snapshot| snapshot.name).collect())
    }
}

/// The records that stay when larder withdraws these images.
fn foreign_names(records: &[ImageRecord], images: &[Image], content: &ContentGraph) -> Vec<Holder> {
    let names = images.iter().flat_map(|image| image.repo_tags.iter().chain(&image.repo_digests));
    let ids: HashSet<&str> = images.iter().map(|image| image.id.as_str()).collect();
    let mut known: HashSet<&str> = names.map(String::as_str).chain(ids.iter().copied()).collect();
    let is_withdrawn = |record: &&ImageRecord| {
        let target = record.target.as_ref().map(|target| target.digest.as_str()).unwrap_or_default();
        !is_full_name(&record.name) && content.below(target).iter().any(|digest| ids.contains(digest))
    };
    known.extend(records.iter().filter(is_withdrawn).map(|record| record.name.as_str()));
    holders::other_names(records, &known)
}

/// The layers of images that take space in containerd: the snapshots in the store are counted there.
fn without_snapshots_of_store(images: &[Image], all: &LayerUsageIndex) -> LayerUsageIndex {
    let mut copies = LayerUsageIndex::unknown();
    for image in images {
        let Some(known) = all.layers_of(&image.id) else { continue };
        let layers = known.layers.iter().map(|&layer| &all.all()[layer as usize]);
        let layers: Vec<_> = layers.filter(|layer| layer.amount != DiskSpace::ZERO).cloned().collect();
        if !layers.is_empty() {
            let ids: Vec<_> = layers.iter().map(|layer| layer.id.clone()).collect();
            for layer in layers {
                copies.add(layer);
            }
            copies.add_image(image.id.clone(), &ids, known.own);
        }
    }
    copies
}
