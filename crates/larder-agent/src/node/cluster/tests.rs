//! The images of bound pods against the API server of the testkit.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use larder::events::{Event, EventReason, EventSink as _, EventType, RingSink};
use larder::pod::{ObjectRef, Pod};
use larder::pull::ImageManager;
use larder::retention::RetentionSource as _;
use larder_kube::{Cluster, ClusterOptions};
use larder_testkit::fake_backend::{FakeBackend, ScriptedPull, image};
use larder_testkit::kube_api::{ADMINISTRATOR, ApiFault, KubeApi, PolicyRule};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::{self, Instant};

use super::{ClusterIdentity, NodeCluster, run_pods};
use crate::node::pods::desired::{DesiredImages, DesiredUses};

const PODS: &str = "/api/v1/namespaces/default/pods";
const SECRETS: &str = "/api/v1/namespaces/default/secrets";

fn pod(name: &str, image: &str, secrets: &[&str]) -> Value {
    let secrets: Vec<Value> = secrets.iter().map(|name| json!({ "name": name })).collect();
    let container = json!({ "name": "app", "image": image, "imagePullPolicy": "IfNotPresent" });
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": name, "namespace": "default" },
        "spec": { "nodeName": "n1", "containers": [container], "imagePullSecrets": secrets },
    })
}

fn secret(name: &str, kind: &str) -> Value {
    // {"auths":{"r.example":{"auth":"dTpw"}}}
    let document = "eyJhdXRocyI6eyJyLmV4YW1wbGUiOnsiYXV0aCI6ImRUcHcifX19";
    json!({
        "apiVersion": "v1", "kind": "Secret", "type": kind,
        "metadata": { "name": name, "namespace": "default" },
        "data": { ".dockerconfigjson": document },
    })
}

/// The cluster of a server, with the rights of this token.
fn cluster(api: &KubeApi, token: &str) -> Cluster {
    Cluster::open(&ClusterOptions { kubeconfig: Some(api.kubeconfig(token)), node: "n1".into() })
}

/// A node with two images at its registry, whose pods are read from the API server.
struct TestNode {
    backend: FakeBackend,
    held: DesiredUses,
    cluster: Arc<NodeCluster>,
    task: JoinHandle<()>,
}

impl Drop for TestNode {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl TestNode {
    fn start(cluster: Cluster) -> TestNode {
        TestNode::with(cluster, false)
    }

    fn with(cluster: Cluster, uses_runtime_handlers: bool) -> TestNode {
        let backend = FakeBackend::new();
        for name in ["r.example/a:1", "r.example/b:1"] {
            backend.offer(name, image(format!("sha256:{name}"), 1));
        }
        let manager = Arc::new(ImageManager::new(Arc::new(backend.clone())));
        let held = DesiredUses::default();
        let first = held.begin_first_scan();
        let desired = DesiredImages::new(manager, held.clone());
        let cluster =
            Arc::new(NodeCluster::of_test_with(Some(ClusterIdentity::new(cluster, "pods of node n1")), None));
        let own = Arc::clone(&cluster);
        let task = tokio::spawn(async move {
            if let Some(identity) = &own.node {
                run_pods(&own, identity, desired, uses_runtime_handlers, Some(first)).await;
            }
        });
        TestNode { backend, held, cluster, task }
    }

    fn at(api: &KubeApi) -> TestNode {
        TestNode::start(cluster(api, ADMINISTRATOR))
    }

    async fn uses(&self) -> Vec<String> {
        let uses = self.held.retentions().await.expect("they are known");
        uses.into_iter().map(|found| format!("{}: {}", found.purpose, found.image)).collect()
    }

    /// Waits until exactly these images are in use.
    async fn until_uses(&self, wanted: &[&str]) {
        let reached = async {
            while self.uses().await != wanted {
                time::sleep(Duration::from_millis(20)).await;
            }
        };
        let in_time = time::timeout(Duration::from_secs(60), reached).await;
        assert!(in_time.is_ok(), "{:?} instead of {wanted:?}", self.uses().await);
    }

    async fn until_connected(&self) {
        let is_connected = || self.cluster.status().node_identity.is_some_and(|node| node.connected);
        let reached = async {
            while !is_connected() {
                time::sleep(Duration::from_millis(20)).await;
            }
        };
        assert!(time::timeout(Duration::from_secs(60), reached).await.is_ok(), "{:?}", self.cluster.status());
    }

