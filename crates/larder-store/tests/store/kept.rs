//! Layers that were finished before a pull failed, or died with its process, are there for the next one.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use larder::backend::ProgressReporter;
use larder::gc::{ReclaimTrigger, ReclaimableSpace};
use larder::reference::Reference;
use larder::scheduler::Scheduler;
use larder_registry::{RegistryClient, RegistryConfig};
use larder_store::disk::measure;
use larder_store::fsck::FsckOptions;
use larder_store::pull::{PullError, StorePullConfig, StorePuller};
use larder_store::store::{LeaseRecord, LeaseResources, RemoveOptions, Store};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, PutImage, ResponseFault};
use larder_testkit_peers::faulty_disk::{DiskFault, FaultyDisk, UnsyncedData};

use crate::fsck::unpacked_layer;
use crate::help::*;

const DAY: Duration = Duration::from_secs(24 * 3600 + 60);

/// Puts an image of plain layers with one file each of so many bytes; the last layer cannot be had. Layers that come
/// one after another do so from the largest to the smallest.
fn put_broken_image(registry: &FaultRegistry, name: &str, sizes: &[usize]) -> PutImage {
    let layers: Vec<Vec<u8>> = sizes
        .iter()
        .map(|size| {
            TarBuilder::new().with(TarBuilderEntry::file(format!("f{size}"), vec![7; *size])).finish()
        })
        .collect();
    let image = registry.put_image(name, "1", "application/vnd.oci.image.layer.v1.tar", &layers, &[]);
    registry.fault(FaultTrigger::path(image.layers.last().unwrap()), ResponseFault::status(404));
    image
}

/// Returns when all threads that worked at it have ended.
fn pull(store: &Store, registry: &FaultRegistry, name: &str) -> Result<(), PullError> {
    let config = StorePullConfig { scheduler: Scheduler::for_layers(1), ..StorePullConfig::default() };
    let puller = StorePuller::new(store.clone(), RegistryClient::new(RegistryConfig::default()), config);
    let name = Reference::parse(&format!("{}:1", registry.image(name))).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(puller.pull(&name, None, &ProgressReporter::unwatched())).map(drop)
}

/// Digests of the fetched blobs.
fn asked(registry: &FaultRegistry) -> Vec<String> {
    let requests = registry.requests_for("/blobs/");
    requests
        .iter()
        .filter(|request| request.method == "GET")
        .map(|request| request.path.rsplit('/').next().unwrap().to_owned())
        .collect()
}

fn pull_leases(store: &Store) -> Vec<LeaseRecord> {
    store.leases(&SystemTime::now().into()).unwrap()
}

/// A lease as that of a pull that wants this layer.
fn wants(layer: &str) -> LeaseRecord {
    let leased = LeaseResources { ingests: vec![ingest_id(layer)], ..LeaseResources::default() };
    LeaseRecord::granted(format!("pull/{layer}"), leased, Duration::MAX, &noon().into())
}

fn du(path: &Path) -> u64 {
    let output = Command::new("du").args(["-s", "-B1"]).arg(path).output().unwrap();
    String::from_utf8(output.stdout).unwrap().split_whitespace().next().unwrap().parse().unwrap()
}

fn assert_sound(store: &Store) {
    let report = store.fsck(&FsckOptions::default()).unwrap();
    assert!(report.is_sound() && report.problems.is_empty(), "{report:?}");
}

