//! The manifests of `packaging/kubernetes`: what they install, and whether their rules are what larder needs.

mod kustomize;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt as _;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use larder::reference::{ImageId, ImageName};
use larder_kube::image_sets::{
    ImageSetOptions, NodeImages, NodeImagesReport, SetImages, WantedImage, run_image_sets,
};
use larder_kube::{
    Cluster, ClusterError, ClusterOptions, NodeEvent, NodeEvents, PullSecrets, RuntimeClasses, check_cluster,
    watch_bound_pods,
};
use larder_testkit::kube_api::{ADMINISTRATOR, ApiFault, ApiRequest, KubeApi, PROGRAM_VARIABLE, PolicyRule};
use serde_json::{Value, json};

const MANIFESTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/kubernetes");
const NAMESPACE: &str = "larder-system";
const BASE: &str = "base/rbac.yaml";
const ACCOUNT: &str = "system:serviceaccount:larder-system:larder";
const SETS: &str = "/apis/images.larder.dev/v1alpha1/imagesets";
const OVERLAYS: [&str; 5] = ["default", "k3s", "rke2", "snapshotter", "cluster-secrets"];

/// Every image is there as soon as its secrets were read.
struct FetchedImages {
    secrets: PullSecrets,
    is_present: AtomicBool,
}

#[async_trait]
impl SetImages for FetchedImages {
    async fn ensure(&self, image: &WantedImage) -> Result<ImageId, String> {
        let (_, errors) = self.secrets.of_pod(NAMESPACE, &image.pull_secrets).await;
        assert_eq!(errors, []);
        self.is_present.store(true, Ordering::Relaxed);
        Ok(ImageId::from(image.image.as_str()))
    }

    async fn find(&self, image: &WantedImage) -> Result<Option<ImageId>, String> {
        Ok(self.is_present.load(Ordering::Relaxed).then(|| ImageId::from(image.image.as_str())))
    }

    fn retain(&self, _: &WantedImage, _: &ImageId) {}

    fn release(&self, _: &ImageName) {}
}

async fn connect(api: &KubeApi, token: &str) -> Cluster {
    connect_with(api.kubeconfig(token)).await
}

async fn connect_with(kubeconfig: PathBuf) -> Cluster {
    let options = ClusterOptions { kubeconfig: Some(kubeconfig), node: "n1".into() };
    Cluster::connect(&options).await.expect("a client")
}

fn documents(name: &str) -> Vec<Value> {
    let text = fs_err::read_to_string(Path::new(MANIFESTS).join(name)).expect("a manifest");
    serde_saphyr::from_multiple(&text).expect("YAML")
}

/// The rules of all roles of a manifest.
fn rules(manifest: &str) -> Vec<PolicyRule> {
    let texts =
        |value: &Value| -> Vec<String> { serde_json::from_value(value.clone()).expect("a list of texts") };
    let mut rules = Vec::new();
    for role in documents(manifest) {
        for rule in role["rules"].as_array().into_iter().flatten() {
            rules.push(PolicyRule {
                api_groups: texts(&rule["apiGroups"]),
                resources: texts(&rule["resources"]),
                resource_names: rule.get("resourceNames").map(texts).unwrap_or_default(),
                verbs: texts(&rule["verbs"]),
                namespace: role["metadata"]["namespace"].as_str().map(str::to_owned),
            });
        }
    }
    rules
}

/// One rule for each verb, so that an unused verb is found.
fn by_verb(rules: Vec<PolicyRule>) -> Vec<PolicyRule> {
    let split = |rule: PolicyRule| {
        let verbs = rule.verbs.clone().into_iter();
        verbs.map(move |verb| PolicyRule { verbs: vec![verb], ..rule.clone() })
    };
    rules.into_iter().flat_map(split).collect()
}

fn program_beside_the_server(name: &str) -> Option<PathBuf> {
    let server = PathBuf::from(std::env::var_os(PROGRAM_VARIABLE)?);
    Some(server.with_file_name(name)).filter(|program| program.exists())
}

