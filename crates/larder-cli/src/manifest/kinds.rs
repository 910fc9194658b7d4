//! Which Kubernetes kinds larder reads, and where in each of them the pod is.

/// What a document is to larder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A pod.
    Pod,
    /// A pod template lies at this path.
    Template(&'static [&'static str]),
    /// A secret.
    Secret,
    /// A list of objects, which may leave their kind to the list.
    List,
    /// Nothing that names images.
    Other,
}

/// Tells what an `apiVersion` and `kind` are. The group must be right, its version need not be known.
pub(super) fn kind_of(api_version: &str, kind: &str) -> Kind {
    let group = api_version.split_once('/').map_or("", |(group, _)| group);
    match (group, kind) {
        ("", "Pod") => Kind::Pod,
        ("", "Secret") => Kind::Secret,
        ("", "ReplicationController")
        | ("apps", "Deployment" | "StatefulSet" | "DaemonSet" | "ReplicaSet")
        | ("extensions", "Deployment" | "DaemonSet" | "ReplicaSet")
        | ("batch", "Job") => Kind::Template(&["spec", "template"]),
        ("batch", "CronJob") => Kind::Template(&["spec", "jobTemplate", "spec", "template"]),
        ("", "PodTemplate") => Kind::Template(&["template"]),
        ("", "List") => Kind::List,
        // `PodList` and its like hold what their name says.
        (_, list) => match list.strip_suffix("List") {
            Some(item) if !item.is_empty() && kind_of(api_version, item) != Kind::Other => Kind::List,
            _ => Kind::Other,
        },
    }
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
            assert_eq!(kind_of(api_version, kind), Kind::Template(&["spec", "template"]), "{kind}");
        }
        assert_eq!(
            kind_of("batch/v1", "CronJob"),
            Kind::Template(&["spec", "jobTemplate", "spec", "template"])
        );
    }

    #[test]
    fn a_kind_of_another_group_is_another_kind() {
        assert_eq!(kind_of("serving.knative.dev/v1", "Deployment"), Kind::Other);
        assert_eq!(kind_of("metrics.k8s.io/v1beta1", "PodList"), Kind::Other);
        assert_eq!(kind_of("v1", "ConfigMapList"), Kind::Other);
    }

    #[test]
    fn lists_are_told_from_what_they_hold() {
        assert_eq!(kind_of("v1", "List"), Kind::List);
        assert_eq!(kind_of("v1", "PodList"), Kind::List);
        assert_eq!(kind_of("apps/v1", "DeploymentList"), Kind::List);
        assert_eq!(item_kind("PodList"), Some("Pod"));
        assert_eq!(item_kind("List"), None);
    }
}