#[test]
fn a_pull_after_one_that_failed_asks_only_for_what_is_missing() {
    for restart in [false, true] {
        let (registry, mut scratch) = (FaultRegistry::start(), TempStore::new());
        let image = put_broken_image(&registry, "app", &[300_000, 200_000, 100_000, 50_000]);
        pull(&scratch.store, &registry, "app").unwrap_err();
        assert_eq!(entries(&scratch.root().join("layers")).len(), 3);
        assert_eq!(entries(&scratch.root().join("staging")), [""; 0]);
        if restart {
            scratch = scratch.reopen();
        }
        registry.clear_faults();
        registry.forget_requests();
        pull(&scratch.store, &registry, "app").unwrap();

        assert_eq!(asked(&registry), [image.config, image.layers[3].clone()], "restart: {restart}");
        let sent: u64 = registry.requests().iter().map(|request| request.sent).sum();
        assert!(sent < 60_000, "{sent} bytes for a layer of 50,000");
        assert_eq!(pull_leases(&scratch.store), [], "it ended with the commit");
        let scratch = scratch.reopen();
        assert_sound(&scratch.store);
        assert_eq!(scratch.store.images().unwrap()[0].layers.len(), 4);
        assert_eq!(entries(&scratch.root().join("layers")).len(), 4);
    }
}

#[test]
fn each_pull_keeps_its_layers_whichever_pull_fetched_them() {
    let (registry, scratch) = (FaultRegistry::start(), TempStore::new());
    put_broken_image(&registry, "app", &[300_000, 50_000]);
    put_broken_image(&registry, "web", &[300_000, 40_000]);
    pull(&scratch.store, &registry, "app").unwrap_err();
    let [first] = &pull_leases(&scratch.store)[..] else { panic!("one lease") };
    pull(&scratch.store, &registry, "web").unwrap_err();
    scratch.store.end_lease(&first.id).unwrap();
    scratch.store.sweep(&SystemTime::now().into()).unwrap();
    registry.clear_faults();
    registry.forget_requests();
    pull(&scratch.store, &registry, "web").unwrap();
    assert_eq!(asked(&registry).len(), 2, "the config and the layer that failed");
}

#[test]
fn kept_layers_count_and_are_removed_after_an_unused_day() {
    let (registry, scratch) = (FaultRegistry::start(), TempStore::new());
    put_broken_image(&registry, "app", &[900_000, 500_000, 50_000]);
    pull(&scratch.store, &registry, "app").unwrap_err();
    let scratch = scratch.reopen();
    let (said, is) = (scratch.store.usage().unwrap().total().bytes, du(&scratch.root()));
    assert!(is > 1_400_000 && is.abs_diff(said) * 100 <= is, "du says {is}, the store {said}");
    assert_sound(&scratch.store);
    scratch.store.sweep(&SystemTime::now().into()).unwrap();
    assert_eq!(entries(&scratch.root().join("layers")).len(), 2);
    scratch.store.sweep(&(SystemTime::now() + DAY).into()).unwrap();
    assert_eq!(entries(&scratch.root().join("layers")), [""; 0]);
    scratch.store.empty_trash().unwrap();
    let index = ["larder.db", "larder.db-wal"].map(|name| du(&scratch.root().join(name)));
    assert!(du(&scratch.root()) < 200_000 + index.iter().sum::<u64>());
    assert_eq!(scratch.store.usage().unwrap().layers.bytes, 0);
}

#[test]
fn a_kept_layer_is_believed_only_in_the_run_of_the_machine_that_unpacked_it() {
    let disk = FaultyDisk::new();
    let open_on = |disk: &FaultyDisk| {
        Store::open_on(Arc::new(disk.clone()), &disk.root().join("store"), config()).unwrap()
    };
    let store = open_on(&disk);
    store.lease(&wants("a")).unwrap();
    drop(layer_on(&disk, &store, "a").unwrap());
    drop(layer_on(&disk, &store, "unwanted").unwrap());
    larder_store::disk::FilesystemSync::sync(&disk).unwrap();
    drop(store);
    for (survives, there) in [(UnsyncedData::Everything, true), (UnsyncedData::Nothing, false)] {
        let disk = disk.restarted(survives);
        let store = open_on(&disk);
        let layers = entries(&store.root().join("layers"));
        assert_eq!(layers, if there { vec![key("a").as_str().to_owned()] } else { vec![] }, "{survives:?}");
        assert_eq!(store.layer(&key("a")).unwrap().is_some_and(|layer| layer.is_uncommitted()), there);
    }
}

