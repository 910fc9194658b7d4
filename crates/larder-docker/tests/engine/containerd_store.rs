//! Docker 29, which has its images in containerd. The answers of the engine are those of 29.7.2, shortened to what
//! larder reads, with the digests of the images that a real containerd has here.

use std::path::{Path, PathBuf};

use larder::backend::Backend as _;
use larder::gc::{DiskSpace, LayerSource as _};
use larder_docker::DockerBackend;
use larder_testkit_peers::{
    Containerd, ImageBuilder, LayerFiles, Package, RegistryOptions, RegistryProcess, require,
};
use serde_json::json;
use tempfile::TempDir;

use crate::fake::FakeEngine;
use crate::world::block_on;

const NAMESPACE: &str = "moby";
const ENGINE_ID: &str = "b58a1948-eecc-4d84-84cc-fd7d0969df7b";

/// A containerd as an engine uses it, with two images on one base. The first one has three records: two names, and the
/// one that the engine made when a tag was moved away from it.
struct EngineContainerd {
    containerd: Containerd,
    /// The data root of the engine.
    root: TempDir,
    snapshotter: &'static str,
    names: [String; 2],
    /// The digests of the manifests.
    ids: [String; 2],
}

impl EngineContainerd {
    fn new() -> Option<EngineContainerd> {
        let needed = [Package::Containerd, Package::Runc, Package::DockerRegistry, Package::Skopeo];
        if !require(&needed).is_available() {
            return None;
        }
        let (containerd, registry) =
            (Containerd::start().unwrap(), RegistryProcess::start(RegistryOptions::default()).unwrap());
        let snapshotter = if containerd.has_overlay() { "overlayfs" } else { "native" };
        let layer = |seed: u64, size| LayerFiles::new().noise(format!("srv/{seed}"), size, seed);
        let names = [2, 3].map(|seed| {
            let name = format!("shop/app-{seed}:1");
            let image = ImageBuilder::new().layer(layer(1, 4_000_000)).layer(layer(seed, 2_000_000));
            image.push(&registry, &name).unwrap();
            registry.image(&name)
        });
        let ctr = |arguments: &[&str]| containerd.ctr(NAMESPACE, arguments).unwrap();
        for name in &names {
            ctr(&["images", "pull", "--plain-http", "--snapshotter", snapshotter, name]);
        }
        let listed = ctr(&["images", "ls"]);
        let digest = |name: &String| {
            let record = listed.lines().find(|line| line.starts_with(name.as_str())).unwrap();
            record.split_whitespace().find(|word| word.starts_with("sha256:")).unwrap().to_owned()
        };
        let ids = [digest(&names[0]), digest(&names[1])];
        for other in ["docker.io/other/alias:2", &format!("moby-dangling@{}", ids[0])] {
            ctr(&["images", "tag", &names[0], other]);
        }
        let root = tempfile::tempdir().unwrap();
        fs_err::write(root.path().join("engine-id"), ENGINE_ID).unwrap();
        Some(EngineContainerd { containerd, root, snapshotter, names, ids })
    }

    /// The directory of containerd.
    fn dir(&self) -> PathBuf {
        self.containerd.socket().parent().unwrap().join("root")
    }

    /// Disk usage of its archives and snapshots.
    fn on_disk(&self) -> u64 {
        let parts =
            ["content.v1.content".to_owned(), format!("snapshotter.v1.{}/snapshots", self.snapshotter)];
        parts
            .iter()
            .map(|part| crate::collecting::du(&self.dir().join(format!("io.containerd.{part}"))))
            .sum()
    }

    fn remove_records_of_first(&self) {
        let dangling = format!("moby-dangling@{}", self.ids[0]);
        let names = [self.names[0].as_str(), "docker.io/other/alias:2", &dangling];
        self.containerd.ctr(NAMESPACE, &[&["images", "rm", "--sync"][..], &names[..]].concat()).unwrap();
    }

