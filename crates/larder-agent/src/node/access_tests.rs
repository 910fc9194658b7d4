//! Which pods may use the images of larder's own store: what is recorded decides, never what is absent.

use std::path::Path;
use std::time::Duration;

use larder::credentials::{NodeKeyring, PullSecret, SecretCoordinates};
use larder::gc::{GcGoal, GcPolicy};
use larder::pod::Pod;
use larder::pull::{EnsureError, EnsureRequest, EnsuredImage, ImagePresence, PullPolicy};
use larder_registry::{Proxy, RegistryConfig};
use larder_store::store::Store;
use larder_store::store::import::ImportSource;
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::fault_registry::{FaultRegistry, FaultRegistryAuth, FaultTrigger, ResponseFault};
use serde_json::json;

use super::{Node, NodeOptions, StateDirAccess};
use crate::backend::{OpenMode, RuntimeRequirement};
use crate::config::{self, SettingsSources};
use crate::environment::DefaultPaths;

const PLAIN: &str = "application/vnd.oci.image.layer.v1.tar";

fn open(dir: &Path) -> Node {
    let sources = SettingsSources { places: DefaultPaths::of(true, |_| None), layers: Vec::new() };
    let mut config = config::load(&sources).unwrap();
    config.root = dir.join("store");
    config.state = Some(dir.join("state"));
    config.registry =
        RegistryConfig { config_dirs: Vec::new(), proxy: Proxy::None, ..RegistryConfig::default() };
    let options = NodeOptions {
        store: OpenMode::Create,
        runtime: RuntimeRequirement::Require,
        state: StateDirAccess::CurrentUser,
        publishes: false,
        joins_cluster: false,
        logs_events: false,
        verbosity: tracing::Level::ERROR,
    };
    Node::open(sources, config, Some(NodeKeyring::default()), options).unwrap()
}

fn store(node: &Node) -> &Store {
    node.storage.store().unwrap().store()
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
    let data = [(".dockerconfigjson".to_owned(), auths.to_string().into_bytes().into())].into();
    vec![PullSecret { kind: "kubernetes.io/dockerconfigjson".into(), coordinates, data }]
}

fn request(image: &str, policy: PullPolicy, secrets: Vec<PullSecret>) -> EnsureRequest {
    let uid = format!("uid {image} {}", secrets.len());
    let pod = Pod { uid, name: "app".into(), namespace: "tenant".into(), ..Pod::default() };
    EnsureRequest { secrets, ..EnsureRequest::new(image, policy, pod) }
}

async fn ensure(node: &Node, image: &str, secrets: Vec<PullSecret>) -> Result<EnsuredImage, EnsureError> {
    node.pulls.manager().ensure(&request(image, PullPolicy::IfNotPresent, secrets)).await
}

async fn is_present_for_all(node: &Node, image: &str) -> bool {
    ensure(node, image, Vec::new()).await.is_ok_and(|ensured| ensured.outcome == ImagePresence::Present)
}

/// Makes all pull records of the state directory a year old.
fn age_records(dir: &Path) {
    const TIME: &str = "\"lastUpdatedTime\":\"";
    for entry in fs_err::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            age_records(&path);
        } else if let Ok(text) = fs_err::read_to_string(&path)
            && let Some((start, rest)) = text.split_once(TIME)
        {
            fs_err::write(&path, format!("{start}{TIME}2024-10-21T12:26:40Z{}", &rest[20..])).unwrap();
        }
    }
}

/// Loads an image of one layer, as `docker save` writes it.
async fn load(node: &Node, name: &str) {
    let dir = tempfile::tempdir().unwrap();
    let layer = layer("preloaded");
    let diff_id = larder::reference::Digest::sha256(&layer);
    let config = json!({"os": "linux", "architecture": match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }, "rootfs": {"type": "layers", "diff_ids": [diff_id.as_str()]}});
    let manifest = json!([{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]);
    fs_err::write(dir.path().join("config.json"), config.to_string()).unwrap();
    fs_err::write(dir.path().join("manifest.json"), manifest.to_string()).unwrap();
    fs_err::write(dir.path().join("layer.tar"), layer).unwrap();
    let puller = node.storage.store().unwrap().puller();
    puller.load(ImportSource::Path(dir.path().to_owned()), None).await.unwrap();
}

