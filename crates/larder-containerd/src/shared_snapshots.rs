//! Finds out which snapshots of larder's store containerd retains when larder withdraws its images, and which copies of
//! their layers it has itself.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::Duration;

use larder::backend::{BackendError, Image};
use larder::gc::{DiskSpace, LayerUsageIndex};
use larder_cri::channel::CriChannel;
use tonic::Status;

use crate::NAMESPACE;
use crate::client::ContainerdClient;
use crate::graph::{self, ContentGraph, ImageIdKind, SnapshotChains, leads_to};
use crate::holders::{self, Holder};
use crate::images::is_full_name;
use crate::layers::{ContainerdLayers, lease_holders};
use crate::proto::images::Image as ImageRecord;
use crate::proto::snapshots::Kind;
use crate::publish::{SNAPSHOTTER, is_as_published};

/// Queries containerd for what it has of images of larder's store.
pub struct SharedSnapshots {
    client: ContainerdClient,
    layers: ContainerdLayers,
}

/// The part of containerd in images of larder's store.
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

    /// The directories of containerd's content and snapshots, as far as containerd says where they are.
    pub async fn roots(&self) -> Result<Vec<String>, BackendError> {
        let mut roots = Vec::new();
        for kind in ["type==io.containerd.content.v1", "type==io.containerd.snapshotter.v1"] {
            let found = self.client.within_limit(self.client.plugins(kind)).await;
            let found = found.map_err(|status| self.client.error(&status))?;
            roots.extend(found.into_iter().filter_map(|plugin| plugin.exports.get("root").cloned()));
        }
        Ok(roots)
    }

    async fn query(&self, images: &[Image]) -> Result<ContainerdShare, Status> {
        let mut content = ContentGraph::of(self.client.content(NAMESPACE, None).await?);
        let mut chains = Vec::new();
        let snapshotters: BTreeSet<&str> = content.snapshotters().into_iter().chain([SNAPSHOTTER]).collect();
        for snapshotter in snapshotters {
            chains.extend(self.chains(snapshotter).await?);
        }
        let records = self.client.images(NAMESPACE).await?;
        let (withdrawn, foreign) = split_records(records, images, &content);
        let mut holders = holders::other_names(&foreign, &HashSet::new());
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
        let copies = graph::layers(images, ImageIdKind::Config, &content, &chains, Some(&withdrawn));
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
            // It may be one that does not answer: its copies are not counted.
            let Ok(usages) = self.layers.usages(snapshotter, &all).await else { return Ok(None) };
            usages
        };
        Ok(Some(SnapshotChains::of(snapshotter, &all, usages)))
    }

    async fn committed(&self, namespace: &str) -> Result<Vec<String>, Status> {
        let all = self.client.snapshots(namespace, SNAPSHOTTER).await?;
        let committed = all.into_iter().filter(|snapshot| snapshot.kind() == Kind::Committed);
        Ok(committed.map(|snapshot| snapshot.name).collect())
    }
}

/// The records that go when larder withdraws these images, and those that stay: a name may stand for another image.
fn split_records(
    records: Vec<ImageRecord>,
    images: &[Image],
    content: &ContentGraph,
) -> (Vec<ImageRecord>, Vec<ImageRecord>) {
    let ids: HashSet<&str> = images.iter().map(|image| image.id.as_str()).collect();
    let mut by_name: HashMap<&str, &str> = ids.iter().map(|&id| (id, id)).collect();
    for image in images {
        let names = image.repo_tags.iter().chain(&image.repo_digests);
        by_name.extend(names.map(|name| (name.as_str(), image.id.as_str())));
    }
    let is_withdrawn = |record: &ImageRecord| match by_name.get(record.name.as_str()) {
        Some(id) => is_as_published(record) || leads_to(content, record, id),
        None => !is_full_name(&record.name) && ids.iter().any(|id| leads_to(content, record, id)),
    };
    records.into_iter().partition(is_withdrawn)
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
