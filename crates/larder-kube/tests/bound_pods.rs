//! The pods of a node against the API server of the testkit.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures_util::{Stream, StreamExt as _};
use larder::credentials::plugin::{ServiceAccountClient as _, ServiceAccountTokenRequest};
use larder_kube::{
    BoundPods, Cluster, ClusterError, ClusterOptions, ClusterServiceAccounts, PullSecrets, ResponseObserver,
    UnreadSecret, watch_bound_pods,
};
use larder_testkit::kube_api::{ADMINISTRATOR, ApiFault, KubeApi, PolicyRule};
use serde_json::{Value, json};

const POD: &str = "/api/v1/namespaces/default/pods";

async fn connect(api: &KubeApi, token: &str) -> Cluster {
    let options = ClusterOptions { kubeconfig: Some(api.kubeconfig(token)), node: "n1".into() };
    Cluster::connect(&options).await.expect("a client")
}

fn create_namespace(api: &KubeApi, name: &str) {
    api.create("/api/v1/namespaces", &json!({ "metadata": { "name": name } }));
}

fn pod(name: &str, node: &str, image: &str) -> Value {
    json!({
        "metadata": { "name": name },
        "spec": { "nodeName": node, "containers": [{ "name": "app", "image": image }] },
    })
}

/// Of the core group.
fn rule(resource: &str, verb: &str) -> PolicyRule {
    PolicyRule {
        api_groups: vec![String::new()],
        resources: vec![resource.into()],
        verbs: vec![verb.into()],
        ..PolicyRule::default()
    }
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

/// Returns the next known pods after the time in which the server is down.
async fn next_known(pods: &mut (impl Stream<Item = Result<BoundPods, ClusterError>> + Unpin)) -> Vec<String> {
    loop {
        let names = next(pods).await;
        if !names.iter().any(|name| name.contains("the API server is unavailable")) {
            return names;
        }
    }
}

/// How many lists the server has sent.
fn lists(api: &KubeApi) -> usize {
    let lists = api.requests().into_iter().filter(|request| !request.path.contains("watch="));
    lists.filter(|request| request.status == 200).count()
}

/// Follows the pods, which do not change, until something else has happened.
async fn nothing_changes_until(
    pods: &mut (impl Stream<Item = Result<BoundPods, ClusterError>> + Unpin),
    has_happened: impl Fn() -> bool,
) {
    let happens = async {
        while !has_happened() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        names = next(pods) => panic!("{names:?}"),
        () = happens => {}
    }
}

#[tokio::test]
async fn pods_of_the_node_are_known_and_followed_without_another_list() {
    let api = KubeApi::start();
    api.create(POD, &pod("before", "n1", "a:1"));
    let cluster = connect(&api, ADMINISTRATOR).await;
    let mut pods = pin!(watch_bound_pods(&cluster));
    assert_eq!(next(&mut pods).await, ["before"]);
    api.create(POD, &pod("other", "n2", "a:1"));
    api.create(POD, &pod("after", "n1", "a:1"));
    assert_eq!(next(&mut pods).await, ["after", "before"]);
    api.patch(&format!("{POD}/before/status"), &json!({ "status": { "phase": "Succeeded" } }));
    assert_eq!(next(&mut pods).await, ["after"]);
    api.delete(&format!("{POD}/after"));
    assert_eq!(next(&mut pods).await, [""; 0]);
    assert_eq!(lists(&api), 1, "{:?}", api.requests());
    let is_from_cache = api.requests()[0].path.contains("resourceVersion=0");
    assert!(is_from_cache, "{:?}", api.requests());
}

#[tokio::test]
async fn a_server_that_comes_back_is_asked_for_what_changed_and_410_lists_again() {
    let mut api = KubeApi::start();
    api.create(POD, &pod("a", "n1", "a:1"));
    let cluster = connect(&api, ADMINISTRATOR).await;
    let mut pods = pin!(watch_bound_pods(&cluster));
    assert_eq!(next(&mut pods).await, ["a"]);
    api.stop();
    api.restart();
    api.create(POD, &pod("b", "n1", "a:1"));
    assert_eq!(next_known(&mut pods).await, ["a", "b"]);
    assert_eq!(lists(&api), 1, "{:?}", api.requests());
    api.stop();
    api.delete(&format!("{POD}/a"));
    api.compact();
    api.restart();
    assert_eq!(next_known(&mut pods).await, ["b"]);
    assert_eq!(lists(&api), 2, "410 lists again");
}

/// Counts what watches receive.
#[derive(Default)]
struct ReceivedFrames(AtomicUsize);

impl ResponseObserver for ReceivedFrames {
    fn observe(&self, _: &str, _: Result<(), ClusterError>) {}

    fn observe_watch(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[tokio::test]
async fn bookmarks_alone_keep_a_watch_resumable_although_the_version_of_its_pods_is_forgotten() {
    let mut api = KubeApi::in_process();
    api.create(POD, &pod("a", "n1", "a:1"));
    let received = Arc::<ReceivedFrames>::default();
    let cluster = connect(&api, ADMINISTRATOR).await.observed_by(received.clone());
    let mut pods = pin!(watch_bound_pods(&cluster));
    assert_eq!(next(&mut pods).await, ["a"]);
    let is_watched =
        || api.requests().iter().any(|request| request.path.contains("watch=") && request.status == 200);
    nothing_changes_until(&mut pods, is_watched).await;
    create_namespace(&api, "of-others");
    let before = received.0.load(Ordering::Relaxed);
    api.send_bookmarks();
    nothing_changes_until(&mut pods, || received.0.load(Ordering::Relaxed) > before).await;
    api.stop();
    api.compact();
    api.restart();
    api.create(POD, &pod("b", "n1", "a:1"));
    assert_eq!(next_known(&mut pods).await, ["a", "b"]);
    assert_eq!(lists(&api), 1, "{:?}", api.requests());
}

#[tokio::test]
async fn a_watch_whose_connection_is_closed_is_begun_again() {
    let api = KubeApi::in_process();
    api.fault("watch=true", 1, ApiFault::Hangup);
    api.create(POD, &pod("a", "n1", "a:1"));
    let cluster = connect(&api, ADMINISTRATOR).await;
    let mut pods = pin!(watch_bound_pods(&cluster));
    assert_eq!(next(&mut pods).await, ["a"]);
    api.create(POD, &pod("b", "n1", "a:1"));
    assert_eq!(next_known(&mut pods).await, ["a", "b"]);
}

#[tokio::test]
async fn secrets_are_read_by_name_and_a_missing_permission_is_named() {
    let api = KubeApi::start();
    create_namespace(&api, "shop");
    let secrets = "/api/v1/namespaces/shop/secrets";
    let data = json!({ ".dockerconfigjson": "e30=" });
    api.create(
        secrets,
        &json!({ "metadata": { "name": "reg" }, "type": "kubernetes.io/dockerconfigjson", "data": data }),
    );
    let cluster = connect(&api, ADMINISTRATOR).await;
    let names = ["gone".to_owned(), "reg".to_owned()];
    let (found, errors) =
        PullSecrets::of(&cluster, Duration::ZERO, Duration::ZERO).of_pod("shop", &names).await;
    assert_eq!(found[0].data[".dockerconfigjson"], b"{}");
    let missing = ClusterError::NotFound { what: "secret shop/gone".into() };
    assert_eq!(errors, [UnreadSecret { name: "gone".into(), error: missing }]);
    api.authorize("t", "reader", vec![rule("pods", "list")]);
    let error = PullSecrets::of(&connect(&api, "unknown").await, Duration::ZERO, Duration::ZERO)
        .get("shop", "reg")
        .await
        .unwrap_err();
    assert!(matches!(error, ClusterError::Unauthorized { .. }), "{error}");
    let cluster = connect(&api, "t").await;
    let error =
        PullSecrets::of(&cluster, Duration::ZERO, Duration::ZERO).get("shop", "reg").await.unwrap_err();
    let missing = "cannot get resource \"secrets\" in API group \"\" in the namespace \"shop\"";
    assert!(matches!(&error, ClusterError::Forbidden { message } if message.contains(missing)), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_server_that_does_not_answer_fails_the_call_after_ten_seconds() {
    let api = KubeApi::in_process();
    api.fault("GET", 2, ApiFault::Delay(Duration::from_secs(3600)));
    let cluster = connect(&api, ADMINISTRATOR).await;
    let names = ["a".to_owned(), "b".to_owned()];
    let started = tokio::time::Instant::now();
    let (_, errors) = PullSecrets::of(&cluster, Duration::ZERO, Duration::ZERO).of_pod("shop", &names).await;
    assert_eq!(started.elapsed().as_secs(), 10, "both at the same time");
    assert!(
        errors.iter().all(|unread| matches!(unread.error, ClusterError::Unavailable { .. })),
        "{errors:?}"
    );
    assert_eq!(errors.len(), 2);
}

#[tokio::test]
async fn a_token_is_requested_for_the_audience_and_the_pod() {
    let api = KubeApi::start();
    create_namespace(&api, "shop");
    let accounts = "/api/v1/namespaces/shop/serviceaccounts";
    api.create(accounts, &json!({ "metadata": { "name": "puller", "annotations": { "role": "reader" } } }));
    let mut web = pod("web", "n1", "a:1");
    web["spec"]["serviceAccountName"] = json!("puller");
    let web = api.create("/api/v1/namespaces/shop/pods", &web);
    api.authorize(
        "t",
        "reader",
        vec![rule("serviceaccounts", "get"), rule("serviceaccounts/token", "create")],
    );
    let client = ClusterServiceAccounts::of(&connect(&api, "t").await);
    let account = client.get("shop", "puller").await.unwrap();
    assert_eq!(account.annotations["role"], "reader");
    let mut request = ServiceAccountTokenRequest {
        account: account.at,
        audience: "registry".into(),
        pod_name: "web".into(),
        pod_uid: web["metadata"]["uid"].as_str().unwrap().into(),
    };
    let token = client.token(&request).await.unwrap();
    let claims = token.reveal().split('.').nth(1).map(ToOwned::to_owned).unwrap();
    let claims: Value = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(claims).unwrap()).unwrap();
    assert_eq!(claims["aud"], json!(["registry"]));
    assert_eq!(claims["kubernetes.io"]["pod"]["name"], "web");
    assert_eq!(claims["sub"], "system:serviceaccount:shop:puller");
    (request.pod_name, request.pod_uid) = ("gone".into(), "gone".into());
    let refused = client.token(&request).await.unwrap_err();
    assert_eq!(refused, "token of service account shop/puller does not exist");
    api.revoke("t");
    request.pod_name = "another".into();
    let refused = client.token(&request).await.unwrap_err();
    assert!(refused.contains("401"), "{refused}");
}

/// Runs the clock ahead, without the connections.
async fn advance(seconds: u64) {
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(seconds)).await;
    tokio::time::resume();
}

#[tokio::test]
async fn a_token_is_requested_again_after_most_of_its_lifetime_and_an_account_after_a_minute() {
    let api = KubeApi::in_process();
    let created = api
        .create("/api/v1/namespaces/default/serviceaccounts", &json!({ "metadata": { "name": "puller" } }));
    let mut web = pod("web", "n1", "a:1");
    web["spec"]["serviceAccountName"] = json!("puller");
    let web = api.create(POD, &web);
    let client = ClusterServiceAccounts::of(&connect(&api, ADMINISTRATOR).await);
    let requests = |part: &str| api.requests().iter().filter(|request| request.path.contains(part)).count();
    for (seconds, expected) in [(0, 1), (50, 1), (11, 2)] {
        advance(seconds).await;
        let account = client.get("default", "puller").await.unwrap();
        assert_eq!(account.at.uid, created["metadata"]["uid"].as_str().unwrap());
        assert_eq!(requests("/serviceaccounts/puller"), expected);
    }
    let request = ServiceAccountTokenRequest {
        account: client.get("default", "puller").await.unwrap().at,
        audience: "registry".into(),
        pod_name: "web".into(),
        pod_uid: web["metadata"]["uid"].as_str().unwrap().into(),
    };
    let first = client.token(&request).await.unwrap();
    advance(2870).await;
    assert_eq!(client.token(&request).await.unwrap(), first, "80 % of an hour are 2880 s");
    advance(20).await;
    let second = client.token(&request).await.unwrap();
    assert_ne!(second, first);
    assert_eq!(requests("/token"), 2);
    let other = ServiceAccountTokenRequest { audience: "other".into(), ..request.clone() };
    assert_ne!(client.token(&other).await.unwrap(), second, "each audience has its own");
    advance(3000).await;
    api.fault("/token", 2, ApiFault::Status(500, "InternalError"));
    assert_eq!(client.token(&request).await.unwrap(), second, "valid for 10 minutes more");
    advance(601).await;
    assert!(client.token(&request).await.unwrap_err().contains("unavailable"));
}

#[tokio::test]
async fn a_token_that_is_refused_is_requested_once_in_ten_seconds() {
    let api = KubeApi::start();
    let accounts = "/api/v1/namespaces/default/serviceaccounts";
    api.create(accounts, &json!({ "metadata": { "name": "puller" } }));
    let mut web = pod("web", "n1", "a:1");
    web["spec"]["serviceAccountName"] = json!("puller");
    let web = api.create(POD, &web);
    api.authorize("t", "reader", vec![rule("serviceaccounts", "get")]);
    let cluster = connect(&api, "t").await;
    let client = ClusterServiceAccounts::of(&cluster);
    let request = ServiceAccountTokenRequest {
        account: client.get("default", "puller").await.unwrap().at,
        audience: "registry".into(),
        pod_name: "web".into(),
        pod_uid: web["metadata"]["uid"].as_str().unwrap().into(),
    };
    for _ in 0..100 {
        let refused = client.token(&request).await.unwrap_err();
        assert!(refused.contains("cannot create resource \"serviceaccounts/token\""), "{refused}");
        client.get("default", "missing").await.unwrap_err();
    }
    assert_eq!(cluster.requests().requests, 3, "two accounts and a token");
    api.authorize(
        "t",
        "reader",
        vec![rule("serviceaccounts", "get"), rule("serviceaccounts/token", "create")],
    );
    advance(11).await;
    client.token(&request).await.unwrap();
    assert_eq!(cluster.requests().requests, 4);
}
