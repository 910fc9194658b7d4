//! The custom resource `ImageSet`: images that a cluster wants on its nodes.

#![allow(unreachable_pub, reason = "the derive of schemas with rules makes an item inside a function")]
#![allow(clippy::duplicated_attributes, reason = "columns are attributes of the same names")]

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::{CustomResource, KubeSchema};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// The images to have on the selected nodes.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[kube(
    group = "images.larder.dev",
    version = "v1alpha1",
    kind = "ImageSet",
    shortname = "imgset",
    status = "ImageSetStatus",
    derive = "PartialEq",
    doc = "Images that larder has on the selected nodes before a pod needs them.",
    printcolumn(name = "Images", type_ = "integer", json_path = ".status.images"),
    printcolumn(name = "Policy", type_ = "string", json_path = ".spec.policy"),
    printcolumn(name = "Desired", type_ = "integer", json_path = ".status.desired"),
    printcolumn(name = "Ready", type_ = "integer", json_path = ".status.ready"),
    printcolumn(name = "Failing", type_ = "integer", json_path = ".status.failing"),
    printcolumn(
        name = "Progress",
        type_ = "string",
        priority = 1,
        json_path = ".status.conditions[?(@.type==\"Progressing\")].reason"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct ImageSetSpec {
    /// The images, each once: a tag or a digest.
    #[x_kube(merge_strategy = ListMerge::Map(vec!["image".into()]))]
    #[schemars(length(min = 1, max = 1000))]
    pub images: Vec<SetImage>,
    /// Names of Secrets with registry credentials, in the namespace of larder.
    #[x_kube(merge_strategy = ListMerge::Set)]
    #[x_kube(validation = crate::image_sets::validation::secret_names())]
    #[schemars(length(max = 16), inner(length(min = 1, max = 253)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pull_secrets: Vec<String>,
    /// The nodes, by their labels; all nodes without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_selector: Option<NodeSelector>,
    /// Retention of an image after its pull.
    #[serde(default)]
    pub policy: RetentionPolicy,
    /// How many of the selected nodes may pull at the same time: a number or a percentage (rounded up). A node counts
    /// until it has all images, or has got none for five minutes while failing. Nodes are admitted in the order of
    /// their names; one that joins later and comes before `status.admittedUpTo` pulls at once, in addition.
    #[serde(default = "all_nodes")]
    #[schemars(schema_with = "parallelism")]
    pub parallelism: Option<IntOrString>,
    /// How long a node may take from when it may pull until it has all images; after that it is reported as failing,
    /// and continues. No limit without it.
    #[schemars(range(min = 1, max = 31_536_000))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_seconds: Option<u32>,
    /// How a failed pull is repeated.
    #[serde(default)]
    pub retry: RetryPolicy,
}

/// One image of a set.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct SetImage {
    /// Such as `registry.example/app:1` or `registry.example/app@sha256:...`.
    #[x_kube(validation = crate::image_sets::validation::image())]
    #[schemars(length(min = 1, max = 512))]
    pub image: String,
    /// Whether a present image is pulled again when the set changes or larder starts; as for a pod, by default only an
    /// image with the tag `latest` or without a tag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull_policy: Option<SetPullPolicy>,
    /// Whether the image is ready once its containers can start, while its data follows (true), or once all of it is on
    /// the node (false); by default as the settings of the node say. An image that is present already is ready even
    /// while it is incomplete, unless its pull policy pulls it again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lazy: Option<bool>,
}

/// Whether a present image is pulled again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub enum SetPullPolicy {
    /// Present or not.
    Always,
    /// Only a missing image is pulled.
    IfNotPresent,
}

/// Retention of an image after its pull. The strongest one counts where sets disagree; a later one is stronger.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize, JsonSchema,
)]
pub enum RetentionPolicy {
    /// Pulled once for each generation of the set. GC may remove it.
    PullOnce,
    /// larder's GC retains it, and it is pulled again if anything else removes it.
    #[default]
    KeepPresent,
    /// `KeepPresent`, and pinned over CRI: kubelet's GC and `crictl rmi` cannot remove it.
    Pin,
}

/// How a failed pull is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize, KubeSchema)]
#[x_kube(validation = crate::image_sets::validation::backoff())]
#[serde(rename_all = "camelCase")]
pub struct RetryPolicy {
    /// Attempts for each image until the set changes; without it, no limit.
    #[schemars(range(min = 1, max = 1_000_000))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u32>,
    /// Seconds until the second attempt; doubled after each one.
    #[schemars(range(min = 1, max = 86400))]
    #[serde(default = "first_backoff")]
    pub backoff_seconds: u32,
    /// The longest time between two attempts, in seconds.
    #[schemars(range(min = 1, max = 86400))]
    #[serde(default = "longest_backoff")]
    pub max_backoff_seconds: u32,
}

impl Default for RetryPolicy {
    fn default() -> RetryPolicy {
        RetryPolicy { limit: None, backoff_seconds: first_backoff(), max_backoff_seconds: longest_backoff() }
    }
}

