//! A slow registry delays its own images only: slots and layers that others need are not kept by it.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use larder::backend::{MinimumRate, ProgressReporter};
use larder::reference::{Digest, Reference};
use larder::scheduler::Callers;
use larder_registry::{Proxy, RegistryClient, RegistryConfig};
use larder_store::pull::{PullError, StorePullConfig, StorePuller};
use larder_store::store::{ImageRecord, Store, StoreConfig};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, ResponseFault};
use larder_testkit_peers::process::poll;
use serde_json::json;
use tempfile::TempDir;
use tokio::task::JoinHandle;

const ZSTD: &str = "application/vnd.oci.image.layer.v1.tar+zstd";
const PLAIN: &str = "application/vnd.oci.image.layer.v1.tar";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";

/// Enough for a pull on a busy machine, and far less than a slow layer takes.
const SOON: Duration = Duration::from_secs(60);

/// Window of the minimum rate, and a time slice.
const WINDOW: Duration = Duration::from_millis(1500);

struct Node {
    _dir: TempDir,
    puller: StorePuller,
}

impl Node {
    fn new() -> Node {
        Node::with_minimum(MinimumRate::default().bytes_per_second)
    }

    fn with_minimum(bytes_per_second: u64) -> Node {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store"), StoreConfig::default()).unwrap();
        let config =
            RegistryConfig { config_dirs: Vec::new(), proxy: Proxy::None, ..RegistryConfig::default() };
        let minimum_rate = MinimumRate { bytes_per_second, window: WINDOW };
        let pulls = StorePullConfig { minimum_rate, ..StorePullConfig::default() };
        Node { _dir: dir, puller: StorePuller::new(store, RegistryClient::new(config), pulls) }
    }

    fn pull(&self, registry: &FaultRegistry, name: &str) -> JoinHandle<Result<ImageRecord, PullError>> {
        self.pull_for("", registry, name)
    }

    fn pull_for(
        &self,
        namespace: &str,
        registry: &FaultRegistry,
        name: &str,
    ) -> JoinHandle<Result<ImageRecord, PullError>> {
        let name = Reference::parse(&registry.image(name)).unwrap();
        let (puller, callers) = (self.puller.clone(), Callers::new(namespace));
        tokio::spawn(async move {
            puller.pull(&name, None, &ProgressReporter::unwatched().for_callers(&callers)).await
        })
    }

    async fn pull_soon(&self, registry: &FaultRegistry, name: &str) {
        let pulling = tokio::time::timeout(SOON, self.pull(registry, name)).await;
        pulling.expect("the slow registry does not delay it").unwrap().unwrap();
    }
}

fn layer(name: &str, byte: u8) -> Vec<u8> {
    layer_of(name, byte, 3 << 20)
}

fn layer_of(name: &str, byte: u8, bytes: usize) -> Vec<u8> {
    TarBuilder::new().with(TarBuilderEntry::file(name, vec![byte; bytes])).finish()
}

/// The layer in one zstd frame with a window of 128 MiB, which is all the memory that such windows may have.
fn in_the_largest_window(layer: &[u8]) -> Vec<u8> {
    let mut encoder = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
    encoder.window_log(27).unwrap();
    encoder.include_contentsize(false).unwrap();
    encoder.write_all(layer).unwrap();
    encoder.finish().unwrap()
}

/// Serves these layers at 800 bytes per second.
fn slow_down(registry: &FaultRegistry, layers: &[String]) {
    trickle(registry, layers, 80);
}

/// Serves these layers so many bytes at a time, ten times per second.
fn trickle(registry: &FaultRegistry, layers: &[String], bytes: u64) {
    for layer in layers {
        let trickle = ResponseFault::Trickle(bytes, Duration::from_millis(100));
        registry.fault(FaultTrigger::path(format!("/blobs/{layer}")), trickle);
    }
}

async fn requested(registry: &Arc<FaultRegistry>, blob: &str, count: usize) {
    requested_of(vec![registry.clone()], blob, count).await;
}