    async fn until_problem(&self, part: &str) {
        let problem =
            || self.cluster.status().node_identity.and_then(|node| node.problem).unwrap_or_default();
        let reached = async {
            while !problem().contains(part) {
                time::sleep(Duration::from_millis(20)).await;
            }
        };
        let in_time = time::timeout(Duration::from_secs(60), reached).await;
        assert!(in_time.is_ok(), "{:?} instead of {part:?}", problem());
    }
}

#[tokio::test]
async fn images_of_a_bound_pod_are_pulled_and_in_use_until_it_is_deleted_or_finished() {
    let api = KubeApi::start();
    api.create(PODS, &pod("web", "r.example/a:1", &[]));
    let node = TestNode::at(&api);
    node.until_uses(&["pod default/web: sha256:r.example/a:1"]).await;
    api.create(PODS, &pod("job", "r.example/b:1", &[]));
    node.until_uses(&["pod default/job: sha256:r.example/b:1", "pod default/web: sha256:r.example/a:1"])
        .await;
    assert_eq!(node.cluster.status().pods, 2);
    api.delete(&format!("{PODS}/web"));
    node.until_uses(&["pod default/job: sha256:r.example/b:1"]).await;
    api.patch(&format!("{PODS}/job/status"), &json!({ "status": { "phase": "Succeeded" } }));
    node.until_uses(&[]).await;
    assert_eq!(node.backend.images().len(), 2, "GC decides when they are removed");
}

#[tokio::test]
async fn a_pod_that_is_deleted_during_its_pull_cancels_it_and_holds_nothing() {
    let api = KubeApi::start();
    let node = TestNode::at(&api);
    node.backend.hold_pulls();
    api.create(PODS, &pod("web", "r.example/a:1", &[]));
    node.backend.until(|counts| counts.running == 1).await;
    api.delete(&format!("{PODS}/web"));
    node.backend.until(|counts| counts.canceled == 1).await;
    assert!(node.uses().await.is_empty());
    assert_eq!(node.cluster.status().pods, 0);
    // A pod that comes later is pulled from the start.
    api.create(PODS, &pod("new", "r.example/a:1", &[]));
    node.backend.until(|counts| counts.running == 1).await;
    let finished = ScriptedPull::with_outcome(Ok(image("sha256:r.example/a:1", 1)));
    assert!(node.backend.finish_pull_of("r.example/a:1", finished));
    node.until_uses(&["pod default/new: sha256:r.example/a:1"]).await;
}

#[tokio::test]
async fn an_api_server_that_is_down_for_an_hour_stops_no_known_pod_and_is_reported() {
    let mut api = KubeApi::start();
    api.create(PODS, &pod("web", "r.example/a:1", &[]));
    let node = TestNode::at(&api);
    node.until_uses(&["pod default/web: sha256:r.example/a:1"]).await;
    assert!(node.cluster.status().node_identity.unwrap().connected);
    api.stop();
    node.until_problem("the API server is unavailable").await;
    time::pause();
    node.backend.set_images(Vec::new());
    time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(node.backend.images().len(), 1, "pulled again without the API server");
    api.restart();
    // The longest back-off.
    time::advance(Duration::from_secs(61)).await;
    time::resume();
    api.create(PODS, &pod("new", "r.example/b:1", &[]));
    node.until_uses(&["pod default/new: sha256:r.example/b:1", "pod default/web: sha256:r.example/a:1"])
        .await;
    assert!(node.cluster.status().node_identity.unwrap().connected);
}

#[tokio::test]
async fn a_server_that_answers_again_is_connected_although_no_pod_changes() {
    let mut api = KubeApi::start();
    api.create(PODS, &pod("web", "r.example/a:1", &[]));
    let node = TestNode::at(&api);
    node.until_uses(&["pod default/web: sha256:r.example/a:1"]).await;
    api.stop();
    node.until_problem("the API server is unavailable").await;
    api.restart();
    node.until_connected().await;
}

#[tokio::test]
async fn images_in_use_are_known_as_soon_as_pods_are_although_none_is_pulled() {
    let api = KubeApi::start();
    let node = TestNode::at(&api);
    let started = Instant::now();
    assert!(node.uses().await.is_empty());
    assert!(started.elapsed() < Duration::from_secs(8), "no pods: {:?}", started.elapsed());
    let mut unknown = pod("web", "r.example/a:1", &[]);
    unknown["spec"]["runtimeClassName"] = json!("missing");
    let api = KubeApi::in_process();
    api.create(PODS, &unknown);
    let node = TestNode::with(cluster(&api, ADMINISTRATOR), true);
    let started = Instant::now();
    assert!(node.uses().await.is_empty());
    assert!(started.elapsed() < Duration::from_secs(8), "an unknown runtime class: {:?}", started.elapsed());
}

#[tokio::test]
async fn pods_are_found_after_an_api_server_that_was_down_at_the_start() {
    let mut api = KubeApi::start();
    api.create(PODS, &pod("web", "r.example/a:1", &[]));
    api.stop();
    let node = TestNode::at(&api);
    node.until_problem("the API server is unavailable").await;
    api.restart();
    node.until_uses(&["pod default/web: sha256:r.example/a:1"]).await;
}

#[tokio::test]
async fn pods_are_listed_again_after_their_version_was_forgotten() {
    let mut api = KubeApi::start();
    api.create(PODS, &pod("web", "r.example/a:1", &[]));
    let node = TestNode::at(&api);
    node.until_uses(&["pod default/web: sha256:r.example/a:1"]).await;
    api.stop();
    api.delete(&format!("{PODS}/web"));
    api.create(PODS, &pod("new", "r.example/b:1", &[]));
    api.compact();
    api.restart();
    node.until_uses(&["pod default/new: sha256:r.example/b:1"]).await;
    node.until_connected().await;
}

/// Rules for these verbs of pods.
fn pods(verbs: &[&str]) -> Vec<PolicyRule> {
    let verbs = verbs.iter().map(|&verb| verb.to_owned()).collect();
    let (api_groups, resources) = (vec![String::new()], vec!["pods".to_owned()]);
    vec![PolicyRule { api_groups, resources, verbs, ..PolicyRule::default() }]
}

#[tokio::test]
async fn a_missing_rule_is_named_until_it_is_granted_and_what_is_allowed_goes_on() {
    let api = KubeApi::start();
    api.create(PODS, &pod("web", "r.example/a:1", &[]));
    api.authorize("t", "limited", pods(&["list"]));
    let node = TestNode::start(cluster(&api, "t"));
    node.until_uses(&["pod default/web: sha256:r.example/a:1"]).await;
    node.until_problem("cannot watch resource \"pods\" in API group \"\" at the cluster scope").await;
    api.authorize("t", "limited", pods(&["list", "watch"]));
    node.until_connected().await;
    api.create(PODS, &pod("new", "r.example/b:1", &[]));
    node.until_uses(&["pod default/new: sha256:r.example/b:1", "pod default/web: sha256:r.example/a:1"])
        .await;
}

#[tokio::test]
async fn a_rejected_token_is_reported_and_its_successor_is_read() {
    let mut api = KubeApi::start();
    api.create(PODS, &pod("web", "r.example/a:1", &[]));
    api.authorize("first", "u1", pods(&["list", "watch"]));
    let kubeconfig = api.kubeconfig("first");
    let options = ClusterOptions { kubeconfig: Some(kubeconfig.clone()), node: "n1".into() };
    let node = TestNode::start(Cluster::open(&options));
    node.until_uses(&["pod default/web: sha256:r.example/a:1"]).await;
    api.revoke("first");
    api.stop();
    api.restart();
    node.until_problem("the API server rejected the credentials (401)").await;
    assert_eq!(node.uses().await, ["pod default/web: sha256:r.example/a:1"], "known pods go on");
    api.authorize("second", "u2", pods(&["list", "watch"]));
    fs_err::copy(api.kubeconfig("second"), &kubeconfig).expect("a file");
    node.until_connected().await;
    api.delete(&format!("{PODS}/web"));
    node.until_uses(&[]).await;
}

#[tokio::test]
async fn a_server_that_is_slow_for_one_pod_delays_no_other() {
    let api = KubeApi::in_process();
    api.fault("/secrets/", 1, ApiFault::Delay(Duration::from_secs(3600)));
    api.create(PODS, &pod("slow", "r.example/a:1", &["registry"]));
    api.create(PODS, &pod("web", "r.example/b:1", &[]));
    let node = TestNode::at(&api);
    node.backend.until(|counts| counts.succeeded > 0).await;
    time::pause();
    time::advance(Duration::from_secs(11)).await;
    time::resume();
    // Its secret has no answer within ten seconds, which any later answer lets be forgotten: it is pulled without.
    node.until_uses(&["pod default/slow: sha256:r.example/a:1", "pod default/web: sha256:r.example/b:1"])
        .await;
    // The pod has no secret, so its watch alone has news of it.
    api.create(PODS, &pod("new", "r.example/b:1", &[]));
    node.until_connected().await;
}

/// Waits until a pull with a credential has begun.
async fn until_credential(node: &TestNode) {
    let reached = async {
        while !node.backend.requests().iter().any(|call| call.credential.is_some()) {
            time::sleep(Duration::from_millis(20)).await;
        }
    };
    assert!(time::timeout(Duration::from_secs(60), reached).await.is_ok(), "{:?}", node.backend.requests());
}

#[tokio::test]
async fn pulls_have_the_secrets_of_the_pod_without_those_that_give_none() {
    let api = KubeApi::start();
    api.create(SECRETS, &secret("registry", "kubernetes.io/dockerconfigjson"));
    api.create(SECRETS, &secret("wrong", "Opaque"));
    api.create(PODS, &pod("web", "r.example/a:1", &["missing", "wrong", "registry"]));
    let node = TestNode::at(&api);
    node.until_uses(&["pod default/web: sha256:r.example/a:1"]).await;
    until_credential(&node).await;
}

#[tokio::test]
async fn a_secret_that_is_created_after_a_failed_pull_is_used() {
    let api = KubeApi::start();
    api.create(PODS, &pod("web", "r.example/a:1", &["late"]));
    let node = TestNode::at(&api);
    for _ in 0..2 {
        node.backend.on_pull_of("r.example/a:1", ScriptedPull::fails("denied"));
    }
    node.backend.until(|counts| counts.failed > 0).await;
    assert!(node.backend.requests().iter().all(|call| call.credential.is_none()));
    api.create(SECRETS, &secret("late", "kubernetes.io/dockerconfigjson"));
    time::pause();
    time::advance(Duration::from_secs(31)).await;
    time::resume();
    until_credential(&node).await;
}

#[tokio::test]
async fn events_about_the_node_reach_the_cluster_and_those_of_kubelet_do_not() {
    let api = KubeApi::start();
    let own = ClusterIdentity::new(cluster(&api, ADMINISTRATOR), "image sets and events");
    let journal = Arc::new(RingSink::new(10));
    let cluster = Arc::new(NodeCluster::of_test_with(None, Some(own)));
    let (sender, follower) = (Arc::clone(&cluster), journal.follow(0));
    let task = tokio::spawn(async move { sender.send_events(follower, || true).await });
    let record = |object: ObjectRef, reason: EventReason, message: &str| {
        let (event_type, requester) = (EventType::Warning, String::new());
        let time = SystemTime::now();
        journal.record(Event { time, event_type, reason, object, message: message.into(), requester });
    };
    let pod = Pod { name: "web".into(), namespace: "default".into(), ..Pod::default() };
    record(ObjectRef::new(&pod, "spec.containers{app}"), EventReason::Failed, "denied");
    for _ in 0..2 {
        record(ObjectRef::node("n1"), EventReason::ImageGcFailed, "no space");
    }
    while cluster.event_counts().sent < 2 {
        assert_eq!(cluster.event_counts().failed, 0, "{:?}", cluster.status());
        time::sleep(Duration::from_millis(20)).await;
    }
    task.abort();
    let events = api.get("/apis/events.k8s.io/v1/namespaces/default/events");
    // A real server has events of its own.
    let events = events["items"].as_array().expect("a list").iter();
    let events: Vec<_> = events.filter(|event| event["reportingController"] == "larder").collect();
    assert_eq!(events.len(), 1, "repetitions are one series: {events:?}");
    let (event, about) = (&events[0], &events[0]["regarding"]);
    assert_eq!((&event["reason"], &event["type"]), (&json!("ImageGCFailed"), &json!("Warning")));
    assert_eq!((&event["note"], &event["series"]["count"]), (&json!("no space"), &json!(2)));
    assert_eq!((&about["kind"], &about["name"], &about["uid"]), (&json!("Node"), &json!("n1"), &json!("n1")));
}
