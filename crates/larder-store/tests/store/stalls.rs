//! A disk that hangs stops no task but those that wait for it.

use std::sync::Arc;

use futures_util::FutureExt as _;
use larder::backend::ProgressReporter;
use larder::reference::Reference;
use larder_registry::{RegistryClient, RegistryConfig};
use larder_store::pull::{LoadOptions, StorePullConfig, StorePuller};
use larder_store::store::Store;
use larder_testkit::one_worker::OneWorker;

use crate::help::*;
use crate::imports::{layout, stream, tar_of};
use crate::recording_disk::RecordingDisk;

/// A store on a disk of which a step may wait.
struct StallingStore {
    worker: OneWorker,
    disk: RecordingDisk,
    store: Store,
    _dir: tempfile::TempDir,
}

impl StallingStore {
    fn new() -> StallingStore {
        let (dir, disk) = (tempfile::tempdir().unwrap(), RecordingDisk::default());
        let store = Store::open_on(Arc::new(disk.clone()), &dir.path().join("store"), config()).unwrap();
        StallingStore { worker: OneWorker::new(), disk, store, _dir: dir }
    }

    /// Drops a part of a pull in a task, and returns true if other tasks run while this step of it waits.
    fn runs_others_while_dropping<T: Send + 'static>(&self, dropped: T, step: &'static str) -> bool {
        let stall = self.disk.stall(step);
        let task = self.worker.spawn(async move { drop(dropped) });
        stall.wait();
        let runs_others = self.worker.runs_tasks();
        drop(stall);
        self.worker.join(task);
        runs_others
    }
}

#[test]
fn parts_of_a_dropped_pull_stop_no_other_task() {
    let world = StallingStore::new();
    let layer = layer(&world.store, "a");
    assert!(world.runs_others_while_dropping(layer, "rename"), "an uncommitted layer");
    let staging = world.store.begin_layer().unwrap();
    assert!(world.runs_others_while_dropping(staging, "rename"), "a partially unpacked layer");
    let download = world.store.ingest(&blob_of("blob", 100)).unwrap();
    download.write_at(b"0123456789", 0).unwrap();
    assert!(world.runs_others_while_dropping(download, "open extents.latest"), "a download");
}

#[test]
fn a_download_whose_note_is_written_stops_no_task() {
    let world = StallingStore::new();
    let download = world.store.ingest(&blob_of("blob", 4 << 20)).unwrap();
    for step in ["open extents", "rename extents", "sync_data"] {
        let stall = world.disk.stall(step);
        let writer = download.clone();
        let noted = std::thread::spawn(move || writer.forget());
        stall.wait();
        let file = download.clone();
        let used = world.worker.spawn(async move {
            file.stop(std::io::ErrorKind::ConnectionAborted, "the pull was canceled");
            file.resume();
            file.close();
            file.present()
        });
        let runs = world.worker.runs_tasks();
        drop(stall);
        noted.join().unwrap().unwrap();
        assert_eq!(world.worker.join(used), []);
        assert!(runs, "{step}");
    }
}

#[test]
fn the_commit_of_a_dropped_load_is_waited_for() {
    let world = StallingStore::new();
    let client = RegistryClient::new(RegistryConfig::default());
    let puller = StorePuller::new(world.store.clone(), client, StorePullConfig::default());
    let archive = tar_of(&layout("example.com/app:1", &["a"]));
    let stall = world.disk.stall("create_dir sha256");
    let loading = puller.clone();
    let load =
        world.worker.spawn(async move { loading.load(stream(archive), &LoadOptions::default()).await });
    stall.wait();
    load.abort();
    let is_settled = world.worker.spawn(async move {
        let _canceled = load.await;
        let mut settled = Box::pin(puller.wait_for_ending_pulls());
        let is_settled = (&mut settled).now_or_never().is_some();
        drop(stall);
        settled.await;
        is_settled
    });
    assert!(!world.worker.join(is_settled), "the image may still become present");
    assert_eq!(tags(&world.store), ["example.com/app:1"]);
}

#[test]
fn a_pull_that_reads_the_settings_of_a_registry_stops_no_other_task() {
    let world = StallingStore::new();
    let certs = tempfile::tempdir().unwrap();
    let dir = certs.path().join("reg.example");
    fs_err::create_dir(&dir).unwrap();
    // Opening a pipe waits for the other end.
    let file = dir.join("hosts.toml");
    rustix::fs::mkfifoat(rustix::fs::CWD, &file, rustix::fs::Mode::from_raw_mode(0o600)).unwrap();
    let config = RegistryConfig { config_dirs: vec![certs.path().to_owned()], ..RegistryConfig::default() };
    let puller =
        StorePuller::new(world.store.clone(), RegistryClient::new(config), StorePullConfig::default());
    let pull = world.worker.spawn(async move {
        let name = Reference::parse("reg.example/app:1").unwrap();
        puller.pull(&name, None, &ProgressReporter::unwatched()).await
    });
    let runs_others = world.worker.runs_tasks();
    fs_err::write(&file, "no TOML").unwrap();
    let error = world.worker.join(pull).expect_err("the settings are invalid");
    assert!(runs_others && error.to_string().contains("hosts.toml"), "{error}");
}
