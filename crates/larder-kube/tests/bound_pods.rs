//! The pods of a node against the API server of the testkit.

use std::pin::pin;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures_util::{Stream, StreamExt as _};
use larder::credentials::plugin::{ServiceAccountClient as _, ServiceAccountTokenRequest};
use larder_kube::{BoundPods, Cluster, ClusterError, ClusterServiceAccounts, PullSecrets, watch_bound_pods};
use larder_testkit::kube_api::{ApiFault, KubeApi, PolicyRule};
use serde_json::{Value, json};

const POD: &str = "/api/v1/namespaces/default/pods";

fn pod(name: &str, node: &str, image: &str) -> Value {
    json!({
        "metadata": { "name": name },
        "spec": { "nodeName": node, "containers": [{ "name": "app", "image": image }] },
    })
}

/// Names of the pods in the next state that the watch reports.
async fn next(pods: &mut (impl Stream<Item = Result<BoundPods, ClusterError>> + Unpin)) -> Vec<String> {
    let next = tokio::time::timeout(Duration::from_secs(30), pods.next()).await;
    let mut names: Vec<_> = match next.expect("a change").expect("it never ends") {
        Ok(pods) => pods.pods().map(|pod| pod.pod.name.clone()).collect(),
        Err(error) => vec![error.to_string()],
    };
    names.sort();
    names
}

/// The same, after the time in which the server is down.
async fn next_known(pods: &mut (impl Stream<Item = Result<BoundPods, ClusterError>> + Unpin)) -> Vec<String> {
    loop {
        let names = next(pods).await;
        if !names.iter().any(|name| name.contains("API server")) {
            return names;
        }
    }
}

#[tokio::test]
async fn pods_of_the_node_are_known_and_followed_without_another_list() {
    let api = KubeApi::start();
    api.create(POD, &pod("before", "n1", "a:1"));
    let cluster = Cluster::at_url(&api.url(), "n1", None).unwrap();
    let mut pods = pin!(watch_bound_pods(&cluster));
    assert_eq!(next(&mut pods).await, ["before"]);
    api.create(POD, &pod("other", "n2", "a:1"));
    api.create(POD, &pod("after", "n1", "a:1"));
    assert_eq!(next(&mut pods).await, ["after", "before"]);
    api.patch(&format!("{POD}/before/status"), &json!({ "status": { "phase": "Succeeded" } }));
    assert_eq!(next(&mut pods).await, ["after"]);
    api.delete(&format!("{POD}/after"));
    assert_eq!(next(&mut pods).await, [""; 0]);
    let lists = api.requests().into_iter().filter(|request| !request.path.contains("watch=")).count();
    assert_eq!(lists, 1, "{:?}", api.requests());
}

#[tokio::test]
async fn a_server_that_comes_back_is_asked_for_what_changed_since_a_bookmark_and_410_lists_again() {
    let mut api = KubeApi::start();
    api.create(POD, &pod("a", "n1", "a:1"));
    let cluster = Cluster::at_url(&api.url(), "n1", None).unwrap();
    let mut pods = pin!(watch_bound_pods(&cluster));
    assert_eq!(next(&mut pods).await, ["a"]);
    api.stop();
    api.restart();
    api.create(POD, &pod("b", "n1", "a:1"));
    assert_eq!(next_known(&mut pods).await, ["a", "b"]);
    let lists = |api: &KubeApi| {
        let lists = api.requests().into_iter().filter(|request| !request.path.contains("watch="));
        lists.filter(|request| request.status == 200).count()
    };
    assert_eq!(lists(&api), 1, "{:?}", api.requests());
    api.stop();
    api.delete(&format!("{POD}/a"));
    api.compact();
    api.restart();
    assert_eq!(next_known(&mut pods).await, ["b"]);
    assert_eq!(lists(&api), 2, "410 lists again");
}

#[tokio::test]
async fn secrets_are_read_by_name_and_a_missing_permission_is_named() {
    let api = KubeApi::start();
    let secrets = "/api/v1/namespaces/shop/secrets";
    let data = json!({ ".dockerconfigjson": "e30=" });
    api.create(
        secrets,
        &json!({ "metadata": { "name": "reg" }, "type": "kubernetes.io/dockerconfigjson", "data": data }),
    );
    let cluster = Cluster::at_url(&api.url(), "n1", None).unwrap();
    let names = ["gone".to_owned(), "reg".to_owned()];
    let (found, errors) = PullSecrets::of(&cluster).of_pod("shop", &names).await;
    assert_eq!(found[0].data[".dockerconfigjson"], b"{}");
    assert_eq!(errors, [ClusterError::NotFound { what: "secret shop/gone".into() }]);
    let pods = PolicyRule {
        api_groups: vec![String::new()],
        resources: vec!["pods".into()],
        verbs: vec!["list".into()],
        ..PolicyRule::default()
    };
    api.authorize("t", "system:node:n1", vec![pods]);
    let error = PullSecrets::of(&cluster).get("shop", "reg").await.unwrap_err();
    assert!(matches!(error, ClusterError::Unauthorized { .. }), "{error}");
    let cluster = Cluster::at_url(&api.url(), "n1", Some("t")).unwrap();
    let error = PullSecrets::of(&cluster).get("shop", "reg").await.unwrap_err();
    let missing = "cannot get resource \"secrets\" in API group \"\" in the namespace \"shop\"";
    assert!(matches!(&error, ClusterError::Forbidden { message } if message.contains(missing)), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_server_that_does_not_answer_fails_the_call_after_ten_seconds() {
    let api = KubeApi::start();
    api.fault("GET", 2, ApiFault::Delay(Duration::from_secs(3600)));
    let cluster = Cluster::at_url(&api.url(), "n1", None).unwrap();
    let names = ["a".to_owned(), "b".to_owned()];
    let started = tokio::time::Instant::now();
    let (_, errors) = PullSecrets::of(&cluster).of_pod("shop", &names).await;
    assert_eq!(started.elapsed().as_secs(), 10, "both at the same time");
    assert!(errors.iter().all(|error| matches!(error, ClusterError::Unavailable { .. })), "{errors:?}");
    assert_eq!(errors.len(), 2);
}

#[tokio::test]
async fn a_token_is_requested_for_the_audience_and_the_pod() {
    let api = KubeApi::start();
    let accounts = "/api/v1/namespaces/shop/serviceaccounts";
    api.create(accounts, &json!({ "metadata": { "name": "puller", "annotations": { "role": "reader" } } }));
    let client = ClusterServiceAccounts::of(&Cluster::at_url(&api.url(), "n1", None).unwrap());
    let account = client.get("shop", "puller").await.unwrap();
    assert_eq!(account.annotations["role"], "reader");
    let request = ServiceAccountTokenRequest {
        account: account.at,
        audience: "registry".into(),
        pod_name: "web".into(),
        pod_uid: "u1".into(),
    };
    let token = client.token(&request).await.unwrap();
    let claims = token.reveal().split('.').nth(1).map(ToOwned::to_owned).unwrap();
    let claims: Value = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(claims).unwrap()).unwrap();
    assert_eq!(claims["aud"], json!(["registry"]));
    assert_eq!(claims["pod"], "web");
    assert_eq!(claims["sub"], "system:serviceaccount:shop:puller");
    api.authorize("t", "system:node:n1", Vec::new());
    let refused = client.token(&request).await.unwrap_err();
    assert!(refused.contains("401"), "{refused}");
}
