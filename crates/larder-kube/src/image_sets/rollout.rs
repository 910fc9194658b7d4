//! Status that the elected agent writes: counts over the nodes, and which nodes may pull.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;

use super::node_images::{NodeSetReport, NodeSetState};
use super::resource::{ImageSet, ImageSetStatus, NodeFailure, count};
use super::wanted::{generation_of, name_of};

/// So many failing nodes are named.
const NAMED_FAILURES: usize = 10;
/// The reason of conditions of a set that selects no node.
pub(super) const NO_MATCHING_NODES: &str = "NoMatchingNodes";
/// The condition of a set with pull secrets that cannot be read; absent otherwise.
pub(super) const PULL_SECRETS_MISSING: &str = "PullSecretsMissing";
/// Its reason: that of kubelet's event.
pub(super) const FAILED_TO_RETRIEVE: &str = "FailedToRetrieveImagePullSecret";
/// At most so many bytes of changed objects are sent to all watches of image sets in a second.
const WATCH_BYTES_PER_SECOND: u64 = 1_000_000;

/// A node that was admitted and is failing, or reports nothing, and for so long gets no further image does not keep
/// others from pulling.
pub(super) const STALLED_AFTER: Duration = Duration::from_secs(300);
/// Time without a further image after which a pulling node no longer counts: an image may be large, and the node may
/// have lost its power.
pub(super) const PULL_STALLED_AFTER: Duration = Duration::from_secs(1800);

/// An admitted node that does not have all images of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct UnfinishedNode {
    /// How many it has.
    pub(super) ready: u32,
    /// How long it may get no further image before others are admitted in its place.
    pub(super) stalls_after: Duration,
}

/// Labels of the nodes, by name.
pub(super) type Nodes = BTreeMap<String, BTreeMap<String, String>>;
/// Reports of the nodes, by the node's name.
pub(super) type Reports = BTreeMap<String, Vec<NodeSetReport>>;

/// The nodes that a set selects with what they report about its generation, in the order of their names.
pub(super) struct SelectedNodes<'a>(Vec<(&'a str, Option<&'a NodeSetReport>)>);

impl<'a> SelectedNodes<'a> {
    pub(super) fn of(set: &ImageSet, nodes: &'a Nodes, reports: &'a Reports) -> SelectedNodes<'a> {
        let (name, generation) = (name_of(set), generation_of(set));
        let selected = nodes.iter().filter(|(_, labels)| set.spec.selects(labels));
        let report = |node: &str| {
            let reported = reports.get(node).into_iter().flatten();
            reported.into_iter().find(|report| report.name == name && report.generation == generation)
        };
        SelectedNodes(selected.map(|(node, _)| (node.as_str(), report(node))).collect())
    }

    /// The admitted nodes that are not ready.
    pub(super) fn unfinished(&self, admitted_up_to: Option<&str>) -> BTreeMap<&'a str, UnfinishedNode> {
        let is_admitted = |node: &str| admitted_up_to.is_some_and(|last| node <= last);
        let unfinished = |(node, report): &(&'a str, Option<&NodeSetReport>)| {
            let stalls_after = match report.map(|report| report.state) {
                Some(NodeSetState::Ready) => return None,
                Some(NodeSetState::Pulling | NodeSetState::Waiting) => PULL_STALLED_AFTER,
                Some(NodeSetState::Failing) | None => STALLED_AFTER,
            };
            let ready = report.map_or(0, |report| report.ready);
            Some((*node, UnfinishedNode { ready, stalls_after }))
        };
        self.0.iter().filter(|(node, _)| is_admitted(node)).filter_map(unfinished).collect()
    }

    /// The last node that may pull now: the next ones while fewer than `limit` admitted ones are pulling. A failing
    /// node pulls its other images and retries. Nodes in `stalled` do not keep the others from pulling.
    fn admit(&self, known: Option<&'a str>, limit: usize, stalled: &BTreeSet<String>) -> Option<&'a str> {
        let is_pulling = |node: &str, report: Option<&NodeSetReport>| {
            report.is_none_or(|report| report.state != NodeSetState::Ready) && !stalled.contains(node)
        };
        let is_admitted = |node: &str| known.is_some_and(|last| node <= last);
        let admitted = self.0.iter().filter(|(node, _)| is_admitted(node));
        let mut pulling = admitted.filter(|(node, report)| is_pulling(node, *report)).count();
        let mut last = known;
        for (node, report) in self.0.iter().filter(|(node, _)| !is_admitted(node)) {
            if pulling >= limit {
                break;
            }
            pulling += usize::from(is_pulling(node, *report));
            last = Some(*node);
        }
        last
    }
}

