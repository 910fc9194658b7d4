//! `larder kube check`: finds what larder lacks on a cluster.

mod expiry;
mod identity;
mod rules;
mod steps;

use http::Request;
use http::header::DATE;
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::{SignedDuration, Timestamp, fmt::rfc2822};
use kube::Api;
use kube::api::{ListParams, PostParams};
use kube::client::Body;
use kube::core::{PartialObjectMeta, Status};
use serde::Serialize;

use crate::cluster::{Cluster, ClusterOptions};
use crate::error::ClusterError;
use crate::image_sets::LEASE;
use crate::kubeconfig::{self, KubeconfigState};
use crate::node_name::{node_name, other_node};
use identity::{admission, node_of};
use rules::{NEEDED, NeededRule, missing_by_role};
use steps::Role;

/// Tokens and certificates are valid from the second in which they are made.
const MAX_SKEW: SignedDuration = SignedDuration::from_secs(30);
/// The group and version of larder's custom resources, and the resources.
const GROUP_VERSION: &str = "images.larder.dev/v1alpha1";
const RESOURCES: [&str; 3] = ["imagesets", "imagesets/status", "nodeimages"];
const INSTALL: &str = "kubectl apply -k packaging/kubernetes/base";

const NODE_IDENTITY: &str = "identity of the node";
const OWN_IDENTITY: &str = "larder's identity";

/// One part of the answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ClusterCheck {
    /// Such as `API server`.
    pub name: &'static str,
    /// True if the part is as larder needs it.
    pub ok: bool,
    /// State of the part, as it was found.
    pub found: String,
    /// The next step: a command, or a rule in YAML.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

fn check(name: &'static str, result: Result<String, (String, Option<String>)>) -> ClusterCheck {
    match result {
        Ok(found) => ClusterCheck { name, ok: true, found, next: None },
        Err((found, next)) => ClusterCheck { name, ok: false, found, next },
    }
}

/// Checks what the identity of the node needs, and what larder's own identity needs, with its objects in `namespace`.
/// If the settings say that it `needs_own`, its absence is a failure.
pub async fn check_cluster(
    node: Option<&ClusterOptions>,
    own: Option<&ClusterOptions>,
    needs_own: bool,
    namespace: &str,
    now: Timestamp,
) -> Vec<ClusterCheck> {
    if node.is_none() && own.is_none() {
        let next = "set kubernetes.nodeKubeconfig to kubelet's kubeconfig, or kubernetes.kubeconfig";
        return vec![check(
            "API server",
            Err(("no cluster: larder has no identity".to_owned(), Some(next.to_owned()))),
        )];
    }
    let absent = |name, without: &str| ClusterCheck {
        name,
        ok: true,
        found: format!("none: larder runs without {without}"),
        next: None,
    };
    let mut checks = match node {
        Some(node) => check_node(node, now).await,
        None => vec![absent(NODE_IDENTITY, "images of pods and tokens of service accounts")],
    };
    checks.extend(match own {
        Some(own) => check_own(own, namespace, now).await,
        None if needs_own => {
            let next = "set kubernetes.kubeconfig to one of larder's own, or kubernetes.imageSets and kubernetes.events to \
                        false";
            vec![check(OWN_IDENTITY, Err(("none: no image sets and events".to_owned(), Some(next.to_owned()))))]
        }
        None => vec![absent(OWN_IDENTITY, "image sets and events")],
    });
    checks
}

