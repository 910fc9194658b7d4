//! Which pods may use the images of larder's own store: what is recorded decides, never what is absent.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use larder::backend::ProgressReporter;
use larder::credentials::{PullSecret, SecretCoordinates};
use larder::gc::{GcGoal, GcPolicy};
use larder::pod::Pod;
use larder::pull::{EnsureError, EnsureRequest, EnsuredImage, ImagePresence, PullPolicy};
use larder::reference::{Digest, Reference};
use larder_agent::LocalNode;
use larder_registry::{Proxy, RegistryClient, RegistryConfig};
use larder_store::pull::{LoadOptions, StorePullConfig, StorePuller};
use larder_store::store::import::ImportSource;
use larder_store::store::{Store, StoreConfig};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::fault_registry::{FaultRegistry, FaultRegistryAuth, FaultTrigger, ResponseFault};
use serde_json::json;

const PLAIN: &str = "application/vnd.oci.image.layer.v1.tar";

/// The store of a node that is not open.
fn puller(root: &Path) -> StorePuller {
    let store = Store::open(root, StoreConfig::default()).unwrap();
    let config = RegistryConfig { config_dirs: Vec::new(), proxy: Proxy::None, ..RegistryConfig::default() };
    StorePuller::new(store, RegistryClient::new(config), StorePullConfig::default())
}

fn layer(name: &str) -> Vec<u8> {
    TarBuilder::new().with(TarBuilderEntry::file(name, vec![7; 20_000])).finish()
}

/// A registry that requires a login.
fn private_registry() -> FaultRegistry {
    let registry = FaultRegistry::start();
    registry.require(FaultRegistryAuth::Basic { user: "me".into(), password: "secret".into() });
    registry
}

fn pull_secret(registry: &FaultRegistry) -> Vec<PullSecret> {
    let coordinates = SecretCoordinates { uid: "u".into(), namespace: "team".into(), name: "reg".into() };
    let auths = json!({"auths": {registry.address(): {"username": "me", "password": "secret"}}});
    let data = [(".dockerconfigjson".to_owned(), auths.to_string().into_bytes())].into();
    vec![PullSecret { kind: "kubernetes.io/dockerconfigjson".into(), coordinates, data }]
}

fn request(image: &str, policy: PullPolicy, secrets: Vec<PullSecret>) -> EnsureRequest {
    let uid = format!("uid {image} {}", secrets.len());
    let pod = Pod { uid, name: "app".into(), namespace: "tenant".into(), ..Pod::default() };
    EnsureRequest { secrets, ..EnsureRequest::new(image, policy, pod) }
}

async fn ensure(
    node: &LocalNode,
    image: &str,
    secrets: Vec<PullSecret>,
) -> Result<EnsuredImage, EnsureError> {
    node.ensure_for(&request(image, PullPolicy::IfNotPresent, secrets)).await
}

async fn is_present_for_all(node: &LocalNode, image: &str) -> bool {
    ensure(node, image, Vec::new()).await.is_ok_and(|ensured| ensured.outcome == ImagePresence::Present)
}

/// The pull records of a store that are below a directory of this name: `pulled`, or `pulling` for intents.
fn records(dir: &Path, kind: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs_err::read_dir(dir).into_iter().flatten() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(records(&path, kind));
        } else if path.parent().is_some_and(|parent| parent.ends_with(kind)) {
            found.push(path);
        }
    }
    found
}

/// Makes all pull records a year old.
fn age_records(root: &Path) {
    const TIME: &str = "\"lastUpdatedTime\":\"";
    for path in records(root, "pulled") {
        let text = fs_err::read_to_string(&path).unwrap();
        let (start, rest) = text.split_once(TIME).unwrap();
        fs_err::write(&path, format!("{start}{TIME}2024-10-21T12:26:40Z{}", &rest[20..])).unwrap();
    }
}

