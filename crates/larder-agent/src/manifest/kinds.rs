//! Which Kubernetes kinds larder reads, and where in each of them the pod is.

use larder::suggestions;

/// Kind of a document, as far as larder distinguishes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ManifestKind {
    /// A pod.
    Pod,
    /// A pod template lies at this path.
    Template(&'static [&'static str]),
    /// A secret.
    Secret,
    /// A list of objects, which may leave their kind to the list.
    List,
    /// A custom kind with a pod template at the usual path.
    Foreign,
    /// Nothing that names images.
    Other,
    /// No kind at all: its group is Kubernetes' own, which has none of this name.
    Unknown,
}

/// Where most controllers keep their pod template.
pub(super) const USUAL_TEMPLATE: &[&str] = &["spec", "template"];

impl ManifestKind {
    /// Where the pod template lies; empty where there is none.
    pub(super) fn template(self) -> &'static [&'static str] {
        match self {
            ManifestKind::Template(path) => path,
            ManifestKind::Foreign => USUAL_TEMPLATE,
            _ => &[],
        }
    }
}

/// The kinds of the groups in which a kind that larder does not know can only be a slip.
const KINDS: [(&str, &[&str]); 3] = [
    (
        "",
        &[
            "Binding",
            "ComponentStatus",
            "ConfigMap",
            "Endpoints",
            "Event",
            "LimitRange",
            "List",
            "Namespace",
            "Node",
            "PersistentVolume",
            "PersistentVolumeClaim",
            "Pod",
            "PodTemplate",
            "ReplicationController",
            "ResourceQuota",
            "Secret",
            "Service",
            "ServiceAccount",
            "Status",
        ],
    ),
    ("apps", &["ControllerRevision", "DaemonSet", "Deployment", "ReplicaSet", "Scale", "StatefulSet"]),
    ("batch", &["CronJob", "Job"]),
];

/// Classifies an `apiVersion` and `kind`. The group must match, the version may be unknown.
pub(super) fn kind_of(api_version: &str, kind: &str) -> ManifestKind {
    let group = api_version.split_once('/').map_or("", |(group, _)| group);
    match (group, kind) {
        ("", "Pod") => ManifestKind::Pod,
        ("", "Secret") => ManifestKind::Secret,
        ("", "ReplicationController")
        | ("apps", "Deployment" | "StatefulSet" | "DaemonSet" | "ReplicaSet")
        | ("extensions", "Deployment" | "DaemonSet" | "ReplicaSet")
        | ("batch", "Job") => ManifestKind::Template(&["spec", "template"]),
        ("batch", "CronJob") => ManifestKind::Template(&["spec", "jobTemplate", "spec", "template"]),
        ("", "PodTemplate") => ManifestKind::Template(&["template"]),
        ("", "List") => ManifestKind::List,
        // `PodList` and its like hold what their name says.
        (_, list) => match list.strip_suffix("List") {
            Some(item) if !item.is_empty() => match kind_of(api_version, item) {
                ManifestKind::Other => ManifestKind::Other,
                ManifestKind::Unknown => ManifestKind::Unknown,
                _ => ManifestKind::List,
            },
            _ => match kinds_of(group) {
                Some(kinds) if !kinds.contains(&kind) => ManifestKind::Unknown,
                _ => ManifestKind::Other,
            },
        },
    }
}

/// The kinds of a group, if all of them are known here.
fn kinds_of(group: &str) -> Option<&'static [&'static str]> {
    KINDS.iter().find(|(known, _)| *known == group).map(|(_, kinds)| *kinds)
}

/// A suggestion for a kind that its group does not have: the same kind of another group, or one spelt alike.
pub(super) fn meant(api_version: &str, kind: &str) -> Option<String> {
    let group = api_version.split_once('/').map_or("", |(group, _)| group);
    let other_group = KINDS.iter().find(|(known, kinds)| *known != group && kinds.contains(&kind));
    if let Some((group, _)) = other_group {
        let version = if group.is_empty() { "v1".to_owned() } else { format!("{group}/v1") };
        return Some(format!("{kind} has the apiVersion {version}"));
    }
    let all = KINDS.iter().flat_map(|(_, kinds)| kinds.iter().copied());
    suggestions::nearest(kind, all).map(|meant| format!("did you mean {meant}?"))
}

/// The kind that a list's items have when they do not say: `Pod` in a `PodList`, none in a `List`.
pub(super) fn item_kind(list: &str) -> Option<&str> {
    list.strip_suffix("List").filter(|item| !item.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_workload_keeps_its_template_where_kubernetes_has_it() {
        for (api_version, kind) in [
            ("apps/v1", "Deployment"),
            ("apps/v1", "StatefulSet"),
            ("apps/v1", "DaemonSet"),
            ("apps/v1", "ReplicaSet"),
            ("v1", "ReplicationController"),
            ("batch/v1", "Job"),
        ] {
            assert_eq!(kind_of(api_version, kind), ManifestKind::Template(&["spec", "template"]), "{kind}");
        }
        assert_eq!(
            kind_of("batch/v1", "CronJob"),
            ManifestKind::Template(&["spec", "jobTemplate", "spec", "template"])
        );
    }

    #[test]
    fn a_kind_of_another_group_is_another_kind() {
        assert_eq!(kind_of("serving.knative.dev/v1", "Deployment"), ManifestKind::Other);
        assert_eq!(kind_of("metrics.k8s.io/v1beta1", "PodList"), ManifestKind::Other);
        assert_eq!(kind_of("v1", "ConfigMapList"), ManifestKind::Other);
    }

    #[test]
    fn a_kind_unknown_to_a_kubernetes_group_is_misspelt() {
        for (api_version, kind, said) in [
            ("apps/v1", "Deploymnet", "did you mean Deployment?"),
            ("v1", "pod", "did you mean Pod?"),
            ("v1", "Deployment", "Deployment has the apiVersion apps/v1"),
            ("batch/v1", "Pod", "Pod has the apiVersion v1"),
        ] {
            assert_eq!(kind_of(api_version, kind), ManifestKind::Unknown, "{kind}");
            assert_eq!(meant(api_version, kind).as_deref(), Some(said));
        }
        assert_eq!(kind_of("v1", "PodsList"), ManifestKind::Unknown);
        assert_eq!(meant("v1", "Xyzzy"), None);
        assert_eq!(kind_of("v1", "Service"), ManifestKind::Other);
        assert_eq!(kind_of("argoproj.io/v1alpha1", "Rollout"), ManifestKind::Other);
    }

    #[test]
    fn lists_are_recognized_by_their_items() {
        assert_eq!(kind_of("v1", "List"), ManifestKind::List);
        assert_eq!(kind_of("v1", "PodList"), ManifestKind::List);
        assert_eq!(kind_of("apps/v1", "DeploymentList"), ManifestKind::List);
        assert_eq!(item_kind("PodList"), Some("Pod"));
        assert_eq!(item_kind("List"), None);
    }
}