#[test]
fn a_commit_of_a_kept_layer_makes_it_durable() {
    let disk = FaultyDisk::new();
    let root = disk.root().join("store");
    let store = Store::open_on(Arc::new(disk.clone()), &root, config()).unwrap();
    let layer = unpacked_layer(&store, &[("etc/name", "a")]);
    let (wanted, ingests) = (layer.key().clone(), vec![blob(&layer.record().facts).ingest_id()]);
    let leased = LeaseResources { ingests, ..LeaseResources::default() };
    store.lease(&LeaseRecord { leased, ..wants("a") }).unwrap();
    drop(layer);
    drop(store);
    let store = Store::open_on(Arc::new(disk.clone()), &root, config()).unwrap();
    let kept = store.layer(&wanted).unwrap().expect("it is kept");
    store.commit(&image(&["app"], &[kept]), noon()).unwrap();
    drop(store);
    let disk = disk.restarted(UnsyncedData::Nothing);
    let store = Store::open_on(Arc::new(disk.clone()), &disk.root().join("store"), config()).unwrap();
    assert_eq!(tags(&store).len(), 1);
    let layer = store.layer(&wanted).unwrap().expect("it is committed");
    assert_eq!(name_in(&layer), "a");
}

#[test]
fn a_note_that_cannot_be_believed_keeps_nothing() {
    let damages: [fn(&Path); 3] = [
        |note| fs_err::remove_file(note).unwrap(),
        |note| fs_err::write(note, "{").unwrap(),
        |note| {
            let (mut bytes, wanted, other) = (fs_err::read(note).unwrap(), key("a"), key("b"));
            let (wanted, other) = (wanted.as_str().as_bytes(), other.as_str().as_bytes());
            while let Some(at) = bytes.windows(wanted.len()).position(|part| part == wanted) {
                bytes[at..at + wanted.len()].copy_from_slice(other);
            }
            fs_err::write(note, bytes).unwrap();
        },
    ];
    for damage in damages {
        let scratch = TempStore::new();
        scratch.store.lease(&wants("a")).unwrap();
        let layer = layer(&scratch.store, "a");
        damage(layer.path());
        drop(layer);
        let scratch = scratch.reopen();
        assert_eq!(entries(&scratch.root().join("layers")), [""; 0]);
        assert!(scratch.store.layer(&key("a")).unwrap().is_none());
    }
}

#[test]
fn a_removal_takes_a_kept_layer_of_the_damaged_image_with_it() {
    let scratch = TempStore::new();
    commit(&scratch.store, "app", &["a"]);
    fs_err::remove_file(scratch.root().join("layers").join(key("a").as_str())).unwrap();
    let scratch = scratch.reopen();
    scratch.store.lease(&wants("a")).unwrap();
    drop(layer(&scratch.store, "a")); // fetched again, by a pull that failed at another layer
    let id = scratch.store.missing().unwrap()[0].image.to_string();
    scratch.store.remove(&id, &RemoveOptions { force: true, ..RemoveOptions::default() }).unwrap();
    assert_eq!(entries(&scratch.root().join("layers")), [""; 0]);
    assert!(scratch.store.layer(&key("a")).unwrap().is_none(), "its files are gone");
    assert_eq!(scratch.store.usage().unwrap().layers.bytes, 0);
}

#[test]
fn layers_are_kept_only_for_pulls() {
    let scratch = TempStore::new();
    scratch.store.lease(&wants("other")).unwrap();
    drop(layer(&scratch.store, "a"));
    assert_eq!(entries(&scratch.root().join("layers")), [""; 0]);
    scratch.store.lease(&wants("a")).unwrap();
    drop(layer(&scratch.store, "a"));
    assert_eq!(entries(&scratch.root().join("layers")).len(), 1);
}