/// `kubectl` beside the kube-apiserver.
fn kubectl(arguments: &[&OsStr]) -> String {
    let program = program_beside_the_server("kubectl").expect("kubectl is beside the kube-apiserver");
    let done = Command::new(program).args(arguments).output().expect("kubectl runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(done.status.success(), "{arguments:?}: {}", text(&done.stderr));
    text(&done.stdout)
}

fn overlay(name: &str) -> PathBuf {
    Path::new(MANIFESTS).join("overlays").join(name)
}

/// `kubectl apply -k` of an overlay, with a real server.
fn apply(api: &KubeApi, name: &str) {
    let kubeconfig = api.kubeconfig(ADMINISTRATOR);
    let command = ["apply", "--validate=strict", "--kubeconfig"].map(OsStr::new);
    let path = overlay(name);
    let rest = [kubeconfig.as_os_str(), OsStr::new("-k"), path.as_os_str()];
    kubectl(&[command.as_slice(), &rest].concat());
}

/// Installs what larder's identity needs on node `n1`, and returns its token.
fn install(api: &KubeApi) -> String {
    if std::env::var_os(PROGRAM_VARIABLE).is_none() {
        return install_in_process(api);
    }
    apply(api, "default");
    token_of_pod_on(api, "n1")
}

fn install_in_process(api: &KubeApi) -> String {
    let token = "larder";
    api.create("/api/v1/namespaces", &json!({ "metadata": { "name": NAMESPACE } }));
    for definition in documents("base/crds.yaml") {
        api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", &definition);
    }
    api.authorize(token, ACCOUNT, by_verb(rules(BASE)));
    token.to_owned()
}

/// A token as kubelet gives it to the pod of larder on this node.
fn token_of_pod_on(api: &KubeApi, node: &str) -> String {
    let pod = json!({
        "metadata": { "name": format!("larder-{node}") },
        "spec": {
            "nodeName": node, "serviceAccountName": "larder",
            "containers": [{ "name": "larder", "image": "larder.dev/larder:1" }],
        },
    });
    let pod = api.create(&format!("/api/v1/namespaces/{NAMESPACE}/pods"), &pod);
    let (name, uid) = (&pod["metadata"]["name"], &pod["metadata"]["uid"]);
    issue(api, &json!({ "boundObjectRef": { "apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid } }))
}

fn issue(api: &KubeApi, spec: &Value) -> String {
    let account = format!("/api/v1/namespaces/{NAMESPACE}/serviceaccounts/larder/token");
    let issued = api.create(&account, &json!({ "spec": spec }));
    issued["status"]["token"].as_str().expect("a token").to_owned()
}

/// Runs what larder does with its own identity until each part has happened.
async fn use_own_identity(api: &KubeApi, cluster: Cluster) {
    api.create("/api/v1/nodes", &json!({ "metadata": { "name": "n1" } }));
    let secret = json!({ "metadata": { "name": "reg" }, "data": { "a": "e30=" } });
    api.create(&format!("/api/v1/namespaces/{NAMESPACE}/secrets"), &secret);
    let options = ImageSetOptions {
        lease: Duration::from_secs(5),
        first_attempt: Duration::from_millis(10),
        report_delay: Duration::from_millis(20),
        ..ImageSetOptions::new(NAMESPACE)
    };
    let images = FetchedImages {
        secrets: PullSecrets::of(&cluster, Duration::ZERO, Duration::ZERO),
        is_present: AtomicBool::default(),
    };
    let task = tokio::spawn(run_image_sets(cluster, options, Arc::new(images)));
    api.create(
        SETS,
        &json!({
            "apiVersion": "images.larder.dev/v1alpha1", "kind": "ImageSet", "metadata": { "name": "web" },
            "spec": { "images": [{ "image": "registry.example/web:1" }], "pullSecrets": ["reg"] },
        }),
    );
    let lease = format!("/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/larder-image-sets");
    let writes = |part: &str| {
        api.requests().iter().filter(|request| request.path.contains(part) && request.method == "PUT").count()
    };
    let sends_events = || api.requests().iter().any(|request| request.path.contains("/events"));
    for _ in 0..300 {
        let is_ready = api.get(&format!("{SETS}/web"))["status"]["ready"] == 1;
        if is_ready && writes("leases") > 0 && sends_events() {
            let lease = api.get(&lease);
            assert!(lease["spec"]["holderIdentity"].as_str().is_some_and(|holder| holder.starts_with("n1_")));
            task.abort();
            return;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("{:#}", api.get(&format!("{SETS}/web")));
}

#[tokio::test]
async fn the_roles_of_the_manifest_suffice_and_nothing_in_them_is_unused() {
    let api = KubeApi::start();
    let token = install(&api);
    let cluster = connect(&api, &token).await;
    // An event that repeats is a patch of its series.
    let mut events = NodeEvents::of(&cluster);
    let event = NodeEvent { is_warning: true, reason: "BackendDown".into(), note: "no answer".into() };
    for _ in 0..2 {
        events.send(&event).await.expect("an event of the node");
    }
    use_own_identity(&api, cluster).await;
    assert_eq!(refused(&api), []);
    if std::env::var_os(PROGRAM_VARIABLE).is_none() {
        assert_eq!(api.unused_rules(&token), []);
    }
}

fn refused(api: &KubeApi) -> Vec<ApiRequest> {
    api.requests().into_iter().filter(|request| request.status == 403).collect()
}

/// The reports of nodes, with this token.
async fn reports(api: &KubeApi, token: &str) -> Api<NodeImages> {
    let config = Kubeconfig::read_from(api.kubeconfig(token)).expect("a kubeconfig");
    let config =
        Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await.expect("a config");
    Api::all(Client::try_from(config).expect("a client"))
}

#[tokio::test]
async fn a_node_writes_its_own_report_only() {
    if std::env::var_os(PROGRAM_VARIABLE).is_none() {
        eprintln!("==== SKIPPED, NOT TESTED: the admission policy; {PROGRAM_VARIABLE} is not set ====");
        return;
    }
    let api = KubeApi::start();
    let token = install(&api);
    let first = reports(&api, &token).await;
    let second = reports(&api, &token_of_pod_on(&api, "n2")).await;
    let unbound = reports(&api, &issue(&api, &json!({}))).await;
    let administrator = reports(&api, ADMINISTRATOR).await;
    let report = |name: &str| NodeImages::new(name, NodeImagesReport::default());
    let (params, trial) = (PostParams::default(), PostParams { dry_run: true, ..PostParams::default() });
    // The server reads policies by a watch of its own.
    let mut refused = None;
    for _ in 0..100 {
        refused = first.create(&trial, &report("n2")).await.err();
        if refused.is_some() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let refused = refused.expect("a refusal").to_string();
    assert!(refused.contains("a pod on node n1 may write only the NodeImages of that node"), "{refused}");
    first.create(&params, &report("n1")).await.expect("its own");
    second.create(&params, &report("n2")).await.expect("its own");
    let (patch, fields) = (PatchParams::default(), Patch::Merge(json!({ "ready": 7 })));
    second.patch("n2", &patch, &fields).await.expect("its own");
    let of_other = second.patch("n1", &patch, &fields).await.expect_err("the report of another node");
    assert!(of_other.to_string().contains("a pod on node n2 may write only"), "{of_other}");
    let without_node = unbound.patch("n1", &patch, &fields).await.expect_err("a token of no pod");
    assert!(without_node.to_string().contains("the token is of no pod on a node"), "{without_node}");
    unbound.create(&params, &report("n3")).await.expect_err("a token of no pod");
    administrator.patch("n1", &patch, &fields).await.expect("not larder's account");
    administrator.delete("n1", &DeleteParams::default()).await.expect("not larder's account");
    let own = ClusterOptions { kubeconfig: Some(api.kubeconfig(&token)), node: "n1".to_owned() };
    let checks = check_cluster(None, Some(&own), true, NAMESPACE, Timestamp::now()).await;
    let admission = checks.iter().find(|check| check.name == "admission").expect("the server has policies");
    assert_eq!(admission.found, "a node writes its own NodeImages only");
}

#[tokio::test]
async fn the_kubeconfig_of_the_snapshotter_overlay_suffices_on_a_node() {
    if std::env::var_os(PROGRAM_VARIABLE).is_none() {
        eprintln!("==== SKIPPED, NOT TESTED: the snapshotter overlay; {PROGRAM_VARIABLE} is not set ====");
        return;
    }
    let api = KubeApi::start();
    apply(&api, "snapshotter");
    // What the controller manager does.
    let secret = format!("/api/v1/namespaces/{NAMESPACE}/secrets/larder-token");
    api.patch(&secret, &json!({ "stringData": { "token": issue(&api, &json!({})) } }));
    let administrator = api.kubeconfig(ADMINISTRATOR);
    let kubectl = program_beside_the_server("kubectl").expect("kubectl is beside the kube-apiserver");
    let path = format!("{}:/usr/bin:/bin", kubectl.parent().expect("a directory").display());
    let mut script = Command::new("sh");
    let kubeconfig = administrator.with_file_name("larder's");
    script.arg(overlay("snapshotter").join("kubeconfig.sh")).arg(&kubeconfig).env("PATH", path);
    let done = script.env("KUBECONFIG", &administrator).output().expect("sh");
    assert!(done.status.success(), "{done:?}");
    use_own_identity(&api, connect_with(kubeconfig).await).await;
    assert_eq!(refused(&api), []);
}

#[tokio::test]
async fn larders_identity_reads_pods_and_secrets_with_cluster_secrets_and_no_rule_is_unused() {
    let api = KubeApi::start();
    let secret = json!({ "metadata": { "name": "reg" }, "data": { "a": "e30=" } });
    api.create("/api/v1/namespaces/default/secrets", &secret);
    let class = json!({ "metadata": { "name": "vm" }, "handler": "kata" });
    api.create("/apis/node.k8s.io/v1/runtimeclasses", &class);
    api.create(
        "/api/v1/namespaces/default/pods",
        &json!({
            "metadata": { "name": "app" },
            "spec": { "nodeName": "n1", "containers": [{ "name": "app", "image": "a:1" }] },
        }),
    );
    api.authorize("wide", ACCOUNT, by_verb(rules("overlays/cluster-secrets/rbac.yaml")));
    let cluster = connect(&api, "wide").await;
    let mut states = pin!(watch_bound_pods(&cluster));
    let known = states.next().await.expect("it never ends").expect("its pods");
    assert_eq!(known.pods().count(), 1);
    api.delete("/api/v1/namespaces/default/pods/app");
    let known = states.next().await.expect("it never ends").expect("its pods");
    assert_eq!(known.pods().count(), 0);
    PullSecrets::of(&cluster, Duration::ZERO, Duration::ZERO)
        .get("default", "reg")
        .await
        .expect("any secret");
    assert_eq!(RuntimeClasses::of(&cluster).handler("vm").await.expect("a handler"), "kata");
    assert_eq!(refused(&api), []);
    if std::env::var_os(PROGRAM_VARIABLE).is_none() {
        assert_eq!(api.unused_rules("wide"), []);
    }
}

#[tokio::test]
async fn larders_own_identity_reads_neither_other_secrets_nor_pods() {
    let api = KubeApi::start();
    let cluster = connect(&api, &install(&api)).await;
    let error = PullSecrets::of(&cluster, Duration::ZERO, Duration::ZERO)
        .get("default", "reg")
        .await
        .expect_err("another namespace");
    assert!(matches!(error, ClusterError::Forbidden { .. }), "{error}");
    let pods = pin!(watch_bound_pods(&cluster)).next().await;
    assert!(matches!(pods, Some(Err(ClusterError::Forbidden { .. }))), "{pods:?}");
}

/// Names and findings of the parts that are not as larder needs them.
async fn missing(api: &KubeApi, (node, own): (&str, &str), name: &str) -> Vec<(String, String)> {
    let options = |token| ClusterOptions { kubeconfig: Some(api.kubeconfig(token)), node: name.to_owned() };
    let now = Timestamp::now();
    let checks = check_cluster(Some(&options(node)), Some(&options(own)), true, NAMESPACE, now).await;
    let missing = checks.into_iter().filter(|check| !check.ok);
    missing.map(|check| (check.name.to_owned(), format!("{} -> {:?}", check.found, check.next))).collect()
}

#[tokio::test]
async fn a_check_of_the_cluster_names_what_is_missing() {
    let api = KubeApi::start();
    api.authorize("stranger", "stranger", Vec::new());
    let found = missing(&api, (ADMINISTRATOR, "stranger"), "n1").await;
    let names: Vec<_> = found.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, [vec!["node", "custom resources"], vec!["rules"; 3]].concat());
    assert!(found[0].1.starts_with("node n1 does not exist"), "{found:?}");
    let rule = "ClusterRole larder: may not list, watch imagesets.images.larder.dev; patch imagesets/status";
    assert!(found[2].1.starts_with(rule), "{found:?}");
    let added = "# ClusterRole larder\\n- apiGroups: [images.larder.dev]\\n  resources: [imagesets]\\n  verbs: [list, watch]";
    assert!(found[2].1.contains(added), "{found:?}");
    assert!(found[4].1.contains("# Role larder-events in default"), "{found:?}");
    let token = install(&api);
    api.create("/api/v1/nodes", &json!({ "metadata": { "name": "n1" } }));
    assert_eq!(missing(&api, (ADMINISTRATOR, &token), "n1").await, []);
    let found = missing(&api, ("unknown", "unknown"), "n1").await;
    let names: Vec<_> = found.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["API server", "custom resources", "rules"], "{found:?}");
    assert!(found[0].1.contains("401") && found[0].1.contains("write a valid token into"), "{found:?}");
    for (_, own) in &found[1..] {
        assert!(own.contains("401") && own.contains("write a new token or certificate into"), "{found:?}");
    }
    if std::env::var_os(PROGRAM_VARIABLE).is_none() {
        let versions = api.requests().into_iter().filter(|request| request.path == "/version").count();
        assert_eq!(versions, 3, "one for each check of a node");
    }
}

#[tokio::test]
async fn a_check_says_once_that_larders_identity_is_that_of_a_node() {
    let api = KubeApi::start();
    install(&api);
    for name in ["n1", "n2"] {
        api.create("/api/v1/nodes", &json!({ "metadata": { "name": name } }));
    }
    api.authorize("node", "system:node:n1", Vec::new());
    let found = missing(&api, (ADMINISTRATOR, "node"), "n1").await;
    let [(name, own)] = found.as_slice() else { panic!("{found:?}") };
    assert!(
        name == "larder's identity" && own.contains("the identity of node n1, not larder's own"),
        "{found:?}"
    );
    assert!(own.contains("kubeconfig.sh /"), "how to get one: {found:?}");
    let found = missing(&api, ("node", ADMINISTRATOR), "n2").await;
    let [(name, node)] = found.as_slice() else { panic!("{found:?}") };
    assert!(name == "node" && node.contains("set kubernetes.nodeName: n1"), "{found:?}");
}

#[tokio::test]
async fn a_check_finds_that_admission_forbids_the_lease() {
    let api = KubeApi::in_process();
    let token = install_in_process(&api);
    api.create("/api/v1/nodes", &json!({ "metadata": { "name": "n1" } }));
    api.fault("leases?&dryRun=All", 1, ApiFault::Status(403, "Forbidden"));
    let found = missing(&api, (ADMINISTRATOR, &token), "n1").await;
    let [(name, lease)] = found.as_slice() else { panic!("{found:?}") };
    assert!(name == "lease" && lease.contains("must be of larder's ServiceAccount"), "{found:?}");
}

#[tokio::test]
async fn a_check_says_whether_the_admission_policy_applies_and_does_not_fail_without_it() {
    let api = KubeApi::in_process();
    let token = install_in_process(&api);
    api.create("/api/v1/nodes", &json!({ "metadata": { "name": "n1" } }));
    let options = |token| ClusterOptions { kubeconfig: Some(api.kubeconfig(token)), node: "n1".to_owned() };
    let policy = async || {
        let own = options(&token);
        let checks = check_cluster(None, Some(&own), true, NAMESPACE, Timestamp::now()).await;
        assert!(checks.iter().all(|check| check.ok), "{checks:?}");
        checks.into_iter().find(|check| check.name == "admission").map(|check| check.found)
    };
    assert_eq!(policy().await, None, "the server has no policies");
    let name = "validatingadmissionpolicies";
    let served = json!({
        "metadata": { "name": name },
        "spec": {
            "group": "admissionregistration.k8s.io", "scope": "Cluster",
            "names": { "kind": "ValidatingAdmissionPolicy", "plural": name },
            "versions": [{ "name": "v1", "served": true }],
        },
    });
    api.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", &served);
    let without = policy().await.expect("a hint");
    assert!(without.contains("a node can write the NodeImages of others"), "{without}");
    api.fault("nodeimages?&dryRun=All", 1, ApiFault::Status(403, "Forbidden"));
    assert_eq!(policy().await, None, "it may be refused by something else");
    assert_eq!(
        api.get("/apis/images.larder.dev/v1alpha1/nodeimages")["items"],
        json!([]),
        "nothing is written"
    );
}

#[tokio::test]
async fn a_check_without_any_identity_fails() {
    let checks = check_cluster(None, None, false, NAMESPACE, Timestamp::now()).await;
    assert!(matches!(&checks[..], [only] if !only.ok && only.found.contains("no identity")), "{checks:?}");
}

#[tokio::test]
async fn a_check_names_a_wrong_certificate_authority() {
    if std::env::var_os(PROGRAM_VARIABLE).is_none() {
        eprintln!("==== SKIPPED, NOT TESTED: a wrong CA; {PROGRAM_VARIABLE} is not set ====");
        return;
    }
    let (api, other) = (KubeApi::start(), KubeApi::start());
    let mut kubeconfig: Value =
        serde_saphyr::from_str(&fs_err::read_to_string(api.kubeconfig(ADMINISTRATOR)).expect("a file"))
            .expect("a kubeconfig");
    kubeconfig["clusters"][0]["cluster"]["server"] = json!(other.url());
    let path = api.kubeconfig(ADMINISTRATOR);
    fs_err::write(&path, kubeconfig.to_string()).expect("a file");
    let options = ClusterOptions { kubeconfig: Some(path.clone()), node: "n1".to_owned() };
    let checks = check_cluster(Some(&options), None, false, NAMESPACE, Timestamp::now()).await;
    let failed = checks.iter().find(|check| !check.ok).expect("a failure");
    let next = failed.next.clone().unwrap_or_default();
    let expected = format!("certificate-authority in {} must be that of the API server", path.display());
    assert!(next.starts_with(&expected), "{failed:?}");
}

#[test]
fn each_overlay_is_complete_and_has_only_known_fields() {
    for name in OVERLAYS {
        let objects = kustomize::render(&overlay(name));
        for object in &objects {
            kustomize::check_fields(object);
        }
        let agents: Vec<_> = objects.iter().filter(|object| object["kind"] == "DaemonSet").collect();
        assert_eq!(agents.len(), usize::from(name != "snapshotter"), "{name}");
        for agent in agents {
            let config = objects.iter().find(|object| object["kind"] == "ConfigMap").expect("settings");
            let config = config["data"]["config.yaml"].as_str().expect("a file");
            let config: Value = serde_saphyr::from_str(config).expect("YAML");
            check_agent(name, &agent["spec"]["template"]["spec"], &config);
        }
    }
}

#[test]
fn a_server_accepts_each_overlay_and_kubectl_merges_it_as_this_test_does() {
    if std::env::var_os(PROGRAM_VARIABLE).is_none() {
        eprintln!(
            "==== SKIPPED, NOT TESTED: a server accepts the overlays; {PROGRAM_VARIABLE} is not set ===="
        );
        return;
    }
    let api = KubeApi::start();
    for name in OVERLAYS {
        apply(&api, name);
        let text = kubectl(&[OsStr::new("kustomize"), overlay(name).as_os_str()]);
        let objects: Vec<Value> = serde_saphyr::from_multiple(&text).expect("YAML");
        let rendered = kustomize::render(&overlay(name));
        assert_eq!(objects.len(), rendered.len(), "{name}");
        // What overlays change.
        for mut object in objects
            .into_iter()
            .filter(|object| ["ConfigMap", "DaemonSet"].map(Value::from).contains(&object["kind"]))
        {
            // kustomize adds a hash to the name of a generated ConfigMap.
            let volumes = object.pointer_mut("/spec/template/spec/volumes").and_then(Value::as_array_mut);
            for volume in volumes.into_iter().flatten().filter(|volume| volume["configMap"].is_object()) {
                volume["configMap"]["name"] = "larder".into();
            }
            if object["kind"] == "ConfigMap" {
                object["metadata"]["name"] = "larder".into();
            }
            assert!(rendered.contains(&object), "{name}: {object:#}");
        }
    }
}

/// Every mount has its volume, host directories have the same path inside, the image is of this version, and paths of
/// the settings are mounted. Of the directory with kubelet's kubeconfig, which has keys of other components, only files
/// are.
fn check_agent(overlay: &str, pod: &Value, config: &Value) {
    let container = &pod["containers"][0];
    assert_eq!(container["image"], concat!("larder.dev/larder:", env!("CARGO_PKG_VERSION")), "{overlay}");
    let volumes = pod["volumes"].as_array().expect("volumes");
    let mounts = container["volumeMounts"].as_array().expect("mounts");
    assert_eq!(volumes.len(), mounts.len(), "{overlay}");
    for mount in mounts {
        let volume = volumes.iter().find(|volume| volume["name"] == mount["name"]).expect("a volume");
        if let Some(path) = volume["hostPath"]["path"].as_str() {
            assert_eq!(mount["mountPath"], path, "{overlay}");
        }
    }
    let node_name =
        json!([{ "name": "NODE_NAME", "valueFrom": { "fieldRef": { "fieldPath": "spec.nodeName" } } }]);
    assert_eq!(container["env"], node_name, "{overlay}");
    let setting =
        |value: &Value| PathBuf::from(value.as_str().expect("a path").trim_start_matches("unix://"));
    let kubeconfig = setting(&config["kubernetes"]["nodeKubeconfig"]);
    let is_mounted = |path: &Path| {
        let mut mounts = mounts.iter().filter_map(|mount| mount["mountPath"].as_str());
        mounts.any(|mount| path.starts_with(mount))
    };
    for path in [&kubeconfig, &setting(&config["backend"]), &setting(&config["staticPodPath"])] {
        assert!(is_mounted(path), "{overlay}: {} is not mounted", path.display());
    }
    let directory = kubeconfig.parent().expect("a directory");
    assert!(
        !is_mounted(directory) || directory == Path::new("/etc/larder"),
        "{overlay}: {}",
        directory.display()
    );
}

#[tokio::test]
async fn a_node_reads_the_secrets_of_its_own_pods_only() {
    if std::env::var_os(PROGRAM_VARIABLE).is_none() {
        eprintln!("==== SKIPPED, NOT TESTED: the Node authorizer; {PROGRAM_VARIABLE} is not set ====");
        return;
    }
    let api = KubeApi::start();
    for (node, secret) in [("n1", "mine"), ("n2", "other")] {
        let object = json!({ "metadata": { "name": secret }, "data": { "a": "e30=" } });
        api.create("/api/v1/namespaces/default/secrets", &object);
        api.create(
            "/api/v1/namespaces/default/pods",
            &json!({
                "metadata": { "name": secret },
                "spec": {
                    "nodeName": node, "imagePullSecrets": [{ "name": secret }],
                    "containers": [{ "name": "app", "image": "a:1" }],
                },
            }),
        );
    }
    api.authorize("node", "system:node:n1", Vec::new());
    let cluster = connect(&api, "node").await;
    let known = pin!(watch_bound_pods(&cluster)).next().await.expect("it never ends").expect("its pods");
    let names: Vec<_> = known.pods().map(|pod| pod.pod.name.as_str()).collect();
    assert_eq!(names, ["mine"]);
    let secrets = PullSecrets::of(&cluster, Duration::ZERO, Duration::ZERO);
    secrets.get("default", "mine").await.expect("a secret of a pod of the node");
    let error = secrets.get("default", "other").await.expect_err("a secret of another node's pod");
    assert!(matches!(error, ClusterError::Forbidden { .. }), "{error}");
}
