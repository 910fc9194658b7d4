//! Layers that were removed, and are pulled again by what was kept of them.

use std::io::Write as _;

use larder_store::fsck::{FsckReport, RepairState, StoreDamage};

use super::credentials::{credential, keyring};
use super::*;

/// The first file of [`many_files`].
const FIRST: &str = "first";

/// Files of several megabytes, of a few bytes, and of zeros.
fn many_files() -> Vec<u8> {
    let text = (0..400_000_u32).flat_map(|number| (number % 7919).to_string().into_bytes());
    let text: Vec<u8> = text.collect();
    // Nothing reads it: the fill in the background is held at it.
    let mut archive = TarBuilder::new().with(TarBuilderEntry::file(FIRST, noise(12_000_000, 4)));
    for number in 0..40 {
        archive = archive.with(TarBuilderEntry::file(format!("small/{number}"), noise(700, number)));
    }
    archive = archive
        .with(TarBuilderEntry::file("large", noise(5_000_000, 1)))
        .with(TarBuilderEntry::file("text", text))
        .with(TarBuilderEntry::file("zeros", vec![0; 3_000_000]))
        .with(TarBuilderEntry::hard_link("link", "large"));
    for number in 0..300 {
        archive =
            archive.with(TarBuilderEntry::file(format!("medium/{number}"), noise(30_000, 100 + number)));
    }
    archive.finish()
}

/// A layer of this archive, without a table of contents.
fn layer(name: &'static str, archive: &[u8], compress: fn(&[u8]) -> Vec<u8>) -> Fixture {
    Fixture { name, blob: compress(archive), annotations: serde_json::Map::new(), plain: archive.to_vec() }
}

/// An ordinary layer of this archive.
pub(super) fn gzip_layer(name: &'static str, archive: &[u8]) -> Fixture {
    layer(name, archive, gzip)
}

fn gzip(plain: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(plain).unwrap();
    encoder.finish().unwrap()
}

/// Frames of four megabytes.
fn zstd_frames(plain: &[u8]) -> Vec<u8> {
    plain.chunks(4 << 20).flat_map(|part| zstd::bulk::compress(part, 1).unwrap()).collect()
}

fn puller(dir: &Path) -> StorePuller {
    let config = StoreConfig { keep_remnants: true, ..StoreConfig::default() };
    puller_into(Store::open(&dir.join("store"), config).unwrap(), false)
}

pub(super) async fn start(dir: TempDir, keeper: Arc<KeepHere>) -> Option<LazyNode> {
    let puller = puller(dir.path());
    Some(LazyNode::of(puller, dir, keeper, LONGEST_WAIT).await?.0)
}

async fn new_node() -> Option<LazyNode> {
    start(tempfile::tempdir().unwrap(), Arc::default()).await
}

/// Pulls an image in full, and removes it. Returns what the removal freed.
pub(super) async fn pull_and_remove(node: &LazyNode, image: &Reference) -> DiskSpace {
    let pulled = node.pull(image).await;
    assert!(!node.is_partial(&pulled), "its first pull is one in full");
    remove(node, &pulled)
}

/// A node whose process ends while a container runs from an image that was restored by its remnant.
struct Restored {
    runtime: tokio::runtime::Runtime,
    node: LazyNode,
    keeper: Arc<KeepHere>,
    registry: FaultRegistry,
    image: Reference,
    pulled: ImageRecord,
    mounted: PathBuf,
}

impl Restored {
    fn new() -> Option<Restored> {
        let (keeper, dir) = (Arc::<KeepHere>::default(), tempfile::tempdir().unwrap());
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let node = runtime.block_on(start(dir, Arc::clone(&keeper)))?;
        let (registry, fixture) = (FaultRegistry::start(), gzip_layer("app", &many_files()));
        let image = fixture.put(&registry);
        runtime.block_on(pull_and_remove(&node, &image));
        hold_background(&registry, &fixture);
        let pulled = runtime.block_on(node.pull(&image));
        assert!(node.is_partial(&pulled));
        let mounted = node.mount_at(&pulled, "app");
        Some(Restored { runtime, node, keeper, registry, image, pulled, mounted })
    }
}

fn remove(node: &LazyNode, image: &ImageRecord) -> DiskSpace {
    node.store().remove(image.id.as_str(), &RemoveOptions::default()).unwrap().unwrap().freed
}