/// Reclaims, after a check that this is what was announced.
fn reclaim(store: &Store, trigger: ReclaimTrigger, now: SystemTime) -> ReclaimableSpace {
    let announced = store.reclaimable(trigger, &now.into()).unwrap();
    let outcome = store.reclaim(trigger, &now.into());
    assert!(outcome.error.is_none(), "{outcome:?}");
    let reclaimed = outcome.freed;
    assert_eq!(announced, reclaimed, "{trigger:?}");
    assert_eq!(store.reclaimable(trigger, &now.into()).unwrap(), ReclaimableSpace::default(), "{trigger:?}");
    reclaimed
}

/// A store with a resumable layer `a`, a download `b` and their lease, and a layer `c` that only a lease of its own
/// names.
fn leftovers() -> TempStore {
    let scratch = TempStore::new();
    let seconds = 60;
    scratch.store.lease(&LeaseRecord { seconds, ..wants("a") }).unwrap();
    drop(layer(&scratch.store, "a"));
    let download = blob_of("b", 500_000);
    scratch.store.ingest(&download).unwrap().write_at(&vec![7; 400_000], 0).unwrap();
    let leased = LeaseResources { ingests: vec![download.ingest_id()], ..LeaseResources::default() };
    scratch.store.lease(&LeaseRecord { seconds, leased, ..wants("b") }).unwrap();
    let leased = LeaseResources { layers: vec![key("c")], ..LeaseResources::default() };
    let time = Duration::from_secs(seconds);
    let lease = LeaseRecord::granted("other", leased, time, &noon().into());
    scratch.store.commit_layers(&[layer(&scratch.store, "c")], Some(&lease)).unwrap();
    scratch
}

#[test]
fn until_space_is_needed_only_what_has_expired_is_reclaimed() {
    let scratch = leftovers();
    assert_eq!(reclaim(&scratch.store, ReclaimTrigger::Schedule, noon()), ReclaimableSpace::default());
    let later = SystemTime::now().max(noon()) + DAY;
    let reclaimed = reclaim(&scratch.store, ReclaimTrigger::Schedule, later);
    assert!((400_000..500_000).contains(&reclaimed.downloads.bytes), "{reclaimed:?}");
    assert!(reclaimed.layers.inodes > 0, "{reclaimed:?}");
    assert_eq!(entries(&scratch.root().join("ingest")), [""; 0]);
    assert_eq!(entries(&scratch.root().join("layers")), [""; 0]);
    assert_eq!(scratch.store.leases(&UNIX_EPOCH.into()).unwrap(), []);
}

#[test]
fn when_space_is_needed_all_that_ended_pulls_left_is_reclaimed() {
    for trigger in [ReclaimTrigger::Pressure, ReclaimTrigger::Request] {
        let scratch = leftovers();
        let before = du(&scratch.root());
        let reclaimed = reclaim(&scratch.store, trigger, noon());
        assert!((400_000..500_000).contains(&reclaimed.downloads.bytes), "{reclaimed:?}");
        let freed = before - du(&scratch.root());
        assert!(freed.abs_diff(reclaimed.total().bytes) < 50_000, "du: {freed}, {reclaimed:?}");
        assert_eq!(entries(&scratch.root().join("ingest")), [""; 0]);
        assert_eq!(entries(&scratch.root().join("layers")), [""; 0]);
        assert_eq!(pull_leases(&scratch.store), []);
    }
}

#[test]
fn removed_files_that_are_not_deleted_yet_are_reclaimed() {
    let scratch = TempStore::new();
    commit(&scratch.store, "app", &["a"]);
    scratch.store.remove("app", &RemoveOptions::default()).unwrap();
    let reclaimed = reclaim(&scratch.store, ReclaimTrigger::Schedule, noon());
    assert!(reclaimed.trash.inodes > 0, "{reclaimed:?}");
    assert_eq!(entries(&scratch.root().join("trash")), [""; 0]);
}