/// kubelet's identity: the server, the clock, the node's object and its pods.
async fn check_node(options: &ClusterOptions, now: Timestamp) -> Vec<ClusterCheck> {
    let state = read_state(options).await;
    let failed = |error: &ClusterError, refused: &str| {
        Err((error.to_string(), Role::Node.after(error, options, &state, Some(refused))))
    };
    let cluster = match Cluster::connect(options).await {
        Ok(cluster) => cluster,
        Err(error) => return vec![check(NODE_IDENTITY, failed(&error, ""))],
    };
    let mut checks =
        vec![check(NODE_IDENTITY, expiry::of_kubeconfig(options, Role::Node, &state, now).await)];
    match server_version(&cluster).await {
        Ok((version, date)) => {
            checks.push(check("API server", Ok(version)));
            checks.push(check("clock", skew(date, now)));
        }
        Err(error) => {
            checks.push(check("API server", failed(&error, "the server must be that of a cluster")));
            return checks;
        }
    }
    let name = &options.node;
    if let Some((found, next)) = other_name(options, node_of(&cluster).await).await {
        checks.push(check("node", Err((found, Some(next)))));
        return checks;
    }
    let found = find_node(&cluster).await;
    let next = "kubernetes.nodeName must be a name that `kubectl get nodes` prints";
    let found = found.map(|()| format!("{name} exists")).or_else(|error| failed(&error, next));
    checks.push(check("node", found));
    let pods: Api<PartialObjectMeta<Pod>> = Api::all(cluster.client.clone());
    let of_node = ListParams::default().fields(&format!("spec.nodeName={name}")).limit(1);
    let found = cluster.call("the list of pods".to_owned(), pods.list(&of_node)).await;
    let next = "kubernetes.nodeKubeconfig must be that of the kubelet of this node";
    let found = found.map(|_| "may be listed".to_owned()).or_else(|error| failed(&error, next));
    checks.push(check("pods of the node", found));
    checks
}

/// That the identity is of a node of another name, which the server or the certificate has.
async fn other_name(options: &ClusterOptions, of_server: Option<String>) -> Option<(String, String)> {
    let path = options.kubeconfig.clone()?;
    let of_certificate = move || node_name(&path);
    // It fails only when the runtime stops.
    let own = tokio::task::spawn_blocking(move || of_server.or_else(of_certificate)).await.ok()??;
    other_node(options.kubeconfig.as_ref()?, &own, &options.node)
}

/// Reads the state of the identity's file, for the steps after errors.
async fn read_state(options: &ClusterOptions) -> KubeconfigState {
    let path = options.kubeconfig.clone();
    let read = tokio::task::spawn_blocking(move || kubeconfig::state(path.as_deref())).await;
    // It fails only when the runtime stops.
    read.unwrap_or(KubeconfigState::Other)
}

/// As kubelet finds it: by a list of this node alone, which larder's own identity may have as well.
async fn find_node(cluster: &Cluster) -> Result<(), ClusterError> {
    let what = format!("node {}", cluster.node);
    let nodes: Api<PartialObjectMeta<Node>> = Api::all(cluster.client.clone());
    let only = ListParams::default().fields(&format!("metadata.name={}", cluster.node));
    let found = cluster.call(what.clone(), nodes.list(&only)).await?;
    if found.items.is_empty() { Err(ClusterError::NotFound { what }) } else { Ok(()) }
}

/// larder's own identity: custom resources and rules.
async fn check_own(options: &ClusterOptions, namespace: &str, now: Timestamp) -> Vec<ClusterCheck> {
    let state = read_state(options).await;
    let failed = |error: &ClusterError, refused: &str| {
        Err((error.to_string(), Role::Own.after(error, options, &state, Some(refused))))
    };
    let cluster = match Cluster::connect(options).await {
        Ok(cluster) => cluster,
        Err(error) => return vec![check(OWN_IDENTITY, failed(&error, ""))],
    };
    if let Some(node) = node_of(&cluster).await {
        let place = options.kubeconfig.as_ref().map(|path| format!("{}: ", path.display()));
        let found = format!("{}the identity of node {node}, not larder's own", place.unwrap_or_default());
        return vec![check(OWN_IDENTITY, Err((found, Some(Role::Own.replace(options)))))];
    }
    let mut checks = vec![check(OWN_IDENTITY, expiry::of_kubeconfig(options, Role::Own, &state, now).await)];
    checks.push(match custom_resources(&cluster).await {
        Ok(Ok(found)) => check("custom resources", Ok(found)),
        Ok(Err(found)) => check("custom resources", Err((found, Some(INSTALL.to_owned())))),
        Err(error) => check("custom resources", failed(&error, INSTALL)),
    });
    let mut missing = Vec::new();
    for rule in NEEDED {
        match missing_verbs(&cluster, rule, namespace).await {
            Ok(verbs) if verbs.is_empty() => {}
            Ok(verbs) => missing.push((rule, verbs)),
            Err(error) => {
                checks.push(check("rules", failed(&error, INSTALL)));
                return checks;
            }
        }
    }
    if missing.is_empty() {
        checks.push(check("rules", Ok("all of them".to_owned())));
        let found = try_lease(&cluster, namespace).await.map(|()| "may be held".to_owned());
        let found = found.or_else(|error| match error {
            ClusterError::NotFound { .. } => failed(&error, INSTALL),
            _ => failed(&error, &Role::Own.replace(options)),
        });
        checks.push(check("lease", found));
        checks.extend(admission(&cluster, options).await);
    }
    let missing = missing_by_role(&missing, namespace);
    checks.extend(missing.into_iter().map(|(found, next)| check("rules", Err((found, Some(next))))));
    checks
}

