//! Pulls and loads on a small filesystem that runs out of space or inodes during them.
//!
//! Admission lets these pass: no reserve is kept, and the layers are megabytes of ones, or thousands of files, that
//! come as a few kilobytes. A filler takes all but so much as a round wants; each round leaves a little more, until the
//! image fits, so that the disk is full at one step after another.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use larder::backend::ProgressReporter;
use larder::gc::{ClockReading, ReclaimTrigger};
use larder::reference::{Digest, Reference};
use larder::scheduler::Scheduler;
use larder_registry::{RegistryClient, RegistryConfig};
use larder_store::disk::DiskSpace;
use larder_store::fsck::FsckOptions;
use larder_store::mounts::MountOptions;
use larder_store::pull::{LoadOptions, PullError, StorePullConfig, StorePuller};
use larder_store::store::import::ImportSource;
use larder_store::store::{
    BlobSource, LeaseRecord, LeaseResources, RemoveOptions, Store, StoreConfig, StoreOpenError,
};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, ResponseFault};
use larder_testkit_peers::{ImageBuilder, LayerFiles, LoopDisk, LoopFilesystem};
use tempfile::TempDir;

/// A small ext4.
struct SmallDisk(LoopDisk);

impl SmallDisk {
    /// Of so many MiB and inodes; `None`, after a loud message, where it cannot be mounted.
    fn new(mib: u64, inodes: u64) -> Option<SmallDisk> {
        let kind = LoopFilesystem::Ext4;
        kind.is_available().then(|| {
            let inodes = inodes.to_string();
            SmallDisk(LoopDisk::new(kind, mib, &["-b", "1024", "-N", &inodes]).unwrap())
        })
    }

    fn path(&self) -> PathBuf {
        self.0.path()
    }

    /// Returns the free space, including bytes that were deleted or written a moment ago.
    fn free(&self) -> DiskSpace {
        self.0.free().unwrap().0
    }

    /// Gives data its blocks as it is written. Otherwise ext4 counts up to 2,048 blocks twice for a moment, when it
    /// writes data out.
    fn allocate_at_once(&self) {
        self.0.tune(&["-o", "nodelalloc"]).unwrap();
    }

    /// Takes all but `left`.
    fn fill(&self, left: DiskSpace) {
        let filler = self.path().join("filler");
        fs_err::create_dir(&filler).unwrap();
        for number in 0..self.free().inodes.saturating_sub(left.inodes) {
            fs_err::write(filler.join(number.to_string()), "").unwrap();
        }
        let file = fs_err::OpenOptions::new().create(true).append(true).open(filler.join("0")).unwrap();
        let mut bytes = self.free().bytes.saturating_sub(left.bytes);
        // The last blocks may be wanted for the filesystem's own tables.
        while bytes > 0
            && rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, bytes).is_err()
        {
            bytes = bytes.saturating_sub(4096);
        }
    }

    fn make_room(&self) {
        fs_err::remove_dir_all(self.path().join("filler")).unwrap();
    }
}

/// How an image is stored.
#[derive(Debug, Clone, Copy)]
enum ImportMethod {
    Pull,
    Load,
}

/// An image in a registry and in a layout.
struct SmallDiskImage {
    registry: FaultRegistry,
    dir: TempDir,
}

impl SmallDiskImage {
    fn new() -> SmallDiskImage {
        SmallDiskImage { registry: FaultRegistry::start(), dir: tempfile::tempdir().unwrap() }
    }

    /// The digests of its blobs, the config first.
    fn add(&self, image: &ImageBuilder, name: &str) -> Vec<String> {
        let layout = image.write(&self.layout(name)).unwrap();
        let blob = |digest: &str| {
            let file = self.layout(name).join("blobs/sha256").join(digest.trim_start_matches("sha256:"));
            fs_err::read(file).unwrap()
        };
        for digest in &layout.blobs {
            self.registry.put_blob(blob(digest));
        }
        let manifest_type = "application/vnd.oci.image.manifest.v1+json";
        self.registry.put_manifest(name, "1", manifest_type, blob(&layout.manifest_digest));
        layout.blobs
    }