async fn requested_of(registries: Vec<Arc<FaultRegistry>>, blob: &str, count: usize) {
    let path = format!("/blobs/{blob}");
    let seen = move || {
        let requests = || registries.iter().map(|registry| registry.requests_for(&path).len()).sum::<usize>();
        poll(SOON, || (requests() >= count).then_some(()))
    };
    tokio::task::spawn_blocking(seen).await.unwrap().expect("the slow registry is asked for the layer");
}

#[tokio::test]
async fn slow_layers_of_one_registry_do_not_stop_pulls_from_another() {
    let (node, slow, fast) = (Node::new(), Arc::new(FaultRegistry::start()), FaultRegistry::start());
    let layers: Vec<_> = (0..6).map(|byte| layer("slow", byte)).collect();
    let image = slow.put_image("slow", "1", PLAIN, &layers, &[]);
    slow_down(&slow, &image.layers);
    let pulling = node.pull(&slow, "slow:1");
    requested(&slow, "", 1 + 4).await;

    fast.put_image("app", "1", PLAIN, &[layer("a", 11), layer("b", 12)], &[]);
    node.pull_soon(&fast, "app:1").await;
    assert!(!pulling.is_finished(), "a slow registry is not an error");
    pulling.abort();
}

#[tokio::test]
async fn slow_layers_of_many_registries_give_way() {
    let (node, fast) = (Node::new(), FaultRegistry::start());
    let mut slow = Vec::new();
    for _ in 0..3 {
        let registry = Arc::new(FaultRegistry::start());
        let layers: Vec<_> = (0..4).map(|byte| layer(&registry.address(), byte)).collect();
        let image = registry.put_image("slow", "1", PLAIN, &layers, &[]);
        slow_down(&registry, &image.layers);
        slow.push((node.pull(&registry, "slow:1"), registry));
    }
    // Three configs, and a layer in each of the eight slots.
    let all: Vec<_> = slow.iter().map(|(_, registry)| registry.clone()).collect();
    requested_of(all, "", 3 + 8).await;
    fast.put_image("app", "1", PLAIN, &[layer("a", 11), layer("b", 12)], &[]);
    node.pull_soon(&fast, "app:1").await;
    for (pulling, _registry) in slow {
        pulling.abort();
    }
}

#[tokio::test]
async fn layers_of_many_registries_give_way_to_another_namespace_at_any_rate() {
    // All layers are faster.
    let (node, fast) = (Node::with_minimum(1), Arc::new(FaultRegistry::start()));
    let mut hostile = Vec::new();
    for _ in 0..8 {
        let registry = Arc::new(FaultRegistry::start());
        let layer = layer_of(&registry.address(), 1, 24 << 20);
        let image = registry.put_image("slow", "1", PLAIN, &[layer], &[]);
        trickle(&registry, &image.layers, 64 << 10); // 38 seconds
        hostile.push((node.pull_for("hostile", &registry, "slow:1"), registry));
    }
    // A config each, and a layer in each of the eight slots.
    let all: Vec<_> = hostile.iter().map(|(_, registry)| registry.clone()).collect();
    requested_of(all, "", 8 + 8).await;
    fast.put_image("app", "1", PLAIN, &[layer("a", 11), layer("b", 12)], &[]);
    // The layers are claimed by a pull that has no slot left, and gets none by another registry's name.
    let claimed = node.pull_for("hostile", &fast, "app:1");
    requested(&fast, "", 1).await;
    let pulled = tokio::time::timeout(Duration::from_secs(30), node.pull_for("honest", &fast, "app:1")).await;
    pulled.expect("the other namespace has its share").unwrap().unwrap();
    claimed.await.unwrap().unwrap();
    for (pulling, _registry) in hostile {
        assert!(!pulling.is_finished());
        pulling.abort();
    }
}

#[tokio::test]
async fn a_pull_fetches_a_layer_itself_whose_fetch_by_another_pull_is_too_slow() {
    let (node, slow, fast) = (Node::new(), Arc::new(FaultRegistry::start()), FaultRegistry::start());
    let base = layer("base", 1);
    let image = slow.put_image("slow", "1", PLAIN, std::slice::from_ref(&base), &[]);
    slow_down(&slow, &image.layers);
    let pulling = node.pull(&slow, "slow:1");
    requested(&slow, &image.layers[0], 1).await;

    fast.put_image("app", "1", PLAIN, &[base, layer("b", 12)], &[]);
    node.pull_soon(&fast, "app:1").await;
    pulling.abort();
}

