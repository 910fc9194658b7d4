//! The rules of larder's own identity, as `packaging/kubernetes/base/rbac.yaml` has them.

/// A rule, and where it is needed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NeededRule {
    pub(super) group: &'static str,
    pub(super) resource: &'static str,
    /// The only object of the rule.
    pub(super) name: Option<&'static str>,
    pub(super) verbs: &'static [&'static str],
    pub(super) scope: RuleScope,
}

/// Where a rule holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RuleScope {
    /// At cluster scope.
    Cluster,
    /// In larder's namespace.
    Own,
    /// In `default`, where events of objects without a namespace are.
    Default,
}

const fn rule(
    group: &'static str,
    resource: &'static str,
    name: Option<&'static str>,
    verbs: &'static [&'static str],
    scope: RuleScope,
) -> NeededRule {
    NeededRule { group, resource, name, verbs, scope }
}

const SETS: &str = "images.larder.dev";
const LEASES: &str = "coordination.k8s.io";

pub(super) const NEEDED: &[NeededRule] = &[
    rule(SETS, "imagesets", None, &["list", "watch"], RuleScope::Cluster),
    rule(SETS, "imagesets/status", None, &["patch"], RuleScope::Cluster),
    rule(SETS, "nodeimages", None, &["get", "list", "watch", "create", "patch"], RuleScope::Cluster),
    rule("", "nodes", None, &["list", "watch"], RuleScope::Cluster),
    rule("", "secrets", None, &["get"], RuleScope::Own),
    rule(LEASES, "leases", Some("larder-image-sets"), &["get", "update"], RuleScope::Own),
    rule(LEASES, "leases", None, &["create"], RuleScope::Own),
    rule("events.k8s.io", "events", None, &["create", "patch"], RuleScope::Default),
];

impl NeededRule {
    /// `imagesets.images.larder.dev`.
    pub(super) fn qualified(&self) -> String {
        if self.group.is_empty() {
            self.resource.to_owned()
        } else {
            format!("{}.{}", self.resource, self.group)
        }
    }

    /// The namespace; larder's is `own`.
    pub(super) fn namespace<'a>(&self, own: &'a str) -> Option<&'a str> {
        match self.scope {
            RuleScope::Cluster => None,
            RuleScope::Own => Some(own),
            RuleScope::Default => Some("default"),
        }
    }

    /// The entry of a role for these verbs.
    fn entry(&self, verbs: &[&str]) -> String {
        let name = self.name.map(|name| format!("  resourceNames: [{name}]\n")).unwrap_or_default();
        let group = if self.group.is_empty() { "\"\"" } else { self.group };
        let (resource, verbs) = (self.resource, verbs.join(", "));
        format!("- apiGroups: [{group}]\n  resources: [{resource}]\n{name}  verbs: [{verbs}]")
    }
}

impl RuleScope {
    /// The role of the manifest; larder's namespace is `own`.
    fn role(self, own: &str) -> String {
        match self {
            RuleScope::Cluster => "ClusterRole larder".to_owned(),
            RuleScope::Own => format!("Role larder in {own}"),
            RuleScope::Default => "Role larder-events in default".to_owned(),
        }
    }
}

/// A rule, and which of its verbs are missing.
pub(super) type MissingVerbs = (&'static NeededRule, Vec<&'static str>);

/// For each role that lacks rules: what is missing, and what to add to it.
pub(super) fn missing_by_role(missing: &[MissingVerbs], own: &str) -> Vec<(String, String)> {
    let mut roles = Vec::new();
    for scope in [RuleScope::Cluster, RuleScope::Own, RuleScope::Default] {
        let of_role: Vec<_> = missing.iter().filter(|(rule, _)| rule.scope == scope).collect();
        if of_role.is_empty() {
            continue;
        }
        let describe = |(rule, verbs): &&MissingVerbs| format!("{} {}", verbs.join(", "), rule.qualified());
        let refused: Vec<_> = of_role.iter().map(describe).collect();
        let entries: Vec<_> = of_role.iter().map(|(rule, verbs)| rule.entry(verbs)).collect();
        let role = scope.role(own);
        roles.push((
            format!("{role}: may not {}", refused.join("; ")),
            format!("# {role}\n{}", entries.join("\n")),
        ));
    }
    roles
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn the_rules_are_those_of_the_manifest() {
        let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/kubernetes/base/rbac.yaml");
        let text = fs_err::read_to_string(manifest).unwrap();
        let documents: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
        let mut installed = Vec::new();
        for role in documents.iter().filter(|document| document.get("rules").is_some()) {
            let namespace = role["metadata"]["namespace"].as_str();
            for rule in role["rules"].as_array().unwrap() {
                let texts = |field: &str| -> Vec<String> {
                    serde_json::from_value(rule.get(field).cloned().unwrap_or(Value::Array(vec![]))).unwrap()
                };
                installed.push((
                    texts("apiGroups").concat(),
                    texts("resources").concat(),
                    texts("resourceNames").concat(),
                    texts("verbs"),
                    namespace.map(str::to_owned),
                ));
            }
        }
        let needed: Vec<_> = NEEDED
            .iter()
            .map(|rule| {
                let text = |text: &str| text.to_owned();
                let namespace = rule.namespace("larder-system").map(text);
                let verbs: Vec<_> = rule.verbs.iter().copied().map(text).collect();
                (
                    text(rule.group),
                    text(rule.resource),
                    rule.name.unwrap_or_default().into(),
                    verbs,
                    namespace,
                )
            })
            .collect();
        assert_eq!(installed, needed);
    }

    #[test]
    fn missing_rules_are_printed_by_role_as_they_are_added() {
        let needed = |resource: &str| NEEDED.iter().find(|rule| rule.resource == resource).unwrap();
        let missing = [
            (needed("events"), vec!["patch"]),
            (needed("leases"), vec!["get", "update"]),
            (needed("nodes"), vec!["list"]),
        ];
        let all = missing_by_role(&missing, "ns");
        let [cluster, own, default] = all.as_slice() else { panic!("{all:?}") };
        assert_eq!(cluster.0, "ClusterRole larder: may not list nodes");
        assert_eq!(
            cluster.1,
            "# ClusterRole larder\n- apiGroups: [\"\"]\n  resources: [nodes]\n  verbs: [list]"
        );
        assert_eq!(own.0, "Role larder in ns: may not get, update leases.coordination.k8s.io");
        let entry = "- apiGroups: [coordination.k8s.io]\n  resources: [leases]\n  resourceNames: [larder-image-sets]\n  \
                     verbs: [get, update]";
        assert_eq!(own.1, format!("# Role larder in ns\n{entry}"));
        assert!(default.1.starts_with("# Role larder-events in default\n"), "{default:?}");
        let both = [(needed("imagesets"), vec!["list", "watch"]), (needed("nodes"), vec!["list"])];
        let all = missing_by_role(&both, "ns");
        assert_eq!(all.len(), 1);
        assert!(all[0].0.ends_with("may not list, watch imagesets.images.larder.dev; list nodes"), "{all:?}");
    }
}