    fn layout(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Brings an image, and returns when all threads that worked at it have ended.
    fn bring(&self, store: &Store, how: ImportMethod, name: &str) -> Result<(), PullError> {
        self.bring_beside(store, how, name, DiskSpace::default())
    }

    /// Adds an image beside a reserve.
    fn bring_beside(
        &self,
        store: &Store,
        how: ImportMethod,
        name: &str,
        reserve: DiskSpace,
    ) -> Result<(), PullError> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        runtime.unwrap().block_on(self.bring_in_runtime(store, how, name, reserve))
    }

    /// Pulls one layer after another, the largest first.
    fn pull_one_by_one(&self, store: &Store, name: &str) -> Result<(), PullError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let config = StorePullConfig {
            reserve: DiskSpace::default(),
            scheduler: Scheduler::for_layers(1),
            ..StorePullConfig::default()
        };
        let puller = StorePuller::new(store.clone(), RegistryClient::new(RegistryConfig::default()), config);
        let name = Reference::parse(&format!("{}:1", self.registry.image(name))).unwrap();
        runtime.block_on(puller.pull(&name, None, &ProgressReporter::unwatched())).map(drop)
    }

    async fn bring_in_runtime(
        &self,
        store: &Store,
        how: ImportMethod,
        name: &str,
        reserve: DiskSpace,
    ) -> Result<(), PullError> {
        let config = StorePullConfig { reserve, ..StorePullConfig::default() };
        let puller = StorePuller::new(store.clone(), RegistryClient::new(RegistryConfig::default()), config);
        match how {
            ImportMethod::Pull => {
                let name = Reference::parse(&format!("{}:1", self.registry.image(name))).unwrap();
                puller.pull(&name, None, &ProgressReporter::unwatched()).await.map(drop)
            }
            ImportMethod::Load => {
                let from = ImportSource::Path(self.layout(name));
                puller
                    .load(
                        from,
                        &LoadOptions::named(Reference::parse(&format!("registry.example/{name}")).unwrap()),
                    )
                    .await
                    .map(drop)
            }
        }
    }
}

fn open(disk: &SmallDisk) -> Store {
    let config = StoreConfig { background_deletion: false, ..StoreConfig::default() };
    Store::open(&disk.path().join("store"), config).unwrap_or_else(|error| panic!("{}", chain(&error)))
}

fn chain(error: &dyn Error) -> String {
    error.source().map_or(error.to_string(), |cause| format!("{error}: {}", chain(cause)))
}

/// Ids of all images, after a look at every file of theirs.
fn sound_images(store: &Store, what: &str) -> Vec<String> {
    let report = store.fsck(&FsckOptions::default()).unwrap();
    assert!(report.is_sound() && report.problems.is_empty(), "{what}: {report:?}");
    store.images().unwrap().iter().map(|image| image.id.to_string()).collect()
}

/// Everything that is mounted can be read.
fn assert_mountable(store: &Store, id: &str, at: &Path) {
    fs_err::create_dir_all(at).unwrap();
    store.mount(id, at, MountOptions::default(), std::time::SystemTime::now()).unwrap();
    assert_eq!(fs_err::read_to_string(at.join("etc/motd")).unwrap(), "kept");
    store.umount(at).unwrap();
}

fn kept() -> ImageBuilder {
    ImageBuilder::new().layer(LayerFiles::new().file("etc/motd", "kept").noise("srv/data", 100_000, 1))
}

/// Layers that take four megabytes each.
fn large() -> ImageBuilder {
    let ones = |name: &str| LayerFiles::new().file(name, vec![1; 4 << 20]);
    ImageBuilder::new().layer(ones("srv/a")).layer(ones("srv/b")).layer(ones("srv/c"))
}

/// Layers that take four hundred inodes each.
fn numerous() -> ImageBuilder {
    let empty = |name: &str| {
        let files = (0..400).map(|number| TarBuilderEntry::file(format!("{name}/{number}"), ""));
        LayerFiles::archive(files.fold(TarBuilder::new(), TarBuilder::with).finish())
    };
    ImageBuilder::new().layer(empty("a")).layer(empty("b")).layer(empty("c"))
}

