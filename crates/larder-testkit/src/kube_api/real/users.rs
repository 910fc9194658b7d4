//! Users by token, and the roles that their rules become.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Collected, Full};
use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::task::JoinSet;

use super::super::authorization::PolicyRule;
use super::super::kubeconfig::ADMINISTRATOR;
use super::super::thread::ServingThread;
use super::client::OWN_TOKEN;
use super::{RealServer, wait_for};

/// The name of the test itself.
pub(super) const OWN_USER: &str = "testkit";

const ROLES: &str = "/apis/rbac.authorization.k8s.io/v1";

/// Who has which token, and the webhook that the server asks.
#[derive(Debug)]
pub(super) struct Users {
    known: Arc<Mutex<BTreeMap<String, User>>>,
    _webhook: ServingThread,
}

#[derive(Debug, Clone, Default)]
struct User {
    name: String,
    groups: Vec<String>,
    /// Paths of its roles and bindings.
    roles: Vec<String>,
    /// How often its rules were replaced.
    changes: u64,
}

impl Users {
    /// Answers on loopback, and writes the file by which the server finds it.
    pub(super) fn start(config: &Path) -> Users {
        let administrator = |name: &str| User {
            name: name.to_owned(),
            groups: vec!["system:masters".to_owned()],
            ..User::default()
        };
        let users = [
            (OWN_TOKEN.to_owned(), administrator(OWN_USER)),
            (ADMINISTRATOR.to_owned(), administrator(ADMINISTRATOR)),
        ];
        let known = Arc::new(Mutex::new(BTreeMap::from(users)));
        let shared = Arc::clone(&known);
        let (webhook, address) =
            ServingThread::start((Ipv4Addr::LOCALHOST, 0).into(), async move |listener| {
                let mut connections = JoinSet::new();
                while let Ok((stream, _)) = listener.accept().await {
                    let known = Arc::clone(&shared);
                    connections.spawn(async move {
                        let service = service_fn(|request| review(request, &known));
                        _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
                    });
                }
            });
        let kubeconfig = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "users",
            "clusters": [{ "name": "users", "cluster": { "server": format!("http://{address}/") } }],
            "contexts": [{ "name": "users", "context": { "cluster": "users", "user": "" } }],
        });
        fs_err::write(config, kubeconfig.to_string()).expect("a kubeconfig");
        Users { known, _webhook: webhook }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, User>> {
        lock(&self.known)
    }

    pub(super) fn token_of(&self, name: &str) -> String {
        let users = self.lock();
        let found = users.iter().find(|(_, user)| user.name == name);
        found.map(|(token, _)| token.clone()).unwrap_or_default()
    }

    /// Replaces the rules of a token, and waits until they hold.
    pub(super) fn authorize(&self, server: &RealServer, token: &str, name: &str, rules: &[PolicyRule]) {
        let mut user = self.lock().get(token).cloned().unwrap_or_default();
        name.clone_into(&mut user.name);
        user.groups = groups_of(name);
        user.changes += 1;
        let mut by_namespace: BTreeMap<Option<&str>, Vec<&PolicyRule>> = BTreeMap::new();
        for rule in rules {
            by_namespace.entry(rule.namespace.as_deref()).or_default().push(rule);
        }
        let wanted: Vec<String> = by_namespace.keys().map(|namespace| role_path(*namespace, token)).collect();
        user.roles.retain(|path| {
            let is_wanted = wanted.contains(path);
            if !is_wanted {
                _ = server.administer("DELETE", path, &Value::Null);
            }
            is_wanted
        });
        for (namespace, rules) in by_namespace {
            let path = role_path(namespace, token);
            let marker = format!("marker-{}", user.changes);
            let mut rules: Vec<Value> = rules.into_iter().map(rule_object).collect();
            rules.push(json!({ "apiGroups": ["testkit"], "resources": [marker], "verbs": ["get"] }));
            if user.roles.contains(&path) {
                expect(server.administer("PATCH", &path, &json!({ "rules": rules })));
            } else {
                create_role(server, namespace, token, &user.name, &rules);
                user.roles.push(path);
            }
            wait_until_allowed(server, &user, namespace, &marker);
        }
        self.lock().insert(token.to_owned(), user);
    }

    pub(super) fn revoke(&self, server: &RealServer, token: &str) {
        let user = self.lock().remove(token).unwrap_or_default();
        // The server remembers it for ten seconds.
        let is_refused = || server.is_refused(token);
        wait_for("the end of a token", is_refused, String::new);
        for role in user.roles {
            _ = server.administer("DELETE", &role, &Value::Null);
        }
    }
}