/// Admission may forbid what the rules allow: nodes write leases in one namespace only. Writes nothing.
async fn try_lease(cluster: &Cluster, namespace: &str) -> Result<(), ClusterError> {
    let metadata = ObjectMeta { name: Some(LEASE.to_owned()), ..ObjectMeta::default() };
    let lease = Lease { metadata, ..Lease::default() };
    let leases: Api<Lease> = Api::namespaced(cluster.client.clone(), namespace);
    let params = PostParams { dry_run: true, ..PostParams::default() };
    let what = format!("lease {namespace}/{LEASE}");
    match cluster.call(what, leases.create(&params, &lease)).await {
        // It exists: admission comes first.
        Ok(_) | Err(ClusterError::Refused { .. }) => Ok(()),
        Err(ClusterError::NotFound { .. }) => {
            Err(ClusterError::NotFound { what: format!("namespace {namespace}") })
        }
        Err(error) => Err(error),
    }
}

/// The version, and the clock of the server if it sends it.
async fn server_version(cluster: &Cluster) -> Result<(String, Option<Timestamp>), ClusterError> {
    #[derive(serde::Deserialize)]
    struct Version {
        #[serde(rename = "gitVersion")]
        git_version: String,
    }
    let call = async {
        let request = Request::get("/version").body(Body::empty()).map_err(kube::Error::HttpError)?;
        let (head, body) = cluster.client.send(request).await?.into_parts();
        let body = body.collect_bytes().await?;
        if !head.status.is_success() {
            let text = String::from_utf8_lossy(&body);
            let status = serde_json::from_slice::<Status>(&body);
            let status =
                status.unwrap_or_else(|_| Status::failure(&text, "").with_code(head.status.as_u16()));
            return Err(kube::Error::Api(status.boxed()));
        }
        let version: Version = serde_json::from_slice(&body).map_err(kube::Error::SerdeError)?;
        let date = head.headers.get(DATE).and_then(|date| rfc2822::parse(date.to_str().ok()?).ok());
        Ok((version.git_version, date.map(|date| date.timestamp())))
    };
    cluster.call("version of the API server".to_owned(), call).await
}

/// Whether the clocks agree: without that, tokens and certificates are not yet valid, or no longer.
fn skew(server: Option<Timestamp>, now: Timestamp) -> Result<String, (String, Option<String>)> {
    let Some(server) = server else { return Ok("unknown: the server sends no Date".to_owned()) };
    let difference = now.duration_since(server);
    if difference.abs() <= MAX_SKEW {
        return Ok("agrees with the API server".to_owned());
    }
    let seconds = difference.as_secs();
    let (seconds, direction) = (seconds.abs(), if seconds > 0 { "ahead of" } else { "behind" });
    Err((
        format!("{} {direction} the API server", human(seconds)),
        Some("synchronise the clock of the node".into()),
    ))
}

