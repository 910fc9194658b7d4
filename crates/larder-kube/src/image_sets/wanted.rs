//! The images that a node should have by the sets that select it.

use std::collections::BTreeMap;

use larder::pull::{PullPolicy, default_policy};
use larder::reference::ImageName;

use super::resource::{ImageSet, RetentionPolicy, RetryPolicy, SetImage, SetPullPolicy};

/// A node, as a selector sees it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct NodeLabels {
    /// Name of its object.
    pub name: String,
    /// Uid of its object.
    pub uid: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
}

/// One image that the node should have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedImage {
    /// As the sets have it.
    pub image: ImageName,
    /// Strongest policy of the sets that want the image.
    pub retention: RetentionPolicy,
    /// `Always` if one of the sets says so, else `IfNotPresent`.
    pub pull_policy: PullPolicy,
    /// True if containers may start before all of the image is here, false if one of the sets wants all of it first;
    /// `None` if no set decides.
    pub lazy: Option<bool>,
    /// Names of the Secrets of all sets, in the namespace of larder.
    pub pull_secrets: Vec<String>,
    /// The shortest back-off and the highest limit of the sets.
    pub retry: RetryPolicy,
    /// True if a set admits the node: the image may be pulled now.
    pub is_admitted: bool,
    /// Names and generations of the sets. A change of a set begins the attempts again.
    pub sets: Vec<(String, i64)>,
}

impl WantedImage {
    fn new(set: &ImageSet, image: &SetImage, is_admitted: bool) -> WantedImage {
        let pull_policy = match image.pull_policy {
            Some(SetPullPolicy::Always) => PullPolicy::Always,
            Some(SetPullPolicy::IfNotPresent) => PullPolicy::IfNotPresent,
            None => default_policy(&image.image),
        };
        WantedImage {
            image: ImageName::from(image.image.as_str()),
            retention: set.spec.policy,
            pull_policy,
            lazy: image.lazy,
            pull_secrets: set.spec.pull_secrets.clone(),
            retry: set.spec.retry,
            is_admitted,
            sets: vec![(name_of(set).to_owned(), generation_of(set))],
        }
    }

    fn join(&mut self, other: WantedImage) {
        self.retention = self.retention.max(other.retention);
        if other.pull_policy == PullPolicy::Always {
            self.pull_policy = PullPolicy::Always;
        }
        self.lazy = [self.lazy, other.lazy].into_iter().flatten().min();
        for secret in other.pull_secrets {
            if !self.pull_secrets.contains(&secret) {
                self.pull_secrets.push(secret);
            }
        }
        let (one, two) = (self.retry, other.retry);
        self.retry = RetryPolicy {
            limit: one.limit.zip(two.limit).map(|(one, two)| one.max(two)),
            backoff_seconds: one.backoff_seconds.min(two.backoff_seconds),
            max_backoff_seconds: one.max_backoff_seconds.min(two.max_backoff_seconds),
        };
        self.is_admitted |= other.is_admitted;
        self.sets.extend(other.sets);
    }
}

/// The sets that select a node, by name. A set that is being deleted selects none.
pub(super) fn sets_of_node<'a>(
    sets: impl IntoIterator<Item = &'a ImageSet>,
    node: &NodeLabels,
) -> Vec<&'a ImageSet> {
    let selects =
        |set: &&ImageSet| set.metadata.deletion_timestamp.is_none() && set.spec.selects(&node.labels);
    let mut selecting: Vec<_> = sets.into_iter().filter(selects).collect();
    selecting.sort_by(|a, b| name_of(a).cmp(name_of(b)));
    selecting
}

/// The images of these sets, each once, by name.
pub(super) fn wanted_images(sets: &[&ImageSet], node: &NodeLabels) -> BTreeMap<String, WantedImage> {
    let mut wanted: BTreeMap<String, WantedImage> = BTreeMap::new();
    for set in sets {
        let is_admitted = admits(set, &node.name);
        for image in &set.spec.images {
            let new = WantedImage::new(set, image, is_admitted);
            match wanted.get_mut(&image.image) {
                Some(known) => known.join(new),
                None => {
                    wanted.insert(image.image.clone(), new);
                }
            }
        }
    }
    wanted
}

/// Whether a node may pull the images of a set now. With a limited `parallelism` the elected agent decides, for this
/// generation of the set; without its decision no node may.
pub(super) fn admits(set: &ImageSet, node: &str) -> bool {
    if set.spec.admits_all_nodes() {
        return true;
    }
    let decided = set.status.as_ref().filter(|status| status.observed_generation == generation_of(set));
    decided.and_then(|status| status.admitted_up_to.as_deref()).is_some_and(|last| node <= last)
}

/// Name of a set.
pub(super) fn name_of(set: &ImageSet) -> &str {
    set.metadata.name.as_deref().unwrap_or_default()
}