fn lock(known: &Mutex<BTreeMap<String, User>>) -> MutexGuard<'_, BTreeMap<String, User>> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The groups that an API server gives to users of this name.
fn groups_of(name: &str) -> Vec<String> {
    let mut groups = vec!["system:authenticated".to_owned()];
    if name.starts_with("system:node:") {
        groups.push("system:nodes".to_owned());
    }
    if let Some((namespace, _)) =
        name.strip_prefix("system:serviceaccount:").and_then(|account| account.split_once(':'))
    {
        groups.extend(["system:serviceaccounts".into(), format!("system:serviceaccounts:{namespace}")]);
    }
    groups
}

/// A name that may be one of an object, whatever the token has.
fn role_name(token: &str) -> String {
    let hash = Sha256::digest(token.as_bytes());
    format!("testkit-{:02x}{:02x}{:02x}{:02x}", hash[0], hash[1], hash[2], hash[3])
}

fn role_path(namespace: Option<&str>, token: &str) -> String {
    let name = role_name(token);
    match namespace {
        Some(namespace) => format!("{ROLES}/namespaces/{namespace}/roles/{name}"),
        None => format!("{ROLES}/clusterroles/{name}"),
    }
}

fn rule_object(rule: &PolicyRule) -> Value {
    let mut object =
        json!({ "apiGroups": rule.api_groups, "resources": rule.resources, "verbs": rule.verbs });
    if !rule.resource_names.is_empty() {
        object["resourceNames"] = json!(rule.resource_names);
    }
    object
}

fn create_role(server: &RealServer, namespace: Option<&str>, token: &str, user: &str, rules: &[Value]) {
    let (at, kind) = match namespace {
        Some(namespace) => (format!("{ROLES}/namespaces/{namespace}/"), "Role"),
        None => (format!("{ROLES}/cluster"), "ClusterRole"),
    };
    let name = role_name(token);
    let role = json!({ "metadata": { "name": name }, "rules": rules });
    expect(server.administer("POST", &format!("{at}roles"), &role));
    let group = "rbac.authorization.k8s.io";
    let binding = json!({
        "metadata": { "name": name },
        "roleRef": { "apiGroup": group, "kind": kind, "name": name },
        "subjects": [{ "apiGroup": group, "kind": "User", "name": user }],
    });
    let path = format!("{at}rolebindings");
    // One of a token that was revoked.
    _ = server.administer("DELETE", &format!("{path}/{name}"), &Value::Null);
    expect(server.administer("POST", &path, &binding));
}

/// The server reads roles by watches of its own.
fn wait_until_allowed(server: &RealServer, user: &User, namespace: Option<&str>, marker: &str) {
    let review = json!({ "spec": {
        "user": user.name, "groups": user.groups,
        "resourceAttributes": {
            "group": "testkit", "resource": marker, "verb": "get", "namespace": namespace.unwrap_or_default(),
        },
    } });
    let path = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
    let is_allowed = || expect(server.administer("POST", path, &review))["status"]["allowed"] == true;
    wait_for("a role", is_allowed, String::new);
}

#[track_caller]
fn expect(answer: Result<Value, String>) -> Value {
    answer.unwrap_or_else(|problem| panic!("a role: {problem}"))
}

/// Answers a `TokenReview`.
async fn review(
    request: Request<Incoming>,
    known: &Mutex<BTreeMap<String, User>>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let body = request.into_body().collect().await.map(Collected::to_bytes).unwrap_or_default();
    let asked: Value = serde_json::from_slice(&body).unwrap_or_default();
    let user = asked["spec"]["token"].as_str().and_then(|token| lock(known).get(token).cloned());
    let status = match user {
        Some(user) => json!({
            "authenticated": true,
            "user": { "username": user.name, "uid": user.name, "groups": user.groups },
        }),
        None => json!({ "authenticated": false }),
    };
    let answer = json!({ "apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "status": status });
    let mut response = Response::new(Full::new(Bytes::from(answer.to_string())));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}
