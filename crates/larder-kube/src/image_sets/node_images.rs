//! The custom resource `NodeImages`: what one node reports about the image sets that select it.
//!
//! Only that node's agent writes it, so that nodes never conflict; the elected agent counts. It has neither spec nor
//! status, as `EndpointSlice` has none: one request writes it.

#![allow(unreachable_pub, reason = "the derive of schemas with rules makes an item inside a function")]
#![allow(clippy::duplicated_attributes, reason = "columns are attributes of the same names")]

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::resource::count;

/// Report of a node about its image sets.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[kube(
    group = "images.larder.dev",
    version = "v1alpha1",
    kind = "NodeImages",
    plural = "nodeimages",
    no_spec,
    derive = "PartialEq",
    doc = "What one node, of the same name, reports about the image sets that select it. larder writes it.",
    printcolumn(name = "Sets", type_ = "integer", json_path = ".sets"),
    printcolumn(name = "Ready", type_ = "integer", json_path = ".ready"),
    printcolumn(name = "Failing", type_ = "integer", json_path = ".failing"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct NodeImagesReport {
    /// How many sets select the node.
    #[serde(default)]
    pub sets: u32,
    /// How many of them have all images here.
    #[serde(default)]
    pub ready: u32,
    /// How many of them are failing here.
    #[serde(default)]
    pub failing: u32,
    /// The sets that select the node.
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    #[serde(default)]
    pub image_sets: Vec<NodeSetReport>,
}

impl NodeImagesReport {
    /// Of these sets.
    pub fn of(image_sets: Vec<NodeSetReport>) -> NodeImagesReport {
        let in_state = |state| count(image_sets.iter().filter(|set| set.state == state).count());
        NodeImagesReport {
            sets: count(image_sets.len()),
            ready: in_state(NodeSetState::Ready),
            failing: in_state(NodeSetState::Failing),
            image_sets,
        }
    }
}

/// One set on one node.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeSetReport {
    /// Name of the `ImageSet`.
    pub name: String,
    /// Its generation that the report is about.
    pub generation: i64,
    /// How far the node is.
    pub state: NodeSetState,
    /// Images of the set that are present, or, with `PullOnce`, were.
    pub ready: u32,
    /// Images of the set.
    pub desired: u32,
    /// The first failed image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<ImageFailure>,
}

impl NodeSetReport {
    /// Whether this image of the set is known to be ready: of several that are not, the report names one.
    pub(super) fn has_ready(&self, image: &str) -> bool {
        match self.desired.checked_sub(self.ready) {
            Some(0) => true,
            Some(1) => self.failure.as_ref().is_some_and(|failure| failure.image != image),
            _ => false,
        }
    }
}

/// How far a node is with a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub enum NodeSetState {
    /// `parallelism` of the set does not admit the node yet.
    Waiting,
    /// Not all images are present.
    Pulling,
    /// All images are present.
    Ready,
    /// An image failed, or the deadline has passed.
    Failing,
}

/// Why an image is not there.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
pub struct ImageFailure {
    /// As the set has it.
    pub image: String,
    /// Text of the failure, shortened.
    #[schemars(length(max = 1024))]
    pub message: String,
}
