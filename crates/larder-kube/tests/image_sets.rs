//! Image sets against the API server of the testkit: several nodes in one process.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use kube::api::PostParams;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use larder::reference::{ImageId, ImageName};
use larder_kube::image_sets::{
    ImageSet, ImageSetOptions, LEASE, SetImages, WantedImage, clear_report, definitions, run_image_sets,
};
use larder_kube::{Cluster, ClusterError, ClusterOptions, ResponseObserver};
use larder_testkit::kube_api::{ADMINISTRATOR, ApiFault, ApiRequest, KubeApi, PolicyRule};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio::time::Instant;

const SETS: &str = "/apis/images.larder.dev/v1alpha1/imagesets";
const REPORTS: &str = "/apis/images.larder.dev/v1alpha1/nodeimages";
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/default/leases";

/// How many nodes pull now, and the most that did so at the same time.
#[derive(Default)]
struct Pulling {
    now: AtomicUsize,
    most: AtomicUsize,
}

/// The images of one node: pulls take a moment, and images named `missing` cannot be pulled.
#[derive(Default)]
struct TestImages {
    pulling: Arc<Pulling>,
    present: Mutex<BTreeMap<String, ImageId>>,
    retained: Mutex<BTreeMap<String, String>>,
}

/// Failed requests of a node, and the actions whose failures are no longer of interest.
#[derive(Default)]
struct FailedRequests {
    errors: Mutex<Vec<ClusterError>>,
    forgotten: Mutex<Vec<String>>,
}

impl ResponseObserver for FailedRequests {
    fn observe(&self, _: &str, outcome: Result<(), ClusterError>) {
        self.errors.lock().expect("no test panicked").extend(outcome.err());
    }

    fn forget(&self, action: &str) {
        self.forgotten.lock().expect("no test panicked").push(action.to_owned());
    }
}

#[async_trait]
impl SetImages for TestImages {
    async fn ensure(&self, image: &WantedImage) -> Result<ImageId, String> {
        if image.image.as_str().contains("missing") {
            return Err(format!("{}: not found", image.image));
        }
        let now = self.pulling.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.pulling.most.fetch_max(now, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(100)).await;
        self.pulling.now.fetch_sub(1, Ordering::SeqCst);
        let id = ImageId::from(image.image.as_str());
        self.present.lock().expect("no test panicked").insert(image.image.to_string(), id.clone());
        Ok(id)
    }

    async fn find(&self, image: &WantedImage) -> Result<Option<ImageId>, String> {
        Ok(self.present.lock().expect("no test panicked").get(image.image.as_str()).cloned())
    }

    fn retain(&self, image: &WantedImage, _: &ImageId) {
        let policy = format!("{:?}", image.retention);
        self.retained.lock().expect("no test panicked").insert(image.image.to_string(), policy);
    }

    fn release(&self, image: &ImageName) {
        self.retained.lock().expect("no test panicked").remove(image.as_str());
    }
}

impl TestImages {
    fn retained(&self) -> Vec<String> {
        self.retained
            .lock()
            .expect("no test panicked")
            .iter()
            .map(|(image, policy)| format!("{image} {policy}"))
            .collect()
    }
}

/// Nodes that run until dropped.
struct Fleet {
    api: KubeApi,
    nodes: BTreeMap<String, TestNode>,
    pulling: Arc<Pulling>,
    options: ImageSetOptions,
    token: &'static str,
}

struct TestNode {
    images: Arc<TestImages>,
    cluster: Cluster,
    failed: Arc<FailedRequests>,
    task: JoinHandle<()>,
}

impl Fleet {
    async fn start(nodes: &[(&str, &str)]) -> Fleet {
        Fleet::start_with(Fleet::options(), nodes).await
    }

    fn options() -> ImageSetOptions {
        ImageSetOptions {
            lease: Duration::from_secs(2),
            first_attempt: Duration::from_millis(10),
            candidate_interval: Duration::from_millis(300),
            report_delay: Duration::from_millis(20),
            retry: Duration::from_millis(200),
            count_interval: Duration::from_millis(20),
            status_interval: Duration::from_millis(50),
            secret_interval: Duration::from_millis(500),
            ..ImageSetOptions::new("default")
        }
    }

