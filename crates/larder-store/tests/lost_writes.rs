//! A disk that loses what was written: the kernel reports it once, to the first process that asks.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use larder::backend::ProgressReporter;
use larder::gc::ClockReading;
use larder::reference::{Digest, Reference};
use larder_registry::{RegistryClient, RegistryConfig};
use larder_store::disk::DiskSpace;
use larder_store::fsck::FsckOptions;
use larder_store::pull::{StorePullConfig, StorePuller};
use larder_store::store::{
    BlobSource, CommitLayer, ImageCommit, LAYER_FILE, LayerHandle, LayerKey, LayerMetadata, LeaseRecord,
    LeaseResources, Store, StoreConfig, StoreError,
};
use larder_store::unpack::{ExpectedLayer, MergedLayers, UnpackOptions, unpack_layer};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, ResponseFault};
use larder_testkit_peers::OverbookedDisk;
use serde_json::json;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// Files of a layer, and the bytes of each. ext4 would place smaller ones into space that it reserved before.
const FILES_OF_LAYER: usize = 40;
const FILE_BYTES: usize = 100_000;

fn open(disk: &OverbookedDisk) -> Store {
    let config = StoreConfig { background_deletion: false, ..StoreConfig::default() };
    Store::open(&disk.path().join("store"), config).unwrap()
}

fn archive(name: &str) -> Vec<u8> {
    let file = |number: usize| TarBuilderEntry::file(format!("{name}/{number}"), vec![b'x'; FILE_BYTES]);
    (0..FILES_OF_LAYER).map(file).fold(TarBuilder::new(), TarBuilder::with).finish()
}

/// The layer of this name, unpacked now or by an earlier pull.
fn layer(store: &Store, name: &str) -> LayerHandle {
    let archive = archive(name);
    let diff_id = Digest::sha256(&archive);
    let key = LayerKey::from(&diff_id);
    if let Some(layer) = store.layer(&key).unwrap() {
        return layer;
    }
    let staging = store.begin_layer().unwrap();
    let expected = ExpectedLayer { digest: None, size: None, diff_id: &diff_id };
    let facts = LayerMetadata {
        digest: diff_id.clone(),
        diff_id: diff_id.clone(),
        compressed_bytes: archive.len() as u64,
        plain_bytes: archive.len() as u64,
        skipped_xattrs: 0,
    };
    let file = staging.dir().join(LAYER_FILE);
    let (_, layer) = unpack_layer(&archive[..], &expected, &file, &UnpackOptions::default()).unwrap();
    let finished = layer.finish(&MergedLayers::default(), &Arc::default()).unwrap();
    staging.finish(&key, facts, finished.file, &blob(&archive)).unwrap()
}

/// The blob of a layer, which is not compressed.
fn blob(archive: &[u8]) -> BlobSource {
    BlobSource::archive(Digest::sha256(archive), archive.len() as u64)
}

/// As a pull does it that may be interrupted and come back.
fn lease(store: &Store, name: &str) {
    let ingests = vec![blob(&archive(name)).ingest_id()];
    let leased = LeaseResources { ingests, ..LeaseResources::default() };
    let id = format!("pull/{name}");
    let lease = LeaseRecord::granted(id, leased, Duration::MAX, &ClockReading::now());
    store.lease(&lease).unwrap();
}

fn commit(store: &Store, name: &str, layer: LayerHandle) -> Result<(), StoreError> {
    let diff_id = layer.record().facts.diff_id.clone();
    let config = serde_json::json!({
        "os": "linux", "architecture": "amd64",
        "rootfs": { "type": "layers", "diff_ids": [diff_id.as_str()] },
    });
    let config = config.to_string().into_bytes();
    let manifest = format!("manifest of {name}").into_bytes();
    let image = ImageCommit {
        names: vec![Reference::parse(name).unwrap()],
        config: (Digest::sha256(&config), config),
        manifests: vec![(Digest::sha256(&manifest), manifest)],
        has_digest: true,
        artifact: None,
        layers: vec![CommitLayer {
            digest: diff_id,
            size: layer.record().facts.compressed_bytes,
            media_type: "application/vnd.oci.image.layer.v1.tar".into(),
            layer,
        }],
        ingests: Vec::new(),
        pinned: false,
        preloaded: false,
        end_lease: Some(format!("pull/{name}")),
    };
    store.commit(&image, SystemTime::now()).map(drop)
}

/// Another process syncs the filesystem, and receives the error.
fn another_process_receives_the_error(disk: &OverbookedDisk) {
    disk.sync().expect_err("writes have failed");
    disk.sync().expect("the kernel reports it once");
}

/// Each file of each image, as the disk has it.
fn assert_sound_on_disk(disk: &OverbookedDisk, images: usize) {
    disk.remount().unwrap();
    let store = open(disk);
    let report = store.fsck(&FsckOptions::default()).unwrap();
    assert!(report.is_sound() && report.problems.is_empty(), "{report:?}");
    assert_eq!(store.images().unwrap().len(), images);
}

