//! The input of garbage collection: sizes of layers, times of use, and figures of the engine.

use std::process::Command;
use std::time::Duration;

use larder::backend::{Backend as _, BackendError, CallErrorKind};
use larder::gc::LayerSource as _;
use larder::reference::ImageId;
use larder_docker::{DockerBackend, EngineConfig};
use larder_testkit_peers::{ImageBuilder, LayerFiles};
use serde_json::json;

use crate::fake::{FakeEngine, ScriptedHttpReply};
use crate::world::{EngineFixture, block_on, pull};

fn layer(seed: u64, size: usize) -> LayerFiles {
    LayerFiles::new().noise(format!("srv/{seed}"), size, seed)
}

/// Two images on one base.
fn fill(world: &EngineFixture, backend: &DockerBackend) -> [ImageId; 2] {
    ["a:1", "b:1"].map(|name| {
        let own = u64::from(name.as_bytes()[0]);
        let name =
            world.push(name, &ImageBuilder::new().layer(layer(1, 2_000_000)).layer(layer(own, 500_000)));
        block_on(pull(backend, &name)).unwrap()
    })
}

pub(crate) fn du(path: &std::path::Path) -> u64 {
    let du = Command::new("du").args(["-s", "-B1"]).arg(path).output().unwrap();
    String::from_utf8(du.stdout).unwrap().split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn layers_have_the_size_that_du_prints_and_shared_ones_count_once() {
    let Some(world) = EngineFixture::new() else { return };
    let backend = world.backend();
    fill(&world, &backend);
    let usage = block_on(backend.usage()).unwrap();
    let store = world.engine.root().join("overlay2");
    assert_eq!(usage.layer_store.as_deref(), Some(store.as_path()));
    let du_bytes = du(&store);
    assert_eq!(usage.on_disk.unwrap().bytes, du_bytes);
    let images = usage.images;
    assert!(!images.estimated && images.count == 2, "{images:?}");
    assert!(
        images.amount.bytes.abs_diff(du_bytes) * 100 <= du_bytes * 2,
        "{} and du {du_bytes}",
        images.amount.bytes
    );
    assert_eq!(usage.engine.unwrap().layers_bytes, 3_000_000, "docker counts bytes of files");

    let container = world.engine.create_container("sha256:missing", "x").unwrap_err();
    assert!(container.to_string().contains("No such image"), "{container}");
    let listed = block_on(backend.list()).unwrap();
    let layers = block_on(backend.layers().layers(&listed)).unwrap();
    assert_eq!(layers.all().len(), 3);
    assert!(layers.all().iter().all(|layer| !layer.estimated && layer.amount.inodes > 1));
}

#[test]
fn a_container_that_started_and_ended_between_two_scans_counts_as_a_use() {
    let Some(mut world) = EngineFixture::new() else { return };
    let dir = tempfile::tempdir().unwrap();
    let backend = world.backend();
    let [used, unused] = fill(&world, &backend);
    let look = |world: &EngineFixture| world.look(dir.path());
    let before = look(&world);
    for id in [&used, &unused] {
        let record = before.get(id, "").unwrap();
        assert_eq!(record.last_used, None);
        assert!(record.first_seen < before.watched().unwrap(), "the engine knows when it came");
    }
    let container = world.engine.create_container("127.0.0.1:1/x", "x");
    assert!(container.is_err(), "no such image is no use of any");
    let container = world.engine.create_container(used.as_str(), "short").unwrap();
    world.engine.remove_container(&container).unwrap();
    let after = look(&world);
    let last_used = after.get(&used, "").unwrap().last_used;
    assert!(last_used.is_some(), "no query ran during its life");
    assert_eq!(after.get(&unused, "").unwrap().last_used, None);

    // The engine forgets its events; another larder has nothing but the file.
    world.engine.stop();
    world.engine.start_again().unwrap();
    let again = look(&world);
    assert_eq!(again.get(&used, "").unwrap().last_used, last_used);
    assert_eq!(again.get(&used, "").unwrap().first_seen, before.get(&used, "").unwrap().first_seen);
}

#[test]
fn a_container_retains_its_layers_after_its_image_is_removed() {
    let Some(world) = EngineFixture::new() else { return };
    let backend = world.backend();
    let [a, b] = fill(&world, &backend);
    world.engine.create_container(a.as_str(), "left").unwrap();
    world.engine.remove_image(&format!("{a}?force=1")).unwrap();
    assert!(world.engine.get(&format!("/images/{a}/json")).is_err(), "the engine knows it no more");
    let listed = block_on(backend.list()).unwrap();
    assert_eq!(listed.iter().map(|image| &image.id).collect::<Vec<_>>(), [&b]);
    let layers = block_on(backend.layers().layers(&listed)).unwrap();
    let held: Vec<_> = layers.all().iter().filter(|layer| layer.referenced_by.is_some()).collect();
    assert_eq!(held.len(), 1, "the base, and not what b has alone: {:?}", layers.all());
    assert_eq!(held[0].referenced_by.as_deref(), Some("container left"));
    assert!(held[0].amount.bytes >= 2_000_000, "{held:?}");
}

/// An engine with containerd's image store, as engines from 23 on may be, in the answers that larder asks for.
fn with_containerd_store(method: &str, path: &str) -> (u16, String) {
    let answer = match (method, path.trim_start_matches("/v1.47")) {
        (_, "/version") => json!({"Version": "27.0.0", "ApiVersion": "1.47", "MinAPIVersion": "1.24"}),
        (_, "/info") => json!({"DockerRootDir": "/var/lib/docker", "Driver": "overlayfs",
            "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]],
            "Containerd": {"Address": "/run/containerd/containerd.sock"}}),
        (_, "/containers/json?all=1") => json!([{"Id": "c", "Names": ["/web"], "ImageID": "sha256:i",
            "Image": "app", "State": "running", "Mounts": [{"Type": "image", "Source": ""}]},
            {"Id": "d", "Names": ["/old"], "ImageID": "sha256:h", "State": "exited"}]),
        // In no list, because other images were built on it; a container uses it.
        (_, "/images/sha256:h/json") => json!({"Id": "sha256:h", "RootFS": {"Layers": ["sha256:1"]}}),
        (_, "/containers/c/json") => {
            json!({"HostConfig": {"Mounts": [{"Type": "image", "Source": "data", "Target": "/data"}]}})
        }
        (_, "/images/json") => json!([{"Id": "sha256:i", "RepoTags": ["app:latest"], "Size": 350}]),
        (_, "/images/data/json") => json!({"Id": "sha256:d", "RepoTags": ["data:latest"]}),
        (_, "/images/sha256:i/json") => json!({"Id": "sha256:i", "RepoTags": ["app:latest"], "Size": 350,
            "RootFS": {"Type": "layers", "Layers": ["sha256:1", "sha256:2"]}}),
        (_, "/images/sha256:i/history") => json!([
            {"CreatedBy": "COPY . /srv # buildkit", "Size": 50}, {"CreatedBy": "ENV A=b", "Size": 0},
            {"CreatedBy": "ADD rootfs.tar / # buildkit", "Size": 300}]),
        _ => return (404, r#"{"message":"not found"}"#.into()),
    };
    (200, answer.to_string())
}

#[tokio::test]
async fn layers_of_containerd_s_store_are_estimated_from_histories() {
    let engine = FakeEngine::start(with_containerd_store);
    let backend = engine.backend();
    let listed = backend.list().await.unwrap();
    let layers = backend.layers().layers(&listed).await.unwrap();
    let bytes: Vec<(u64, bool)> =
        layers.all().iter().map(|layer| (layer.amount.bytes, layer.estimated)).collect();
    assert!(bytes.contains(&(300, true)) && bytes.contains(&(50, true)), "{bytes:?}");
    let held: Vec<_> = layers.all().iter().filter(|layer| layer.referenced_by.is_some()).collect();
    assert_eq!(held.len(), 1, "{held:?}");
    assert_eq!((held[0].id.as_str(), held[0].referenced_by.as_deref()), ("sha256:1", Some("container old")));
    assert_eq!(held[0].amount.bytes, 300);
    let root = &backend.filesystems().await.unwrap().image[0].mountpoint;
    assert_eq!(root.to_str(), Some("/var/lib/containerd"));
}

#[tokio::test]
async fn an_engine_with_remote_images_is_not_measured() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().to_owned();
    let engine = FakeEngine::start(move |method, path| match path {
        "/v1.47/info" => (200, json!({"DockerRootDir": root, "Driver": "overlay2"}).to_string()),
        "/v1.47/system/df" => (409, r#"{"message":"a disk usage operation is already running"}"#.into()),
        _ => with_containerd_store(method, path),
    });
    let backend = engine.backend();
    let places = async || {
        let found = backend.filesystems().await.unwrap();
        let usage = backend.usage().await.unwrap();
        (found.image[0].mountpoint.clone(), found.container[0].mountpoint.clone(), usage.layer_store)
    };
    let configs = dir.path().join("image/overlay2/imagedb/content/sha256");
    fs_err::create_dir_all(&configs).unwrap();
    fs_err::create_dir_all(dir.path().join("overlay2")).unwrap();
    let remote = std::path::PathBuf::from(format!("/docker://{}", dir.path().display()));
    assert_eq!(places().await, (remote.clone(), remote, None));
    fs_err::write(configs.join("i"), "{}").unwrap();
    let (here, store) = (dir.path().to_owned(), dir.path().join("overlay2"));
    assert_eq!(places().await, (here.clone(), here, Some(store)));
}

#[tokio::test]
async fn an_image_that_a_container_mounts_is_in_use() {
    let engine = FakeEngine::start(with_containerd_store);
    let in_use = engine.backend().container_inventory().await.unwrap();
    let container = &in_use.containers[0];
    assert_eq!((container.image_id.as_str(), container.running), ("sha256:i", true));
    assert_eq!(container.mounted_images, ["sha256:d"]);
    assert_eq!(container.mounts_error, None);
}

/// An engine that answers at once, but for what takes it minutes.
fn slow() -> FakeEngine {
    FakeEngine::replying(|method, path| match path {
        "/v1.47/system/df" | "/v1.47/build/prune" => ScriptedHttpReply::Never,
        _ => {
            let (status, body) = with_containerd_store(method, path);
            ScriptedHttpReply::Whole(status, body)
        }
    })
}

#[tokio::test]
async fn sizes_of_system_df_are_omitted_after_a_timeout() {
    let engine = slow();
    let backend = engine.backend();
    backend.info().await.unwrap();
    let limit = EngineConfig::default().request_timeout;
    tokio::time::pause();
    // No other event occurs in the simulated time; all later calls are answered in real time.
    let minutes = async {
        tokio::time::sleep(limit).await;
        tokio::time::resume();
    };
    let (usage, ()) = tokio::join!(backend.usage(), minutes);
    let usage = usage.unwrap();
    assert_eq!((usage.images.count, usage.images.amount.bytes), (1, 350));
    assert_eq!(usage.containers.count, 2);
    let why = usage.engine.unwrap_err();
    assert!(matches!(why, BackendError::Call { kind: CallErrorKind::DeadlineExceeded, .. }), "{why:?}");
}

#[tokio::test]
async fn a_prune_of_the_builder_s_cache_does_not_hold_collection_up_for_ever() {
    let engine = slow();
    let backend = engine.backend();
    backend.info().await.unwrap();
    tokio::time::pause();
    let pruned = tokio::time::timeout(Duration::from_secs(3600), backend.builder_cache().prune()).await;
    let late = pruned.expect("it ends").unwrap_err();
    assert_eq!(late.to_string(), "the engine did not prune its build cache within 30m0s");
}
