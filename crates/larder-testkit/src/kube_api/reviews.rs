//! Requests of a user about the server itself: its own rights, and which resources are served.

use serde_json::{Value, json};

use super::resources::{Resource, Target};
use super::response::ApiError;
use super::state::ApiState;

/// The answer to a `SelfSubjectAccessReview`, to a `SelfSubjectReview` or to discovery; `None` if the path is another
/// one.
pub(super) fn answer(
    path: &str,
    token: Option<&str>,
    body: &[u8],
    state: &ApiState,
) -> Option<Result<Value, ApiError>> {
    if path == "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews" {
        return Some(review(token, body, state));
    }
    if path == "/apis/authentication.k8s.io/v1/selfsubjectreviews" {
        let user = json!({ "username": state.authorization.user_name(token) });
        return Some(Ok(json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview", "metadata": {},
            "status": { "userInfo": user },
        })));
    }
    match path.split('/').collect::<Vec<_>>().as_slice() {
        ["", "apis", group, version] => Some(discover(group, version, state)),
        _ => None,
    }
}

fn review(token: Option<&str>, body: &[u8], state: &ApiState) -> Result<Value, ApiError> {
    let invalid = |error: serde_json::Error| ApiError::bad_request(format!("the body is no JSON: {error}"));
    let mut review: Value = serde_json::from_slice(body).map_err(invalid)?;
    let attributes = &review["spec"]["resourceAttributes"];
    let text = |field: &str| attributes[field].as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let resource = Resource {
        group: text("group").unwrap_or_default(),
        version: String::new(),
        plural: text("resource").unwrap_or_default(),
        kind: String::new(),
        is_namespaced: false,
        has_status: false,
    };
    let target = Target {
        resource,
        namespace: text("namespace"),
        name: text("name"),
        subresource: text("subresource"),
    };
    let is_allowed = state.authorization.review(token, &text("verb").unwrap_or_default(), &target)?;
    review["status"] = json!({ "allowed": is_allowed });
    Ok(review)
}

fn discover(group: &str, version: &str, state: &ApiState) -> Result<Value, ApiError> {
    let served = state.resources.iter().filter(|known| known.group == group && known.version == version);
    let describe = |name: String, known: &Resource| {
        json!({
            "name": name, "singularName": "", "namespaced": known.is_namespaced, "kind": known.kind, "verbs": [],
        })
    };
    let described = |known: &Resource| {
        let status = known.has_status.then(|| describe(format!("{}/status", known.plural), known));
        [Some(describe(known.plural.clone(), known)), status]
    };
    let resources: Vec<_> = served.flat_map(described).flatten().collect();
    if resources.is_empty() {
        return Err(ApiError::new(
            404,
            "NotFound",
            "the server could not find the requested resource".to_owned(),
        ));
    }
    let group_version = format!("{group}/{version}");
    Ok(json!({
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": resources,
    }))
}
