//! Decides when to write this node's `NodeImages`, and keeps what was written.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use tokio::time::Instant;

use super::ImageSetOptions;
use super::node_images::{NodeImages, NodeImagesReport, NodeSetReport};
use super::tasks::random;
use crate::cluster::Cluster;
use crate::error::{ClusterError, ErrorLog};

/// Reports as written, and the time of the next write.
pub(super) struct ReportWriter {
    /// As the object is now, empty if it does not exist; `None` if that is not known.
    written: Option<Vec<NodeSetReport>>,
    /// Reports of an earlier process of larder.
    before: Vec<NodeSetReport>,
    next: Vec<NodeSetReport>,
    /// Uid of the node that the reports are about.
    owner: String,
    due: Option<Instant>,
    pub(super) refresh: Instant,
    log: ErrorLog,
}

impl ReportWriter {
    /// There are no earlier reports, unless one is taken in.
    pub(super) fn new(options: &ImageSetOptions, now: Instant) -> ReportWriter {
        ReportWriter {
            written: Some(Vec::new()),
            before: Vec::new(),
            next: Vec::new(),
            owner: String::new(),
            due: None,
            refresh: now + options.refresh,
            log: ErrorLog::default(),
        }
    }

    /// Takes in the report of before a restart.
    pub(super) fn take_in(&mut self, found: NodeImages) {
        let owners = found.metadata.owner_references.unwrap_or_default();
        self.owner =
            owners.into_iter().find(|owner| owner.kind == "Node").map_or_else(String::new, |owner| owner.uid);
        self.before = found.spec.image_sets;
        self.written = Some(self.before.clone());
    }

    /// The reports are about the node of this uid. What an earlier node of the same name has reported is removed with
    /// that node, and is not true of this one.
    pub(super) fn set_owner(&mut self, uid: &str) {
        if self.owner != uid {
            (self.owner, self.written) = (uid.to_owned(), Some(Vec::new()));
            self.before.clear();
        }
    }

    /// Whether an image of a set, with the set's generation, was ready before larder started.
    pub(super) fn was_ready(&self, image: &str, (set, generation): &(String, i64)) -> bool {
        let of_set = |report: &&NodeSetReport| report.name == *set && report.generation == *generation;
        self.before.iter().find(of_set).is_some_and(|report| report.has_ready(image))
    }

    /// Plans to write these reports if they differ from what was written.
    pub(super) fn plan(&mut self, next: Vec<NodeSetReport>, options: &ImageSetOptions, now: Instant) {
        // A set that is created again is another one, also with the same generation.
        let is_same = |old: &NodeSetReport, new: &NodeSetReport| {
            (&old.name, old.generation) == (&new.name, new.generation)
        };
        self.before.retain(|old| next.iter().any(|new| is_same(old, new)));
        self.next = next;
        let is_written = self.written.as_ref() == Some(&self.next);
        self.due = match self.due {
            _ if is_written => None,
            Some(due) => Some(due),
            None => Some(now + options.report_delay.mul_f64(1.0 + random())),
        };
    }

    /// There is nothing to report about.
    pub(super) fn cancel(&mut self) {
        self.due = None;
    }

    /// When to write.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    pub(super) async fn write_if_due(&mut self, cluster: &Cluster, options: &ImageSetOptions) {
        let now = Instant::now();
        let is_refresh = self.refresh <= now;
        if is_refresh {
            self.refresh = now + options.refresh.mul_f64(0.75 + random() / 2.0);
        }
        // A write that changes nothing restores an object that was removed.
        let is_due = self.due.is_some_and(|due| due <= now)
            || (is_refresh && self.written.as_ref().is_none_or(|written| !written.is_empty()));
        if !is_due || self.owner.is_empty() {
            return;
        }
        let written = write_report(cluster, &self.owner, &self.next).await;
        self.note_written(&written, now + options.retry.mul_f64(1.0 + random()));
        self.log.note("report about image sets", written);
    }

    /// Notes how a write of the next reports ended. One that failed may have reached the API server all the same.
    fn note_written(&mut self, written: &Result<(), ClusterError>, retry_at: Instant) {
        (self.written, self.due) = match written {
            Ok(()) => (Some(self.next.clone()), None),
            Err(_) => (None, Some(retry_at)),
        };
    }
}