/// The last node that the status of a set admits for its present generation.
pub(super) fn admitted_up_to(set: &ImageSet) -> Option<&str> {
    let status = set.status.as_ref().filter(|status| status.observed_generation == generation_of(set))?;
    status.admitted_up_to.as_deref()
}

/// Inputs of a set's status, beside the reports of its nodes.
#[derive(Default)]
pub(super) struct SetFindings {
    /// The nodes that do not keep others from pulling.
    pub(super) stalled: BTreeSet<String>,
    /// Pull secrets of the set that cannot be read.
    pub(super) missing_secrets: Vec<String>,
}

/// The status of a set.
pub(super) fn status_of(
    set: &ImageSet,
    selected: &SelectedNodes<'_>,
    findings: &SetFindings,
    now: Timestamp,
) -> ImageSetStatus {
    let limit = set.spec.node_limit(selected.0.len());
    let last = limit.and_then(|limit| selected.admit(admitted_up_to(set), limit, &findings.stalled));
    let mut status = ImageSetStatus {
        observed_generation: generation_of(set),
        images: count(set.spec.images.len()),
        desired: count(selected.0.len()),
        admitted_up_to: last.map(ToOwned::to_owned),
        ..ImageSetStatus::default()
    };
    for (node, report) in &selected.0 {
        let is_admitted = limit.is_none() || last.is_some_and(|last| *node <= last);
        match report.map(|report| report.state) {
            Some(NodeSetState::Ready) => status.ready += 1,
            Some(NodeSetState::Failing) => status.failing += 1,
            _ if is_admitted => status.pulling += 1,
            _ => status.waiting += 1,
        }
    }
    let failing = selected.0.iter().filter_map(|(node, report)| {
        let failure = report.filter(|report| report.state == NodeSetState::Failing)?.failure.clone()?;
        Some(NodeFailure { node: (*node).to_owned(), image: failure.image, message: failure.message })
    });
    status.failures = failing.take(NAMED_FAILURES).collect();
    status.conditions = conditions(set, &status, &findings.missing_secrets, now);
    status
}

/// How long no other status is written after one of a set: each one is sent to all nodes, and with it the images of the
/// set.
pub(super) fn write_cost(nodes: usize, object_bytes: usize) -> Duration {
    let bytes = u64::try_from(nodes.saturating_mul(object_bytes)).unwrap_or(u64::MAX);
    Duration::from_millis(bytes.saturating_mul(1000) / WATCH_BYTES_PER_SECOND)
}