#[tokio::test]
async fn a_layer_that_one_repository_of_a_registry_sends_slowly_comes_from_another() {
    let (node, registry) = (Node::new(), Arc::new(FaultRegistry::start()));
    let base = layer("base", 1);
    let image = registry.put_image("slow", "1", PLAIN, std::slice::from_ref(&base), &[]);
    let trickle = ResponseFault::Trickle(80, Duration::from_millis(100));
    registry.fault(FaultTrigger::path(format!("slow/blobs/{}", image.layers[0])), trickle);
    let pulling = node.pull(&registry, "slow:1");
    requested(&registry, &image.layers[0], 1).await;

    registry.put_image("app", "1", PLAIN, &[base, layer("b", 12)], &[]);
    node.pull_soon(&registry, "app:1").await;
    assert!(!pulling.is_finished());
    pulling.abort();
}

#[tokio::test]
async fn a_fetched_layer_above_a_slow_one_does_not_keep_others_waiting() {
    let (node, slow, fast) = (Node::new(), Arc::new(FaultRegistry::start()), FaultRegistry::start());
    let base = TarBuilder::new().with(TarBuilderEntry::file("usr/bin/base", vec![1; 1 << 20])).finish();
    let image = slow.put_image("slow", "1", PLAIN, &[layer("junk", 9), base.clone()], &[]);
    slow_down(&slow, &image.layers[..1]);
    let pulling = node.pull(&slow, "slow:1");
    requested(&slow, &image.layers[1], 1).await;
    tokio::time::sleep(Duration::from_secs(1)).await; // until it is unpacked

    fast.put_image("app", "1", PLAIN, &[base, layer("b", 12)], &[]);
    node.pull_soon(&fast, "app:1").await;
    pulling.abort();
}

#[tokio::test]
async fn the_download_of_a_blob_under_another_diff_id_does_not_keep_others_waiting() {
    let (node, slow, fast) = (Node::new(), Arc::new(FaultRegistry::start()), FaultRegistry::start());
    let base = layer("base", 1);
    let blob = slow.put_blob(base.clone());
    let config = json!({"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers",
        "diff_ids": [format!("sha256:{}", "0".repeat(64))]}})
    .to_string();
    let manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST,
        "config": {"mediaType": CONFIG, "digest": slow.put_blob(config.clone()), "size": config.len()},
        "layers": [{"mediaType": PLAIN, "digest": blob, "size": base.len()}]});
    slow.put_manifest("slow", "1", MANIFEST, manifest.to_string());
    slow_down(&slow, std::slice::from_ref(&blob));
    let pulling = node.pull(&slow, "slow:1");
    requested(&slow, &blob, 1).await;

    fast.put_image("app", "1", PLAIN, &[base], &[]);
    node.pull_soon(&fast, "app:1").await;
    pulling.abort();
}

#[tokio::test]
async fn a_slow_layer_holds_no_memory_for_zstd_that_other_layers_wait_for() {
    let (node, slow, fast) = (Node::new(), Arc::new(FaultRegistry::start()), FaultRegistry::start());
    let [held, wanted] = ["held", "wanted"].map(|name| {
        // What does not compress, so that its download takes long.
        let mut state = name.len() as u64;
        let noise = (0..1 << 20).map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state.to_be_bytes()[0]
        });
        TarBuilder::new().with(TarBuilderEntry::file(name, noise.collect::<Vec<_>>())).finish()
    });
    let image = slow.put_image(
        "slow",
        "1",
        ZSTD,
        &[in_the_largest_window(&held)],
        &[Digest::sha256(&held).to_string()],
    );
    slow_down(&slow, &image.layers);
    let pulling = node.pull(&slow, "slow:1");
    requested(&slow, &image.layers[0], 1).await;
    tokio::time::sleep(Duration::from_secs(1)).await; // until the header of its frame is read

    let diff_id = Digest::sha256(&wanted).to_string();
    fast.put_image("app", "1", ZSTD, &[in_the_largest_window(&wanted)], &[diff_id]);
    node.pull_soon(&fast, "app:1").await;
    assert!(!pulling.is_finished());
    pulling.abort();
}