/// Replaces the report of a node, which is removed together with the node.
async fn write_report(
    cluster: &Cluster,
    node_uid: &str,
    reports: &[NodeSetReport],
) -> Result<(), ClusterError> {
    let (api, node): (Api<NodeImages>, _) = (Api::all(cluster.client.clone()), &cluster.node);
    let mut object = NodeImages::new(node, NodeImagesReport::of(reports.to_vec()));
    object.metadata.owner_references = Some(vec![OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: node.clone(),
        uid: node_uid.to_owned(),
        ..OwnerReference::default()
    }]);
    let what = format!("nodeimages {node}");
    let (params, patch) = (PatchParams::default(), Patch::Merge(&object));
    match cluster.call(what.clone(), api.patch(node, &params, &patch)).await {
        Err(ClusterError::NotFound { .. }) => {
            let params = PostParams::default();
            cluster.call(what, api.create(&params, &object)).await.map(drop)
        }
        answer => answer.map(drop),
    }
}

/// Says that no image set has images on this node: larder no longer follows them.
pub(super) async fn clear_report(cluster: &Cluster) -> Result<(), ClusterError> {
    let (api, node): (Api<NodeImages>, _) = (Api::all(cluster.client.clone()), &cluster.node);
    let patch = Patch::Merge(NodeImagesReport::default());
    let answer =
        cluster.call(format!("nodeimages {node}"), api.patch(node, &PatchParams::default(), &patch)).await;
    match answer {
        // Nothing was ever reported.
        Ok(_) | Err(ClusterError::NotFound { .. }) => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;
    use crate::image_sets::node_images::ImageFailure;
    use crate::image_sets::wanted::tests::set;
    use crate::image_sets::wanted::{NodeLabels, WantedImage, wanted_images};

    fn writer_after_restart() -> ReportWriter {
        let found = json!({
            "apiVersion": "images.larder.dev/v1alpha1", "kind": "NodeImages",
            "metadata": { "name": "n1", "ownerReferences": [
                { "apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "u1" },
            ] },
            "imageSets": [{ "name": "s", "generation": 1, "state": "Ready", "ready": 1, "desired": 1 }],
        });
        let mut writer = ReportWriter::new(&ImageSetOptions::new("default"), Instant::now());
        writer.take_in(serde_json::from_value(found).unwrap());
        writer
    }

    fn wanted() -> BTreeMap<String, WantedImage> {
        let set = set("s", json!({ "images": [{ "image": "a:1" }], "policy": "PullOnce" }));
        wanted_images(&[&set], &NodeLabels::default())
    }

    #[test]
    fn the_report_of_before_a_restart_is_written_again_only_if_it_is_not_true_any_more() {
        let (options, now) = (ImageSetOptions::new("default"), Instant::now());
        let mut writer = writer_after_restart();
        writer.set_owner("u1");
        let same = writer.written.clone().unwrap();
        writer.plan(same, &options, now);
        assert_eq!(writer.due(), None, "it is written already");
        writer.plan(Vec::new(), &options, now);
        assert!(writer.due().is_some(), "no set selects the node: the old report is cleared");
    }

    #[test]
    fn a_report_whose_write_has_no_answer_is_replaced_when_its_set_is_deleted() {
        let (options, now) = (ImageSetOptions::new("default"), Instant::now());
        let reports = writer_after_restart().written.unwrap();
        let mut writer = ReportWriter::new(&options, now);
        writer.plan(reports, &options, now);
        writer.note_written(&Err(ClusterError::Unavailable { message: "timed out".into() }), now);
        writer.plan(Vec::new(), &options, now);
        assert!(writer.due().is_some(), "the API server may have it");
        writer.note_written(&Ok(()), now);
        writer.plan(Vec::new(), &options, now);
        assert_eq!(writer.due(), None);
    }

    #[test]
    fn where_one_image_had_failed_the_others_were_ready_before_a_restart() {
        let mut writer = writer_after_restart();
        let mut was_ready = |ready, generation| {
            let failure = ImageFailure { image: "b:1".into(), message: "not found".into() };
            let report = &mut writer.before[0];
            (report.ready, report.desired, report.failure) = (ready, 3, Some(failure));
            ["a:1", "b:1"].map(|image| writer.was_ready(image, &("s".into(), generation)))
        };
        assert_eq!(was_ready(2, 1), [true, false]);
        assert_eq!(was_ready(1, 1), [false, false], "another one was not ready");
        assert_eq!(was_ready(2, 2), [false, false], "the set has changed");
    }

    #[test]
    fn what_an_earlier_node_of_the_same_name_has_pulled_is_not_done() {
        let (mut same, mut reinstalled) = (writer_after_restart(), writer_after_restart());
        same.set_owner("u1");
        reinstalled.set_owner("u2");
        assert!(same.was_ready("a:1", &wanted()["a:1"].sets[0]));
        assert!(!reinstalled.was_ready("a:1", &wanted()["a:1"].sets[0]));
        assert_eq!(reinstalled.written, Some(Vec::new()), "it is removed with that node");
    }
}