/// `3d`, `2h`, `5m` or `40s`.
fn human(seconds: i64) -> String {
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// The group and version, or what is missing of it.
async fn custom_resources(cluster: &Cluster) -> Result<Result<String, String>, ClusterError> {
    let call = cluster.client.list_api_group_resources(GROUP_VERSION);
    let served = match cluster.call(GROUP_VERSION.to_owned(), call).await {
        Ok(served) => served.resources,
        Err(error @ ClusterError::NotFound { .. }) => return Ok(Err(format!("not installed: {error}"))),
        Err(error) => return Err(error),
    };
    let is_missing = |name: &&str| !served.iter().any(|resource| resource.name == **name);
    Ok(match RESOURCES.iter().find(|name| is_missing(name)) {
        Some(missing) => Err(format!("{GROUP_VERSION} has no {missing}: it is of another version")),
        None => Ok(GROUP_VERSION.to_owned()),
    })
}

async fn missing_verbs(
    cluster: &Cluster,
    rule: &NeededRule,
    namespace: &str,
) -> Result<Vec<&'static str>, ClusterError> {
    let mut missing = Vec::new();
    for &verb in rule.verbs {
        if !is_allowed(cluster, rule, verb, namespace).await? {
            missing.push(verb);
        }
    }
    Ok(missing)
}

async fn is_allowed(
    cluster: &Cluster,
    rule: &NeededRule,
    verb: &str,
    namespace: &str,
) -> Result<bool, ClusterError> {
    let (resource, subresource) = match rule.resource.split_once('/') {
        Some((resource, subresource)) => (resource, Some(subresource.to_owned())),
        None => (rule.resource, None),
    };
    let attributes = ResourceAttributes {
        group: Some(rule.group.to_owned()),
        resource: Some(resource.to_owned()),
        subresource,
        name: rule.name.map(str::to_owned),
        verb: Some(verb.to_owned()),
        namespace: rule.namespace(namespace).map(str::to_owned),
        ..ResourceAttributes::default()
    };
    let spec = SelfSubjectAccessReviewSpec { resource_attributes: Some(attributes), ..Default::default() };
    let review = SelfSubjectAccessReview { spec, ..SelfSubjectAccessReview::default() };
    let reviews: Api<SelfSubjectAccessReview> = Api::all(cluster.client.clone());
    let params = PostParams::default();
    let answer = cluster.call("access review".to_owned(), reviews.create(&params, &review)).await?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}

#[cfg(test)]
mod tests {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;

    use super::*;

    #[test]
    fn a_clock_is_wrong_from_half_a_minute_on() {
        let now = Timestamp::from_second(1_000_000).unwrap();
        let server = |seconds: i64| Timestamp::from_second(1_000_000 - seconds).unwrap();
        assert!(skew(Some(server(30)), now).is_ok());
        assert!(skew(None, now).is_ok());
        for (seconds, found) in [(31, "31s ahead of the API server"), (-7200, "2h behind the API server")] {
            assert_eq!(skew(Some(server(seconds)), now).unwrap_err().0, found);
        }
    }

    #[tokio::test]
    async fn an_identity_of_another_node_is_named_with_its_name() {
        let name = b"system:node:a";
        let der = [&[0x06, 0x03, 0x55, 0x04, 0x03, 0x13, 13], &name[..]].concat();
        let pem =
            format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", STANDARD.encode(der));
        let file = tempfile::NamedTempFile::new().unwrap();
        let kubeconfig = serde_json::json!({
            "current-context": "c",
            "contexts": [{ "name": "c", "context": { "cluster": "c", "user": "u" } }],
            "users": [{ "name": "u", "user": { "client-certificate-data": STANDARD.encode(pem) } }],
        });
        fs_err::write(file.path(), kubeconfig.to_string()).unwrap();
        let options = |node: &str| {
            let kubeconfig = Some(file.path().to_owned());
            ClusterOptions { kubeconfig, node: node.to_owned() }
        };
        assert_eq!(other_name(&options("a"), None).await, None);
        let (found, next) = other_name(&options("b"), None).await.unwrap();
        assert!(found.starts_with("the node is called b here") && found.ends_with("is of node a"), "{found}");
        assert_eq!(next, "set kubernetes.nodeName: a");
        let (_, next) = other_name(&options("b"), Some("of-token".into())).await.unwrap();
        assert_eq!(next, "set kubernetes.nodeName: of-token");
    }
}
