//! Stores of every released format are read. `tests/fixtures/store-v1.tar.gz` is a store of format 1 as after a reboot;
//! these tests open copies.
//!
//! To write the fixture, as root: `LARDER_WRITE_FIXTURE=1 cargo test -p larder-store writing_the_fixture`.
//! The fixture of a released format is never written again.

use std::path::{Path, PathBuf};
use std::time::Duration;

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use larder_store::fsck::FsckOptions;
use larder_store::mounts::MountOptions;
use larder_store::snapshots::NewSnapshot;
use larder_store::store::{FORMAT, LeaseRecord, LeaseResources, RemoveOptions, SnapshotKind, Store};

use crate::fsck::unpacked;
use crate::help::*;

fn path(format: u32) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/store-v{format}.tar.gz"))
}

/// The store of this format, unpacked in a directory that is deleted when this is dropped.
fn unpack_fixture(format: u32) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let archive = GzDecoder::new(fs_err::File::open(path(format)).unwrap());
    let mut archive = tar::Archive::new(archive);
    archive.set_preserve_permissions(true);
    archive.set_preserve_mtime(true);
    archive.unpack(dir.path()).unwrap();
    let root = dir.path().join("store");
    (dir, root)
}

#[test]
fn stores_of_all_formats_are_read() {
    for format in 1..=FORMAT {
        let (_dir, root) = unpack_fixture(format);
        assert_has_snapshots(&open(&root));
        assert_is_the_fixture(&root);
    }
}

fn assert_has_snapshots(store: &Store) {
    let layers = store.image("app").unwrap().unwrap().layers;
    let snapshots = store.snapshots().unwrap();
    let [active, layer] = snapshots.as_slice() else { panic!("two snapshots: {snapshots:?}") };
    assert_eq!((active.key.as_str(), &active.parent), ("k8s.io/1/container", &layer.key));
    assert_eq!((active.kind, layer.kind), (SnapshotKind::Active, SnapshotKind::Committed));
    assert_eq!(layer.layer.as_ref(), Some(&layers[0].key));
    let written = store.root().join(format!("snapshots/{}/fs/notes", active.id));
    assert_eq!(fs_err::read_to_string(written).unwrap(), "kept");
}

fn assert_is_the_fixture(root: &Path) {
    let store = open(root);
    assert_eq!(
        tags(&store),
        ["docker.io/library/app:latest", "docker.io/library/app:v2", "docker.io/library/web:latest"]
    );
    let app = store.image("app").unwrap().unwrap();
    assert_eq!((app.user.as_str(), app.pulled_at, app.layers.len()), ("1000:1000", 1_800_000_000, 1));
    assert_eq!(app.id.hex(), "450d8423ab7e677f430f966def42eb87bb00c132be9aa623e91768540a407d45");
    let leases = store.leases(&noon().into()).unwrap();
    assert_eq!((leases.len(), leases[0].id.as_str()), (1, "pull/1"));
    assert_eq!(leases[0].leased.ingests, [blob_of("half", 3 << 20).ingest_id()]);
    let mounts = store.mounts().unwrap();
    assert_eq!((mounts.len(), mounts[0].mounted, mounts[0].image.clone()), (1, false, app.id.clone()));
    let written = root.join("mounts").join(&mounts[0].id).join("upper/notes");
    assert_eq!(fs_err::read_to_string(written).unwrap(), "kept");
    assert!(store.ratio().unwrap().bytes > 0.0);
    assert_eq!(store.ingest(&blob_of("half", 3 << 20)).unwrap().done(), 1 << 20);
    let report = store.fsck(&FsckOptions::default()).unwrap();
    if rustix::process::geteuid().is_root() {
        assert_eq!(report.problems, [], "every file is as it was unpacked");
    }
    // What only reading cannot show.
    commit(&store, "new", &["new"]);
    store.remove("web", &RemoveOptions::default()).unwrap().expect("web was there");
    drop(store);
    assert_eq!(tags(&open(root)).len(), 3);
}

#[test]
fn writing_the_fixture() {
    if std::env::var_os("LARDER_WRITE_FIXTURE").is_none() {
        return; // the fixture of this format is there; see above
    }
    let scratch = TempStore::new();
    let store = &scratch.store;
    unpacked(store, "app", &[("bin/tool", "#!tool"), ("etc/conf", "a=1")]);
    unpacked(store, "app:v2", &[("bin/tool", "#!tool"), ("etc/conf", "a=1")]);
    unpacked(store, "web", &[("bin/server", "#!server")]);
    unpacked(store, "gone", &[("gone", "gone")]);
    store.remove("gone", &RemoveOptions::default()).unwrap();
    let leased =
        LeaseResources { ingests: vec![blob_of("half", 3 << 20).ingest_id()], ..LeaseResources::default() };
    let lease = LeaseRecord::granted("pull/1", leased, Duration::MAX, &noon().into());
    store.lease(&lease).unwrap();
    store.ingest(&blob_of("half", 3 << 20)).unwrap().write_at(&vec![7; 1 << 20], 0).unwrap();
    // The fixture is read on other machines, and after reboots: what is there is durable.
    let ingests = store.root().join("ingest");
    for ingest in entries(&ingests) {
        let extents = br#"{"boot":"","size":3145728,"durable":[[0,1048576]],"present":[[0,1048576]]}"#;
        fs_err::write(ingests.join(ingest).join("extents"), extents).unwrap();
    }
    let target = scratch.dir.path().join("target");
    fs_err::create_dir(&target).unwrap();
    store.mount("app", &target, MountOptions { writable: true, ..MountOptions::default() }, noon()).unwrap();
    fs_err::write(target.join("notes"), "kept").unwrap();
    rustix::mount::unmount(&target, rustix::mount::UnmountFlags::empty()).unwrap();
    let chain = store.image("app").unwrap().unwrap().chain_ids();
    let snapshot = |key: &str, parent: &str| NewSnapshot {
        key: key.to_owned(),
        parent: parent.to_owned(),
        labels: [("containerd.io/snapshot.ref".to_owned(), chain[0].to_string())].into(),
    };
    let layer_snapshot = store.adopt_layer(&chain[0], snapshot("", ""), noon()).unwrap().unwrap();
    store.create_snapshot(snapshot("k8s.io/1/container", &layer_snapshot), true, noon()).unwrap();
    let container = store.snapshot("k8s.io/1/container").unwrap().id;
    fs_err::write(store.root().join(format!("snapshots/{container}/fs/notes")), "kept").unwrap();
    // As after a reboot: nothing is mounted, and the directories are there.
    for lower in entries(&store.root().join("lowers")) {
        let lower = store.root().join("lowers").join(lower);
        rustix::mount::unmount(&lower, rustix::mount::UnmountFlags::empty()).unwrap();
    }
    let unfinished = layer(store, "unfinished");
    write(store, &path(FORMAT));
    drop(unfinished);
}

fn write(store: &Store, path: &Path) {
    fs_err::create_dir_all(path.parent().unwrap()).unwrap();
    let file = GzEncoder::new(fs_err::File::create(path).unwrap(), Compression::best());
    let mut archive = tar::Builder::new(file);
    archive.follow_symlinks(false);
    archive.append_dir_all("store", store.root()).unwrap();
    archive.into_inner().unwrap().finish().unwrap();
}