    fn engine(&self, socket: &Path) -> FakeEngine {
        let info = json!({"ID": ENGINE_ID, "DockerRootDir": self.root.path(), "Driver": self.snapshotter,
            "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]],
            "Containerd": {"Address": socket, "Namespaces": {"Containers": "moby", "Plugins": "plugins.moby"}}});
        let (ids, names) = (&self.ids, &self.names);
        let images = json!([
            {"Containers": 0, "Created": 0, "Id": ids[0], "Labels": {}, "ParentId": "", "SharedSize": -1,
                "Size": 12_000_000, "RepoTags": [names[0], "other/alias:2"],
                "RepoDigests": [format!("other/alias@{}", ids[0])],
                "Descriptor": {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": ids[0]}},
            {"Containers": 0, "Created": 0, "Id": ids[1], "Labels": {}, "ParentId": "", "SharedSize": -1,
                "Size": 12_000_000, "RepoTags": [names[1]], "RepoDigests": []}]);
        let system_df =
            json!({"LayersSize": 16_000_000, "Images": images, "Containers": [], "BuildCache": []});
        FakeEngine::start(move |_, path| {
            let answer = match path.trim_start_matches("/v1.51") {
                "/version" => json!({"Version": "29.7.2", "ApiVersion": "1.55", "MinAPIVersion": "1.40"}),
                "/info" => info.clone(),
                "/images/json" => images.clone(),
                "/containers/json?all=1" => json!([]),
                "/system/df" => system_df.clone(),
                _ => return (404, r#"{"message":"not found"}"#.into()),
            };
            (200, answer.to_string())
        })
    }
}

/// Disk usage that removing the first image frees, and that of all images, with true if they are estimates.
fn promised(backend: &DockerBackend) -> (DiskSpace, DiskSpace, bool) {
    let images = block_on(backend.list()).unwrap();
    let layers = block_on(backend.layers().layers(&images)).unwrap();
    let [first, second] = [0, 1].map(|at: usize| layers.layers_of(&images[at].id).unwrap());
    let sum = |of: &[u32]| of.iter().map(|&at| layers.all()[at as usize].amount).sum::<DiskSpace>();
    let unique: Vec<u32> =
        first.layers.iter().copied().filter(|layer| !second.layers.contains(layer)).collect();
    let freed = sum(&unique) + first.own;
    let estimated = layers.all().iter().any(|layer| layer.estimated);
    (freed, freed + sum(&second.layers) + second.own, estimated)
}

fn is_within_one_percent(promised: u64, measured: u64) -> bool {
    promised.abs_diff(measured) * 100 <= measured
}

#[test]
fn archives_and_layers_of_docker_29_are_measured_and_freed_as_promised() {
    let Some(store) = EngineContainerd::new() else { return };
    let engine = store.engine(&store.containerd.socket());
    let backend = engine.backend();
    let filesystem = block_on(backend.filesystems()).unwrap().image.remove(0);
    assert_eq!(filesystem.mountpoint, store.dir());
    let before = store.on_disk();
    assert!(is_within_one_percent(filesystem.used_bytes.unwrap(), before), "{filesystem:?} of {before}");

    let usage = block_on(backend.usage()).unwrap();
    assert_eq!(usage.layer_store, Some(store.dir()));
    assert_eq!((usage.images.count, usage.images.amount.bytes), (2, filesystem.used_bytes.unwrap()));

    let (freed, all, estimated) = promised(&backend);
    assert_eq!(all.bytes, filesystem.used_bytes.unwrap(), "the base counts once");
    assert_eq!(estimated, !store.containerd.has_overlay(), "snapshots of `native` may share blocks");
    store.remove_records_of_first();
    let measured = before - store.on_disk();
    assert!(is_within_one_percent(freed.bytes, measured), "promised {freed:?}, freed {measured}");
}

#[test]
fn an_unreachable_containerd_of_docker_29_leaves_estimates_and_the_filesystem_of_the_engine() {
    let Some(store) = EngineContainerd::new() else { return };
    let engine = store.engine(&store.root.path().join("no.sock"));
    let filesystem = block_on(engine.backend().filesystems()).unwrap().image.remove(0);
    assert_eq!(filesystem.mountpoint, store.root.path());
}