/// Loads an image of one layer, as `docker save` writes it.
async fn load(puller: &StorePuller, name: &str) {
    let dir = tempfile::tempdir().unwrap();
    let layer = layer("preloaded");
    let diff_id = Digest::sha256(&layer);
    let config = json!({"os": "linux", "architecture": match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }, "rootfs": {"type": "layers", "diff_ids": [diff_id.as_str()]}});
    let manifest = json!([{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]);
    fs_err::write(dir.path().join("config.json"), config.to_string()).unwrap();
    fs_err::write(dir.path().join("manifest.json"), manifest.to_string()).unwrap();
    fs_err::write(dir.path().join("layer.tar"), layer).unwrap();
    puller.load(ImportSource::Path(dir.path().to_owned()), &LoadOptions::default()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_private_image_that_lost_a_layer_is_private_after_another_pull_has_fetched_it() {
    let (registry, dir) = (private_registry(), tempfile::tempdir().unwrap());
    let root = dir.path().join("store");
    let layers = [layer("base"), layer("secret")];
    let private = registry.put_image("private", "1", PLAIN, &layers, &[]);
    registry.put_image("other", "1", PLAIN, &layers[..1], &[]);
    let names = ["private:1", "other:1"].map(|name| registry.image(name));
    let node = LocalNode::open(&root).await.unwrap();
    ensure(&node, &names[0], pull_secret(&registry)).await.unwrap();
    node.close().await;
    // Not compressed, so that its digest is its diff ID, which names its file.
    fs_err::remove_file(root.join("layers").join(private.layers[0].trim_start_matches("sha256:"))).unwrap();
    age_records(&root);

    let node = LocalNode::open(&root).await.unwrap();
    assert_eq!(node.images().await.unwrap(), [], "it lacks a layer");
    node.collect(&GcPolicy::default(), GcGoal::AllUnused).await.unwrap();
    ensure(&node, &names[1], pull_secret(&registry)).await.unwrap();
    assert_eq!(records(&root, "pulled").len(), 2, "its record is kept");
    assert_eq!(node.images().await.unwrap().len(), 1, "kubelet may have forgotten who may use it");
    ensure(&node, &names[0], Vec::new()).await.unwrap_err();
    registry.forget_requests();
    ensure(&node, &names[0], pull_secret(&registry)).await.unwrap();
    for layer in &private.layers {
        assert_eq!(registry.requests_for(layer), [], "its own pull fetches no layer");
    }
    assert!(!is_present_for_all(&node, &names[0]).await);
    node.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_without_a_record_is_preloaded_only_if_it_was_loaded() {
    let (registry, dir) = (FaultRegistry::start(), tempfile::tempdir().unwrap());
    let root = dir.path().join("store");
    registry.put_image("app", "1", PLAIN, &[layer("app")], &[]);
    let (pulled, loaded) = (registry.image("app:1"), registry.image("loaded:1"));
    let store = puller(&root);
    // As if its record were lost.
    let (name, progress) = (Reference::parse(&pulled).unwrap(), ProgressReporter::unwatched());
    store.pull(&name, None, &progress).await.unwrap();
    load(&store, &loaded).await;
    drop(store);
    registry.fault(FaultTrigger::path("/v2/"), ResponseFault::status(403));
    for _ in 0..2 {
        let node = LocalNode::open(&root).await.unwrap();
        assert!(!is_present_for_all(&node, &pulled).await);
        assert!(is_present_for_all(&node, &loaded).await);
        node.close().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pull_leaves_preloaded_images_of_its_repository_to_all_while_it_runs_and_after_it() {
    let (registry, dir) = (FaultRegistry::start(), tempfile::tempdir().unwrap());
    let root = dir.path().join("store");
    let other = registry.put_image("app", "2", PLAIN, &[layer("other")], &[]);
    let (loaded, by_digest) = (registry.image("app:1"), registry.image(&format!("app@{}", other.manifest)));
    load(&puller(&root), &loaded).await;
    let node = LocalNode::open(&root).await.unwrap();
    registry.fault(FaultTrigger::path(&other.layers[0]), ResponseFault::StallAfter(0));
    let running = async {
        while registry.requests_for(&other.layers[0]).is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(records(&root, "pulling").len(), 1);
        assert!(is_present_for_all(&node, &loaded).await, "while the pull runs");
    };
    let pull = request(&by_digest, PullPolicy::Always, Vec::new());
    tokio::select! {
        pulled = node.ensure_for(&pull) => panic!("{pulled:?}"),
        () = running => {}
    }
    assert!(is_present_for_all(&node, &loaded).await, "its caller gave up");
    let closed = async {
        while !records(&root, "pulling").is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), closed).await.expect("the intent ends with the pull");

    registry.clear_faults();
    registry.fault(FaultTrigger::path(&other.layers[0]), ResponseFault::status(404));
    node.ensure_for(&pull).await.unwrap_err();
    assert!(is_present_for_all(&node, &loaded).await, "it failed");
    node.close().await;
    assert_eq!(records(&root, "pulling"), Vec::<PathBuf>::new());
}