#[tokio::test(flavor = "multi_thread")]
async fn files_of_a_layer_that_was_removed_are_read_before_it_is_complete() {
    let Some(node) = new_node().await else { return };
    let archive = many_files();
    for (name, compress) in [("gzip", gzip as fn(&[u8]) -> Vec<u8>), ("zstd", zstd_frames)] {
        let (registry, fixture) = (FaultRegistry::start(), layer(name, &archive, compress));
        let image = fixture.put(&registry);
        pull_and_remove(&node, &image).await;
        let sent = registry.bytes_sent(&digest(&fixture.blob));
        hold_background(&registry, &fixture);
        let pulled = node.pull(&image).await;
        assert!(node.is_partial(&pulled), "{name}");
        assert_eq!(registry.bytes_sent(&digest(&fixture.blob)), sent, "{name}: nothing of the layer came");
        let mounted = node.mount(&pulled, name);
        let files: BTreeMap<PathBuf, Vec<u8>> = fixture.files().into_iter().collect();
        for (path, content) in files.iter().filter(|(path, _)| !path.ends_with(FIRST)) {
            assert!(mounted.read(path).await.unwrap() == *content, "{name}: {}", path.display());
        }
        assert!(mounted.read(Path::new("link")).await.unwrap() == files[Path::new("large")], "{name}");
        assert!(node.is_partial(&pulled), "{name}: its reads did not wait for all of it");
        registry.clear_faults();
        node.complete(&image).await;
        assert!(!node.is_partial(&pulled), "{name}");
        for (path, content) in &files {
            assert!(mounted.read(path).await.unwrap() == *content, "{name}: {}", path.display());
        }
        let checked = node.store().fsck(&FsckOptions { contents: true, ..FsckOptions::default() }).unwrap();
        assert!(checked.problems.is_empty(), "{name}: {:?}", checked.problems);
        drop(mounted);
        remove(&node, &pulled);
    }
}