/// Lets an image come to a disk with ever more room, until it fits. `kind` says what is short: the error must name it.
fn fill_up(
    disk: &SmallDisk,
    image: &ImageBuilder,
    how: ImportMethod,
    rounds: impl Iterator<Item = DiskSpace>,
) {
    let source = SmallDiskImage::new();
    source.add(&kept(), "kept");
    source.add(image, "app");
    let store = open(disk);
    source.bring(&store, ImportMethod::Pull, "kept").unwrap();
    let id = sound_images(&store, "at first").remove(0);
    drop(store);
    let (mut full, mut refused) = (0, 0);
    for left in rounds {
        let what = format!("{how:?} with {left:?} left");
        disk.fill(left);
        // A full disk does not prevent reads.
        let store = open(disk);
        let before = disk.free();
        let brought = source.bring(&store, how, "app");
        if brought.is_ok() {
            // Inodes are refused in advance: a layer takes as few as are estimated.
            assert!(
                full + refused >= 5,
                "{what}: it fits; full {full} times, refused {refused} times before"
            );
            eprintln!("{what}: fits; full {full} times, refused {refused} times before");
            assert_eq!(sound_images(&store, &what).len(), 2, "{what}");
            store.remove("app", &RemoveOptions::default()).unwrap();
            disk.make_room();
            return;
        }
        let error = brought.unwrap_err();
        match &error {
            PullError::InsufficientSpace(_) => refused += 1,
            error => {
                let text = chain(error);
                assert!(text.contains("No space left on device"), "{what}: {text}");
                assert!(text.contains("store/") || text.contains("cannot"), "{what}: where? {text}");
                full += 1;
            }
        }
        assert!(
            error.hint().is_some_and(|hint| {
                let hint = hint.to_string();
                hint.starts_with("larder ") || hint.contains("larder df")
            }),
            "{what}: {error:?}"
        );
        assert_eq!(sound_images(&store, &what), [id.as_str()], "{what}");
        store.empty_trash().unwrap();
        let after = disk.free();
        // Fetched layers, a few kilobytes each, stay for the next try; the database may have grown.
        assert!(after.bytes + (512 << 10) >= before.bytes, "{what}: {before:?} before, {after:?} after");
        assert!(after.inodes + 20 >= before.inodes, "{what}: {before:?} before, {after:?} after");
        drop(store);
        disk.make_room();
        let store = open(disk);
        assert_mountable(&store, &id, &disk.0.dir().join("mnt"));
        source.bring(&store, how, "app").unwrap_or_else(|error| panic!("{what}: again: {}", chain(&error)));
        assert_eq!(sound_images(&store, &what).len(), 2, "{what}");
        let app = store.images().unwrap().into_iter().find(|image| image.id.to_string() != id).unwrap();
        store.remove(app.id.as_str(), &RemoveOptions::default()).unwrap();
        store.empty_trash().unwrap();
    }
    panic!("{how:?}: it does not fit even with the most room");
}

#[test]
fn a_disk_that_fills_up_fails_only_the_artifact_on_its_way() {
    let Some(disk) = SmallDisk::new(40, 4000) else { return };
    let files = LayerFiles::new().noise("a", 4 << 20, 1).noise("b", 4 << 20, 2).noise("c", 4 << 20, 3);
    let artifact = ImageBuilder::new().layer(files).artifact("application/vnd.example.model");
    // It takes its size once, also while it is downloaded.
    let kib = [0, 64, 128, 256, 2000, 6000, 9000].into_iter().chain((12_100..12_900).step_by(60));
    let rounds = kib.map(|kib| DiskSpace { bytes: kib << 10, inodes: u64::MAX });
    fill_up(&disk, &artifact, ImportMethod::Pull, rounds);
}

#[test]
fn a_disk_that_fills_up_fails_only_the_image_on_its_way() {
    for how in [ImportMethod::Pull, ImportMethod::Load] {
        let Some(disk) = SmallDisk::new(40, 4000) else { return };
        // The image takes 12 MiB and a little: the last steps are those of the commit.
        let kib = [0, 64, 128, 256, 2000, 6000, 9000].into_iter().chain((12_100..14_000).step_by(60));
        let rounds = kib.map(|kib| DiskSpace { bytes: kib << 10, inodes: u64::MAX });
        fill_up(&disk, &large(), how, rounds);
    }
}

