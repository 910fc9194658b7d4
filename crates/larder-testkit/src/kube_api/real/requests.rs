//! The requests of users, from the server's audit log.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;

use super::super::ApiRequest;
use super::users::{OWN_USER, Users};

/// Every request but those of the test itself and of the server's own parts, once it is answered. A watch is answered
/// when it begins.
pub(super) const POLICY: &str = "apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: None
  users: ['testkit', 'system:apiserver', 'system:anonymous']
- level: Metadata
";

/// The requests so far. An answer may be read before it is logged: waits until the log no longer grows.
pub(super) fn read(log: &Path, users: &Users) -> Vec<ApiRequest> {
    let mut content = String::new();
    loop {
        super::pause();
        let now = fs_err::read_to_string(log).unwrap_or_default();
        if now == content {
            break;
        }
        content = now;
    }
    let events = content.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut seen = BTreeSet::new();
    let mut requests = Vec::new();
    for event in events {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        if text(&event["user"]["username"]) == OWN_USER || !seen.insert(text(&event["auditID"])) {
            continue;
        }
        let method = match event["verb"].as_str() {
            Some("create" | "post") => "POST",
            Some("update" | "put") => "PUT",
            Some("patch") => "PATCH",
            Some("delete" | "deletecollection") => "DELETE",
            _ => "GET",
        };
        let status = event["responseStatus"]["code"].as_u64().and_then(|code| u16::try_from(code).ok());
        requests.push(ApiRequest {
            method: method.to_owned(),
            path: text(&event["requestURI"]),
            token: users.token_of(&text(&event["user"]["username"])),
            status: status.unwrap_or_default(),
        });
    }
    requests
}
