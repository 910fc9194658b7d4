//! Real pulls, loads and removals, with the power cut or the disk failing at every step of them.
//!
//! These tests do with a [`StorePuller`] and a registry what `crashes.rs` does by hand with the store's parts:
//! ingest, unpacking, settling, commit. Layers themselves are written past the faulty disk; what was not synced of
//! them is lost with the power all the same.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;

use larder::backend::ProgressReporter;
use larder::reference::Reference;
use larder_registry::{RegistryClient, RegistryConfig};
use larder_store::fsck::{FsckOptions, StoreDamage};
use larder_store::pull::{LoadOptions, PullError, StorePullConfig, StorePuller};
use larder_store::store::import::ImportSource;
use larder_store::store::{RemoveOptions, Store};
use larder_testkit::fault_registry::FaultRegistry;
use larder_testkit_peers::faulty_disk::{DiskFault, FaultyDisk, UnsyncedData};
use larder_testkit_peers::{ImageBuilder, LayerFiles};
use tempfile::TempDir;

use crate::help::*;

/// Operation on the store.
#[derive(Debug, Clone, Copy)]
enum StoreOperation {
    Pull,
    Load,
    Remove,
}

/// A registry and a layout with two images that share a layer.
struct SharedLayerImages {
    registry: FaultRegistry,
    dir: TempDir,
}

impl SharedLayerImages {
    fn new() -> SharedLayerImages {
        let world = SharedLayerImages { registry: FaultRegistry::start(), dir: tempfile::tempdir().unwrap() };
        let base = LayerFiles::new().file("etc/motd", "base").file("etc/name", "base");
        world.add("kept", &ImageBuilder::new().layer(base.clone()));
        world.add(
            "app",
            &ImageBuilder::new().layer(base).layer(LayerFiles::new().noise("srv/data", 50_000, 1)),
        );
        world
    }

    fn layout(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn add(&self, name: &str, image: &ImageBuilder) {
        let layout = image.write(&self.layout(name)).unwrap();
        let blob = |digest: &str| {
            let hex = digest.trim_start_matches("sha256:");
            fs_err::read(self.layout(name).join("blobs/sha256").join(hex)).unwrap()
        };
        for digest in &layout.blobs {
            self.registry.put_blob(blob(digest));
        }
        let manifest_type = "application/vnd.oci.image.manifest.v1+json";
        self.registry.put_manifest(name, "1", manifest_type, blob(&layout.manifest_digest));
    }

    /// Returns when all threads that worked at it have ended.
    fn bring(&self, store: &Store, deed: StoreOperation, name: &str) -> Result<(), PullError> {
        let puller = StorePuller::new(
            store.clone(),
            RegistryClient::new(RegistryConfig::default()),
            StorePullConfig::default(),
        );
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            if let StoreOperation::Load = deed {
                let from = ImportSource::Path(self.layout(name));
                return puller
                    .load(
                        from,
                        &LoadOptions::named(Reference::parse(&format!("registry.example/{name}")).unwrap()),
                    )
                    .await
                    .map(drop);
            }
            let name = Reference::parse(&format!("{}:1", self.registry.image(name))).unwrap();
            puller.pull(&name, None, &ProgressReporter::unwatched()).await.map(drop)
        })
    }

    fn run(&self, store: &Store, deed: StoreOperation) -> Result<(), String> {
        let done = match deed {
            StoreOperation::Pull | StoreOperation::Load => {
                self.bring(store, deed, "app").map_err(|error| format!("{error:?}"))
            }
            StoreOperation::Remove => {
                let app = self.registry.image("app:1");
                store.remove(&app, &RemoveOptions::default()).map(drop).map_err(|error| format!("{error:?}"))
            }
        };
        done.and_then(|()| store.empty_trash().map_err(|error| format!("{error:?}")))
    }

    /// A disk with a store to which the deed can be done.
    fn prepared(&self, deed: StoreOperation) -> FaultyDisk {
        let disk = FaultyDisk::new();
        let store = open_on(&disk);
        self.bring(&store, StoreOperation::Pull, "kept").unwrap();
        if let StoreOperation::Remove = deed {
            self.bring(&store, StoreOperation::Pull, "app").unwrap();
        }
        disk
    }

    /// Every image is whole; how many there are.
    fn check(&self, store: &Store, what: &str) -> usize {
        let report = store.fsck(&FsckOptions::default()).unwrap();
        // What a step that failed could not take away lies there until the next start.
        let problems =
            report.problems.iter().filter(|problem| !matches!(problem.found, StoreDamage::Leftover { .. }));
        assert_eq!(problems.count(), 0, "{what}: {report:?}");
        let kept = store.image(self.registry.image("kept:1")).unwrap();
        assert!(kept.is_some_and(|image| image.complete), "{what}: the image that was there is gone");
        store.images().unwrap().len()
    }

    /// Goes on with the store after the fault, and tries the deed again.
    fn go_on(&self, store: &Store, deed: StoreOperation, done: bool, what: &str) {
        let (before, after) = if let StoreOperation::Remove = deed { (2, 1) } else { (1, 2) };
        let visible = self.check(store, what);
        assert!(visible == after || (!done && visible == before), "{what}: {visible} images");
        self.run(store, deed).unwrap_or_else(|error| panic!("{what}: trying again: {error}"));
        assert_eq!(self.check(store, what), after, "{what}: after trying again");
        for dir in ["staging", "ingest", "trash"] {
            assert_eq!(entries(&store.root().join(dir)), [""; 0], "{what}: left in {dir}");
        }
    }
}

