//! Image sets on this node: follows the sets and the node's labels, looks after the images, and reports.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::core::PartialObjectMeta;
use kube::runtime::watcher;
use kube::{Api, ResourceExt as _};
use tokio::sync::watch;
use tokio::time::{self, Instant};

use super::ImageSetOptions;
use super::node_images::NodeImages;
use super::progress::{AdmittedSince, next_deadline, note_admitted, report};
use super::report_writer::ReportWriter;
use super::resource::ImageSet;
use super::tasks::{FirstScanGuard, ImageTasks, SetImages, random};
use super::wanted::{NodeLabels, sets_of_node, wanted_images};
use crate::cluster::Cluster;
use crate::error::{ClusterError, ErrorLog};
use crate::watched::{Watched, from_cache};

/// The part of image sets that runs on every node.
pub(super) struct NodeSets {
    cluster: Cluster,
    options: ImageSetOptions,
    sets: Watched<ImageSet>,
    node: Watched<PartialObjectMeta<Node>>,
    tasks: ImageTasks,
    /// Held until the images that are wanted at first are looked for.
    first: Option<FirstScanGuard>,
    since: AdmittedSince,
    reports: ReportWriter,
    /// Whether the cluster has sets: without any, no agent needs to be elected.
    has_sets: watch::Sender<bool>,
}

/// Requests about image sets of each node.
const ACTIONS: [&str; 5] =
    ["list imagesets", "watch imagesets", "get nodeimages", "patch nodeimages", "post nodeimages"];

impl Drop for NodeSets {
    fn drop(&mut self) {
        self.cluster.forget(&ACTIONS);
    }
}

impl NodeSets {
    pub(super) fn new(
        cluster: &Cluster,
        options: &ImageSetOptions,
        images: Arc<dyn SetImages>,
        has_sets: watch::Sender<bool>,
    ) -> NodeSets {
        let client = || cluster.client.clone();
        let own = from_cache().fields(&format!("metadata.name={}", cluster.node));
        // Never older than what was seen: a set that seems to be missing would release its images.
        let sets = watcher(Api::<ImageSet>::all(client()), watcher::Config::default());
        let node = watcher(Api::<PartialObjectMeta<Node>>::all(client()), own);
        NodeSets {
            cluster: cluster.clone(),
            options: options.clone(),
            sets: Watched::new(cluster, "the list of image sets", sets),
            node: Watched::new(cluster, "the node", node),
            first: images.begin_first_scan(),
            tasks: ImageTasks::new(images),
            since: AdmittedSince::new(),
            reports: ReportWriter::new(options, Instant::now()),
            has_sets,
        }
    }

    /// Never ends.
    pub(super) async fn run(mut self) {
        self.read_own_report().await;
        loop {
            let deadline = self.wake_at();
            tokio::select! {
                result = self.sets.changed() => {
                    self.apply_if(result.is_ok());
                }
                result = self.node.changed() => self.apply_if(result.is_ok()),
                () = self.tasks.changed() => self.note_report(),
                () = time::sleep_until(deadline) => {
                    self.note_report();
                    self.reports.write_if_due(&self.cluster, &self.options).await;
                }
            }
        }
    }

    /// The own report of before a restart says what was pulled once already.
    async fn read_own_report(&mut self) {
        let mut log = ErrorLog::default();
        loop {
            let api: Api<NodeImages> = Api::all(self.cluster.client.clone());
            let what = format!("nodeimages {}", self.cluster.node);
            match self.cluster.call(what, api.get(&self.cluster.node)).await {
                Ok(found) => return self.reports.take_in(found),
                Err(ClusterError::NotFound { .. }) => return,
                Err(error) => {
                    self.first = None;
                    let is_temporary = error.is_temporary();
                    log.note("report about image sets", Err(error));
                    // Without a permission for it, images of `PullOnce` are pulled again.
                    if !is_temporary {
                        return;
                    }
                    time::sleep(self.options.retry.mul_f64(1.0 + random())).await;
                }
            }
        }
    }

    fn node_labels(&self) -> Option<NodeLabels> {
        let node = self.node.objects().get(&self.cluster.node)?;
        let uid = node.uid().unwrap_or_default();
        Some(NodeLabels { name: self.cluster.node.clone(), uid, labels: node.labels().clone() })
    }

    /// Without an answer of the API server, what is wanted stays as it is known.
    fn apply_if(&mut self, is_answered: bool) {
        if is_answered {
            self.apply();
        } else {
            self.first = None;
        }
    }

    /// Looks after what is wanted now. Until both are known, nothing changes.
    fn apply(&mut self) {
        if !self.sets.is_known() || !self.node.is_known() {
            return;
        }
        self.has_sets.send_if_modified(|known| {
            let has_sets = !self.sets.objects().is_empty();
            std::mem::replace(known, has_sets) != has_sets
        });
        // A node that was removed from the cluster is selected by no set.
        let wanted = match self.node_labels() {
            Some(node) => {
                self.reports.set_owner(&node.uid);
                let sets = sets_of_node(self.sets.objects().values(), &node);
                note_admitted(&mut self.since, &sets, &node.name, Instant::now());
                wanted_images(&sets, &node)
            }
            None => BTreeMap::new(),
        };
        let was_ready = |image: &str, set: &_| self.reports.was_ready(image, set);
        self.tasks.set(wanted, was_ready, self.first.take().as_ref());
        self.note_report();
    }

    /// Computes the reports, and plans to write them if they differ from what was written.
    fn note_report(&mut self) {
        let Some(node) = self.node_labels().filter(|_| self.sets.is_known()) else {
            return self.reports.cancel();
        };
        let now = Instant::now();
        let sets = sets_of_node(self.sets.objects().values(), &node);
        let next = report(&sets, &node.name, &self.tasks.states(), &self.since, now);
        self.reports.plan(next, &self.options, now);
    }

    fn wake_at(&self) -> Instant {
        let (now, node) = (Instant::now(), self.node_labels().unwrap_or_default());
        let sets = sets_of_node(self.sets.objects().values(), &node);
        let deadline = next_deadline(&sets, &self.since, now);
        let times = [self.reports.due(), deadline, Some(self.reports.refresh)];
        times.into_iter().flatten().min().unwrap_or(self.reports.refresh)
    }
}