    async fn start_with(options: ImageSetOptions, nodes: &[(&str, &str)]) -> Fleet {
        Fleet::start_at(KubeApi::start(), options, nodes).await
    }

    async fn start_at(api: KubeApi, options: ImageSetOptions, nodes: &[(&str, &str)]) -> Fleet {
        for definition in definitions() {
            let definition = serde_json::to_value(definition).expect("JSON");
            api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", &definition);
        }
        let mut fleet =
            Fleet { api, nodes: BTreeMap::new(), pulling: Arc::default(), options, token: ADMINISTRATOR };
        for (name, zone) in nodes {
            fleet.add(name, zone).await;
        }
        fleet
    }

    async fn add(&mut self, name: &str, zone: &str) {
        let node = json!({ "metadata": { "name": name, "labels": { "zone": zone } } });
        self.api.create("/api/v1/nodes", &node);
        self.run(name).await;
    }

    async fn run(&mut self, name: &str) {
        let images = Arc::new(TestImages { pulling: Arc::clone(&self.pulling), ..TestImages::default() });
        let kubeconfig = Some(self.api.kubeconfig(self.token));
        let cluster =
            Cluster::connect(&ClusterOptions { kubeconfig, node: name.to_owned() }).await.expect("a client");
        let failed = Arc::<FailedRequests>::default();
        let cluster = cluster.observed_by(failed.clone());
        let task = tokio::spawn(run_image_sets(cluster.clone(), self.options.clone(), images.clone()));
        self.nodes.insert(name.to_owned(), TestNode { images, cluster, failed, task });
    }

    fn kill(&mut self, name: &str) {
        self.nodes.remove(name).expect("a node").task.abort();
    }

    fn create(&self, name: &str, spec: &Value) {
        let set = json!({
            "apiVersion": "images.larder.dev/v1alpha1", "kind": "ImageSet",
            "metadata": { "name": name }, "spec": spec,
        });
        self.api.create(SETS, &set);
    }

    fn status(&self, name: &str) -> Value {
        self.api.get(&format!("{SETS}/{name}"))["status"].clone()
    }

    /// Waits until the status of a set has these counts: desired, ready, failing.
    async fn counts(&self, name: &str, (desired, ready, failing): (u32, u32, u32)) -> Value {
        let expected = json!([desired, ready, failing]);
        let found = || {
            let status = self.status(name);
            (json!([status["desired"], status["ready"], status["failing"]]) == expected).then_some(status)
        };
        until(found).await.unwrap_or_else(|| panic!("not {expected}: {}", self.status(name)))
    }

    /// The node and the process that hold the lease, and how often it has changed hands.
    fn lease(&self) -> Option<(String, String, i64)> {
        let leases = self.api.get(LEASES);
        let lease = leases["items"].as_array()?.iter().find(|lease| lease["metadata"]["name"] == LEASE)?;
        let holder = lease["spec"]["holderIdentity"].as_str().filter(|holder| !holder.is_empty())?;
        let (node, process) = holder.split_once('_').expect("NODE_ID");
        Some((node.to_owned(), process.to_owned(), lease["spec"]["leaseTransitions"].as_i64()?))
    }

    /// The node and the process that hold the lease.
    fn holder(&self) -> Option<(String, String)> {
        self.lease().map(|(node, process, _)| (node, process))
    }

    fn retained(&self, node: &str) -> Vec<String> {
        self.nodes[node].images.retained()
    }

    /// Reasons and notes of the events about a set.
    fn events(&self, set: &str) -> Vec<String> {
        let events = self.api.get("/apis/events.k8s.io/v1/namespaces/default/events");
        let events = events["items"].as_array().cloned().unwrap_or_default().into_iter();
        let of_set = events.filter(|event| event["regarding"]["name"] == set);
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        of_set.map(|event| format!("{}: {}", text(&event["reason"]), text(&event["note"]))).collect()
    }

    /// Requests of all nodes so far.
    fn requests(&self) -> u64 {
        self.nodes.values().map(|node| node.cluster.requests().requests).sum()
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for node in self.nodes.values() {
            node.task.abort();
        }
    }
}

