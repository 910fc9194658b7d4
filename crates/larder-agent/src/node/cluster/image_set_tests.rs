//! The images of image sets against the API server of the testkit.

use std::sync::Arc;
use std::time::Duration;

use larder::backend::PullUntil;
use larder::events::{EventReason, RingSink};
use larder::pod::ObjectRef;
use larder::pull::ImageManager;
use larder::retention::{Retention, RetentionPurpose, RetentionSource as _};
use larder_kube::image_sets::definitions;
use larder_kube::{Cluster, ClusterOptions};
use larder_testkit::fake_backend::{BackendCall, FakeBackend, image};
use larder_testkit::kube_api::{ADMINISTRATOR, KubeApi};
use serde_json::{Value, json};
use tokio::time;

use super::{ClusterIdentity, ImageSetContext, NodeCluster, follow_image_sets};
use crate::config::Config;
use crate::node::metrics::tests::assert_served;
use crate::node::metrics::{ExpositionFormat, exposition};
use crate::node::pods::desired::DesiredUses;
use crate::node::{Node, testing};
use crate::serve::connections::Connections;

const SETS: &str = "/apis/images.larder.dev/v1alpha1/imagesets";

fn set(name: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "images.larder.dev/v1alpha1", "kind": "ImageSet",
        "metadata": { "name": name }, "spec": spec,
    })
}

fn texts(uses: Vec<Retention>) -> Vec<String> {
    uses.into_iter().map(|found| format!("{}: {}", found.purpose, found.image)).collect()
}

async fn pinned(held: &DesiredUses) -> Vec<String> {
    let retained = held.retentions().await.expect("they are known").into_iter();
    let pinned = retained.filter_map(|Retention { image, purpose, .. }| match purpose {
        RetentionPurpose::Desired { by, is_pinned: true, .. } => Some(format!("{by}: {image}")),
        _ => None,
    });
    pinned.collect()
}

async fn until_uses(held: &DesiredUses, wanted: &[&str]) {
    let uses = async || texts(held.retentions().await.expect("they are known"));
    let reached = async {
        while uses().await != wanted {
            time::sleep(Duration::from_millis(20)).await;
        }
    };
    let in_time = time::timeout(Duration::from_secs(60), reached).await;
    assert!(in_time.is_ok(), "{:?} instead of {wanted:?}", uses().await);
}