#[tokio::test]
async fn a_private_image_that_lost_a_layer_is_private_after_another_pull_has_completed_it() {
    let (registry, dir) = (private_registry(), tempfile::tempdir().unwrap());
    let layers = [layer("base"), layer("secret")];
    let private = registry.put_image("private", "1", PLAIN, &layers, &[]);
    registry.put_image("other", "1", PLAIN, &layers[..1], &[]);
    let names = ["private:1", "other:1"].map(|name| registry.image(name));
    let node = open(dir.path());
    ensure(&node, &names[0], pull_secret(&registry)).await.unwrap();
    let image = store(&node).image(private.config.as_str()).unwrap().unwrap();
    let lost = store(&node).layer(&image.layers[0].key).unwrap().unwrap().path().to_owned();
    drop(node);
    fs_err::remove_file(lost).unwrap();
    age_records(&dir.path().join("state"));

    let node = open(dir.path());
    assert_eq!(store(&node).images().unwrap(), [], "it lacks a layer");
    let policy = GcPolicy::default();
    node.collection.collector().unwrap().round(GcGoal::AllUnused, &policy).await.into_result().unwrap();
    node.pulls.records().unwrap().flush().await.unwrap();
    ensure(&node, &names[1], pull_secret(&registry)).await.unwrap();
    assert!(store(&node).image(private.config.as_str()).unwrap().is_some(), "it is complete again");
    assert!(!is_present_for_all(&node, &names[0]).await);
    let owner = ensure(&node, &names[0], pull_secret(&registry)).await.unwrap();
    assert_eq!(owner.outcome, ImagePresence::Present, "its record is kept");
}

#[tokio::test]
async fn an_image_without_a_record_is_preloaded_only_if_it_was_loaded() {
    let (registry, dir) = (FaultRegistry::start(), tempfile::tempdir().unwrap());
    registry.put_image("app", "1", PLAIN, &[layer("app")], &[]);
    let (pulled, loaded) = (registry.image("app:1"), registry.image("loaded:1"));
    let node = open(dir.path());
    let name = larder::reference::Reference::parse(&pulled).unwrap();
    let progress = larder::backend::ProgressReporter::unwatched();
    // A pull whose record is lost.
    node.storage.store().unwrap().puller().pull(&name, None, &progress).await.unwrap();
    load(&node, &loaded).await;
    registry.fault(FaultTrigger::path("/v2/"), ResponseFault::status(403));
    assert!(!is_present_for_all(&node, &pulled).await);
    assert!(is_present_for_all(&node, &loaded).await);
    drop(node);
    let node = open(dir.path());
    assert!(is_present_for_all(&node, &loaded).await, "after a restart");
}

#[tokio::test]
async fn a_pull_leaves_preloaded_images_of_its_repository_to_all_while_it_runs_and_after_it() {
    let (registry, dir) = (FaultRegistry::start(), tempfile::tempdir().unwrap());
    let other = registry.put_image("app", "2", PLAIN, &[layer("other")], &[]);
    let (loaded, by_digest) = (registry.image("app:1"), registry.image(&format!("app@{}", other.manifest)));
    let node = open(dir.path());
    load(&node, &loaded).await;
    registry.fault(FaultTrigger::path(&other.layers[0]), ResponseFault::StallAfter(0));
    let running = async {
        while registry.requests_for(&other.layers[0]).is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!(is_present_for_all(&node, &loaded).await, "while the pull runs");
    };
    let pull = request(&by_digest, PullPolicy::Always, Vec::new());
    tokio::select! {
        pulled = node.pulls.manager().ensure(&pull) => panic!("{pulled:?}"),
        () = running => {}
    }
    assert!(is_present_for_all(&node, &loaded).await, "its caller gave up");
    let records = node.pulls.records().unwrap();
    let closed = async {
        while records.on_disk().unwrap().0 > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), closed).await.expect("the intent ends with the pull");

    registry.clear_faults();
    registry.fault(FaultTrigger::path(&other.layers[0]), ResponseFault::status(404));
    node.pulls.manager().ensure(&pull).await.unwrap_err();
    assert!(is_present_for_all(&node, &loaded).await, "it failed");
    records.flush().await.unwrap();
    assert_eq!(records.on_disk().unwrap(), (0, 0));
}