#[test]
fn a_disk_without_inodes_fails_only_the_image_on_its_way() {
    for how in [ImportMethod::Pull, ImportMethod::Load] {
        let Some(disk) = SmallDisk::new(40, 1600) else { return };
        let rounds = (0..60).step_by(4).map(|inodes| DiskSpace { bytes: u64::MAX, inodes });
        fill_up(&disk, &numerous(), how, rounds);
    }
}

/// Transactions that have room in the log, and none in the database.
#[test]
fn a_store_whose_index_cannot_grow_any_more_opens_and_removes() {
    let Some(disk) = SmallDisk::new(40, 4000) else { return };
    disk.allocate_at_once();
    let source = SmallDiskImage::new();
    source.add(&kept(), "kept");
    let store = open(&disk);
    source.bring(&store, ImportMethod::Pull, "kept").unwrap();
    let id = sound_images(&store, "at first").remove(0);
    disk.fill(DiskSpace::default());
    let index = || fs_err::metadata(disk.path().join("store/larder.db")).unwrap().len();
    let before = index();
    let names = |store: &Store| store.images().unwrap()[0].names().count();
    let names_before = names(&store);
    let image = Digest::parse(&id).unwrap();
    for number in 0..20 {
        let name = Reference::parse(&format!("registry.example/{}:{number}", "n".repeat(200))).unwrap();
        store.add_name(&image, &name).unwrap_or_else(|error| panic!("{number}: {}", chain(&error)));
    }
    drop(store);
    assert_eq!(index(), before, "its new pages are in the log");
    let store = open(&disk);
    assert_eq!(names(&store), names_before + 20);
    drop(store);
    let store = open(&disk);
    store.remove(&id, &RemoveOptions { force: true, ..RemoveOptions::default() }).unwrap();
    store.empty_trash().unwrap();
    drop(store);
    assert_eq!(sound_images(&open(&disk), "after its removal"), [""; 0]);
}

#[test]
fn layers_of_a_pull_that_failed_do_not_keep_another_one_out() {
    let Some(disk) = SmallDisk::new(40, 4000) else { return };
    let source = SmallDiskImage::new();
    let app = ImageBuilder::new()
        .layer(LayerFiles::new().file("srv/a", vec![1; 16 << 20]))
        .layer(LayerFiles::new().file("srv/b", vec![1; 8 << 20]))
        .layer(LayerFiles::new().file("srv/c", "c"));
    let blobs = source.add(&app, "app");
    // It hardly compresses, so that admission asks for more than is left.
    source.add(&ImageBuilder::small(1, 5 << 20), "other");
    source.registry.fault(FaultTrigger::path(&blobs[3]), ResponseFault::status(404));
    let store = open(&disk);
    source.pull_one_by_one(&store, "app").unwrap_err();
    assert!(store.usage().unwrap().layers.bytes > 24 << 20, "they are kept");
    assert!(disk.free().bytes < 16 << 20);
    source.bring(&store, ImportMethod::Pull, "other").unwrap_or_else(|error| panic!("{}", chain(&error)));
    assert_eq!(sound_images(&store, "the other image").len(), 1);
    assert!(store.usage().unwrap().layers.bytes < 24 << 20, "they gave way");
}

/// Layers of a megabyte of noise, which is what is fetched of them, and of ones: admission expects less than they take.
fn swelling() -> ImageBuilder {
    let layer = |seed: u64| {
        LayerFiles::new()
            .noise(format!("srv/noise{seed}"), 2 << 20, seed)
            .file(format!("srv/ones{seed}"), vec![1; 10 << 20])
    };
    ImageBuilder::new().layer(layer(1)).layer(layer(2)).layer(layer(3))
}