#[tokio::test]
async fn images_of_a_set_are_pulled_with_its_secret_and_in_use_until_it_is_deleted() {
    let api = KubeApi::start();
    for definition in definitions() {
        let path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
        api.create(path, &serde_json::to_value(definition).expect("JSON"));
    }
    let namespace =
        json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "larder-system" } });
    api.create("/api/v1/namespaces", &namespace);
    // {"auths":{"r.example":{"auth":"dTpw"}}}
    let document = "eyJhdXRocyI6eyJyLmV4YW1wbGUiOnsiYXV0aCI6ImRUcHcifX19";
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/dockerconfigjson",
        "metadata": { "name": "registry" }, "data": { ".dockerconfigjson": document },
    });
    api.create("/api/v1/namespaces/larder-system/secrets", &secret);
    api.create("/api/v1/nodes", &json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n1" } }));
    let keep = json!({ "images": [{ "image": "r.example/a:1" }], "pullSecrets": ["missing", "registry"] });
    api.create(SETS, &set("keep", &keep));
    api.create(
        SETS,
        &set("pin", &json!({ "images": [{ "image": "r.example/b:1", "lazy": true }], "policy": "Pin" })),
    );
    let broken = json!({ "images": [{ "image": "r.example/c:1" }], "pullSecrets": ["missing"] });
    api.create(SETS, &set("broken", &broken));

    let backend = FakeBackend::new();
    for name in ["r.example/a:1", "r.example/b:1"] {
        backend.offer(name, image(format!("sha256:{name}"), 1));
    }
    let held = DesiredUses::default();
    let context = context(&backend, &held);
    let cluster = cluster(&api);
    let following = Arc::clone(&cluster);
    let task =
        tokio::spawn(async move { follow_image_sets(&following, context, Arc::default(), None).await });

    let both = ["ImageSet keep: sha256:r.example/a:1", "ImageSet pin: sha256:r.example/b:1"];
    until_uses(&held, &both).await;
    assert_eq!(pinned(&held).await, both[1..], "over CRI");
    let with_credential = |call: &larder_testkit::fake_backend::RecordedCall| call.credential.is_some();
    assert!(backend.requests().iter().any(with_credential));
    let until = |name: &str| {
        let requests = backend.requests().into_iter();
        let mut pulls = requests
            .filter(|request| matches!(&request.call, BackendCall::Pull { image, .. } if image == name));
        pulls.next().and_then(|pull| pull.spec).map(|spec| spec.options.until)
    };
    assert_eq!(until("r.example/b:1"), Some(PullUntil::Startable), "the set says `lazy`");
    assert_eq!(until("r.example/a:1"), Some(PullUntil::Configured));
    assert!(cluster.status().own_identity.is_some_and(|own| own.connected));
    let report = async {
        loop {
            let found = api.get("/apis/images.larder.dev/v1alpha1/nodeimages");
            let sets = found["items"][0]["imageSets"].as_array().cloned().unwrap_or_default();
            let failures = sets.iter().filter_map(|set| set["failure"]["message"].as_str());
            if let Some(failure) = failures.map(str::to_owned).next() {
                return failure;
            }
            time::sleep(Duration::from_millis(50)).await;
        }
    };
    let failure = time::timeout(Duration::from_secs(60), report).await.expect("a report");
    assert!(
        failure.contains("without a pull secret: secret larder-system/missing does not exist"),
        "{failure}"
    );
    api.delete(&format!("{SETS}/pin"));
    until_uses(&held, &both[..1]).await;
    task.abort();
    _ = task.await;
    until_uses(&held, &[]).await;
}