fn open_on(disk: &FaultyDisk) -> Store {
    let store = Store::open_on(Arc::new(disk.clone()), &disk.root().join("store"), config());
    store.unwrap_or_else(|error| panic!("the store opens: {error:?}"))
}

fn lose_power_everywhere(deed: StoreOperation) {
    let world = SharedLayerImages::new();
    let prepared = world.prepared(deed);
    for survives in [UnsyncedData::Nothing, UnsyncedData::Everything, UnsyncedData::Some(1)] {
        for step in 0.. {
            let what = format!("{deed:?}, power lost at step {step}, {survives:?} survives");
            let disk = prepared.restarted(UnsyncedData::Everything);
            let store = open_on(&disk);
            disk.arm(DiskFault::LosesPowerAt(step));
            let done = world.run(&store, deed).is_ok();
            let met = disk.has_failed();
            drop(store);
            let store = open_on(&disk.restarted(survives));
            world.go_on(&store, deed, done, &what);
            if !met {
                assert!(step > 5, "{what}: something was done");
                break; // every shorter life has been tried
            }
        }
    }
}

fn fail_everywhere(deed: StoreOperation) {
    let world = SharedLayerImages::new();
    let prepared = world.prepared(deed);
    for kind in [ErrorKind::StorageFull, ErrorKind::Other] {
        for step in 0.. {
            let what = format!("{deed:?}, {kind:?} at step {step}");
            let disk = prepared.restarted(UnsyncedData::Everything);
            let store = open_on(&disk);
            disk.arm(DiskFault::FailsAt(step, kind));
            let done = world.run(&store, deed).is_ok();
            let met = disk.has_failed();
            disk.arm(DiskFault::None);
            // The store continues after the failure, without being reopened.
            world.go_on(&store, deed, done, &what);
            drop(store);
            let store = open_on(&disk);
            let report = store.fsck(&FsckOptions::default()).unwrap();
            assert!(report.is_sound() && report.problems.is_empty(), "{what}: opened again: {report:?}");
            if !met {
                break;
            }
        }
    }
}

#[test]
fn a_real_pull_survives_power_loss_at_any_step() {
    lose_power_everywhere(StoreOperation::Pull);
}

#[test]
fn a_real_load_survives_power_loss_at_any_step() {
    lose_power_everywhere(StoreOperation::Load);
}

#[test]
fn a_real_removal_survives_power_loss_at_any_step() {
    lose_power_everywhere(StoreOperation::Remove);
}

#[test]
fn any_step_of_a_real_pull_load_or_removal_may_fail_and_be_tried_again() {
    for deed in [StoreOperation::Pull, StoreOperation::Load, StoreOperation::Remove] {
        fail_everywhere(deed);
    }
}
