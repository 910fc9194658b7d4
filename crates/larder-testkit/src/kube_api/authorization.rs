//! Tokens, and what their users may do.

use std::collections::BTreeMap;

use super::kubeconfig::ADMINISTRATOR;
use super::resources::Target;
use super::response::ApiError;

/// A rule as in a `ClusterRole`: `*` stands for everything.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PolicyRule {
    /// API groups; the core group is empty.
    pub api_groups: Vec<String>,
    /// `pods`, or `imagesets/status`.
    pub resources: Vec<String>,
    /// Names of objects; none are all of them.
    pub resource_names: Vec<String>,
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`.
    pub verbs: Vec<String>,
    /// Only there; `None` is everywhere.
    pub namespace: Option<String>,
}

/// Who may do what. Without users every request is allowed.
#[derive(Debug, Default)]
pub(super) struct Authorization {
    users: BTreeMap<String, User>,
}

#[derive(Debug)]
struct User {
    name: String,
    rules: Vec<PolicyRule>,
    used: Vec<bool>,
}

impl Authorization {
    /// From now on requests need a token, and this is one.
    pub(super) fn add(&mut self, token: &str, name: &str, rules: Vec<PolicyRule>) {
        let used = vec![false; rules.len()];
        self.users.insert(token.to_owned(), User { name: name.to_owned(), rules, used });
    }

    pub(super) fn revoke(&mut self, token: &str) {
        self.users.remove(token);
        // An empty map would allow everything.
        self.users.entry(String::from("\0")).or_insert_with(|| User {
            name: String::new(),
            rules: Vec::new(),
            used: Vec::new(),
        });
    }

    /// Rules of a token that allowed nothing yet.
    pub(super) fn unused(&self, token: &str) -> Vec<PolicyRule> {
        let Some(user) = self.users.get(token) else { return Vec::new() };
        user.rules.iter().zip(&user.used).filter(|(_, used)| !**used).map(|(rule, _)| rule.clone()).collect()
    }

    /// Name of the user with this token.
    pub(super) fn user_name(&self, token: Option<&str>) -> &str {
        token.and_then(|token| self.users.get(token)).map_or(ADMINISTRATOR, |user| &user.name)
    }

    /// Whether a token may do this, which uses no rule.
    pub(super) fn review(&self, token: Option<&str>, verb: &str, target: &Target) -> Result<bool, ApiError> {
        if self.users.is_empty() || token == Some(ADMINISTRATOR) {
            return Ok(true);
        }
        let user = token.and_then(|token| self.users.get(token)).ok_or_else(ApiError::unauthorized)?;
        Ok(user.rules.iter().any(|rule| rule.allows(verb, target)))
    }

    /// Whether a request may come with this token, or with none.
    pub(super) fn is_known(&self, token: Option<&str>) -> bool {
        let is_known = |token: &str| token == ADMINISTRATOR || self.users.contains_key(token);
        self.users.is_empty() || token.is_none_or(is_known)
    }

    pub(super) fn check(&mut self, token: Option<&str>, verb: &str, target: &Target) -> Result<(), ApiError> {
        if self.users.is_empty() || token == Some(ADMINISTRATOR) {
            return Ok(());
        }
        let user = token.and_then(|token| self.users.get_mut(token)).ok_or_else(ApiError::unauthorized)?;
        let mut is_allowed = false;
        for (rule, used) in user.rules.iter().zip(&mut user.used) {
            if rule.allows(verb, target) {
                (is_allowed, *used) = (true, true);
            }
        }
        if is_allowed { Ok(()) } else { Err(forbidden(&user.name, verb, target)) }
    }
}

impl PolicyRule {
    fn allows(&self, verb: &str, target: &Target) -> bool {
        let has = |list: &[String], item: &str| list.iter().any(|known| known == "*" || known == item);
        let is_named = |name: &String| self.resource_names.is_empty() || self.resource_names.contains(name);
        has(&self.api_groups, &target.resource.group)
            && has(&self.resources, &resource_of(target))
            && has(&self.verbs, verb)
            && self.namespace.as_ref().is_none_or(|namespace| target.namespace.as_ref() == Some(namespace))
            && target.name.as_ref().map_or(self.resource_names.is_empty(), is_named)
    }
}

fn resource_of(target: &Target) -> String {
    match &target.subresource {
        Some(subresource) => format!("{}/{subresource}", target.resource.plural),
        None => target.resource.plural.clone(),
    }
}

fn forbidden(user: &str, verb: &str, target: &Target) -> ApiError {
    let (resource, group) = (resource_of(target), &target.resource.group);
    let name = target.name.as_ref().map(|name| format!(" \"{name}\"")).unwrap_or_default();
    let scope = match &target.namespace {
        Some(namespace) => format!("in the namespace \"{namespace}\""),
        None => "at the cluster scope".to_owned(),
    };
    let plural = target.resource.qualified();
    ApiError::new(
        403,
        "Forbidden",
        format!(
            "{plural}{name} is forbidden: User \"{user}\" cannot {verb} resource \"{resource}\" in API group \"{group}\" {scope}"
        ),
    )
}
