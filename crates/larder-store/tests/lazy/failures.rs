//! Failures while layers are filled and read: of registries, disks, other pulls and an earlier larder.

use std::os::unix::fs::MetadataExt as _;

use larder::backend::MinimumRate;
use larder_testkit_peers::process::{WAIT_LIMIT, poll};
use larder_testkit_peers::{LoopDisk, LoopFilesystem};

use super::*;

/// How long a read waits.
const WAIT: Duration = Duration::from_secs(1);

/// A node whose store is on this disk.
async fn node_on(disk: &LoopDisk) -> Option<LazyNode> {
    let dir = tempfile::tempdir_in(disk.path()).unwrap();
    LazyNode::in_dir(dir, Arc::default(), WAIT).await.map(|(node, _)| node)
}

impl Mounted {
    /// A read that waits for data that does not come: it fails in time.
    async fn assert_fails(&self, path: &str, why: &str) {
        let began = Instant::now();
        let failed = self.read(Path::new(path)).await.map(|read| read.len());
        let failed = failed.expect_err(why);
        assert!(failed.to_string().contains("Input/output error"), "{why}: {failed}");
        assert!(began.elapsed() < WAIT * 10, "{why}: {:?}", began.elapsed());
    }

    /// Reads until that succeeds, and compares all files.
    async fn assert_right(&self, fixture: &Fixture, why: &str) {
        for (path, content) in fixture.files() {
            let read = async {
                loop {
                    if let Ok(read) = self.read(&path).await {
                        return read;
                    }
                }
            };
            let read = tokio::time::timeout(LONGEST_WAIT, read).await;
            assert!(read.expect(why) == content, "{why}: {}", path.display());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_go_on_with_a_registry_that_sends_64_kib_a_second() {
    let Some(node) = LazyNode::new().await else { return };
    let (registry, fixture) = (FaultRegistry::start(), Fixture::made("app", &two_files(1)));
    let image = fixture.put(&registry);
    let slow = ResponseFault::Trickle(4 << 10, Duration::from_millis(62));
    registry.fault(FaultTrigger::path(digest(&fixture.blob)), slow);
    let pulled = node.pull(&image).await;
    let mounted = node.mount(&pulled, "app");
    for (path, content) in fixture.files() {
        assert!(mounted.read(&path).await.unwrap() == content, "{}", path.display());
    }
    node.complete(&image).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_refuses_fails_reads_until_it_sends_again() {
    let dir = tempfile::tempdir().unwrap();
    let Some((node, _)) = LazyNode::in_dir(dir, Arc::default(), WAIT).await else { return };
    let refusals = [
        ("credentials have expired", ResponseFault::status(403)),
        ("too many requests", ResponseFault::RetryAfter(429, "1".into())),
        ("ranges end early", ResponseFault::Truncate(100)),
    ];
    for (seed, (why, refusal)) in (20..).step_by(2).zip(refusals) {
        let (registry, fixture) = (FaultRegistry::start(), Fixture::made("app", &two_files(seed)));
        let image = fixture.put(&registry);
        hold_background(&registry, &fixture);
        let pulled = node.pull(&image).await;
        let mounted = node.mount(&pulled, why);
        registry.clear_faults();
        registry.fault(FaultTrigger::path(digest(&fixture.blob)), refusal);
        mounted.assert_fails("first", why).await;
        registry.clear_faults();
        mounted.assert_right(&fixture, why).await;
        node.complete(&image).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_fails_reads_until_there_is_room() {
    if !LoopFilesystem::Ext4.is_available() {
        return;
    }
    let disk = LoopDisk::new(LoopFilesystem::Ext4, 160, &[]).unwrap();
    let Some(node) = node_on(&disk).await else { return };
    let archive = TarBuilder::new().with(TarBuilderEntry::file("data", noise(4 << 20, 1))).finish();
    let (registry, fixture) = (FaultRegistry::start(), Fixture::made("app", &archive));
    let image = fixture.put(&registry);
    hold_background(&registry, &fixture);
    let pulled = node.pull(&image).await;
    let mounted = node.mount(&pulled, "app");
    registry.clear_faults();
    let filler = disk.path().join("filler");
    let mut file = fs_err::File::create(&filler).unwrap();
    while io::Write::write_all(&mut file, &[1; 4096]).is_ok() {}
    mounted.assert_fails("data", "a full disk").await;
    let other = Fixture::made("other", &two_files(3));
    let refused = node.puller.pull(&other.put(&registry), None, &ProgressReporter::unwatched()).await;
    assert!(refused.is_err(), "{refused:?}");
    assert!(node.is_partial(&pulled));
    fs_err::remove_file(&filler).unwrap();
    drop(file);
    mounted.assert_right(&fixture, "there is room").await;
    node.complete(&image).await;
    node.complete(&other.put(&registry)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_became_read_only_fails_reads() {
    if !LoopFilesystem::Ext4.is_available() {
        return;
    }
    let disk = LoopDisk::new(LoopFilesystem::Ext4, 160, &[]).unwrap();
    disk.tune(&["-e", "remount-ro"]).unwrap();
    let Some(node) = node_on(&disk).await else { return };
    // The fill needs the beginning of the blob first, which does not come.
    let files = [("large", 8 << 20, 2), ("last", 50_000, 1)];
    let entries = files.map(|(name, size, seed)| TarBuilderEntry::file(name, noise(size, seed)));
    let fixture = Fixture::made("app", &TarBuilder::new().extend(entries).finish());
    let registry = FaultRegistry::start();
    let image = fixture.put(&registry);
    hold_background(&registry, &fixture);
    let pulled = node.pull(&image).await;
    let mounted = node.mount(&pulled, "app");
    assert!(mounted.read(Path::new("last")).await.unwrap() == fixture.files()[1].1);
    disk.sync().unwrap();
    fs_err::write(Path::new("/sys/fs/ext4").join(device(&disk)).join("trigger_fs_error"), "1").unwrap();
    fs_err::write(disk.path().join("file"), "").expect_err("the filesystem found an error");
    registry.clear_faults();
    assert!(mounted.read(Path::new("last")).await.unwrap() == fixture.files()[1].1);
    mounted.assert_fails("large", "it cannot be written").await;
    // The store cannot note its end.
    let target = mounted.target.clone();
    std::mem::forget(mounted);
    rustix::mount::unmount(&target, rustix::mount::UnmountFlags::DETACH).unwrap();
}

/// The name of the loop device of a disk.
fn device(disk: &LoopDisk) -> String {
    let mounts = fs_err::read_to_string("/proc/self/mountinfo").unwrap();
    let path = disk.path().display().to_string();
    let mount = mounts.lines().find(|line| line.split(' ').nth(4) == Some(&path)).unwrap();
    mount.split(' ').find_map(|field| field.strip_prefix("/dev/")).unwrap().to_owned()
}

/// Files that are marked, and descriptors of this process.
fn marks_and_descriptors() -> (usize, usize) {
    let infos = fs_err::read_dir("/proc/self/fdinfo").unwrap();
    let infos: Vec<String> =
        infos.filter_map(|info| fs_err::read_to_string(info.ok()?.path()).ok()).collect();
    // The group is open in this process as larder's, and as that of the keeper.
    let marks = infos.iter().map(|info| info.matches("fanotify ino:").count()).max();
    (marks.unwrap_or(0), infos.len())
}

#[tokio::test(flavor = "multi_thread")]
async fn two_hundred_incomplete_layers_take_few_descriptors_and_no_mark_is_left() {
    const LAYERS: usize = 200;
    let Some(node) = LazyNode::new().await else { return };
    let registry = FaultRegistry::start();
    let file = |number: usize| TarBuilderEntry::file(format!("file{number}"), noise(9000, number as u64 + 1));
    let fixtures: Vec<Fixture> = (0..LAYERS)
        .map(|number| Fixture::made("app", &TarBuilder::new().with(file(number)).finish()))
        .collect();
    let image = put_image(&registry, &fixtures.iter().collect::<Vec<_>>());
    for fixture in &fixtures {
        hold_background(&registry, fixture);
    }
    let (_, before) = marks_and_descriptors();
    let pulled = node.pull(&image).await;
    assert_eq!(node.store().filling_layers().len(), LAYERS);
    let (marks, descriptors) = marks_and_descriptors();
    assert_eq!(marks, LAYERS);
    assert!(descriptors - before < LAYERS * 3 + 100, "{descriptors} descriptors");
    let mounted = node.mount(&pulled, "app");
    for fixture in fixtures.iter().step_by(40) {
        let (path, content) = fixture.files().remove(0);
        assert!(mounted.read(&path).await.unwrap() == content, "{}", path.display());
    }
    registry.clear_faults();
    node.complete(&image).await;
    for fixture in &fixtures {
        let (path, content) = fixture.files().remove(0);
        assert!(mounted.read(&path).await.unwrap() == content, "{}", path.display());
    }
    let (marks, descriptors) = marks_and_descriptors();
    assert_eq!(marks, 0);
    assert!(descriptors < before + 50, "{descriptors} descriptors");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_open_while_its_image_is_removed_and_pulled_again_has_no_zeros() {
    use std::os::unix::fs::FileExt as _;
    let Some(node) = LazyNode::new().await else { return };
    let archive = TarBuilder::new().with(TarBuilderEntry::file("data", noise(4 << 20, 1))).finish();
    let (registry, fixture) = (FaultRegistry::start(), Fixture::made("app", &archive));
    let image = fixture.put(&registry);
    hold_background(&registry, &fixture);
    let pulled = node.pull(&image).await;
    let mounted = node.mount(&pulled, "first");
    let open = fs_err::File::open(mounted.target.join("data")).unwrap().into_parts().0;
    rustix::mount::unmount(&mounted.target, rustix::mount::UnmountFlags::DETACH).unwrap();
    drop(mounted);
    node.store().remove(pulled.id.as_str(), &RemoveOptions::default()).unwrap().unwrap();
    node.store().empty_trash().unwrap();
    let read = move |fixture: &Fixture| {
        for (number, expected) in fixture.files()[0].1.chunks(1 << 16).enumerate() {
            let mut bytes = vec![0; expected.len()];
            let read = open.read_exact_at(&mut bytes, (number << 16) as u64);
            assert!(read.is_err() || bytes == expected, "block {number}");
        }
    };
    let pulled = node.pull(&image).await;
    registry.clear_faults();
    node.complete(&image).await;
    let mounted = node.mount(&pulled, "second");
    let fixture = tokio::task::spawn_blocking(move || {
        read(&fixture);
        fixture
    });
    mounted.assert_right(&fixture.await.unwrap(), "it is another file").await;
}

/// The inode of an image's only layer.
fn inode(node: &LazyNode, image: &ImageRecord) -> u64 {
    fs_err::metadata(node.store().layer(&image.layers[0].key).unwrap().unwrap().path()).unwrap().ino()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_that_is_being_filled_is_not_replaced_by_a_pull_from_another_repository() {
    let Some(node) = LazyNode::new().await else { return };
    let (registry, fixture) = (FaultRegistry::start(), Fixture::made("app", &two_files(1)));
    let (image, other) = (fixture.put(&registry), put_image_in(&registry, "other/app", &[&fixture]));
    let slow = ResponseFault::Trickle(4 << 10, Duration::from_millis(60));
    registry.fault(FaultTrigger::path("lazy/app/blobs"), slow);
    let pulled = node.pull(&image).await;
    let (mounted, before) = (node.mount(&pulled, "app"), inode(&node, &pulled));
    assert!(node.is_partial(&pulled));
    let same = node.pull(&other).await;
    assert_eq!((inode(&node, &pulled), inode(&node, &same)), (before, before), "programs read that file");
    assert!(!node.is_partial(&same));
    mounted.assert_right(&fixture, "the first mount").await;
    let sent = registry.requests().len();
    node.complete(&image).await;
    let again = registry.requests()[sent..].iter().filter(|request| request.path.contains("blobs")).count();
    assert_eq!(again, 0, "the first repository has sent it");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fill_that_stands_still_goes_on_with_the_blob_of_a_pull_from_another_repository() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("store"), StoreConfig::default()).unwrap();
    let lazy = LazyPulls { images: vec![Selector::Name("*".into())], minimum_size: 0 };
    let minimum_rate = MinimumRate { bytes_per_second: 1, window: Duration::from_secs(1) };
    let config = StorePullConfig { lazy, minimum_rate, ..StorePullConfig::default() };
    let lazily = StorePuller::new(store, RegistryClient::new(RegistryConfig::default()), config);
    let Some((node, _)) = LazyNode::of(lazily, dir, Arc::default(), WAIT).await else { return };
    let (registry, fixture) = (FaultRegistry::start(), Fixture::made("app", &two_files(1)));
    let (image, other) = (fixture.put(&registry), put_image_in(&registry, "other/app", &[&fixture]));
    let data = FaultTrigger::path("lazy/app/blobs").ranged().nth(2..=usize::MAX);
    registry.fault(data, ResponseFault::StallAfter(0));
    let image = node.pull(&image).await;
    let (mounted, before) = (node.mount(&image, "app"), inode(&node, &image));
    let began = Instant::now();
    let same = node.pull(&other).await;
    assert!(began.elapsed() < LONGEST_WAIT, "{:?}", began.elapsed());
    assert_eq!((inode(&node, &image), inode(&node, &same)), (before, before), "programs read that file");
    assert!(!node.is_partial(&image));
    mounted.assert_right(&fixture, "the first mount").await;
    node.mount(&same, "other").assert_right(&fixture, "the second one").await;
}

#[test]
fn reads_that_wait_end_when_their_layers_cannot_be_guarded_again() {
    let keeper = Arc::<KeepHere>::default();
    let (registry, fixture) = (FaultRegistry::start(), Fixture::made("app", &two_files(1)));
    let Some(killed) = Killed::while_mounted(&keeper, &registry, &fixture, true) else { return };
    let Killed { dir, target, image: _, pulled: _, reader } = killed;
    let store = dir.path().join("store");
    // A loss is to be noted, and cannot be.
    let boot = fs_err::read_to_string(store.join("guard")).unwrap().replace("in-use", "lost");
    fs_err::write(store.join("guard"), boot).unwrap();
    fs_err::create_dir(store.join("guard.new")).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let puller = LazyNode::puller(dir.path(), false);
    let guarded = runtime.block_on(puller.guard_reads(keeper, LONGEST_WAIT));
    assert!(guarded.is_err(), "{guarded:?}");
    let reader = reader.unwrap();
    poll(WAIT_LIMIT, || reader.is_finished().then_some(())).expect("a read hangs");
    let read = reader.join().unwrap();
    assert!(read.is_err() || read.unwrap() == fixture.files()[0].1);
    puller.store().umount(&target).unwrap();
}
