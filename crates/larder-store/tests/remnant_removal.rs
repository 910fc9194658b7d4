//! Removals that keep remnants: of a store that others use, on disks that fail, lose their power, or are full.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::io::{self, ErrorKind, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use larder::backend::{ProgressReporter, RemoveOptions};
use larder::reference::Reference;
use larder_registry::{RegistryClient, RegistryConfig};
use larder_store::disk::{Disk, DiskFile, FileOpenMode, FilesystemSync, RealDisk};
use larder_store::fsck::FsckOptions;
use larder_store::pull::{StorePullConfig, StorePuller};
use larder_store::store::{Store, StoreConfig};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::fault_registry::{FaultRegistry, digest};
use larder_testkit_peers::faulty_disk::{DiskFault, FaultyDisk, UnsyncedData};
use larder_testkit_peers::{LoopDisk, LoopFilesystem};
use parking_lot::Mutex;

/// How long another use of the store may take.
const LONGEST: Duration = Duration::from_secs(20);

fn config() -> StoreConfig {
    StoreConfig { keep_remnants: true, background_deletion: false, ..StoreConfig::default() }
}

/// A store on this disk, with an image of one layer, of which a remnant can be kept.
fn with_image(disk: Arc<dyn Disk>, root: &Path) -> (Store, Reference) {
    let store = Store::open_on(disk, root, config()).unwrap();
    let registry = FaultRegistry::start();
    let content: Vec<u8> = (0..2_500_000_u32).flat_map(|number| (number % 7919).to_le_bytes()).collect();
    let plain = TarBuilder::new().with(TarBuilderEntry::file("data", content)).finish();
    let mut blob = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::new(4));
    blob.write_all(&plain).unwrap();
    let media = "application/vnd.oci.image.layer.v1.tar+gzip";
    registry.put_image("app", "1", media, &[blob.finish().unwrap()], &[digest(&plain)]);
    let name = Reference::parse(&registry.image("app:1")).unwrap();
    let client = RegistryClient::new(RegistryConfig::default());
    let puller = StorePuller::new(store.clone(), client, StorePullConfig::default());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(puller.pull(&name, None, &ProgressReporter::unwatched())).unwrap();
    (store, name)
}

fn remove(store: &Store, name: &Reference) -> Result<(), String> {
    let removed = store.remove(name.to_string().as_str(), &RemoveOptions::default());
    removed.map(|removed| assert!(removed.is_some())).map_err(|error| larder::error_chain(&error))
}

/// Whether a remnant is kept.
fn has_remnant(store: &Store) -> bool {
    let dir = store.root().join("remnants");
    fs_err::read_dir(dir).is_ok_and(|mut remnants| remnants.next().is_some())
}

fn assert_sound(store: &Store, what: &str) {
    let report = store.fsck(&FsckOptions { contents: true, ..FsckOptions::default() }).unwrap();
    assert!(report.problems.is_empty(), "{what}: {report:?}");
}

/// The action of a test when a file is made.
type Hook = Box<dyn FnOnce() + Send>;

/// A disk that calls a hook before it makes a file.
struct HookedDisk(Arc<Mutex<Option<Hook>>>);

impl std::fmt::Debug for HookedDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HookedDisk").finish_non_exhaustive()
    }
}

impl Disk for HookedDisk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        RealDisk.create_dir(path)
    }

    fn open(&self, path: &Path, how: FileOpenMode) -> io::Result<Arc<dyn DiskFile>> {
        let hook = self.0.lock().take();
        if let Some(hook) = hook {
            hook();
        }
        RealDisk.open(path, how)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        RealDisk.rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        RealDisk.remove_file(path)
    }

    fn remove_tree(&self, path: &Path, go_on: &dyn Fn() -> bool) -> io::Result<()> {
        RealDisk.remove_tree(path, go_on)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        RealDisk.sync_dir(path)
    }

    fn open_sync(&self, path: &Path) -> io::Result<Box<dyn FilesystemSync>> {
        RealDisk.open_sync(path)
    }

    fn boot_id(&self) -> String {
        RealDisk.boot_id()
    }
}

#[test]
fn others_change_the_store_while_a_remnant_is_copied() {
    let (dir, hook) = (tempfile::tempdir().unwrap(), Arc::<Mutex<Option<Hook>>>::default());
    let (store, name) = with_image(Arc::new(HookedDisk(Arc::clone(&hook))), &dir.path().join("store"));
    let (other, (done, changed)) = (store.clone(), channel());
    let (report, reported) = channel();
    *hook.lock() = Some(Box::new(move || {
        std::thread::spawn(move || {
            let _ = other.remove("docker.io/library/none:latest", &RemoveOptions::default());
            let _ = done.send(());
        });
        report.send(changed.recv_timeout(LONGEST).is_ok()).unwrap();
    }));
    remove(&store, &name).unwrap();
    assert!(reported.try_recv().expect("the remnant is copied"), "it waits for the copy");
    assert!(has_remnant(&store));
    assert_sound(&store, "removed");
}

#[test]
fn a_disk_that_fails_or_loses_power_at_any_step_of_a_removal_leaves_a_sound_store() {
    let prepared = FaultyDisk::new();
    let (store, name) = with_image(Arc::new(prepared.clone()), &prepared.root().join("store"));
    drop(store);
    let open = |disk: &FaultyDisk| {
        Store::open_on(Arc::new(disk.clone()), &disk.root().join("store"), config()).unwrap()
    };
    let faults = [
        (DiskFault::LosesPowerAt as fn(u64) -> DiskFault, UnsyncedData::Nothing),
        (DiskFault::LosesPowerAt, UnsyncedData::Some(1)),
        (|step| DiskFault::FailsAt(step, ErrorKind::StorageFull), UnsyncedData::Everything),
        (|step| DiskFault::FailsAt(step, ErrorKind::Other), UnsyncedData::Everything),
    ];
    for (fault, survives) in faults {
        let mut without = 0;
        for step in 0.. {
            let what = format!("{:?}, {survives:?} survives", fault(step));
            let disk = prepared.restarted(UnsyncedData::Everything);
            let store = open(&disk);
            disk.arm(fault(step));
            let done = remove(&store, &name);
            let (has_failed, is_kept) = (disk.has_failed(), has_remnant(&store));
            drop(store);
            let store = open(&disk.restarted(survives));
            let is_present = store.image(name.to_string().as_str()).unwrap().is_some();
            assert!(done.is_err() || !is_present, "{what}: it was reported as removed");
            assert_sound(&store, &what);
            if !has_failed {
                assert!(done.is_ok() && is_kept, "{what}: {done:?}");
                break;
            }
            without += usize::from(!is_present && !is_kept);
        }
        assert!(without > 0, "a removal goes on without a remnant");
    }
}

#[test]
fn a_removal_on_a_full_disk_succeeds_without_a_remnant() {
    if !LoopFilesystem::Ext4.is_available() {
        return;
    }
    let disk = LoopDisk::new(LoopFilesystem::Ext4, 160, &[]).unwrap();
    let (store, name) = with_image(Arc::new(RealDisk), &disk.path().join("store"));
    let mut filler = fs_err::File::create(disk.path().join("filler")).unwrap();
    while filler.write_all(&[1; 4096]).is_ok() {}
    remove(&store, &name).unwrap();
    assert!(!has_remnant(&store));
    assert_sound(&store, "removed");
}
