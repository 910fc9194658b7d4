//! The resources that are served, and what a path means.

use super::response::ApiError;

/// A kind of object, by its place in the paths.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Resource {
    /// Empty for the core group.
    pub(super) group: String,
    pub(super) version: String,
    pub(super) plural: String,
    pub(super) kind: String,
    pub(super) is_namespaced: bool,
    pub(super) has_status: bool,
}

impl Resource {
    pub(super) fn api_version(&self) -> String {
        if self.group.is_empty() { self.version.clone() } else { format!("{}/{}", self.group, self.version) }
    }

    /// `pods`, or `leases.coordination.k8s.io`, as errors have it.
    pub(super) fn qualified(&self) -> String {
        if self.group.is_empty() { self.plural.clone() } else { format!("{}.{}", self.plural, self.group) }
    }
}

/// Resources that the server has from the start; definitions of custom resources add theirs.
pub(super) fn built_in() -> Vec<Resource> {
    const TABLE: [(&str, &str, &str, &str, bool, bool); 12] = [
        ("", "v1", "namespaces", "Namespace", false, true),
        ("", "v1", "nodes", "Node", false, true),
        ("", "v1", "pods", "Pod", true, true),
        ("", "v1", "secrets", "Secret", true, false),
        ("", "v1", "serviceaccounts", "ServiceAccount", true, false),
        ("", "v1", "events", "Event", true, false),
        ("events.k8s.io", "v1", "events", "Event", true, false),
        ("coordination.k8s.io", "v1", "leases", "Lease", true, false),
        ("node.k8s.io", "v1", "runtimeclasses", "RuntimeClass", false, false),
        ("apps", "v1", "daemonsets", "DaemonSet", true, true),
        ("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole", false, false),
        ("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", false, true),
    ];
    let resource = |&(group, version, plural, kind, is_namespaced, has_status): &_| Resource {
        group: str::to_owned(group),
        version: str::to_owned(version),
        plural: str::to_owned(plural),
        kind: str::to_owned(kind),
        is_namespaced,
        has_status,
    };
    TABLE.iter().map(resource).collect()
}

/// The resources that the definition of a custom resource adds, one for each served version.
pub(super) fn defined(definition: &serde_json::Value) -> Vec<Resource> {
    let spec = &definition["spec"];
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let versions = spec["versions"].as_array().map(Vec::as_slice).unwrap_or_default();
    let served = versions.iter().filter(|version| version["served"] == true);
    let resource = |version: &serde_json::Value| Resource {
        group: text(&spec["group"]),
        version: text(&version["name"]),
        plural: text(&spec["names"]["plural"]),
        kind: text(&spec["names"]["kind"]),
        is_namespaced: spec["scope"] == "Namespaced",
        has_status: version["subresources"].get("status").is_some(),
    };
    served.map(resource).collect()
}

/// Object that a path names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) resource: Resource,
    /// `None` for all namespaces, and at cluster scope.
    pub(super) namespace: Option<String>,
    /// `None` for a collection.
    pub(super) name: Option<String>,
    /// `status` or `token`.
    pub(super) subresource: Option<String>,
}

/// `/api/v1/...` or `/apis/GROUP/VERSION/...`.
pub(super) fn target(path: &str, known: &[Resource]) -> Result<Target, ApiError> {
    let unknown = || ApiError::unknown_path(path);
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let (group, version, rest) = match parts.as_slice() {
        ["api", version, rest @ ..] => ("", *version, rest),
        ["apis", group, version, rest @ ..] => (*group, *version, rest),
        _ => return Err(unknown()),
    };
    let find = |plural: &str| {
        let is_it =
            |known: &&Resource| known.group == group && known.version == version && known.plural == plural;
        known.iter().find(is_it).cloned()
    };
    let (namespace, rest) = match rest {
        ["namespaces", namespace, plural, rest @ ..]
            if find(plural).is_some_and(|found| found.is_namespaced) =>
        {
            (Some((*namespace).to_owned()), [&[*plural], rest].concat())
        }
        rest => (None, rest.to_vec()),
    };
    let resource = rest.first().and_then(|plural| find(plural)).ok_or_else(unknown)?;
    let owned = |part: Option<&&str>| part.map(|part| (*part).to_owned());
    Ok(Target { resource, namespace, name: owned(rest.get(1)), subresource: owned(rest.get(2)) })
}
