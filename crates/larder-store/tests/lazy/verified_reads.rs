//! Complete layers whose pieces are verified when they are first read.

use std::os::unix::fs::FileExt as _;

use larder_store::lazy::LayerDamage;
use larder_store::store::LayerHandle;
use larder_testkit_peers::process::poll;

use super::*;

const MIB: u64 = 1 << 20;

/// A gzip layer without a table of contents: large files, many small ones, many directories.
fn ordinary() -> Fixture {
    let mut entries: Vec<TarBuilderEntry> = Vec::new();
    for (name, size, seed) in [("large", 3_400_000, 1), ("aligned", 1 << 20, 2), ("short", 700, 3)] {
        entries.push(TarBuilderEntry::file(name, noise(size, seed)));
    }
    for number in 0..1500_usize {
        let path = format!("dir{}/a-file-with-a-name-that-takes-some-space-{number}", number % 37);
        entries.push(TarBuilderEntry::file(path, noise(number * 7 % 2500, 10 + number as u64)));
    }
    Fixture::gzip("ordinary", TarBuilder::new().extend(entries).finish())
}

impl Fixture {
    /// A layer without a table of contents.
    fn gzip(name: &'static str, plain: Vec<u8>) -> Fixture {
        // In blocks: the fastest level makes one.
        let mut blob = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::new(4));
        io::Write::write_all(&mut blob, &plain).unwrap();
        Fixture { name, blob: blob.finish().unwrap(), annotations: serde_json::Map::new(), plain }
    }
}

pub(super) async fn verifying(
    dir: TempDir,
    keeper: &Arc<KeepHere>,
    longest_wait: Duration,
) -> Option<LazyNode> {
    let puller = LazyNode::puller(dir.path(), true);
    LazyNode::of(puller, dir, Arc::clone(keeper), longest_wait).await.map(|(node, _)| node)
}

impl LazyNode {
    fn layer(&self, image: &ImageRecord) -> LayerHandle {
        self.store().layer(&image.layers[0].key).unwrap().unwrap()
    }

    fn flip(&self, image: &ImageRecord, bit: u64) {
        flip(self.layer(image).path(), bit);
    }

    /// Compares all files of an image with its archive; returns how many could not be read.
    async fn check(&self, image: &ImageRecord, fixture: &Fixture, at: &str) -> usize {
        let mounted = self.mount(image, at);
        let mut failed = 0;
        for (path, content) in fixture.files() {
            match mounted.read(&path).await {
                Ok(read) => assert!(read == content, "{}: wrong bytes", path.display()),
                Err(_) => failed += 1,
            }
        }
        failed
    }