fn conditions(
    set: &ImageSet,
    status: &ImageSetStatus,
    missing_secrets: &[String],
    now: Timestamp,
) -> Vec<Condition> {
    let ImageSetStatus { desired, ready, pulling, waiting, failing, .. } = *status;
    let on_nodes = match desired {
        0 => "no node matches nodeSelector".to_owned(),
        _ => format!("{ready} of {desired} nodes have all images"),
    };
    let (is_ready, why) = match (desired, ready == desired) {
        (0, _) => (true, NO_MATCHING_NODES),
        (_, true) => (true, "AllNodesReady"),
        (_, false) => (false, "NodesNotReady"),
    };
    let (is_progressing, progress) = match (pulling + waiting, failing) {
        (0, 0) if desired == 0 => (false, NO_MATCHING_NODES),
        (0, 0) => (false, "Complete"),
        (0, _) => (false, "NodesFailing"),
        _ => (true, "Pulling"),
    };
    let in_progress = format!("nodes that pull: {pulling}, that wait for parallelism: {waiting}");
    let failures = match status.failures.first() {
        Some(NodeFailure { node, image, message }) => {
            format!("{failing} of {desired} nodes failing; {node}: {image}: {message}")
        }
        None => "no node is failing".to_owned(),
    };
    let why_failing = if failing > 0 { "NodesFailing" } else { "NoFailures" };
    // In kubelet's words.
    let without_secrets = format!(
        "Unable to retrieve some image pull secrets ({}); attempting to pull the image may not succeed.",
        missing_secrets.join(", ")
    );
    let mut found = vec![
        ("Ready", is_ready, why, on_nodes),
        ("Progressing", is_progressing, progress, in_progress),
        ("Failing", failing > 0, why_failing, failures),
    ];
    if !missing_secrets.is_empty() {
        found.push((PULL_SECRETS_MISSING, true, FAILED_TO_RETRIEVE, without_secrets));
    }
    let condition = |(kind, is_true, reason, message): (&str, bool, &str, String)| {
        let known = set.status.iter().flat_map(|status| &status.conditions);
        let status = if is_true { "True" } else { "False" };
        let same = known.into_iter().find(|known| known.type_ == kind && known.status == status);
        Condition {
            type_: kind.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message,
            observed_generation: Some(generation_of(set)),
            last_transition_time: same.map_or(Time(now), |same| same.last_transition_time.clone()),
        }
    };
    found.into_iter().map(condition).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::NodeSetState::{Failing, Pulling, Ready, Waiting};
    use super::*;
    use crate::image_sets::node_images::ImageFailure;
    use crate::image_sets::wanted::tests::set;

    const NOW: Timestamp = Timestamp::UNIX_EPOCH;

    fn nodes(names: &[&str]) -> Nodes {
        names.iter().map(|name| ((*name).to_owned(), BTreeMap::new())).collect()
    }

    fn reports(states: &[(&str, i64, NodeSetState)]) -> Reports {
        let report = |&(node, generation, state): &(&str, i64, NodeSetState)| {
            let failure =
                (state == Failing).then(|| ImageFailure { image: "a:1".into(), message: "no route".into() });
            let name = "s".to_owned();
            (node.to_owned(), vec![NodeSetReport { name, generation, state, ready: 0, desired: 1, failure }])
        };
        states.iter().map(report).collect()
    }

    fn status(set: &ImageSet, nodes: &Nodes, reports: &Reports) -> ImageSetStatus {
        status_of(set, &SelectedNodes::of(set, nodes, reports), &SetFindings::default(), NOW)
    }

    fn condition(status: &ImageSetStatus, kind: &str) -> String {
        let found = status.conditions.iter().find(|condition| condition.type_ == kind).unwrap();
        format!("{} {}: {}", found.status, found.reason, found.message)
    }

    #[test]
    fn nodes_are_counted_by_their_report_about_this_generation() {
        let set = set("s", json!({ "images": [{ "image": "a:1" }] }));
        let nodes = nodes(&["n1", "n2", "n3", "n4"]);
        let reported = [("n1", 1, Ready), ("n2", 1, Failing), ("n3", 0, Ready), ("gone", 1, Ready)];
        let found = status(&set, &nodes, &reports(&reported));
        let counts = (found.desired, found.ready, found.failing, found.pulling, found.waiting, found.images);
        assert_eq!(counts, (4, 1, 1, 2, 0, 1));
        assert_eq!((found.failures.len(), found.failures[0].node.as_str()), (1, "n2"));
        assert_eq!(condition(&found, "Ready"), "False NodesNotReady: 1 of 4 nodes have all images");
        let failing = "True NodesFailing: 1 of 4 nodes failing; n2: a:1: no route";
        assert_eq!(condition(&found, "Failing"), failing);
        assert_eq!(
            condition(&found, "Progressing"),
            "True Pulling: nodes that pull: 2, that wait for parallelism: 0"
        );
        let none = status(&set, &Nodes::new(), &Reports::new());
        assert_eq!(condition(&none, "Ready"), "True NoMatchingNodes: no node matches nodeSelector");
        assert!(condition(&none, "Progressing").starts_with("False NoMatchingNodes"));
    }

    #[test]
    fn pull_secrets_that_cannot_be_read_are_a_condition_in_kubelets_words() {
        let set = set("s", json!({ "images": [{ "image": "a:1" }], "pullSecrets": ["a", "b"] }));
        let (nodes, reports) = (nodes(&["n1"]), reports(&[("n1", 1, Ready)]));
        let missing_secrets = vec!["a".to_owned(), "b".to_owned()];
        let findings = SetFindings { missing_secrets, ..SetFindings::default() };
        let found = status_of(&set, &SelectedNodes::of(&set, &nodes, &reports), &findings, NOW);
        let expected = "True FailedToRetrieveImagePullSecret: Unable to retrieve some image pull secrets (a, b); \
                        attempting to pull the image may not succeed.";
        assert_eq!(condition(&found, "PullSecretsMissing"), expected);
        assert_eq!(status(&set, &nodes, &reports).conditions.len(), 3);
    }

    #[test]
    fn at_most_ten_failing_nodes_are_named_and_a_condition_keeps_its_time() {
        let mut set = set("s", json!({ "images": [{ "image": "a:1" }] }));
        let names: Vec<_> = (0..15).map(|index| format!("n{index:02}")).collect();
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        let failing: Vec<_> = names.iter().map(|name| (*name, 1, Failing)).collect();
        let found = status(&set, &nodes(&names), &reports(&failing));
        assert_eq!((found.failing, found.failures.len(), found.failures[9].node.as_str()), (15, 10, "n09"));
        set.status = Some(found.clone());
        let later = NOW + Duration::from_secs(60);
        let (nodes, ready) = (nodes(&names), reports(&[("n00", 1, Ready)]));
        let next = status_of(&set, &SelectedNodes::of(&set, &nodes, &ready), &SetFindings::default(), later);
        let time = |status: &ImageSetStatus, at: usize| status.conditions[at].last_transition_time.0;
        assert_eq!([time(&next, 0), time(&next, 1), time(&next, 2)], [NOW, later, later]);
    }

    #[test]
    fn nodes_are_admitted_in_turn_while_fewer_than_the_limit_pull() {
        let all = nodes(&["n1", "n2", "n3", "n4", "n5"]);
        let admitted = |known: Option<&str>, reported: &[(&str, i64, NodeSetState)], stalled: &[&str]| {
            let mut set = set("s", json!({ "images": [{ "image": "a:1" }], "parallelism": "40%" }));
            let known = json!({ "observedGeneration": 1, "admittedUpTo": known });
            set.status = serde_json::from_value(known).unwrap();
            let stalled = stalled.iter().map(|node| (*node).to_owned()).collect();
            let findings = SetFindings { stalled, ..SetFindings::default() };
            let reports = reports(reported);
            let found = status_of(&set, &SelectedNodes::of(&set, &all, &reports), &findings, NOW);
            (found.admitted_up_to.unwrap_or_default(), found.pulling, found.waiting)
        };
        let cases = [
            (None, vec![], vec![], ("n2", 2, 3)),
            (Some("n2"), vec![("n1", 1, Pulling)], vec![], ("n2", 2, 3)),
            (Some("n2"), vec![("n1", 1, Ready), ("n2", 1, Pulling)], vec![], ("n3", 2, 2)),
            // A failing node still pulls. One that has failed for long does not block the others; nor does one that is
            // down.
            (Some("n2"), vec![("n1", 1, Failing), ("n2", 1, Pulling)], vec![], ("n2", 1, 3)),
            (Some("n2"), vec![("n1", 1, Failing), ("n2", 1, Pulling)], vec!["n1"], ("n3", 2, 2)),
            (Some("n2"), vec![("n1", 1, Pulling)], vec!["n2"], ("n3", 3, 2)),
            // Nor does one that lost its power during a pull.
            (Some("n2"), vec![("n1", 1, Ready), ("n2", 1, Pulling)], vec!["n2"], ("n4", 3, 1)),
            // A node that has everything already takes no turn.
            (None, vec![("n1", 1, Ready), ("n2", 1, Waiting)], vec![], ("n3", 2, 2)),
            (Some("n5"), vec![], vec![], ("n5", 5, 0)),
        ];
        for (known, reported, silent, (last, pulling, waiting)) in cases {
            let found = admitted(known, &reported, &silent);
            assert_eq!(found, (last.to_owned(), pulling, waiting), "{known:?} {reported:?}");
        }
    }

    #[test]
    fn an_admitted_node_is_unfinished_until_it_is_ready_and_longer_while_it_pulls() {
        let set = set("s", json!({ "images": [{ "image": "a:1" }], "parallelism": 1 }));
        let all = nodes(&["n1", "n2", "n3", "n4", "n5"]);
        let reported =
            reports(&[("n1", 1, Ready), ("n2", 1, Failing), ("n3", 1, Pulling), ("n5", 1, Pulling)]);
        let found = SelectedNodes::of(&set, &all, &reported).unfinished(Some("n4"));
        let limits: Vec<_> = found.iter().map(|(node, found)| (*node, found.stalls_after)).collect();
        let expected = [("n2", STALLED_AFTER), ("n3", PULL_STALLED_AFTER), ("n4", STALLED_AFTER)];
        assert_eq!(limits, expected);
    }

    #[test]
    fn a_status_is_written_less_often_the_more_it_costs_all_watches() {
        let seconds = |nodes, bytes| write_cost(nodes, bytes).as_secs();
        assert_eq!([seconds(10, 2_000), seconds(1_000, 2_000), seconds(1_000, 80_000)], [0, 2, 80]);
    }
}