/// Generation of a set.
pub(super) fn generation_of(set: &ImageSet) -> i64 {
    set.metadata.generation.unwrap_or_default()
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A set of this name and generation 1.
    pub(in crate::image_sets) fn set(name: &str, spec: impl Into<Value>) -> ImageSet {
        let metadata = json!({ "name": name, "uid": format!("uid-{name}"), "generation": 1 });
        serde_json::from_value(json!({
            "apiVersion": "images.larder.dev/v1alpha1", "kind": "ImageSet", "metadata": metadata, "spec": spec.into(),
        }))
        .unwrap()
    }

    fn node(labels: &[(&str, &str)]) -> NodeLabels {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        NodeLabels { name: "n5".into(), uid: "u".into(), labels }
    }

    #[test]
    fn a_set_selects_nodes_by_labels_and_expressions() {
        let term = |operator: &str, values: &[&str]| json!({ "key": "zone", "operator": operator, "values": values });
        let gpu = json!({ "matchLabels": { "gpu": "a" } });
        let cases = [
            (json!({}), [true, true, true]),
            (gpu.clone(), [false, true, false]),
            (json!({ "matchExpressions": [term("In", &["x", "y"])] }), [false, false, true]),
            (json!({ "matchExpressions": [term("NotIn", &["x"])] }), [true, true, false]),
            (json!({ "matchExpressions": [term("Exists", &[])] }), [false, true, true]),
            (json!({ "matchExpressions": [term("DoesNotExist", &[])] }), [true, false, false]),
            (
                json!({ "matchLabels": { "gpu": "a" }, "matchExpressions": [term("In", &["x"])] }),
                [false, false, false],
            ),
        ];
        let nodes = [node(&[]), node(&[("gpu", "a"), ("zone", "z")]), node(&[("zone", "x")])];
        for (selector, selected) in cases {
            let set = set("s", json!({ "images": [{ "image": "a:1" }], "nodeSelector": selector }));
            let found = nodes.each_ref().map(|node| !sets_of_node([&set], node).is_empty());
            assert_eq!(found, selected, "{selector}");
        }
        let mut deleted = set("s", json!({ "images": [{ "image": "a:1" }] }));
        deleted.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
        assert!(sets_of_node([&deleted], &nodes[0]).is_empty());
    }

    #[test]
    fn the_strongest_policy_wins_where_sets_disagree() {
        let once = json!({
            "images": [{ "image": "a:1", "lazy": true }, { "image": "b", "lazy": true }], "policy": "PullOnce",
            "pullSecrets": ["one"],
            "retry": { "limit": 3, "backoffSeconds": 5 },
        });
        let pin = json!({
            "images": [{ "image": "a:1", "pullPolicy": "Always", "lazy": false }, { "image": "b" }], "policy": "Pin",
            "pullSecrets": ["two", "one"],
            "retry": { "limit": 7 },
        });
        let (once, pin) = (set("once", once), set("pin", pin));
        let wanted = wanted_images(&sets_of_node([&pin, &once], &node(&[])), &node(&[]));
        let (a, b) = (&wanted["a:1"], &wanted["b"]);
        assert_eq!((a.retention, &a.pull_policy), (RetentionPolicy::Pin, &PullPolicy::Always));
        assert_eq!(a.pull_secrets, ["one", "two"]);
        assert_eq!((a.retry.limit, a.retry.backoff_seconds), (Some(7), 5));
        assert_eq!(a.sets, [("once".to_owned(), 1), ("pin".to_owned(), 1)]);
        assert_eq!((b.retention, &b.pull_policy), (RetentionPolicy::Pin, &PullPolicy::Always), "latest");
        assert_eq!((a.lazy, b.lazy), (Some(false), Some(true)), "all of it where a set wants that");
    }

    #[test]
    fn a_limited_set_admits_only_nodes_of_a_decision_about_its_generation() {
        let spec = |parallelism: Value| json!({ "images": [{ "image": "a:1" }], "parallelism": parallelism });
        let decided = |generation: i64, last: Option<&str>| {
            let mut set = set("s", spec(json!(2)));
            let status = json!({ "observedGeneration": generation, "admittedUpTo": last });
            set.status = serde_json::from_value(status).unwrap();
            set
        };
        assert!(admits(&set("s", json!({ "images": [{ "image": "a:1" }] })), "n5"), "100% by default");
        assert!(!admits(&set("s", spec(json!("99%"))), "n5"), "no decision");
        for (generation, last, admitted) in
            [(1, None, false), (1, Some("n4"), false), (1, Some("n5"), true), (0, Some("n9"), false)]
        {
            assert_eq!(admits(&decided(generation, last), "n5"), admitted, "{generation} {last:?}");
        }
    }
}
