//! A load, a pull and a removal, with the power cut at each step of them, and the filesystem mounted again.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::sync::Arc;

use larder::backend::ProgressReporter;
use larder::reference::Reference;
use larder_registry::{RegistryClient, RegistryConfig};
use larder_store::fsck::FsckOptions;
use larder_store::pull::{LoadOptions, StorePullConfig, StorePuller};
use larder_store::store::import::ImportSource;
use larder_store::store::{RemoveOptions, Store, StoreConfig};
use larder_testkit::fault_registry::FaultRegistry;
use larder_testkit_peers::{CutDisk, ImageBuilder, LayerFiles, LoopDisk, LoopFilesystem};
use serde_json::json;

const APP: &str = "registry.example/app:image";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// A store on a small disk, images to load, and an artifact to pull.
struct PowerCutStore {
    disk: LoopDisk,
    registry: FaultRegistry,
    runtime: tokio::runtime::Runtime,
}

impl PowerCutStore {
    fn new(kind: LoopFilesystem) -> PowerCutStore {
        let disk = LoopDisk::new(kind, 96, &[]).unwrap();
        let base = LayerFiles::new().file("etc/motd", "base").noise("srv/base", 40_000, 1);
        let kept = ImageBuilder::new().layer(base.clone());
        let app = ImageBuilder::new().layer(base).layer(LayerFiles::new().noise("srv/app", 50_000, 2));
        kept.write(&disk.dir().join("kept")).unwrap();
        app.write(&disk.dir().join("app")).unwrap();
        let registry = FaultRegistry::start();
        let weights = vec![7; 50_000];
        let digest = registry.put_blob(weights.clone());
        let layer = json!({"mediaType": "application/octet-stream", "digest": digest, "size": weights.len()});
        let config = registry.put_blob("{}");
        let config = json!({"mediaType": "application/vnd.oci.empty.v1+json", "digest": config, "size": 2});
        let model = json!({"schemaVersion": 2, "mediaType": MANIFEST, "artifactType": "model",
            "config": config, "layers": [layer]});
        registry.put_manifest("model", "1", MANIFEST, model.to_string());
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let store = PowerCutStore { disk, registry, runtime };
        store.load(&store.open(usize::MAX).1, "kept").unwrap();
        store
    }

    /// The store, whose power is cut before this step.
    fn open(&self, steps: usize) -> (Arc<CutDisk>, Store) {
        let cut = CutDisk::of(&self.disk);
        let config = StoreConfig { background_deletion: false, ..StoreConfig::default() };
        let store = Store::open_on(cut.clone(), &self.disk.path().join("store"), config).unwrap();
        cut.cut_before(steps);
        (cut, store)
    }

    fn artifact(&self) -> Reference {
        Reference::parse(&self.registry.image("model:1")).unwrap()
    }

    fn pull(&self, store: &Store) -> Result<(), String> {
        let (name, progress) = (self.artifact(), ProgressReporter::unwatched());
        let done = self.runtime.block_on(puller_into(store).pull(&name, None, &progress));
        done.map(drop).map_err(|error| error.to_string())
    }

    fn load(&self, store: &Store, name: &str) -> Result<(), String> {
        let puller = puller_into(store);
        let image = Reference::parse(&format!("registry.example/{name}")).unwrap();
        let source = ImportSource::Path(self.disk.dir().join(name));
        let loaded = self.runtime.block_on(puller.load(source, &LoadOptions::named(image)));
        loaded.map(drop).map_err(|error| error.to_string())
    }

    /// Mounts the disk again after the power came back; returns whether the image of this name is present. Nothing else
    /// may be lost.
    fn check(&self, name: &str, what: &str) -> bool {
        self.disk.remount().unwrap();
        let (_, store) = self.open(usize::MAX);
        let report = store.fsck(&FsckOptions::default()).unwrap();
        assert!(report.is_sound(), "{what}: {report:?}");
        let is_present = |name: &str| store.image(name).unwrap().is_some();
        assert!(is_present("registry.example/kept:image"), "{what}: an image is lost");
        is_present(name)
    }
}

fn puller_into(store: &Store) -> StorePuller {
    let client = RegistryClient::new(RegistryConfig::default());
    StorePuller::new(store.clone(), client, StorePullConfig::default())
}

/// Fails as root if there are none: the program that cuts the power comes with XFS.
fn filesystems() -> Vec<LoopFilesystem> {
    let mut kinds = vec![LoopFilesystem::Ext4, LoopFilesystem::Xfs];
    kinds.retain(|kind| kind.is_available() && LoopFilesystem::Xfs.is_available());
    let is_root = rustix::process::geteuid().is_root();
    assert!(!kinds.is_empty() || !is_root, "nothing is tested: install mkfs.xfs and xfs_io");
    kinds
}

#[test]
fn a_power_cut_loses_no_image_and_leaves_none_half_visible() {
    for kind in filesystems() {
        let node = PowerCutStore::new(kind);
        let mut cuts = 0;
        for step in 1.. {
            let what = format!("{kind}, load, step {step}");
            let (cut, store) = node.open(step);
            let loaded = node.load(&store, "app");
            drop(store);
            let present = node.check(APP, &what);
            assert!(loaded.is_err() || present, "{what}: it was reported as loaded");
            if !cut.is_cut() {
                assert_eq!(loaded, Ok(()), "{what}");
                break;
            }
            cuts += 1;
            let (_, store) = node.open(usize::MAX);
            if present {
                store.remove(APP, &RemoveOptions::default()).unwrap();
            }
        }
        assert!(cuts >= 15, "{kind}: only {cuts} places to cut at");

        for step in 1.. {
            let what = format!("{kind}, removal, step {step}");
            let (cut, store) = node.open(step);
            let removed = store.remove(APP, &RemoveOptions::default());
            drop(store);
            let present = node.check(APP, &what);
            assert!(removed.is_err() || !present, "{what}: it was reported as removed");
            if !cut.is_cut() {
                break;
            }
            if !present {
                node.load(&node.open(usize::MAX).1, "app").unwrap();
            }
        }
    }
}

/// The file of a download becomes that of a layer: what the power cut left of one is never taken for the other.
#[test]
fn a_power_cut_loses_no_artifact_and_leaves_none_half_visible() {
    for kind in filesystems() {
        let node = PowerCutStore::new(kind);
        let name = node.artifact().to_string();
        let mut cuts = 0;
        for step in 1.. {
            let what = format!("{kind}, pull, step {step}");
            let (cut, store) = node.open(step);
            let pulled = node.pull(&store);
            drop(store);
            let present = node.check(&name, &what);
            assert!(pulled.is_err() || present, "{what}: it was reported as pulled");
            if !cut.is_cut() {
                assert_eq!(pulled, Ok(()), "{what}");
                break;
            }
            cuts += 1;
            let (_, store) = node.open(usize::MAX);
            // With what the download has left, if anything.
            node.pull(&store).unwrap_or_else(|error| panic!("{what}: again: {error}"));
            drop(store);
            assert!(node.check(&name, &what), "{what}: it was pulled again");
            node.open(usize::MAX).1.remove(name.as_str(), &RemoveOptions::default()).unwrap();
        }
        assert!(cuts >= 20, "{kind}: only {cuts} places to cut at");
    }
}
