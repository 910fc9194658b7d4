//! Tokens of service accounts.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::objects::ObjectKey;
use super::response::ApiError;
use super::state::ApiState;

/// Answers a `TokenRequest`. The token names its account, audience and pod, and has the form of one: three parts, the
/// second with an expiry.
pub(super) fn issue(
    mut request: Value,
    account: &ObjectKey,
    state: &mut ApiState,
) -> Result<Value, ApiError> {
    state.objects.get(account)?;
    let mut binding = json!({ "namespace": account.namespace, "serviceaccount": { "name": account.name } });
    let bound_to = &request["spec"]["boundObjectRef"];
    if let Some(pod) = bound_to["name"].as_str() {
        check_pod(pod, &bound_to["uid"], account, state)?;
        binding["pod"] = json!({ "name": pod, "uid": bound_to["uid"] });
    }
    state.issued_tokens += 1;
    let seconds = request["spec"]["expirationSeconds"].as_u64().unwrap_or(3600);
    let expires = Timestamp::now() + Duration::from_secs(seconds);
    let claims = json!({
        "sub": format!("system:serviceaccount:{}:{}", account.namespace, account.name),
        "aud": request["spec"]["audiences"], "kubernetes.io": binding, "exp": expires.as_second(),
        "jti": state.issued_tokens.to_string(),
    });
    let claims = URL_SAFE_NO_PAD.encode(claims.to_string());
    let token = format!("e30.{claims}.c2ln");
    request["spec"]["expirationSeconds"] = json!(seconds);
    request["status"] = json!({ "token": token, "expirationTimestamp": expires.to_string() });
    Ok(request)
}

/// A token is bound only to a pod that exists and runs as the account.
fn check_pod(pod: &str, uid: &Value, account: &ObjectKey, state: &ApiState) -> Result<(), ApiError> {
    let known = state.resources.iter().find(|known| known.kind == "Pod").expect("it is built in").clone();
    let key = ObjectKey { resource: known, namespace: account.namespace.clone(), name: pod.to_owned() };
    let found = state.objects.get(&key)?;
    if found["spec"]["serviceAccountName"] != account.name.as_str() {
        let error = "cannot bind token for serviceaccount";
        let message =
            format!("{error} {:?} to pod running with different serviceaccount name.", account.name);
        return Err(ApiError::bad_request(message));
    }
    if !uid.is_null() && found["metadata"]["uid"] != *uid {
        return Err(ApiError::conflict(&key.resource, pod));
    }
    Ok(())
}