/// Names in a directory of the store.
fn entries(store: &Store, dir: &str) -> Vec<String> {
    let entries = fs_err::read_dir(store.root().join(dir)).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn pull_leases(store: &Store) -> usize {
    let leases = store.leases(&std::time::UNIX_EPOCH.into()).unwrap();
    leases.len()
}

#[test]
fn a_pull_that_fails_for_lack_of_space_keeps_nothing() {
    let Some(disk) = SmallDisk::new(40, 4000) else { return };
    let source = SmallDiskImage::new();
    source.add(&swelling(), "app");
    source.add(&large(), "other");
    let store = open(&disk);
    let before = disk.free();
    for one_by_one in [true, false] {
        let pulled = if one_by_one {
            source.pull_one_by_one(&store, "app")
        } else {
            source.bring(&store, ImportMethod::Pull, "app")
        };
        let error = chain(&pulled.unwrap_err());
        assert!(error.contains("No space left on device"), "{error}");
        for dir in ["ingest", "layers", "staging", "trash"] {
            assert_eq!(entries(&store, dir), [""; 0], "{dir}");
        }
        assert_eq!(pull_leases(&store), 0);
        let after = disk.free();
        assert!(after.bytes + (256 << 10) >= before.bytes, "{before:?} before, {after:?} after");
    }
    source.bring(&store, ImportMethod::Pull, "other").unwrap_or_else(|error| panic!("{}", chain(&error)));
    assert_eq!(sound_images(&store, "the other image").len(), 1);
}

#[test]
fn a_download_of_a_pull_that_failed_does_not_keep_another_one_out() {
    let Some(disk) = SmallDisk::new(40, 4000) else { return };
    let source = SmallDiskImage::new();
    source.add(&ImageBuilder::small(1, 9 << 20), "other");
    let store = open(&disk);
    let blob = BlobSource::archive(Digest::sha256("failed"), 20 << 20);
    store.ingest(&blob).unwrap().write_at(&vec![7; 16 << 20], 0).unwrap();
    let leased = LeaseResources { ingests: vec![blob.ingest_id()], ..LeaseResources::default() };
    store.lease(&LeaseRecord::granted("pull/a", leased, Duration::MAX, &ClockReading::now())).unwrap();
    let kept = store.usage().unwrap().ingest.bytes;
    let offered = store.reclaimable(ReclaimTrigger::Pressure, &std::time::SystemTime::now().into()).unwrap();
    assert!(offered.downloads.bytes + (64 << 10) > kept, "{offered:?}");
    source.bring(&store, ImportMethod::Pull, "other").unwrap_or_else(|error| panic!("{}", chain(&error)));
    assert_eq!(sound_images(&store, "the other image").len(), 1);
    assert!(store.usage().unwrap().ingest.bytes < 1 << 20, "it gave way");
}

/// The least that is free on the disk while something runs.
fn least_free_during(disk: &SmallDisk, run: impl FnOnce()) -> DiskSpace {
    let ended = AtomicBool::new(false);
    let look = || {
        let stat = rustix::fs::statvfs(disk.path()).unwrap();
        DiskSpace { bytes: stat.f_bavail * stat.f_frsize, inodes: stat.f_favail }
    };
    std::thread::scope(|scope| {
        let watching = scope.spawn(|| {
            let mut least = look();
            while !ended.load(Ordering::Acquire) {
                let now = look();
                least = DiskSpace { bytes: least.bytes.min(now.bytes), inodes: least.inodes.min(now.inodes) };
                std::thread::yield_now();
            }
            least
        });
        run();
        ended.store(true, Ordering::Release);
        watching.join().unwrap()
    })
}

/// Brings an image that does not fit beside a reserve.
fn stops_at(
    disk: &SmallDisk,
    source: &SmallDiskImage,
    (store, how, name): (&Store, ImportMethod, &str),
    reserve: DiskSpace,
    figures: &str,
) {
    let what = format!("{how:?} of {name}");
    let mut brought = Ok(());
    let least = least_free_during(disk, || brought = source.bring_beside(store, how, name, reserve));
    let error = brought.expect_err(&what);
    let text = chain(&error);
    assert!(text.contains("insufficient space: ") && text.contains(figures), "{what}: {text}");
    assert!(error.hint().is_some_and(|hint| hint.to_string().contains("df")), "{what}: {error:?}");
    // Tables of the filesystem, and what was on its way to other threads.
    assert!(least.bytes + (1 << 20) >= reserve.bytes, "{what}: {least:?}, {reserve:?}");
    assert!(least.inodes + 16 >= reserve.inodes, "{what}: {least:?}, {reserve:?}");
    for dir in ["ingest", "layers", "staging", "trash"] {
        assert_eq!(entries(store, dir), [""; 0], "{what}: {dir}");
    }
}

/// Empty files whose names take 20 MiB: a layer has them in its directories, which are written at its end.
fn long_names() -> LayerFiles {
    let padding = "n".repeat(200);
    let name = |number: u32| format!("{}/{padding}{number:08}", number % 10);
    let files = (0..100_000).map(|number| TarBuilderEntry::file(name(number), ""));
    LayerFiles::archive(files.fold(TarBuilder::new(), TarBuilder::with).finish())
}

#[test]
fn a_layer_that_swells_stops_at_the_reserve() {
    let Some(disk) = SmallDisk::new(96, 4000) else { return };
    disk.allocate_at_once();
    let source = SmallDiskImage::new();
    source.add(&ImageBuilder::new().layer(LayerFiles::new().file("srv/bomb", vec![1; 200 << 20])), "bytes");
    source.add(&ImageBuilder::new().layer(long_names()), "names");
    source.add(&numerous(), "inodes");
    let store = open(&disk);
    let reserve = DiskSpace { bytes: 16 << 20, inodes: 3000 };
    for how in [ImportMethod::Pull, ImportMethod::Load] {
        stops_at(&disk, &source, (&store, how, "bytes"), reserve, "(16.8MB reserved)");
        let reserve = DiskSpace { bytes: disk.free().bytes - (20 << 20), inodes: 0 };
        stops_at(&disk, &source, (&store, how, "names"), reserve, " reserved)");
    }
    // The files of a layer take no inodes.
    source.bring_beside(&store, ImportMethod::Pull, "inodes", reserve).unwrap();
    assert!(disk.free().inodes > reserve.inodes);
}

#[test]
fn images_are_removed_where_no_byte_and_no_inode_is_free() {
    let Some(disk) = SmallDisk::new(40, 1000) else { return };
    let source = SmallDiskImage::new();
    let layers = (0..60).map(|number| LayerFiles::new().file(format!("etc/{number}"), "x"));
    source.add(&layers.fold(ImageBuilder::new(), ImageBuilder::layer), "app");
    source.add(&kept(), "kept");
    let store = open(&disk);
    source.bring(&store, ImportMethod::Load, "app").unwrap();
    source.bring(&store, ImportMethod::Load, "kept").unwrap();
    drop(store);
    // As after a failed sync, or a rebuild.
    fs_err::write(disk.path().join("store/larder.db-wal"), "").unwrap();
    drop(open(&disk));
    disk.fill(DiskSpace::default());
    assert_eq!(disk.free(), DiskSpace::default());
    let store = open(&disk);
    let images = store.images().unwrap();
    assert_eq!(images.len(), 2);
    for image in images {
        let removed = store.remove(image.id.as_str(), &RemoveOptions::default());
        removed.unwrap_or_else(|error| panic!("{}", chain(&error))).expect("it was there");
    }
    let outcome = store.reclaim(ReclaimTrigger::Request, &std::time::SystemTime::now().into());
    assert!(outcome.error.is_none(), "{outcome:?}");
    assert!(disk.free().inodes > 60, "{:?}", disk.free());
    assert_eq!(sound_images(&store, "afterwards"), [""; 0]);
}

#[test]
fn a_store_that_does_not_fit_on_the_disk_is_not_called_damaged() {
    let Some(disk) = SmallDisk::new(40, 200) else { return };
    let mut errors = Vec::new();
    for kib in (0..8192).step_by(4) {
        let root = disk.path().join("store");
        fs_err::create_dir(&root).unwrap();
        disk.fill(DiskSpace { bytes: kib << 10, inodes: 100 });
        let opened = Store::open(&root, StoreConfig::default()).map(drop);
        disk.make_room();
        fs_err::remove_dir_all(&root).unwrap();
        let Err(error) = opened else { break };
        let (text, hint) = (chain(&error), error.hint().unwrap().to_string());
        assert!(hint.contains("free disk space") && !hint.contains("fsck"), "{kib} KiB: {text}: {hint}");
        errors.push(error);
    }
    let of_database = |error: &StoreOpenError| matches!(error, StoreOpenError::Database { .. });
    assert!(errors.iter().any(of_database), "the database is one of the files that do not fit: {errors:?}");
}