    /// All was read.
    pub(super) async fn wait_until_verified(&self) {
        let verified = async {
            while self.store().read_verification().unwrap().guarded_layers > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(LONGEST_WAIT, verified).await.unwrap();
    }

    pub(super) fn assert_sound(&self) {
        let checked = self.store().fsck(&FsckOptions { contents: true, ..FsckOptions::default() }).unwrap();
        assert!(checked.problems.is_empty(), "{:?}", checked.problems);
    }
}

pub(super) fn flip(layer: &Path, bit: u64) {
    let file = fs_err::OpenOptions::new().read(true).write(true).open(layer).unwrap();
    let mut byte = [0];
    file.file().read_exact_at(&mut byte, bit / 8).unwrap();
    file.file().write_all_at(&[byte[0] ^ (1 << (bit % 8))], bit / 8).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_of_each_part_of_a_layer_is_repaired_before_it_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let Some(node) = verifying(dir, &Arc::default(), LONGEST_WAIT).await else { return };
    let (registry, fixture) = (FaultRegistry::start(), ordinary());
    let image = fixture.put(&registry);
    let pulled = node.pull(&image).await;
    let bytes = node.layer(&pulled).record().erofs.bytes;
    let digests = bytes + 3;
    let places = [
        ("superblock", vec![1030]),
        ("first data", vec![4096]),
        ("end of a piece", vec![MIB - 1]),
        ("begin of a piece", vec![MIB]),
        ("metadata", vec![bytes / 8 * 7]),
        ("last byte", vec![bytes - 1]),
        ("each piece", (0..bytes / MIB).map(|piece| piece * MIB + 77).collect()),
        ("digests", vec![digests]),
        ("digests of an earlier version", (bytes..bytes + 32).collect()),
    ];
    for (name, places) in &places {
        for place in places {
            node.flip(&pulled, place * 8 + 3);
        }
        let before = node.store().read_verification().unwrap();
        assert_eq!(node.check(&pulled, &fixture, name).await, 0, "{name}");
        let after = node.store().read_verification().unwrap();
        let expected = if name.starts_with("digests") { 0 } else { places.len() as u64 };
        assert_eq!(after.damaged_pieces - before.damaged_pieces, expected, "{name}");
        assert_eq!(after.repaired_pieces - before.repaired_pieces, expected, "{name}");
        node.wait_until_verified().await;
        node.assert_sound();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_data_takes_one_request_and_damaged_metadata_the_whole_blob() {
    let dir = tempfile::tempdir().unwrap();
    let Some(node) = verifying(dir, &Arc::default(), LONGEST_WAIT).await else { return };
    let registry = FaultRegistry::start();
    let large = TarBuilderEntry::file("large", noise(24 << 20, 1));
    let fixture = Fixture::gzip("large", TarBuilder::new().with(large).finish());
    let pulled = node.pull(&fixture.put(&registry)).await;
    let bytes = node.layer(&pulled).record().erofs.bytes;
    let blob = digest(&fixture.blob);
    for (at, is_data) in [(12 * MIB + 7, true), (bytes - 1, false)] {
        node.flip(&pulled, at * 8);
        registry.forget_requests();
        assert_eq!(node.check(&pulled, &fixture, &format!("at-{at}")).await, 0);
        node.wait_until_verified().await;
        node.assert_sound();
        let requests = registry.requests_for(&blob).len();
        let fetched = registry.bytes_sent(&blob);
        assert_eq!((requests == 1, fetched * 2 < bytes), (is_data, is_data), "{requests}, {fetched} bytes");
        let downloads = node.store().reclaim(ReclaimTrigger::Request, &ClockReading::now()).freed.downloads;
        assert_eq!(downloads.bytes == 0, is_data, "a whole blob is kept for what is found later");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_that_was_pulled_lazily_is_repaired_as_well() {
    let dir = tempfile::tempdir().unwrap();
    let Some(node) = verifying(dir, &Arc::default(), LONGEST_WAIT).await else { return };
    for name in FIXTURES.into_iter().chain(["app"]) {
        let fixture = if name == "app" { Fixture::made(name, &two_files(40)) } else { Fixture::load(name) };
        let registry = FaultRegistry::start();
        let image = fixture.put(&registry);
        let pulled = node.pull(&image).await;
        node.complete(&image).await;
        let bytes = node.layer(&pulled).record().erofs.bytes;
        for at in [4096, bytes / 2, bytes - 1] {
            node.flip(&pulled, at * 8);
        }
        assert_eq!(node.check(&pulled, &fixture, name).await, 0, "{name}");
        node.wait_until_verified().await;
        node.assert_sound();
    }
}

#[test]
fn containers_that_start_after_the_setting_was_made_are_verified() {
    let (registry, fixture) = (FaultRegistry::start(), ordinary());
    let Some((runtime, node)) = LazyNode::start(&Arc::default()) else { return };
    let pulled = runtime.block_on(async { node.pull(&fixture.put(&registry)).await });
    let running = node.mount_at(&pulled, "running");
    let lower = node.dir.path().join("store/lowers").join(pulled.layers[0].key.as_str());
    let mount = || rustix::fs::stat(&lower).unwrap().st_dev;
    node.flip(&pulled, (2 * MIB + 5) * 8);
    let (before, dir) = (mount(), node.stop(runtime));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let node = runtime.block_on(verifying(dir, &Arc::default(), LONGEST_WAIT)).unwrap();
    poll(LONGEST_WAIT, || (mount() != before).then_some(())).expect("the layer is mounted again");
    assert_eq!(runtime.block_on(node.check(&pulled, &fixture, "started")), 0);
    assert_eq!(node.store().read_verification().unwrap().repaired_pieces, 1);
    node.store().umount(&running).unwrap();
    drop(node);
    runtime.shutdown_timeout(LONGEST_WAIT);
}

#[test]
fn a_layer_that_is_repaired_for_long_does_not_delay_the_mounts_of_others() {
    let registry = FaultRegistry::start();
    let layer = |name: &'static str, seed| {
        let file = TarBuilderEntry::file(name, noise(600_000, seed));
        Fixture::gzip(name, TarBuilder::new().with(file).finish())
    };
    let layers: Vec<Fixture> =
        ["a", "b", "c"].into_iter().zip(1..).map(|(name, seed)| layer(name, seed)).collect();
    let Some((runtime, node)) = LazyNode::start(&Arc::default()) else { return };
    let image = put_image(&registry, &layers.iter().collect::<Vec<_>>());
    let pulled = runtime.block_on(node.pull(&image));
    let running = node.mount_at(&pulled, "running");
    let mounted = |number: usize| {
        let lower = node.dir.path().join("store/lowers").join(pulled.layers[number].key.as_str());
        move || rustix::fs::stat(&lower).unwrap().st_dev
    };
    // The first layer in the order of keys is repaired.
    let mut numbers: Vec<usize> = (0..layers.len()).collect();
    numbers.sort_by_key(|number| pulled.layers[*number].key.as_str());
    let damaged = node.store().layer(&pulled.layers[numbers[0]].key).unwrap().unwrap();
    flip(damaged.path(), 1030 * 8);
    drop(damaged);
    let mounts: Vec<_> = numbers.iter().map(|number| mounted(*number)).collect();
    let before: Vec<_> = mounts.iter().map(|mount| mount()).collect();
    let dir = node.stop(runtime);
    registry.fault(FaultTrigger::path("/").from(0), ResponseFault::StallAfter(0));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let node = runtime.block_on(verifying(dir, &Arc::default(), LONGEST_WAIT * 10)).unwrap();
    for (mount, before) in mounts.iter().zip(&before).skip(1) {
        poll(LONGEST_WAIT, || (mount() != *before).then_some(())).expect("it is mounted again");
    }
    assert_eq!(mounts[0](), before[0], "its repair goes on");
    registry.clear_faults();
    node.store().umount(&running).unwrap();
    drop(node);
    runtime.shutdown_timeout(LONGEST_WAIT);
}

/// Flips bits anywhere in a layer, some at a time, and reads all its files.
async fn flip_and_read(flips: usize, at_once: u64, seed: u64) {
    let dir = tempfile::tempdir().unwrap();
    let Some(node) = verifying(dir, &Arc::default(), LONGEST_WAIT).await else { return };
    let (registry, fixture) = (FaultRegistry::start(), ordinary());
    let image = fixture.put(&registry);
    let pulled = node.pull(&image).await;
    let bytes = node.layer(&pulled).record().erofs.bytes;
    let (mut state, mut done, mut round) = (seed, 0, 0);
    while done < flips {
        let mut bits = std::collections::BTreeSet::new();
        for _ in 0..=random(&mut state) % at_once {
            bits.insert(random(&mut state) % (bytes * 8));
        }
        for bit in &bits {
            node.flip(&pulled, *bit);
        }
        assert_eq!(node.check(&pulled, &fixture, &format!("round{round}")).await, 0, "{bits:?}");
        node.wait_until_verified().await;
        done += bits.len();
        round += 1;
    }
    node.assert_sound();
    eprintln!("{done} bits flipped in {round} rounds: {:?}", node.store().read_verification().unwrap());
}

/// `LARDER_FLIPS` is their number.
#[tokio::test(flavor = "multi_thread")]
async fn flipped_bits_reach_no_reader() {
    let flips = std::env::var("LARDER_FLIPS").map_or(30, |flips| flips.parse().unwrap());
    flip_and_read(flips, if flips > 1000 { 40 } else { 8 }, 7).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_fails_reads_without_a_registry_and_is_recorded_until_it_is_repaired() {
    let dir = tempfile::tempdir().unwrap();
    let Some(node) = verifying(dir, &Arc::default(), Duration::from_millis(300)).await else { return };
    let (registry, fixture) = (FaultRegistry::start(), ordinary());
    let image = fixture.put(&registry);
    let pulled = node.pull(&image).await;
    let reported = Arc::<Mutex<Vec<LayerDamage>>>::default();
    let reports = Arc::clone(&reported);
    node.store().observe_damage(Box::new(move |damage| reports.lock().push(damage.clone())));
    registry.fault(FaultTrigger::path("/"), ResponseFault::Hangup);
    node.flip(&pulled, 4096 * 8);
    node.flip(&pulled, (2 * MIB + 5) * 8);
    let target = node.dir.path().join("first");
    fs_err::create_dir(&target).unwrap();
    let refused = node.store().mount(pulled.id.as_str(), &target, MountOptions::default(), SystemTime::now());
    let refused = larder::error_chain(&refused.unwrap_err());
    assert!(refused.contains("damaged"), "the first piece has the superblock: {refused}");
    registry.clear_faults();
    let repaired = async {
        while node.store().read_verification().unwrap().repaired_pieces == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LONGEST_WAIT, repaired).await.unwrap();
    let mounted = node.mount(&pulled, "app");
    registry.fault(FaultTrigger::path("/"), ResponseFault::Hangup);
    // The first repair may have left the blob.
    let _ = node.store().reclaim(ReclaimTrigger::Request, &ClockReading::now());
    let failed = mounted.read(Path::new("large")).await.map(|read| read.len()).unwrap_err();
    assert!(failed.to_string().contains("Input/output error"), "{failed}");
    assert!(mounted.read(Path::new("short")).await.unwrap() == noise(700, 3), "another piece");
    let is_damaged = || node.layer(&pulled).record().damaged;
    let changes = async |expected: bool| {
        let changed = async {
            while is_damaged() != expected {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(LONGEST_WAIT, changed).await.unwrap();
    };
    changes(true).await;
    registry.clear_faults();
    changes(false).await;
    assert!(mounted.read(Path::new("large")).await.unwrap() == noise(3_400_000, 1));
    drop(mounted);
    assert_eq!(node.check(&pulled, &fixture, "again").await, 0);
    node.assert_sound();
    let reported = reported.lock();
    let is_failure: Vec<bool> = reported.iter().map(|damage| damage.failure.is_some()).collect();
    // The first repair may have been in time.
    assert!(is_failure.ends_with(&[false, true, false]), "{reported:?}");
    let names = [image.to_string()];
    assert!(reported.iter().all(|damage| damage.images == names && damage.layer == pulled.layers[0].key));
}

#[test]
fn a_read_of_damage_waits_through_a_restart() {
    let keeper = Arc::<KeepHere>::default();
    let (registry, fixture) = (FaultRegistry::start(), ordinary());
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let Some(node) = runtime.block_on(verifying(dir, &keeper, LONGEST_WAIT)) else { return };
    let pulled = runtime.block_on(async { node.pull(&fixture.put(&registry)).await });
    node.flip(&pulled, (2 * MIB + 5) * 8);
    node.flip(&pulled, (4 * MIB + 5) * 8);
    let target = node.mount_at(&pulled, "app");
    registry.fault(FaultTrigger::path(digest(&fixture.blob)), ResponseFault::StallAfter(0));
    let large = target.join("large");
    let reader = std::thread::spawn(move || fs_err::read(large));
    runtime.block_on(async {
        while node.store().read_verification().unwrap().damaged_pieces == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    let LazyNode { dir, puller } = node;
    drop(puller);
    runtime.shutdown_timeout(LONGEST_WAIT);
    let store = Store::open_for_check(&dir.path().join("store"), StoreConfig::default()).unwrap();
    let checked = store.fsck(&FsckOptions::default()).unwrap();
    assert_eq!(checked.problems.len(), 1, "a check waits for no answer: {:?}", checked.problems);
    drop(store);
    assert!(!reader.is_finished(), "the damage is not read while nothing verifies");
    registry.clear_faults();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let node = runtime.block_on(verifying(dir, &keeper, LONGEST_WAIT)).unwrap();
    assert!(reader.join().unwrap().unwrap() == noise(3_400_000, 1));
    for (path, content) in fixture.files() {
        assert!(fs_err::read(target.join(&path)).unwrap() == content, "{}", path.display());
    }
    node.assert_sound();
    node.store().umount(&target).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_go_on_without_larder_where_no_damage_is_known() {
    let (dir, keeper) = (tempfile::tempdir().unwrap(), Arc::<KeepHere>::default());
    let Some(node) = verifying(dir, &keeper, LONGEST_WAIT).await else { return };
    let (registry, fixture) = (FaultRegistry::start(), ordinary());
    let pulled = node.pull(&fixture.put(&registry)).await;
    let mounted = node.mount(&pulled, "app");
    assert_eq!(node.store().read_verification().unwrap().guarded_layers, 1);
    node.store().end_guard().unwrap();
    assert!(keeper.0.lock().is_none(), "nothing waits for the next start");
    assert!(mounted.read(Path::new("large")).await.unwrap() == noise(3_400_000, 1));
}