fn removed(path: &Path) -> bool {
    !path.exists()
}

#[test]
fn no_image_is_committed_whose_write_error_another_process_has_received() {
    let Some(disk) = OverbookedDisk::new().unwrap() else { return };
    let store = open(&disk);
    commit(&store, "first", layer(&store, "first")).unwrap();
    lease(&store, "app");
    let lost = layer(&store, "app");
    disk.fill().unwrap();
    another_process_receives_the_error(&disk);
    disk.make_room().unwrap();
    let path = lost.path().to_owned();
    commit(&store, "app", lost).expect_err("its files are zeros on the disk");
    assert!(removed(&path), "the next pull must not find it");
    commit(&store, "app", layer(&store, "app")).expect("it is unpacked again");
    drop(store);
    assert_sound_on_disk(&disk, 2);
}

#[test]
fn each_of_several_pulls_learns_of_a_write_error() {
    let Some(disk) = OverbookedDisk::new().unwrap() else { return };
    let store = open(&disk);
    commit(&store, "first", layer(&store, "first")).unwrap();
    let (app, web) = (layer(&store, "app"), layer(&store, "web"));
    disk.fill().unwrap();
    disk.sync().expect_err("writes have failed");
    disk.make_room().unwrap();
    commit(&store, "app", app).expect_err("its files are lost");
    commit(&store, "web", web).expect_err("so are those of the other pull");
    commit(&store, "web", layer(&store, "web")).expect("it is unpacked again");
    drop(store);
    assert_sound_on_disk(&disk, 2);
}

/// A download of an earlier process becomes a layer where it is. Its bytes look right until the page cache is empty.
#[test]
fn a_download_whose_writes_are_lost_does_not_become_a_layer() {
    let Some(disk) = OverbookedDisk::new().unwrap() else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let registry = FaultRegistry::start();
    let weights = vec![b'x'; 24 << 20];
    let blob = registry.put_blob(weights.clone());
    let layer = json!({"mediaType": "application/octet-stream", "digest": blob, "size": weights.len()});
    let config = registry.put_blob("{}");
    let config = json!({"mediaType": "application/vnd.oci.empty.v1+json", "digest": config, "size": 2});
    let manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST, "artifactType": "model", "config": config,
        "layers": [layer]});
    registry.put_manifest("model", "1", MANIFEST, manifest.to_string());
    let name = Reference::parse(&registry.image("model:1")).unwrap();
    let pull = async |store: &Store| {
        let client = RegistryClient::new(RegistryConfig::default());
        let config = StorePullConfig { reserve: DiskSpace::default(), ..StorePullConfig::default() };
        let puller = StorePuller::new(store.clone(), client, config);
        puller.pull(&name, None, &ProgressReporter::unwatched()).await
    };

    let store = open(&disk);
    commit(&store, "first", self::layer(&store, "first")).unwrap();
    registry.fault(FaultTrigger::path(&blob), ResponseFault::StallAfter(20 << 20));
    runtime.block_on(async {
        let downloaded = async {
            while store.usage().unwrap().ingest.bytes < 19 << 20 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! {
            pulled = pull(&store) => panic!("{pulled:?}"),
            () = downloaded => {}
        }
    });
    drop(store);
    disk.fill().unwrap();
    another_process_receives_the_error(&disk);
    disk.make_room().unwrap();
    registry.clear_faults();
    let store = open(&disk);
    runtime.block_on(pull(&store)).expect_err("the beginning is zeros on the disk");
    runtime.block_on(pull(&store)).expect("it is downloaded again");
    drop(store);
    assert_sound_on_disk(&disk, 2);
}

#[test]
fn a_layer_of_a_dead_process_is_compared_with_the_disk_before_its_commit() {
    let Some(disk) = OverbookedDisk::new().unwrap() else { return };
    let store = open(&disk);
    commit(&store, "first", layer(&store, "first")).unwrap();
    lease(&store, "app");
    lease(&store, "web");
    drop(layer(&store, "web"));
    disk.sync().unwrap();
    drop(layer(&store, "app"));
    drop(store);
    disk.fill().unwrap();
    another_process_receives_the_error(&disk);
    disk.make_room().unwrap();
    let store = open(&disk);
    let [app, web] = ["app", "web"].map(|name| layer(&store, name));
    assert!(app.is_uncommitted() && web.is_uncommitted(), "they are retained");
    commit(&store, "web", web).expect("it was written");
    let error = commit(&store, "app", app).unwrap_err();
    assert!(matches!(error, StoreError::LostWrites { .. }), "{error}");
    commit(&store, "app", layer(&store, "app")).expect("it is unpacked again");
    drop(store);
    assert_sound_on_disk(&disk, 3);
}