/// Waits half a minute at most for a result.
async fn until<T>(mut found: impl FnMut() -> Option<T>) -> Option<T> {
    for _ in 0..600 {
        if let Some(found) = found() {
            return Some(found);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    None
}

fn condition(status: &Value, kind: &str) -> String {
    let conditions = status["conditions"].as_array().cloned().unwrap_or_default();
    let found = conditions.iter().find(|condition| condition["type"] == kind).cloned().unwrap_or_default();
    format!(
        "{} {}",
        found["status"].as_str().unwrap_or_default(),
        found["reason"].as_str().unwrap_or_default()
    )
}

#[tokio::test]
async fn images_of_a_set_are_pulled_on_the_selected_nodes_counted_and_released_with_the_set() {
    let mut fleet = Fleet::start(&[("n1", "a"), ("n2", "a"), ("n3", "b")]).await;
    let spec = json!({
        "images": [{ "image": "app:1" }, { "image": "base:2" }], "policy": "Pin",
        "nodeSelector": { "matchExpressions": [{ "key": "zone", "operator": "In", "values": ["a"] }] },
    });
    fleet.create("web", &spec);
    let status = fleet.counts("web", (2, 2, 0)).await;
    assert_eq!(status["images"], 2);
    let pulled = until(|| fleet.events("web").into_iter().find(|event| event.starts_with("Pulled")));
    assert_eq!(pulled.await.as_deref(), Some("Pulled: 2 images present on 2 nodes"));
    assert_eq!(
        (condition(&status, "Ready"), condition(&status, "Failing")),
        ("True AllNodesReady".to_owned(), "False NoFailures".to_owned())
    );
    assert_eq!(fleet.retained("n1"), ["app:1 Pin", "base:2 Pin"]);
    assert_eq!(fleet.retained("n3"), [""; 0]);
    let report = fleet.api.get(&format!("{REPORTS}/n1"));
    let node = fleet.api.get("/api/v1/nodes/n1");
    assert_eq!(report["metadata"]["ownerReferences"][0]["uid"], node["metadata"]["uid"]);
    assert_eq!(report["imageSets"][0]["state"], "Ready");
    fleet.add("n4", "a").await;
    fleet.counts("web", (3, 3, 0)).await;
    fleet.api.delete("/api/v1/nodes/n2");
    fleet.counts("web", (2, 2, 0)).await;
    fleet.api.delete(&format!("{SETS}/web"));
    until(|| fleet.retained("n1").is_empty().then_some(())).await.expect("released");
    let reported = || fleet.api.get(&format!("{REPORTS}/n1"))["imageSets"].clone();
    until(|| (reported() == json!([])).then_some(())).await.expect("the report is about no set");
}

#[tokio::test]
async fn a_node_whose_image_sets_are_turned_off_reports_none() {
    let mut fleet = Fleet::start(&[("n1", "a")]).await;
    let cluster = fleet.nodes["n1"].cluster.clone();
    fleet.create("web", &json!({ "images": [{ "image": "app:1" }] }));
    fleet.counts("web", (1, 1, 0)).await;
    fleet.kill("n1");
    clear_report(&cluster, &fleet.options).await;
    let report = fleet.api.get(&format!("{REPORTS}/n1"));
    assert_eq!((&report["imageSets"], &report["ready"]), (&json!([]), &json!(0)));
    let owner = &report["metadata"]["ownerReferences"][0]["name"];
    assert_eq!(owner, "n1", "it is still removed with the node");
    fleet.api.delete(&format!("{REPORTS}/n1"));
    clear_report(&cluster, &fleet.options).await;
}

#[tokio::test]
async fn an_image_that_never_resolves_is_reported_by_node_and_the_others_are_pulled() {
    let fleet = Fleet::start(&[("n1", "a"), ("n2", "a")]).await;
    fleet.create("web", &json!({ "images": [{ "image": "missing:1" }, { "image": "app:1" }] }));
    let status = fleet.counts("web", (2, 0, 2)).await;
    let first = json!({ "node": "n1", "image": "missing:1", "message": "not found" });
    assert_eq!(status["failures"][0], first);
    assert_eq!(condition(&status, "Failing"), "True NodesFailing");
    let failed = until(|| fleet.events("web").into_iter().find(|event| event.starts_with("Failed")));
    let failed = failed.await.expect("an event");
    assert!(
        failed.ends_with("; n1: missing:1: not found") || failed.ends_with("; n2: missing:1: not found"),
        "{failed}"
    );
    until(|| (fleet.retained("n2") == ["app:1 KeepPresent"]).then_some(())).await.expect("the other image");
    let fixed = json!({ "spec": { "images": [{ "image": "app:1" }] } });
    fleet.api.patch(&format!("{SETS}/web"), &fixed);
    let status = fleet.counts("web", (2, 2, 0)).await;
    assert_eq!(status["observedGeneration"], 2);
    assert_eq!(status["failures"], json!([]));
}

#[tokio::test]
async fn five_hundred_images_that_never_resolve_are_one_failure_of_the_node_and_delay_no_other_image() {
    let options = ImageSetOptions { report_delay: Duration::from_millis(200), ..Fleet::options() };
    let fleet = Fleet::start_with(options, &[("n1", "a")]).await;
    let missing = (0..500).map(|index| json!({ "image": format!("missing:{index:03}") }));
    let images: Vec<_> = missing.chain([json!({ "image": "app:1" })]).collect();
    let started = Instant::now();
    fleet.create("web", &json!({ "images": images }));
    let status = fleet.counts("web", (1, 0, 1)).await;
    assert_eq!(status["images"], 501);
    assert_eq!(status["failures"].as_array().map(Vec::len), Some(1), "{}", status["failures"]);
    until(|| (fleet.retained("n1") == ["app:1 KeepPresent"]).then_some(())).await.expect("the other image");
    let report = || fleet.api.get(&format!("{REPORTS}/n1"))["imageSets"][0].clone();
    until(|| (report()["ready"] == 1).then_some(())).await.unwrap_or_else(|| panic!("{}", report()));
    assert_eq!(report()["failure"]["image"], "missing:000", "{}", report());
    assert!(report().to_string().len() < 2048, "the report does not grow with the failures: {}", report());
    // Each image fails at its own time, and what is reported is written for all that failed since the last time.
    let (requests, elapsed) = (fleet.api.requests(), started.elapsed());
    let most = |interval: Duration| 1 + usize::try_from(elapsed.as_millis() / interval.as_millis()).unwrap();
    let count = |is_counted: fn(&ApiRequest) -> bool| requests.iter().filter(|it| is_counted(it)).count();
    let reports = count(|request| request.method == "PATCH" && request.path.starts_with(REPORTS));
    assert!(reports <= most(fleet.options.report_delay), "{reports} reports in {elapsed:?}");
    // Each time that it is elected it writes a status at once.
    let elections = most(fleet.options.candidate_interval);
    let statuses = count(|request| request.method == "PATCH" && request.path.starts_with(SETS));
    assert!(
        statuses <= most(fleet.options.status_interval) + elections,
        "{statuses} statuses in {elapsed:?}"
    );
    // As many in any time, but for the looks at the lease.
    let others = count(|request| request.method != "PATCH" && !request.path.starts_with(LEASES));
    assert!(others < 50, "{others} other requests");
}

#[tokio::test]
async fn a_set_that_selects_no_node_says_so() {
    let fleet = Fleet::start(&[("n1", "a")]).await;
    let spec =
        json!({ "images": [{ "image": "app:1" }], "nodeSelector": { "matchLabels": { "zone": "z" } } });
    fleet.create("web", &spec);
    let status = until(|| Some(fleet.status("web")).filter(|status| status["conditions"].is_array())).await;
    assert_eq!(condition(&status.expect("a status"), "Ready"), "True NoMatchingNodes");
    let event = until(|| fleet.events("web").into_iter().next()).await;
    assert_eq!(event.as_deref(), Some("NoMatchingNodes: no node matches nodeSelector"));
}

#[tokio::test]
async fn a_pull_secret_that_does_not_exist_is_reported_until_it_does_although_the_pull_succeeds() {
    let fleet = Fleet::start(&[("n1", "a")]).await;
    let secret = |name: &str| {
        let secret = json!({ "metadata": { "name": name }, "data": { "a": "e30=" } });
        fleet.api.create("/api/v1/namespaces/default/secrets", &secret);
    };
    secret("here");
    fleet.create("web", &json!({ "images": [{ "image": "app:1" }], "pullSecrets": ["here", "missing"] }));
    let missing = || condition(&fleet.status("web"), "PullSecretsMissing");
    until(|| (missing() == "True FailedToRetrieveImagePullSecret").then_some(())).await.expect("a condition");
    fleet.counts("web", (1, 1, 0)).await;
    let of_secret = |event: &String| event.starts_with("FailedToRetrieveImagePullSecret");
    let event = until(|| fleet.events("web").into_iter().find(of_secret)).await;
    let text = "FailedToRetrieveImagePullSecret: Unable to retrieve some image pull secrets (missing); \
                attempting to pull the image may not succeed.";
    assert_eq!(event.as_deref(), Some(text));
    secret("missing");
    until(|| (missing() == " ").then_some(())).await.expect("no condition");
}

#[tokio::test]
async fn no_more_nodes_than_parallelism_says_pull_at_the_same_time() {
    let names: Vec<_> = (0..6).map(|index| format!("n{index}")).collect();
    let nodes: Vec<_> = names.iter().map(|name| (name.as_str(), "a")).collect();
    let fleet = Fleet::start(&nodes).await;
    fleet.create("web", &json!({ "images": [{ "image": "app:1" }], "parallelism": 2 }));
    let status = fleet.counts("web", (6, 6, 0)).await;
    assert_eq!(status["admittedUpTo"], "n5");
    assert_eq!(fleet.pulling.most.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn another_agent_takes_over_when_the_elected_one_is_gone() {
    let mut fleet = Fleet::start(&[("n1", "a"), ("n2", "a"), ("n3", "a")]).await;
    fleet.create("web", &json!({ "images": [{ "image": "app:1" }] }));
    fleet.counts("web", (3, 3, 0)).await;
    let (first, _, before) = until(|| fleet.lease()).await.expect("a holder");
    fleet.kill(&first);
    let next = until(|| fleet.lease().filter(|(node, ..)| *node != first)).await;
    assert_eq!(next.expect("another holder").2, before + 1);
    fleet.api.delete(&format!("/api/v1/nodes/{first}"));
    fleet.counts("web", (2, 2, 0)).await;
}

#[tokio::test]
async fn of_two_daemons_with_the_same_node_name_one_is_elected() {
    // A node that stalls for a second does not lose the lease.
    let options = ImageSetOptions { lease: Duration::from_secs(60), ..Fleet::options() };
    let mut fleet = Fleet::start_with(options, &[("n1", "a")]).await;
    fleet.create("web", &json!({ "images": [{ "image": "app:1" }] }));
    fleet.counts("web", (1, 1, 0)).await;
    let holder = fleet.holder();
    assert_eq!(holder.as_ref().map(|(node, _)| node.as_str()), Some("n1"));
    let first = fleet.nodes.remove("n1").expect("a node");
    fleet.run("n1").await;
    // The holder itself reads its lease each 15 s.
    let looked = || {
        let requests = fleet.api.requests();
        requests.iter().filter(|request| request.method == "GET" && request.path.starts_with(LEASES)).count()
    };
    let before = looked();
    until(|| (looked() > before + 3).then_some(())).await.expect("the other one would take it");
    assert_eq!(fleet.holder(), holder, "it is not free");
    first.task.abort();
    let other = || fleet.holder().filter(|other| Some(other) != holder.as_ref());
    let (node, _) = until(other).await.expect("the other one is elected");
    assert_eq!(node, "n1");
}

#[tokio::test]
async fn the_lease_of_an_agent_that_crashed_is_taken_over_after_its_time() {
    let mut fleet = Fleet::start(&[]).await;
    let spec = json!({ "holderIdentity": "n1_crashed", "leaseDurationSeconds": 1, "leaseTransitions": 3 });
    fleet.api.create(LEASES, &json!({ "metadata": { "name": LEASE }, "spec": spec }));
    fleet.add("n1", "a").await;
    fleet.create("web", &json!({ "images": [{ "image": "app:1" }] }));
    let next = until(|| fleet.lease().filter(|(_, process, _)| process != "crashed")).await;
    let (node, _, transitions) = next.expect("another holder");
    assert_eq!((node.as_str(), transitions), ("n1", 4));
    fleet.counts("web", (1, 1, 0)).await;
}

#[tokio::test]
async fn images_stay_retained_while_the_api_server_is_down_and_after_410_changes_are_known() {
    let mut fleet = Fleet::start(&[("n1", "a")]).await;
    fleet.create("web", &json!({ "images": [{ "image": "app:1" }] }));
    fleet.create("old", &json!({ "images": [{ "image": "old:1" }] }));
    fleet.counts("web", (1, 1, 0)).await;
    fleet.counts("old", (1, 1, 0)).await;
    fleet.api.stop();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(fleet.retained("n1"), ["app:1 KeepPresent", "old:1 KeepPresent"]);
    fleet.api.restart();
    fleet.api.delete(&format!("{SETS}/old"));
    fleet.create("new", &json!({ "images": [{ "image": "new:1" }] }));
    fleet.api.compact();
    fleet.counts("new", (1, 1, 0)).await;
    until(|| (fleet.retained("n1") == ["app:1 KeepPresent", "new:1 KeepPresent"]).then_some(()))
        .await
        .expect("the old one is released");
}

#[tokio::test]
async fn the_lease_is_given_up_when_there_is_no_set_any_more() {
    // The next set does not wait for the interval, and a node that stalls for a second does not lose the lease.
    let options = ImageSetOptions {
        lease: Duration::from_secs(60),
        candidate_interval: Duration::from_secs(600),
        ..Fleet::options()
    };
    let fleet = Fleet::start_with(options, &[("n1", "a")]).await;
    fleet.create("web", &json!({ "images": [{ "image": "app:1" }] }));
    fleet.counts("web", (1, 1, 0)).await;
    until(|| fleet.holder()).await.expect("it holds the lease");
    fleet.api.delete(&format!("{SETS}/web"));
    until(|| fleet.holder().is_none().then_some(())).await.expect("no holder");
    let forgotten = fleet.nodes["n1"].failed.forgotten.lock().unwrap().clone();
    assert!(forgotten.iter().any(|action| action == "list nodeimages"), "{forgotten:?}");
    fleet.create("next", &json!({ "images": [{ "image": "app:1" }] }));
    fleet.counts("next", (1, 1, 0)).await;
}

#[tokio::test]
async fn after_an_outage_of_the_api_server_an_agent_is_elected_without_the_wait_of_a_candidate() {
    let lease = Duration::from_millis(600);
    let options = ImageSetOptions { lease, candidate_interval: Duration::from_secs(600), ..Fleet::options() };
    let mut fleet = Fleet::start_at(KubeApi::in_process(), options, &[("n1", "a")]).await;
    fleet.api.fault(LEASES, 3, ApiFault::Status(503, "ServiceUnavailable"));
    fleet.create("first", &json!({ "images": [{ "image": "app:1" }] }));
    fleet.counts("first", (1, 1, 0)).await;
    fleet.api.stop();
    tokio::time::sleep(lease).await; // no agent is elected any more
    fleet.api.restart();
    fleet.create("second", &json!({ "images": [{ "image": "app:1" }] }));
    fleet.counts("second", (1, 1, 0)).await;
}

/// Of the fleet whose requests are counted.
const NODES: u32 = 50;

#[tokio::test]
async fn in_a_steady_state_a_node_makes_fewer_than_two_requests_in_a_minute() {
    // A minute is a second.
    let usual = ImageSetOptions::new("default");
    let options = ImageSetOptions {
        lease: usual.lease / 60,
        first_attempt: usual.first_attempt / 60,
        candidate_interval: usual.candidate_interval / 60,
        report_delay: usual.report_delay / 60,
        refresh: usual.refresh / 60,
        retry: usual.retry / 60,
        count_interval: usual.count_interval / 60,
        status_interval: usual.status_interval / 60,
        secret_interval: usual.secret_interval / 60,
        ..usual
    };
    let names: Vec<_> = (0..NODES).map(|index| format!("n{index:02}")).collect();
    let nodes: Vec<_> = names.iter().map(|name| (name.as_str(), "a")).collect();
    let fleet = Fleet::start_with(options, &nodes).await;
    fleet.create("web", &json!({ "images": [{ "image": "app:1" }, { "image": "base:1" }] }));
    fleet.counts("web", (NODES, NODES, 0)).await;
    // Without the looks at the lease, of which a slow rollout has more.
    let rollout = fleet.api.requests().iter().filter(|request| !request.path.starts_with(LEASES)).count();
    let most = usize::try_from(NODES).expect("a small number") * 15;
    assert!(rollout < most, "{rollout} requests until all nodes are ready");
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (started, before) = (Instant::now(), fleet.requests());
    tokio::time::sleep(Duration::from_secs(10)).await;
    let requests = u32::try_from(fleet.requests() - before).expect("a small number");
    let counted = f64::from(requests) / started.elapsed().as_secs_f64() / f64::from(NODES);
    // A watch that is not interrupted is begun again after 290 seconds; each node has two.
    let each_minute = counted + 2.0 * 60.0 / 290.0;
    assert!((0.5..2.0).contains(&each_minute), "{each_minute} requests for each node and minute");
}

#[tokio::test]
async fn the_api_server_refuses_an_invalid_set_and_says_why() {
    let fleet = Fleet::start(&[]).await;
    let config = Kubeconfig::read_from(fleet.api.kubeconfig(ADMINISTRATOR)).unwrap();
    let config = Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await.unwrap();
    let sets: Api<ImageSet> = Api::all(Client::try_from(config).unwrap());
    let one = || json!([{ "image": "a:1" }]);
    let many: Vec<_> = (0..5000).map(|index| json!({ "image": format!("a:{index}") })).collect();
    let selector = |operator: &str, values: Value| json!({ "matchExpressions": [{ "key": "zone", "operator": operator, "values": values }] });
    let cases = [
        (json!({ "images": many }), "spec.images: Too many: 5000: must have at most 1000 items"),
        (
            json!({ "images": [] }),
            "spec.images: Invalid value: 0: spec.images in body should have at least 1 items",
        ),
        (json!({ "images": [{ "image": "a:1" }, { "image": "a:1" }] }), "spec.images[1]: Duplicate value"),
        (json!({ "images": [{ "image": "" }] }), "spec.images[0].image"),
        (
            json!({ "images": [{ "image": "a b" }] }),
            "spec.images[0].image: Invalid value: \"a b\": must be an image",
        ),
        (
            json!({ "images": [{ "image": "r.example/App:1" }] }),
            "must be an image, such as registry.example/app:1",
        ),
        (json!({ "images": [{ "image": "http://r.example/app:1" }] }), "must be an image"),
        (json!({ "images": [{ "image": "app@sha256:12" }] }), "must be an image"),
        (json!({ "images": one(), "pullSecrets": ["My_Secret"] }), "spec.pullSecrets: Invalid value"),
        (json!({ "images": one(), "nodeSelector": { "matchLabels": { "a b": "c" } } }), "must be labels"),
        (json!({ "images": one(), "nodeSelector": { "matchLabels": { "a": "c d" } } }), "must be labels"),
        (
            json!({ "images": one(), "nodeSelector": { "matchLabels": { "a": "c".repeat(64) } } }),
            "may not be more than 63",
        ),
        (
            json!({ "images": one(), "nodeSelector": selector("In", json!(["c d"])) }),
            "must be values of labels",
        ),
        (
            json!({ "images": one(), "nodeSelector": { "matchExpressions": [{ "key": "a/b/c", "operator": "Exists" }] } }),
            "must be the key of a label",
        ),
        (
            json!({ "images": one(), "retry": { "backoffSeconds": 301 } }),
            "spec.retry: Invalid value: backoffSeconds (10 by default) must not be greater than maxBackoffSeconds",
        ),
        (
            json!({ "images": one(), "retry": { "maxBackoffSeconds": 9 } }),
            "must not be greater than maxBackoffSeconds",
        ),
        (json!({ "images": one(), "pullSecrets": ["a", "a"] }), "spec.pullSecrets[1]: Duplicate value"),
        (
            json!({ "images": one(), "parallelism": 0 }),
            "must be from 1 to 1000000, or a percentage from \"1%\" to \"100%\"",
        ),
        (json!({ "images": one(), "parallelism": "150%" }), "must be from 1 to 1000000, or a percentage"),
        // What larder could not read would hide all sets from it.
        (json!({ "images": one(), "parallelism": 1_000_001 }), "must be from 1 to 1000000"),
        (json!({ "images": one(), "deadlineSeconds": 31_536_001 }), "spec.deadlineSeconds"),
        (json!({ "images": one(), "retry": { "limit": 1_000_001 } }), "spec.retry.limit"),
        (json!({ "images": one(), "deadlineSeconds": 0 }), "spec.deadlineSeconds"),
        (json!({ "images": one(), "retry": { "limit": 0 } }), "spec.retry.limit"),
        (
            json!({ "images": one(), "nodeSelector": selector("In", json!([])) }),
            "values must be given for In and NotIn",
        ),
        (
            json!({ "images": one(), "nodeSelector": selector("Exists", json!(["a"])) }),
            "and for no other operator",
        ),
    ];
    // The server of the testkit checks no schemas: it stores them all.
    let is_real = std::env::var_os("LARDER_KUBE_APISERVER").is_some();
    for (index, (spec, message)) in cases.into_iter().enumerate() {
        let set = ImageSet::new(&format!("bad-{index}"), serde_json::from_value(spec).unwrap());
        let refused = sets.create(&PostParams::default(), &set).await.err().map(|error| error.to_string());
        assert_eq!(refused.is_some(), is_real, "{message}");
        assert!(
            refused.as_ref().is_none_or(|refused| refused.contains(message)),
            "{refused:?} has no {message}"
        );
    }
    for (index, parallelism) in [json!(1), json!("1%"), json!("99%"), json!("100%")].into_iter().enumerate() {
        let spec = json!({ "images": one(), "parallelism": parallelism, "nodeSelector": selector("In", json!(["a", ""])) });
        fleet.create(&format!("good-{index}"), &spec);
    }
    // As much as is allowed is not too much for the rules.
    let image =
        |index| format!("r{index}.example:5000/{}app:1@sha256:{}", "part/".repeat(40), "a".repeat(64));
    let many: Vec<_> = (0..1000).map(|index| json!({ "image": image(index) })).collect();
    let labels: BTreeMap<_, _> =
        (0..50).map(|index| (format!("{}.example/k{index}", "a.b".repeat(50)), "v".repeat(63))).collect();
    let secrets: Vec<_> = (0..16).map(|index| format!("{}{index}", "s".repeat(200))).collect();
    let spec = json!({ "images": many, "pullSecrets": secrets, "nodeSelector": { "matchLabels": labels } });
    fleet.create("big", &spec);
}

#[tokio::test]
async fn a_missing_permission_is_named() {
    let mut fleet = Fleet::start(&[]).await;
    let nodes = PolicyRule {
        api_groups: vec![String::new()],
        resources: vec!["nodes".into()],
        verbs: vec!["list".into(), "watch".into()],
        ..PolicyRule::default()
    };
    fleet.api.authorize("limited", "limited", vec![nodes]);
    fleet.token = "limited";
    fleet.add("n1", "a").await;
    let failed = Arc::clone(&fleet.nodes["n1"].failed);
    let missing =
        "cannot list resource \"imagesets\" in API group \"images.larder.dev\" at the cluster scope";
    let is_named = |error: &ClusterError| matches!(error, ClusterError::Forbidden { message } if message.contains(missing));
    let named = until(|| failed.errors.lock().unwrap().iter().any(is_named).then_some(())).await;
    assert!(named.is_some(), "{:?}", failed.errors.lock().unwrap());
}