/// Labels that a node must have: all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeSelector {
    /// Labels with their values.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[x_kube(validation = crate::image_sets::validation::labels())]
    #[schemars(extend("maxProperties" = 50, "additionalProperties" = { "type": "string", "maxLength": 63 }))]
    pub match_labels: BTreeMap<String, String>,
    /// Requirements on the values of labels.
    #[schemars(length(max = 50))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub match_expressions: Vec<LabelRequirement>,
}

/// A requirement on the value of one label.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, KubeSchema)]
#[x_kube(validation = Rule::new(
    "(self.operator in ['In', 'NotIn']) == (has(self.values) && self.values.size() > 0)"
).message("values must be given for In and NotIn, and for no other operator"))]
pub struct LabelRequirement {
    /// The label.
    #[x_kube(validation = crate::image_sets::validation::label_key())]
    #[schemars(length(min = 1, max = 317))]
    pub key: String,
    /// Requirement on the label's value.
    pub operator: LabelOperator,
    /// The values for `In` and `NotIn`.
    #[x_kube(validation = crate::image_sets::validation::label_values())]
    #[schemars(length(max = 100), inner(length(max = 63)))]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub values: Vec<String>,
}

/// As in a label selector of Kubernetes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub enum LabelOperator {
    /// One of `values`.
    In,
    /// None of `values`, or no such label.
    NotIn,
    /// Any value.
    Exists,
    /// No such label.
    DoesNotExist,
}

/// Counts over the reports of the nodes.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImageSetStatus {
    /// The generation that the counts are about.
    #[serde(default)]
    pub observed_generation: i64,
    /// Images of the set.
    #[serde(default)]
    pub images: u32,
    /// Nodes that the set selects.
    #[serde(default)]
    pub desired: u32,
    /// Nodes with all images.
    #[serde(default)]
    pub ready: u32,
    /// Nodes that pull, or have not reported yet.
    #[serde(default)]
    pub pulling: u32,
    /// Nodes that wait for others, because of `parallelism`.
    #[serde(default)]
    pub waiting: u32,
    /// Nodes on which an image failed or the deadline has passed.
    #[serde(default)]
    pub failing: u32,
    /// With a limited `parallelism`: the last node, by name, that may pull this generation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub admitted_up_to: Option<String>,
    /// The first failing nodes, by name.
    #[schemars(length(max = 10))]
    #[serde(default)]
    pub failures: Vec<NodeFailure>,
    /// `Ready`, `Progressing` and `Failing`.
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    #[serde(default)]
    pub conditions: Vec<Condition>,
}

/// Why a node is failing.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub struct NodeFailure {
    /// The node.
    pub node: String,
    /// The first image of the set that failed there.
    pub image: String,
    /// Text of the failure, shortened.
    pub message: String,
}

impl NodeSelector {
    /// Whether a node with these labels is selected.
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        let has = |(key, value): (&String, &String)| labels.get(key) == Some(value);
        self.match_labels.iter().all(has) && self.match_expressions.iter().all(|term| term.matches(labels))
    }
}

impl LabelRequirement {
    fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        let value = labels.get(&self.key);
        let is_listed = value.is_some_and(|value| self.values.contains(value));
        match self.operator {
            LabelOperator::In => is_listed,
            LabelOperator::NotIn => !is_listed,
            LabelOperator::Exists => value.is_some(),
            LabelOperator::DoesNotExist => value.is_none(),
        }
    }
}

impl ImageSetSpec {
    /// Whether a node with these labels is selected.
    pub fn selects(&self, labels: &BTreeMap<String, String>) -> bool {
        self.node_selector.as_ref().is_none_or(|selector| selector.matches(labels))
    }

    /// Whether every node may pull at once: `parallelism` is 100%.
    pub fn admits_all_nodes(&self) -> bool {
        self.node_limit(1).is_none()
    }

    /// How many of so many selected nodes may pull at the same time; `None` is all of them, now and later. A value that
    /// the API server would have refused is read as one node.
    pub fn node_limit(&self, selected: usize) -> Option<usize> {
        let limit = match self.parallelism.as_ref()? {
            IntOrString::Int(limit) => usize::try_from(*limit).unwrap_or_default(),
            IntOrString::String(text) => {
                let percent = text.strip_suffix('%').and_then(|percent| percent.parse::<usize>().ok());
                match percent {
                    Some(percent @ 1..100) => (selected * percent).div_ceil(100),
                    Some(100..) => return None,
                    _ => 1,
                }
            }
        };
        Some(limit.max(1))
    }
}

#[expect(clippy::unnecessary_wraps, reason = "the default of a field that may be null")]
fn all_nodes() -> Option<IntOrString> {
    Some(IntOrString::String("100%".to_owned()))
}

fn first_backoff() -> u32 {
    10
}

fn longest_backoff() -> u32 {
    300
}

fn parallelism(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "x-kubernetes-int-or-string": true,
        "maxLength": 10,
        "x-kubernetes-validations": [{
            "rule": "type(self) == int ? self >= 1 && self <= 1000000 : self.matches('^(100|[1-9][0-9]?)%$')",
            "message": "must be from 1 to 1000000, or a percentage from \"1%\" to \"100%\"",
        }],
    })
}

/// As counts are written.
pub(super) fn count(of: usize) -> u32 {
    u32::try_from(of).unwrap_or(u32::MAX)
}