#[tokio::test]
async fn a_cluster_without_the_custom_resources_is_not_connected_until_they_are_installed() {
    let api = KubeApi::start();
    api.create("/api/v1/nodes", &json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n1" } }));
    let context = context(&FakeBackend::new(), &DesiredUses::default());
    let cluster = cluster(&api);
    let following = Arc::clone(&cluster);
    let task =
        tokio::spawn(async move { follow_image_sets(&following, context, Arc::default(), None).await });
    let until_problem = async |expected: Option<&str>| {
        let problem = || cluster.status().own_identity.and_then(|own| own.problem);
        let reached = async {
            while problem().as_deref() != expected {
                time::sleep(Duration::from_millis(50)).await;
            }
        };
        let in_time = time::timeout(Duration::from_secs(60), reached).await;
        assert!(in_time.is_ok(), "{:?} instead of {expected:?}", problem());
    };
    let missing = "custom resource imagesets.images.larder.dev is not installed: \
                   `kubectl apply -k packaging/kubernetes/base` installs it";
    until_problem(Some(missing)).await;
    time::sleep(Duration::from_secs(2)).await;
    until_problem(Some(missing)).await;
    for definition in definitions() {
        let path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
        api.create(path, &serde_json::to_value(definition).expect("JSON"));
    }
    until_problem(None).await;
    task.abort();
}

#[tokio::test]
async fn a_wrong_image_that_is_tried_again_and_again_is_reported_once() {
    let api = KubeApi::start();
    for definition in definitions() {
        let path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
        api.create(path, &serde_json::to_value(definition).expect("JSON"));
    }
    api.create("/api/v1/nodes", &json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n1" } }));
    let often = json!({ "limit": 3, "backoffSeconds": 1, "maxBackoffSeconds": 1 });
    api.create(SETS, &set("wrong", &json!({ "images": [{ "image": "r.example/no:1" }], "retry": often })));
    let (backend, ring) = (FakeBackend::new(), Arc::new(RingSink::new(100)));
    let manager = Arc::new(ImageManager::new(Arc::new(backend.clone())).with_events(ring.clone()));
    let context = ImageSetContext { manager, ..context(&backend, &DesiredUses::default()) };
    let cluster = cluster(&api);
    let task = tokio::spawn(async move { follow_image_sets(&cluster, context, Arc::default(), None).await });
    let tried = async {
        while backend.requests().len() < 3 {
            time::sleep(Duration::from_millis(20)).await;
        }
    };
    time::timeout(Duration::from_secs(60), tried).await.expect("three attempts");
    task.abort();
    _ = task.await;
    let reasons: Vec<_> = ring.snapshot().into_iter().map(|event| event.reason).collect();
    assert_eq!(reasons, [EventReason::Pulling, EventReason::Failed]);
}

async fn metrics_page(node: &Node) -> String {
    let (connections, disks) = (Connections::default(), node.collection.filesystems().await);
    exposition(node, &connections, &disks, ExpositionFormat::OpenMetrics).expect("a page")
}

/// The samples of the metric of images, without zeros.
async fn samples(node: &Node) -> Vec<String> {
    let page = metrics_page(node).await;
    let lines = page.lines().filter(|line| line.starts_with("larder_kubernetes_image_set_images{"));
    let mut samples: Vec<_> = lines.filter(|line| !line.ends_with(" 0")).map(str::to_owned).collect();
    samples.sort();
    samples
}

#[tokio::test]
async fn images_of_sets_stay_in_use_while_events_are_turned_off_and_on_but_not_without_sets_or_a_cluster() {
    let api = KubeApi::start();
    for definition in definitions() {
        let path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
        api.create(path, &serde_json::to_value(definition).expect("JSON"));
    }
    api.create("/api/v1/nodes", &json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n1" } }));
    api.create(
        SETS,
        &set("keep", &json!({ "images": [{ "image": "r.example/a:1" }, { "image": "r.example/no:1" }] })),
    );
    let (backend, directory) = (FakeBackend::new(), tempfile::tempdir().expect("a directory"));
    backend.offer("r.example/a:1", image("sha256:r.example/a:1", 1));
    let own =
        Cluster::open(&ClusterOptions { kubeconfig: Some(api.kubeconfig(ADMINISTRATOR)), node: "n1".into() });
    let cluster = NodeCluster::of_test_with(None, Some(ClusterIdentity::new(own, "image sets")));
    let mut parts = testing::parts(&backend, directory.path(), None, |_| {});
    parts.cluster = Some(Arc::new(cluster));
    let node = Arc::new(Node::build(parts));
    let (file, mut text) = (directory.path().join("image-sets.json"), Vec::new());
    let scenario = async {
        let used = ["ImageSet keep: sha256:r.example/a:1"];
        until_uses(node.workloads.uses(), &used).await;
        let change = |change: fn(&mut Config)| {
            let mut config = Config::clone(&node.settings.now());
            change(&mut config);
            node.settings.replace(config);
        };
        for events in [false, true] {
            change(if events {
                |config| config.kubernetes.events = true
            } else {
                |config| config.kubernetes.events = false
            });
            for _ in 0..20 {
                assert_eq!(texts(node.workloads.uses().retentions().await.expect("they are known")), used);
                time::sleep(Duration::from_millis(10)).await;
            }
        }
        let label = |state: &str| format!("larder_kubernetes_image_set_images{{state=\"{state}\"}} 1");
        let mut both = [label("present"), label("failed")];
        both.sort();
        let counted = async {
            while samples(&node).await != both {
                time::sleep(Duration::from_millis(20)).await;
            }
        };
        time::timeout(Duration::from_secs(60), counted).await.expect("one image failed, one is present");
        assert_served(&metrics_page(&node).await, "larder_kubernetes_");
        while !file.exists() {
            time::sleep(Duration::from_millis(20)).await;
        }
        text = fs_err::read(&file).expect("a file");
        change(|config| config.kubernetes.image_sets = false);
        until_uses(node.workloads.uses(), &[]).await;
        while file.exists() || !samples(&node).await.is_empty() {
            time::sleep(Duration::from_millis(20)).await;
        }
    };
    Box::pin(run_until(&node, scenario)).await;
    drop(node);

    fs_err::write(&file, text).expect("a file");
    let without = Arc::new(testing::node(&backend, directory.path(), None, |_| {}));
    let forgotten = async {
        while file.exists() {
            time::sleep(Duration::from_millis(20)).await;
        }
    };
    Box::pin(run_until(&without, forgotten)).await;
}

async fn run_until(node: &Arc<Node>, ended: impl Future<Output = ()>) {
    tokio::select! {
        () = Box::pin(node.run()) => unreachable!("the node runs until dropped"),
        ended = time::timeout(Duration::from_secs(60), ended) => ended.expect("it ends in a minute"),
    }
}

/// Returns the context in which `n1` pulls.
fn context(backend: &FakeBackend, held: &DesiredUses) -> ImageSetContext {
    ImageSetContext {
        manager: Arc::new(ImageManager::new(Arc::new(backend.clone()))),
        held: held.clone(),
        collector: None,
        file: None,
        node: ObjectRef::node("n1"),
    }
}

/// The cluster of `n1`, with an administrator as larder's identity.
fn cluster(api: &KubeApi) -> Arc<NodeCluster> {
    let kubeconfig = Some(api.kubeconfig(ADMINISTRATOR));
    let own = Cluster::open(&ClusterOptions { kubeconfig, node: "n1".into() });
    Arc::new(NodeCluster::of_test_with(None, Some(ClusterIdentity::new(own, "image sets"))))
}

/// A daemon that follows image sets until dropped.
struct Daemon(tokio::task::JoinHandle<()>);

impl Drop for Daemon {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Daemon {
    fn start(api: &KubeApi, backend: &FakeBackend, held: &DesiredUses, file: &std::path::Path) -> Daemon {
        let context = ImageSetContext { file: Some(file.to_owned()), ..context(backend, held) };
        let first = held.begin_first_scan();
        let cluster = cluster(api);
        Daemon(tokio::spawn(async move {
            follow_image_sets(&cluster, context, Arc::default(), Some(first)).await;
        }))
    }
}

#[tokio::test]
async fn images_of_sets_are_in_use_at_once_after_a_restart_also_while_the_api_server_is_down() {
    let mut api = KubeApi::start();
    for definition in definitions() {
        let path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
        api.create(path, &serde_json::to_value(definition).expect("JSON"));
    }
    api.create("/api/v1/nodes", &json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n1" } }));
    api.create(SETS, &set("keep", &json!({ "images": [{ "image": "r.example/a:1" }] })));
    api.create(SETS, &set("pin", &json!({ "images": [{ "image": "r.example/b:1" }], "policy": "Pin" })));
    let backend = FakeBackend::new();
    for name in ["r.example/a:1", "r.example/b:1"] {
        backend.add_image(name, image(format!("sha256:{name}"), 1));
    }
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("image-sets.json");
    let both = ["ImageSet keep: sha256:r.example/a:1", "ImageSet pin: sha256:r.example/b:1"];

    let held = DesiredUses::default();
    let first = Daemon::start(&api, &backend, &held, &file);
    assert_eq!(texts(held.retentions().await.expect("they are known")), both, "GC waits for the first look");
    let written = || {
        fs_err::read_to_string(&file)
            .is_ok_and(|text| text.contains("r.example/a:1") && text.contains("r.example/b:1"))
    };
    while !written() {
        time::sleep(Duration::from_millis(20)).await;
    }
    drop(first);

    api.stop();
    let held = DesiredUses::default();
    let _second = Daemon::start(&api, &backend, &held, &file);
    assert_eq!(texts(held.retentions().await.expect("they are known")), both);
    assert_eq!(pinned(&held).await, both[1..]);
    api.restart();
    api.delete(&format!("{SETS}/pin"));
    until_uses(&held, &both[..1]).await;
    while fs_err::read_to_string(&file).is_ok_and(|text| text.contains("r.example/b:1")) {
        time::sleep(Duration::from_millis(20)).await;
    }
}