#[test]
fn what_a_running_pull_needs_is_never_reclaimed() {
    let later = SystemTime::now().max(noon()) + DAY;
    for trigger in [ReclaimTrigger::Schedule, ReclaimTrigger::Pressure, ReclaimTrigger::Request] {
        let scratch = leftovers();
        let ingests = [ingest_id("a"), blob_of("b", 500_000).ingest_id()];
        let running = scratch.store.reference_ingests(ingests);
        reclaim(&scratch.store, trigger, later);
        assert_eq!(entries(&scratch.root().join("ingest")).len(), 1, "{trigger:?}");
        assert_eq!(entries(&scratch.root().join("layers")), [key("a").as_str()], "{trigger:?}");
        let leases = scratch.store.leases(&UNIX_EPOCH.into()).unwrap();
        assert_eq!(leases.len(), 2, "those of the pull: {trigger:?}");
        drop(running);
        reclaim(&scratch.store, trigger, later);
        assert_eq!(entries(&scratch.root().join("ingest")), [""; 0], "{trigger:?}");
        assert_eq!(entries(&scratch.root().join("layers")), [""; 0], "{trigger:?}");
    }
}

#[test]
fn a_layer_whose_writes_failed_is_not_handed_out() {
    let mut failed = 0;
    for at in 0.. {
        let disk = FaultyDisk::new();
        let root = disk.root().join("store");
        let store = Store::open_on(Arc::new(disk.clone()), &root, config()).unwrap();
        store.lease(&wants("app")).unwrap();
        drop(layer_on(&disk, &store, "app").unwrap());
        let web = layer_on(&disk, &store, "web").unwrap();
        disk.arm(DiskFault::FailsAt(at, std::io::ErrorKind::Other));
        let committed = store.commit(&image(&["web"], &[web]), noon());
        let met = disk.has_failed();
        disk.arm(DiskFault::None);
        failed += u32::from(committed.is_err());
        // The one that was retained, or another.
        let app = layer_on(&disk, &store, "app").unwrap();
        store.commit(&image(&["app"], &[app]), noon()).unwrap_or_else(|error| panic!("step {at}: {error}"));
        if !met {
            break;
        }
    }
    assert!(failed > 2, "{failed}");
}

#[test]
fn a_reclaim_that_fails_reports_what_it_freed_before() {
    let (mut failed, mut freed) = (0, 0);
    for at in 0.. {
        let disk = FaultyDisk::new();
        let root = disk.root().join("store");
        let store = Store::open_on(Arc::new(disk.clone()), &root, config()).unwrap();
        drop(store.ingest(&blob_of("b", 500_000)).unwrap().write_at(&vec![7; 400_000], 0));
        let leased = LeaseResources { layers: vec![key("c")], ..LeaseResources::default() };
        let lease = LeaseRecord::granted("other", leased, Duration::ZERO, &noon().into());
        store.commit_layers(&[layer_on(&disk, &store, "c").unwrap()], Some(&lease)).unwrap();
        let usage = || {
            ["ingest", "layers", "trash"]
                .map(|dir| measure(&root.join(dir)).unwrap().bytes)
                .iter()
                .sum::<u64>()
        };
        let before = usage();
        disk.arm(DiskFault::FailsAt(at, std::io::ErrorKind::Other));
        let outcome = store.reclaim(ReclaimTrigger::Request, &noon().into());
        if outcome.error.is_none() && !disk.has_failed() {
            break;
        }
        failed += u32::from(outcome.error.is_some());
        freed += u32::from(outcome.error.is_some() && outcome.freed.downloads.bytes > 0);
        let change = before - usage();
        assert_eq!(outcome.freed.total().bytes, change, "step {at}: {outcome:?}");
    }
    assert!(failed > 2 && freed > 0, "{failed} failed, of these {freed} after the download was deleted");
}