/// Disk usage of all files below a directory.
fn du(dir: &Path) -> u64 {
    larder_store::disk::measure(dir).unwrap().bytes
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removal_frees_what_was_promised_and_what_is_kept_is_counted() {
    let Some(node) = new_node().await else { return };
    let (registry, fixture) = (FaultRegistry::start(), gzip_layer("app", &many_files()));
    let image = fixture.put(&registry);
    let root = node.dir.path().join("store");
    for attempt in 0..2 {
        let pulled = node.pull(&image).await;
        node.complete(&image).await;
        let usage = node.store().image_usages().unwrap().remove(0);
        let layers = node.store().layer_usage_index().unwrap();
        let planned = layers.all().iter().filter(|layer| layer.referenced_by.is_none());
        let planned: DiskSpace = planned.map(|layer| layer.amount).sum::<DiskSpace>() + usage.own;
        assert_eq!(layers.size_of(pulled.id.as_str()), Some(usage.total), "{attempt}");
        assert_eq!((planned, usage.unique + usage.shared), (usage.unique, usage.total), "{attempt}");
        assert_eq!(
            node.store().usage().unwrap().remnants.inodes,
            attempt,
            "{attempt}: none of a layer that is here"
        );
        let (trigger, now) = (ReclaimTrigger::Schedule, ClockReading::now());
        assert_eq!(node.store().reclaimable(trigger, &now).unwrap().remnants, DiskSpace::ZERO, "{attempt}");
        // What was fetched of the blob goes once the layer is complete.
        let discarded = async {
            while node.store().usage().unwrap().ingest.bytes > 16 << 10 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(LONGEST_WAIT, discarded).await.unwrap();
        node.store().sweep(&now).unwrap();
        node.store().empty_trash().unwrap();
        let before = du(&root);
        let freed = remove(&node, &pulled);
        node.store().empty_trash().unwrap();
        assert_eq!(freed, usage.unique, "{attempt}");
        let found = before - du(&root);
        assert!(found.abs_diff(freed.bytes) <= 16 << 10, "{attempt}: freed {found} of {freed:?}");
        let kept = node.store().usage().unwrap();
        assert!(
            kept.remnants.bytes > 0 && kept.remnants.bytes < usage.total.bytes / 8,
            "{attempt}: {kept:?}"
        );
        assert_eq!(kept.total().bytes, du(&root), "{attempt}");
        let checked = node.store().fsck(&FsckOptions { contents: true, ..FsckOptions::default() }).unwrap();
        assert!(checked.problems.is_empty(), "{attempt}: {:?}", checked.problems);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_kept_is_for_those_who_had_sent_it() {
    let Some(node) = new_node().await else { return };
    let (registry, other) = (FaultRegistry::start(), FaultRegistry::start());
    let fixture = gzip_layer("app", &many_files());
    let image = fixture.put(&registry);
    pull_and_remove(&node, &image).await;
    let elsewhere = fixture.put(&other);
    let blob = digest(&fixture.blob);
    let whole = fixture.blob.len() as u64;
    let pulled = node.pull(&elsewhere).await;
    assert!(!node.is_partial(&pulled), "another registry sends all of it");
    assert_eq!(other.bytes_sent(&blob), whole);
    remove(&node, &pulled);
    let sent = other.bytes_sent(&blob);
    let tenant = put_image_in(&other, "tenant/app", &[&fixture]);
    let login = credential(&tenant, &keyring(&other, "tenant")).await;
    let pulled = node.pull_with(&tenant, &login).await;
    assert!(!node.is_partial(&pulled), "another repository sends all of it to another credential");
    assert_eq!(other.bytes_sent(&blob), sent + whole);
    remove(&node, &pulled);
    hold_background(&other, &fixture);
    assert!(node.is_partial(&node.pull_with(&tenant, &login).await), "it has sent the layer now");
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_of_what_is_kept_is_found_and_the_layer_is_fetched() {
    let Some(node) = new_node().await else { return };
    let (registry, fixture) = (FaultRegistry::start(), gzip_layer("app", &many_files()));
    let image = fixture.put(&registry);
    for damaged in ["remnants", "indexes"] {
        pull_and_remove(&node, &image).await;
        damage_file_in(&node, damaged);
    }
    let pulled = node.pull(&image).await;
    assert!(!node.is_partial(&pulled), "it was fetched as a whole");
    let checked = node.store().fsck(&FsckOptions { contents: true, ..FsckOptions::default() }).unwrap();
    assert!(checked.problems.is_empty(), "{:?}", checked.problems);
}

/// Changes a byte of the one file in this directory of the store.
fn damage_file_in(node: &LazyNode, dir: &str) {
    let dir = node.dir.path().join("store").join(dir);
    let path = fs_err::read_dir(dir).unwrap().next().unwrap().unwrap().path();
    let mut bytes = fs_err::read(&path).unwrap();
    let at = bytes.len() - 200;
    bytes[at] ^= 1;
    fs_err::write(&path, &bytes).unwrap();
}

fn check(node: &LazyNode, repair: bool) -> FsckReport {
    node.store().fsck(&FsckOptions { repair, ..FsckOptions::default() }).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn fsck_finds_damage_of_what_is_kept_and_removes_it() {
    let Some(node) = new_node().await else { return };
    let (registry, fixture) = (FaultRegistry::start(), gzip_layer("app", &many_files()));
    let image = fixture.put(&registry);
    for (damaged, shown) in [("remnants", "content differs"), ("indexes", "its index is missing or damaged")]
    {
        pull_and_remove(&node, &image).await;
        let sound = check(&node, false);
        assert_eq!((sound.remnants, &sound.problems[..]), (1, &[][..]), "{damaged}");
        damage_file_in(&node, damaged);
        let found = check(&node, false);
        let StoreDamage::RemnantDamaged { damage, .. } = &found.problems[0].found else {
            panic!("{found:?}")
        };
        assert_eq!((*damage, found.problems.len(), found.is_sound()), (shown, 1, false), "{damaged}");
        assert_eq!(
            node.store()
                .fsck(&FsckOptions { contents: false, ..FsckOptions::default() })
                .unwrap()
                .problems
                .len(),
            usize::from(damaged == "indexes"),
            "a quick check reads no contents of remnants"
        );
        let repaired = check(&node, true);
        assert_eq!(repaired.problems[0].repair, RepairState::Repaired, "{damaged}");
        assert!(repaired.problems[0].to_string().ends_with(" (removed)"), "{repaired:?}");
        assert!(repaired.is_sound(), "{damaged}: a cache is no content");
        let after = check(&node, false);
        assert_eq!((after.remnants, &after.problems[..]), (0, &[][..]), "{damaged}");
        assert_eq!(names_in(&node, "indexes") + names_in(&node, "remnants"), 0, "{damaged}");
    }
}

fn names_in(node: &LazyNode, dir: &str) -> usize {
    fs_err::read_dir(node.dir.path().join("store").join(dir)).unwrap().count()
}

#[tokio::test(flavor = "multi_thread")]
async fn fsck_finds_damage_of_an_index_and_removes_it() {
    let Some(node) = new_node().await else { return };
    let (registry, fixture) = (FaultRegistry::start(), gzip_layer("app", &many_files()));
    let pulled = node.pull(&fixture.put(&registry)).await;
    damage_file_in(&node, "indexes");
    let found = check(&node, false);
    let key = pulled.layers[0].key.clone();
    assert_eq!(found.problems.len(), 1);
    assert_eq!(found.problems[0].found, StoreDamage::IndexDamaged { key });
    assert!(!found.is_sound());
    assert!(check(&node, true).is_sound());
    assert_eq!((check(&node, false).problems, names_in(&node, "indexes")), (Vec::new(), 0));
    node.store().empty_trash().unwrap();
    let root = node.dir.path().join("store");
    assert_eq!(node.store().usage().unwrap().total().bytes, du(&root), "its space counts no more");
    let usage = node.store().image_usages().unwrap().remove(0);
    assert_eq!(usage.unique, usage.total, "no remnant is promised");
    assert_eq!(node.store().image(pulled.id.as_str()).unwrap().unwrap().disk_bytes, usage.total.bytes);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_remnant_with_the_index_of_another_blob_is_not_kept() {
    let Some(node) = new_node().await else { return };
    let registry = FaultRegistry::start();
    let (first, second) = (gzip_layer("first", &many_files()), layer("second", &many_files(), zstd_frames));
    for fixture in [&first, &second] {
        node.pull(&fixture.put(&registry)).await;
    }
    for image in node.store().images().unwrap() {
        remove(&node, &image);
    }
    assert_eq!(check(&node, false).problems, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_beside_data_that_the_archive_replaces_comes_with_the_whole_blob() {
    let Some(node) = new_node().await else { return };
    let archive = TarBuilder::new()
        .with(TarBuilderEntry::file("replaced", noise(5_000_000, 1)))
        .with(TarBuilderEntry::file("beside", noise(100_000, 2)))
        .with(TarBuilderEntry::file("large", noise(9_000_000, 3)))
        .with(TarBuilderEntry::file("replaced", noise(200_000, 4)));
    let (registry, fixture) = (FaultRegistry::start(), gzip_layer("app", &archive.finish()));
    let image = fixture.put(&registry);
    pull_and_remove(&node, &image).await;
    let pulled = node.pull(&image).await;
    let mounted = node.mount(&pulled, "app");
    assert_eq!(mounted.read(Path::new("beside")).await.unwrap(), noise(100_000, 2));
    assert_eq!(mounted.read(Path::new("replaced")).await.unwrap(), noise(200_000, 4));
}

#[test]
fn another_process_goes_on_and_an_incomplete_layer_is_kept_again() {
    let Some(restored) = Restored::new() else { return };
    let Restored { runtime, node, keeper, registry, image, pulled, mounted } = restored;
    let dir = node.stop(runtime);

    let runtime = tokio::runtime::Runtime::new().unwrap();
    let node = runtime.block_on(start(dir, keeper)).unwrap();
    assert!(node.is_partial(&pulled), "the next process knows it");
    let read = fs_err::read(mounted.join("medium/200")).unwrap();
    assert!(read == noise(30_000, 300), "it answers reads");
    node.store().umount(&mounted).unwrap();
    remove(&node, &pulled);
    let pulled = runtime.block_on(node.pull(&image));
    assert!(node.is_partial(&pulled), "it was kept again");
    registry.clear_faults();
    runtime.block_on(node.complete(&image));
    let checked = node.store().fsck(&FsckOptions { contents: true, ..FsckOptions::default() }).unwrap();
    assert!(checked.problems.is_empty(), "{:?}", checked.problems);
    node.stop(runtime);
}

#[test]
fn what_a_killed_process_left_half_kept_is_cleaned_up() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let Some(node) = runtime.block_on(start(dir, Arc::default())) else { return };
    let (registry, fixture) = (FaultRegistry::start(), gzip_layer("app", &many_files()));
    let image = fixture.put(&registry);
    runtime.block_on(pull_and_remove(&node, &image));
    let dir = node.stop(runtime);
    let remnants = dir.path().join("store/remnants");
    let entry = fs_err::read_dir(&remnants).unwrap().next().unwrap().unwrap();
    fs_err::rename(entry.path(), remnants.join("0".repeat(64))).unwrap();
    let open = |keep_remnants| {
        let config = StoreConfig { keep_remnants, ..StoreConfig::default() };
        Store::open(&dir.path().join("store"), config).unwrap()
    };
    let store = open(true);
    assert_eq!(fs_err::read_dir(&remnants).unwrap().count(), 0);
    assert_eq!(fs_err::read_dir(dir.path().join("store/indexes")).unwrap().count(), 0);
    let checked = store.fsck(&FsckOptions { contents: true, ..FsckOptions::default() }).unwrap();
    assert!(checked.problems.is_empty(), "{:?}", checked.problems);
}

#[test]
fn nothing_stays_where_nothing_is_to_be_kept() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let Some(node) = runtime.block_on(start(dir, Arc::default())) else { return };
    let (registry, fixture) = (FaultRegistry::start(), gzip_layer("app", &many_files()));
    let image = fixture.put(&registry);
    runtime.block_on(pull_and_remove(&node, &image));
    let dir = node.stop(runtime);
    let store = Store::open(&dir.path().join("store"), StoreConfig::default()).unwrap();
    let (trigger, now) = (ReclaimTrigger::Schedule, ClockReading::now());
    let promised = store.reclaimable(trigger, &now).unwrap().remnants;
    let freed = store.reclaim(trigger, &now).freed.remnants;
    assert!(freed.bytes > 0 && freed == promised, "{freed:?} of {promised:?}");
    assert_eq!(store.usage().unwrap().remnants.inodes, 1, "the directory");
}

#[test]
fn an_incomplete_layer_without_its_index_is_filled_by_its_whole_blob() {
    let Some(restored) = Restored::new() else { return };
    let Restored { runtime, node, keeper, registry, image, pulled, mounted } = restored;
    let index = node.dir.path().join("store/indexes").join(pulled.layers[0].key.as_str());
    let dir = node.stop(runtime);
    fs_err::write(&index, "damaged").unwrap();
    registry.clear_faults();

    let runtime = tokio::runtime::Runtime::new().unwrap();
    let node = runtime.block_on(start(dir, keeper)).unwrap();
    assert!(fs_err::read(mounted.join("medium/200")).unwrap() == noise(30_000, 300), "the read waits for it");
    runtime.block_on(node.complete(&image));
    node.store().umount(&mounted).unwrap();
    let checked = node.store().fsck(&FsckOptions { contents: true, ..FsckOptions::default() }).unwrap();
    assert!(checked.problems.is_empty(), "{:?}", checked.problems);
    node.stop(runtime);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_remnant_serves_the_blob_that_its_index_is_of() {
    let Some(node) = new_node().await else { return };
    let registry = FaultRegistry::start();
    let (first, second) = (gzip_layer("first", &many_files()), layer("second", &many_files(), zstd_frames));
    let (image, other) = (first.put(&registry), second.put(&registry));
    node.pull(&image).await;
    let pulled = node.pull(&other).await;
    remove(&node, &pulled);
    if let Some(left) = node.store().image(image.to_string().as_str()).unwrap() {
        remove(&node, &left);
    }
    assert!(!node.is_partial(&node.pull(&other).await), "the other blob of the same layer is fetched");
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_metadata_is_not_kept() {
    let Some(node) = new_node().await else { return };
    let (registry, fixture) = (FaultRegistry::start(), gzip_layer("app", &many_files()));
    let image = fixture.put(&registry);
    let pulled = node.pull(&image).await;
    let layer = node.store().layer(&pulled.layers[0].key).unwrap().unwrap();
    let (path, at) = (layer.path().to_owned(), layer.record().erofs.metadata_start + 500);
    drop(layer);
    let file = fs_err::OpenOptions::new().write(true).open(path).unwrap();
    std::os::unix::fs::FileExt::write_all_at(file.file(), b"?", at).unwrap();
    remove(&node, &pulled);
    assert!(!node.is_partial(&node.pull(&image).await), "it is fetched as a whole");
}
