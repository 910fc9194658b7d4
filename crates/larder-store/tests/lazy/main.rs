//! Layers that containers read before they are complete.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod artifacts;
mod credentials;
mod failures;
mod independent;
mod power_cuts;
mod remnants;
mod soci;
mod verified_reads;

use std::collections::BTreeMap;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use larder::backend::ProgressReporter;
use larder::gc::{ClockReading, ReclaimTrigger};
use larder::reference::Reference;
use larder::retention::Selector;
use larder_registry::{RegistryClient, RegistryConfig};
use larder_store::disk::DiskSpace;
use larder_store::export::{ExportError, ExportRequest};
use larder_store::fsck::FsckOptions;
use larder_store::lazy::{FetchPurpose, FillObserver, GroupKeeper, KeptGroup, ReadEnd};
use larder_store::mounts::{MountError, MountOptions};
use larder_store::pull::{GuardPlan, GuardedBefore, LazyPulls, PullError, StorePullConfig, StorePuller};
use larder_store::snapshots::NewSnapshot;
use larder_store::store::{
    ImageRecord, PromisedSpace, RemoveOptions, Store, StoreConfig, StoreError, Suspect,
};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::chunked_layer::{ChunkedFormat, ChunkedLayer};
use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, ResponseFault, digest};
use parking_lot::Mutex;
use serde_json::json;
use tempfile::TempDir;
use tokio::time::Instant;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const LONGEST_WAIT: Duration = Duration::from_secs(20);

/// Keeps the group in this process, as another process would.
#[derive(Debug, Default)]
struct KeepHere(Mutex<Option<KeptGroup>>);

impl GroupKeeper for KeepHere {
    fn take(&self) -> io::Result<Option<KeptGroup>> {
        self.0.lock().as_ref().map(KeptGroup::try_clone).transpose()
    }

    fn keep(&self, kept: &KeptGroup) -> io::Result<()> {
        *self.0.lock() = Some(kept.try_clone()?);
        Ok(())
    }

    fn release(&self) -> io::Result<()> {
        *self.0.lock() = None;
        Ok(())
    }
}

/// A layer with a table of contents, made by an independent writer.
struct Fixture {
    name: &'static str,
    blob: Vec<u8>,
    annotations: serde_json::Map<String, serde_json::Value>,
    plain: Vec<u8>,
}

const FIXTURES: [&str; 8] = [
    "podman-5.8",
    "skopeo-1.9",
    "stargz-zstd",
    "estargz",
    "estargz-last-file",
    "estargz-lossless",
    "estargz-prioritized",
    "estargz-small-files",
];

impl Fixture {
    /// A layer of this archive.
    fn made(name: &'static str, archive: &[u8]) -> Fixture {
        let made = ChunkedLayer::new(archive, ChunkedFormat::ZstdChunked, 4096);
        let annotations = made.annotations.into_iter().map(|(key, value)| (key, value.into())).collect();
        Fixture { name, blob: made.blob, annotations, plain: made.archive }
    }

    /// With another table of contents: `change` gets the text of its document.
    fn with_table(self, change: impl Fn(String) -> String) -> Fixture {
        let position = "io.github.containers.zstd-chunked.manifest-position";
        let fields = self.annotations[position].as_str().unwrap().split(':');
        let fields: Vec<usize> = fields.map(|field| field.parse().unwrap()).collect();
        let (at, length) = (fields[0], fields[1]);
        let document = zstd::decode_all(&self.blob[at..at + length]).unwrap();
        let document = change(String::from_utf8(document).unwrap());
        let frame = zstd::encode_all(document.as_bytes(), 3).unwrap();
        let size = u32::try_from(frame.len()).unwrap();
        let (header, mut annotations) = (&self.blob[at - 8..at - 4], self.annotations);
        let blob = [&self.blob[..at - 8], header, &size.to_le_bytes(), &frame].concat();
        annotations[position] = format!("{at}:{size}:{}:1", document.len()).into();
        annotations["io.github.containers.zstd-chunked.manifest-checksum"] = digest(&frame).into();
        Fixture { blob, annotations, ..self }
    }

    fn load(name: &'static str) -> Fixture {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/toc");
        let blob = fs_err::read(dir.join(format!("{name}.blob"))).unwrap();
        let annotations = fs_err::read_to_string(dir.join(format!("{name}.annotations"))).unwrap();
        let pairs = annotations.lines().map(|line| line.split_once('=').unwrap());
        let annotations = pairs.map(|(key, value)| (key.to_owned(), value.into()));
        Fixture::of_blob(name, blob, annotations.collect())
    }

    fn of_blob(
        name: &'static str,
        blob: Vec<u8>,
        annotations: serde_json::Map<String, serde_json::Value>,
    ) -> Fixture {
        let mut plain = Vec::new();
        if blob.starts_with(&[0x1f, 0x8b]) {
            flate2::read::MultiGzDecoder::new(&blob[..]).read_to_end(&mut plain).unwrap();
        } else {
            zstd::stream::read::Decoder::new(&blob[..]).unwrap().read_to_end(&mut plain).unwrap();
        }
        Fixture { name, blob, annotations, plain }
    }

    /// Puts an image with this layer into a registry.
    fn put(&self, registry: &FaultRegistry) -> Reference {
        put_image(registry, &[self])
    }

    /// Path and content of each file.
    fn files(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let mut files = Vec::new();
        for entry in tar::Archive::new(&self.plain[..]).entries().unwrap() {
            let mut entry = entry.unwrap();
            let path = entry.path().unwrap().into_owned();
            let is_whiteout = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(".wh."));
            if entry.header().entry_type().is_file() && !is_whiteout {
                let mut content = Vec::new();
                entry.read_to_end(&mut content).unwrap();
                files.push((path, content));
            }
        }
        files
    }
}

/// Puts an image with these layers into a registry, the lowest first. It has the name of the last.
fn put_image(registry: &FaultRegistry, layers: &[&Fixture]) -> Reference {
    put_image_in(registry, "lazy/app", layers)
}

fn put_image_in(registry: &FaultRegistry, repository: &str, layers: &[&Fixture]) -> Reference {
    put_annotated(registry, repository, layers, &json!({}))
}

/// Puts an image whose manifest has these annotations.
fn put_annotated(
    registry: &FaultRegistry,
    repository: &str,
    layers: &[&Fixture],
    annotations: &serde_json::Value,
) -> Reference {
    let diff_ids: Vec<String> = layers.iter().map(|layer| digest(&layer.plain)).collect();
    let config = json!({"architecture": "amd64", "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": diff_ids}});
    let config = config.to_string();
    let descriptor = |layer: &&Fixture| {
        let compression = if layer.blob.starts_with(&[0x1f, 0x8b]) { "gzip" } else { "zstd" };
        let media = format!("application/vnd.oci.image.layer.v1.tar+{compression}");
        json!({"mediaType": media, "digest": registry.put_blob(layer.blob.clone()),
            "size": layer.blob.len(), "annotations": layer.annotations})
    };
    let descriptors: Vec<_> = layers.iter().map(descriptor).collect();
    let manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST,
        "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "size": config.len(),
            "digest": registry.put_blob(config)},
        "layers": descriptors, "annotations": annotations});
    let name = layers.last().unwrap().name;
    registry.put_manifest(repository, name, MANIFEST, manifest.to_string());
    Reference::parse(&registry.image(&format!("{repository}:{name}"))).unwrap()
}

/// A puller that is lazy.
fn puller_into(store: Store, verify_reads: bool) -> StorePuller {
    let registry = RegistryConfig { stall_window: Duration::from_millis(500), ..RegistryConfig::default() };
    let lazy = LazyPulls { images: vec![Selector::Name("*".into())], minimum_size: 0 };
    let config = StorePullConfig { lazy, verify_reads, ..StorePullConfig::default() };
    StorePuller::new(store, RegistryClient::new(registry), config)
}

/// A store whose puller is lazy.
struct LazyNode {
    dir: TempDir,
    puller: StorePuller,
}

impl LazyNode {
    async fn new() -> Option<LazyNode> {
        let dir = tempfile::tempdir().unwrap();
        LazyNode::in_dir(dir, Arc::default(), LONGEST_WAIT).await.map(|(node, _)| node)
    }

    /// Starts a process, which has a runtime of its own.
    fn start(keeper: &Arc<KeepHere>) -> Option<(tokio::runtime::Runtime, LazyNode)> {
        let (runtime, dir) = (tokio::runtime::Runtime::new().unwrap(), tempfile::tempdir().unwrap());
        let started = runtime.block_on(LazyNode::in_dir(dir, Arc::clone(keeper), LONGEST_WAIT));
        started.map(|(node, _)| (runtime, node))
    }

    /// Ends the process.
    fn stop(self, runtime: tokio::runtime::Runtime) -> TempDir {
        let LazyNode { dir, puller } = self;
        drop(puller);
        runtime.shutdown_timeout(LONGEST_WAIT);
        dir
    }

    async fn in_dir(
        dir: TempDir,
        keeper: Arc<KeepHere>,
        longest_wait: Duration,
    ) -> Option<(LazyNode, GuardedBefore)> {
        LazyNode::of(LazyNode::puller(dir.path(), false), dir, keeper, longest_wait).await
    }

    async fn of(
        puller: StorePuller,
        dir: TempDir,
        keeper: Arc<KeepHere>,
        longest_wait: Duration,
    ) -> Option<(LazyNode, GuardedBefore)> {
        if !rustix::process::geteuid().is_root() {
            assert!(std::env::var_os("CI").is_none(), "CI must not skip mounts: run the tests as root");
            eprintln!("==== SKIPPED, NOT TESTED: mounting needs root; run the tests as root ====");
            return None;
        }
        match puller.guard_reads(keeper, longest_wait).await {
            Ok(before) => Some((LazyNode { dir, puller }, before)),
            Err(error) => {
                let error = larder::error_chain(&error);
                eprintln!("==== SKIPPED, NOT TESTED: {error} ====");
                None
            }
        }
    }

    fn puller(dir: &Path, verify_reads: bool) -> StorePuller {
        puller_into(Store::open(&dir.join("store"), StoreConfig::default()).unwrap(), verify_reads)
    }

    fn store(&self) -> &Store {
        self.puller.store()
    }

    async fn pull(&self, name: &Reference) -> ImageRecord {
        let pulled = self.puller.pull(name, None, &ProgressReporter::unwatched()).await;
        pulled.unwrap_or_else(|error| panic!("{name}: {}", larder::error_chain(&error)))
    }

    fn mount(&self, image: &ImageRecord, at: &str) -> Mounted {
        Mounted { target: self.mount_at(image, at), store: self.store().clone() }
    }

    fn mount_at(&self, image: &ImageRecord, at: &str) -> PathBuf {
        let target = self.dir.path().join(at);
        fs_err::create_dir(&target).unwrap();
        self.store().mount(image.id.as_str(), &target, MountOptions::default(), SystemTime::now()).unwrap();
        target
    }

    fn is_partial(&self, image: &ImageRecord) -> bool {
        !self.store().filling_layers().is_empty()
            && image.layers.iter().any(|layer| {
                let layer = self.store().layer(&layer.key).unwrap().unwrap();
                layer.record().partial.is_some()
            })
    }

    async fn complete(&self, name: &Reference) {
        let complete = self.try_complete(name).await;
        complete.unwrap_or_else(|error| panic!("{name}: {}", larder::error_chain(&error)));
    }

    async fn try_complete(&self, name: &Reference) -> Result<ImageRecord, PullError> {
        self.puller.completely().pull(name, None, &ProgressReporter::unwatched()).await
    }
}

struct Mounted {
    store: Store,
    target: PathBuf,
}

impl Mounted {
    async fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        let path = self.target.join(path);
        tokio::task::spawn_blocking(move || fs_err::read(path)).await.unwrap()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let unmounted = self.store.umount(&self.target);
        // A second panic would end the test with its mounts.
        assert!(std::thread::panicking() || unmounted.is_ok(), "{unmounted:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn files_are_read_before_their_layer_is_complete_and_the_layer_becomes_like_any_other() {
    let Some(node) = LazyNode::new().await else { return };
    for name in FIXTURES {
        let fixture = Fixture::load(name);
        let registry = FaultRegistry::start();
        let image = fixture.put(&registry);
        // What the fill in the background requests first does not come.
        let first = FaultTrigger::path(digest(&fixture.blob)).from(0);
        registry.fault(first, ResponseFault::StallAfter(0));
        let pulled = node.pull(&image).await;
        // What comes before the landmark of this one is all of it.
        let is_fetched_at_once = name == "estargz-prioritized";
        assert!(is_fetched_at_once || node.is_partial(&pulled), "{name}");
        let fill = || node.store().image_summary(pulled.id.as_str()).unwrap().unwrap().fill;
        assert!(is_fetched_at_once || fill().is_some(), "{name}: its image is not said to be incomplete");
        let mounted = node.mount(&pulled, name);
        for (path, content) in fixture.files() {
            let read = mounted.read(&path).await;
            assert!(read.unwrap() == content, "{name}: {}", path.display());
        }
        // A small eStargz layer has all come with its table.
        let is_held = !name.starts_with("estargz");
        assert!(!is_held || node.is_partial(&pulled), "{name}: its reads did not wait for all of it");
        registry.clear_faults();
        node.complete(&image).await;
        assert_eq!(fill(), None, "{name}");
        assert!(!node.is_partial(&pulled), "{name}");
        for (path, content) in fixture.files() {
            assert!(mounted.read(&path).await.unwrap() == content, "{name}: {}", path.display());
        }
        let checked = node.store().fsck(&FsckOptions { contents: true, ..FsckOptions::default() }).unwrap();
        assert!(checked.problems.is_empty(), "{name}: {:?}", checked.problems);
        drop(mounted);
        let mut archive = Vec::new();
        let export = ExportRequest { image: pulled.id.as_str().into(), name: None };
        node.store().begin_export(&[export]).unwrap().write_oci(&mut archive).unwrap();
        assert!(
            archive.windows(fixture.plain.len()).any(|window| window == fixture.plain),
            "{name}: the archive of the layer is as it was"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_start_has_read_comes_first_at_the_next_start_of_another_version() {
    let Some(node) = LazyNode::new().await else { return };
    let (registry, size) = (FaultRegistry::start(), 50_000);
    let version = |name, changed: u64| {
        let files = [("changed", changed), ("unread", 8), ("started", 9)];
        let files = files.map(|(name, seed)| TarBuilderEntry::file(name, noise(size, seed)));
        Fixture::made(name, &TarBuilder::new().extend(files).finish())
    };
    let (first, second) = (version("v1", 1), version("v2", 2));
    // The fill in the background gets nothing.
    let hold = |fixture: &Fixture| {
        registry.fault(FaultTrigger::path(digest(&fixture.blob)).from(0), ResponseFault::StallAfter(0));
    };
    hold(&first);
    let (v1, v2) = (first.put(&registry), second.put(&registry));
    let pulled = node.pull(&v1).await;
    let mounted = node.mount(&pulled, "v1");
    assert_eq!(mounted.read(Path::new("started")).await.unwrap(), noise(size, 9));
    drop(mounted);
    registry.clear_faults();
    node.complete(&v1).await;
    hold(&second);
    node.store().remove(pulled.id.as_str(), &RemoveOptions::default()).unwrap().unwrap();
    let began = Instant::now();
    node.pull(&v2).await;
    loop {
        let filling = node.store().filling_layers();
        let [(_, progress)] = &filling[..] else { panic!("{filling:?}") };
        if progress.filled_bytes == size as u64 {
            break;
        }
        assert!(progress.filled_bytes < size as u64 && began.elapsed() < LONGEST_WAIT, "{progress:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn files_before_the_landmark_come_first_when_no_start_is_known() {
    let Some(node) = LazyNode::new().await else { return };
    let (registry, size) = (FaultRegistry::start(), 50_000);
    let file = |name, seed| TarBuilderEntry::file(name, noise(size, seed));
    let landmark = TarBuilderEntry::file(".prefetch.landmark", vec![15]);
    let files = [file("first", 1), file("second", 2), landmark, file("other", 3)];
    let fixture = Fixture::made("app", &TarBuilder::new().extend(files).finish());
    let image = fixture.put(&registry);
    hold_background(&registry, &fixture);
    let began = Instant::now();
    node.pull(&image).await;
    loop {
        let filling = node.store().filling_layers();
        let [(_, progress)] = &filling[..] else { panic!("{filling:?}") };
        if progress.filled_bytes == 2 * size as u64 {
            break;
        }
        assert!(progress.filled_bytes < 2 * size as u64 && began.elapsed() < LONGEST_WAIT, "{progress:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A number of a sequence that looks random.
fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Bytes without a pattern.
fn noise(size: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    std::iter::repeat_with(|| random(&mut state).to_le_bytes()).flatten().take(size).collect()
}

/// An archive of two files of some pages.
fn two_files(seed: u64) -> Vec<u8> {
    let files = [("first", seed), ("second", seed + 1)];
    TarBuilder::new()
        .extend(files.map(|(name, seed)| TarBuilderEntry::file(name, noise(50_000, seed))))
        .finish()
}

/// Changes a table of contents.
type Lie = fn(String) -> String;

/// The fill in the background gets nothing.
fn hold_background(registry: &FaultRegistry, fixture: &Fixture) {
    registry.fault(FaultTrigger::path(digest(&fixture.blob)).from(0), ResponseFault::StallAfter(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_that_lies_is_found_and_the_next_pull_is_in_full() {
    let Some(node) = LazyNode::new().await else { return };
    let registry = FaultRegistry::start();
    let lies: [(&'static str, Lie); 3] = [
        ("mode", |table| table.replacen("\"mode\":420", "\"mode\":493", 1)),
        ("name", |table| table.replace("\"second\"", "\"other\"")),
        ("digest", |table| {
            let digits = table.find("\"chunkDigest\":\"sha256:").unwrap() + 22;
            [&table[..digits], &"0".repeat(64), &table[digits + 64..]].concat()
        }),
    ];
    for (seed, (name, lie)) in (10..).step_by(2).zip(lies) {
        let fixture = Fixture::made(name, &two_files(seed)).with_table(lie);
        let image = fixture.put(&registry);
        hold_background(&registry, &fixture);
        let pulled = node.pull(&image).await;
        registry.clear_faults();
        let ended = async {
            while !node.store().filling_layers().is_empty() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(LONGEST_WAIT, ended).await.unwrap();
        let layer = node.store().layer(&pulled.layers[0].key).unwrap().unwrap();
        assert!(layer.record().damaged, "{name}");
        drop(layer);
        let pulled = node.pull(&image).await;
        assert!(!node.is_partial(&pulled), "{name}: a layer whose table has lied is pulled in full");
        let mounted = node.mount(&pulled, name);
        for (path, content) in fixture.files() {
            assert!(mounted.read(&path).await.unwrap() == content, "{name}: {}", path.display());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_bytes_reach_no_reader() {
    let Some(node) = LazyNode::new().await else { return };
    let (registry, fixture) = (FaultRegistry::start(), Fixture::made("app", &two_files(1)));
    let image = fixture.put(&registry);
    hold_background(&registry, &fixture);
    let pulled = node.pull(&image).await;
    let mounted = node.mount(&pulled, "app");
    registry.fault(FaultTrigger::path(digest(&fixture.blob)).ranged().nth(1..=3), ResponseFault::Corrupt);
    for (path, content) in fixture.files() {
        assert!(mounted.read(&path).await.unwrap() == content, "{}", path.display());
    }
    registry.clear_faults();
    node.complete(&image).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reads_fail_in_time_without_a_registry_and_succeed_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let wait = Duration::from_secs(2);
    let Some((node, _)) = LazyNode::in_dir(dir, Arc::default(), wait).await else { return };
    let (registry, fixture) = (FaultRegistry::start(), Fixture::made("app", &two_files(1)));
    let image = fixture.put(&registry);
    hold_background(&registry, &fixture);
    let pulled = node.pull(&image).await;
    let mounted = node.mount(&pulled, "app");
    registry.fault(FaultTrigger::path("/"), ResponseFault::Hangup);
    let began = Instant::now();
    let failed = mounted.read(Path::new("first")).await.unwrap_err();
    assert!(failed.to_string().contains("Input/output error"), "{failed}");
    // Expired reads are looked for once a second.
    assert!(began.elapsed() < Duration::from_millis(3800), "{:?}: it does not wait twice", began.elapsed());
    registry.clear_faults();
    let until_read = async {
        loop {
            if let Ok(read) = mounted.read(Path::new("first")).await {
                return read;
            }
        }
    };
    assert!(tokio::time::timeout(LONGEST_WAIT, until_read).await.unwrap() == fixture.files()[0].1);
    node.complete(&image).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pull_can_ask_for_it_where_no_image_is_selected_and_reads_are_guarded_from_then_on() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("store"), StoreConfig::default()).unwrap();
    if !rustix::process::geteuid().is_root() || store.check_guard().is_err() {
        eprintln!("==== SKIPPED, NOT TESTED: reads of layers cannot be guarded ====");
        return;
    }
    let client = RegistryClient::new(RegistryConfig::default());
    let puller = StorePuller::new(store, client, StorePullConfig::default());
    let keeper = Arc::<KeepHere>::default();
    let chosen = Arc::clone(&keeper);
    puller.guard_reads_on_demand(GuardPlan {
        keeper: Box::new(move || Ok(Arc::clone(&chosen) as Arc<dyn GroupKeeper>)),
        longest_wait: LONGEST_WAIT,
        guarded: Box::new(|_| ()),
    });
    let registry = FaultRegistry::start();
    let [configured, asked, full] = [("configured", 1), ("asked", 3), ("full", 5)].map(|(name, seed)| {
        let fixture = Fixture::made(name, &two_files(seed));
        (fixture.put(&registry), fixture)
    });
    let progress = ProgressReporter::unwatched();
    puller.pull(&configured.0, None, &progress).await.unwrap();
    assert!(puller.store().filling_layers().is_empty() && keeper.0.lock().is_none());
    hold_background(&registry, &asked.1);
    let image = puller.lazily().pull(&asked.0, None, &progress).await.unwrap();
    assert!(keeper.0.lock().is_some(), "it is kept from now on");
    let node = LazyNode { dir, puller };
    assert!(node.is_partial(&image));
    let mounted = node.mount(&image, "asked");
    assert!(mounted.read(Path::new("first")).await.unwrap() == asked.1.files()[0].1);
    let image = node.puller.lazily().completely().pull(&full.0, None, &progress).await.unwrap();
    assert!(!node.is_partial(&image));
    registry.clear_faults();
    node.complete(&asked.0).await;
}

/// Counts by purpose.
#[derive(Debug, Default)]
struct Counted {
    requests: Mutex<BTreeMap<&'static str, u64>>,
    bytes: Mutex<BTreeMap<&'static str, u64>>,
    waits: Mutex<Vec<(Duration, ReadEnd)>>,
}

impl FillObserver for Counted {
    fn range_requested(&self, purpose: FetchPurpose) {
        *self.requests.lock().entry(purpose.word()).or_default() += 1;
    }

    fn bytes_received(&self, purpose: FetchPurpose, bytes: u64) {
        *self.bytes.lock().entry(purpose.word()).or_default() += bytes;
    }

    fn read_waited(&self, waited: Duration, end: ReadEnd) {
        self.waits.lock().push((waited, end));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_waits_and_the_source_of_missing_data_are_known() {
    let dir = tempfile::tempdir().unwrap();
    let wait = Duration::from_secs(2);
    let Some((node, _)) = LazyNode::in_dir(dir, Arc::default(), wait).await else { return };
    let counted = Arc::new(Counted::default());
    node.store().observe_fills(Arc::clone(&counted) as Arc<dyn FillObserver>);
    let (registry, fixture) = (FaultRegistry::start(), Fixture::made("app", &two_files(1)));
    let image = fixture.put(&registry);
    hold_background(&registry, &fixture);
    let pulled = node.pull(&image).await;
    let mounted = node.mount(&pulled, "app");
    assert!(mounted.read(Path::new("first")).await.unwrap() == fixture.files()[0].1);
    assert!(counted.requests.lock()["read"] >= 1 && counted.bytes.lock()["read"] > 0, "{counted:?}");
    assert!(counted.waits.lock().iter().all(|(_, end)| *end == ReadEnd::Data), "{counted:?}");
    assert!(!counted.waits.lock().is_empty());
    let incomplete = || node.store().incomplete_layers(&ClockReading::now()).unwrap();
    let layers = incomplete();
    assert_eq!(layers.iter().map(|layer| &layer.key).collect::<Vec<_>>(), [&pulled.layers[0].key]);
    assert!(layers[0].fill.missing_bytes < layers[0].total_bytes && layers[0].age < LONGEST_WAIT);
    assert!(layers[0].fill.hosts.iter().eq([image.registry()]), "{layers:?}");

    registry.clear_faults();
    node.complete(&image).await;
    assert_eq!(incomplete(), []);
    assert!(counted.requests.lock()["fill"] >= 1, "{counted:?}");

    let other = Fixture::made("other", &two_files(3));
    let image = other.put(&registry);
    hold_background(&registry, &other);
    let pulled = node.pull(&image).await;
    let mounted = node.mount(&pulled, "other");
    registry.fault(FaultTrigger::path("/"), ResponseFault::Hangup);
    assert!(mounted.read(Path::new("first")).await.is_err());
    assert!(counted.waits.lock().iter().any(|(waited, end)| *end == ReadEnd::Error && *waited >= wait));
    let problem = async {
        loop {
            if let Some(problem) = incomplete()[0].fill.problem.clone() {
                return problem;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let problem = tokio::time::timeout(LONGEST_WAIT, problem).await.expect("the registry does not answer");
    assert!(!problem.reason.is_empty() && problem.retry_in.is_some(), "{problem:?}");
    registry.clear_faults();
    node.complete(&image).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn space_is_promised_to_an_incomplete_image_until_it_is_complete() {
    let size = 64 << 20;
    let Some(node) = LazyNode::new().await else { return };
    let (registry, small) = (FaultRegistry::start(), Fixture::made("small", &two_files(1)));
    let large = TarBuilder::new().with(TarBuilderEntry::file("large", vec![7; 64 << 20])).finish();
    let large = ChunkedLayer::new(&large, ChunkedFormat::ZstdChunked, 4 << 20);
    let annotations = large.annotations.into_iter().map(|(key, value)| (key, value.into())).collect();
    let large = Fixture { name: "large", blob: large.blob, annotations, plain: large.archive };
    let (image, small) = (large.put(&registry), small.put(&registry));
    assert_eq!(node.store().promised().unwrap(), PromisedSpace::default());
    hold_background(&registry, &large);
    let pulled = node.pull(&image).await;
    let usage = node.store().usage().unwrap();
    assert!(usage.promised.bytes > size - size / 8 && usage.layers.bytes < size / 2, "{usage:?}");
    let [free, unpromised] = [node.store().free(), node.store().unpromised()].map(|free| free.unwrap().bytes);
    assert!(free - unpromised > size / 2, "{free} {unpromised}");
    // Half of what is promised would be enough for the other image.
    let reserve = DiskSpace { bytes: free - size / 2, inodes: 0 };
    let config = StorePullConfig { reserve, ..StorePullConfig::default() };
    let client = RegistryClient::new(RegistryConfig::default());
    let other = StorePuller::new(node.store().clone(), client, config);
    let refused = other.pull(&small, None, &ProgressReporter::unwatched()).await;
    assert!(matches!(refused, Err(PullError::InsufficientSpace(_))), "{refused:?}");
    registry.clear_faults();
    node.complete(&image).await;
    assert_eq!(node.store().promised().unwrap(), PromisedSpace::default());
    assert!(node.store().usage().unwrap().layers.bytes >= size);
    drop(pulled);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_layers_of_a_removed_image_are_filled_while_it_is_mounted() {
    let Some(node) = LazyNode::new().await else { return };
    let (registry, fixture) = (FaultRegistry::start(), Fixture::made("app", &two_files(1)));
    let image = fixture.put(&registry);
    hold_background(&registry, &fixture);
    let pulled = node.pull(&image).await;
    let mounted = node.mount(&pulled, "app");
    let remove = |force| {
        let options = RemoveOptions { force, ..RemoveOptions::default() };
        node.store().remove(pulled.id.as_str(), &options)
    };
    assert!(matches!(remove(false), Err(StoreError::Mounted { .. })));
    let removed = remove(true).unwrap().unwrap();
    assert_eq!((removed.layers, removed.freed.bytes < 50_000), (Vec::new(), true), "the mount has its layer");
    assert_eq!(node.store().filling_layers().len(), 1, "its data still comes");
    for (path, content) in fixture.files() {
        assert!(mounted.read(&path).await.unwrap() == content, "{}", path.display());
    }
    drop(mounted);
    let reclaimed = async {
        while !node.store().filling_layers().is_empty() {
            node.store().reclaim(ReclaimTrigger::Request, &ClockReading::now());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONGEST_WAIT, reclaimed).await.expect("without its mount it goes");
    assert_eq!(node.store().incomplete_layers(&ClockReading::now()).unwrap(), []);
    assert_eq!(node.store().leases(&ClockReading::now()).unwrap(), []);
    assert!(node.store().layer(&pulled.layers[0].key).unwrap().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_image_is_not_filled_and_leaves_nothing() {
    let Some(node) = LazyNode::new().await else { return };
    let (registry, fixture) = (FaultRegistry::start(), Fixture::made("app", &two_files(1)));
    let image = fixture.put(&registry);
    hold_background(&registry, &fixture);
    let pulled = node.pull(&image).await;
    let checked = node.store().fsck(&FsckOptions { contents: true, ..FsckOptions::default() }).unwrap();
    assert!(checked.problems.is_empty(), "missing data is no damage: {:?}", checked.problems);
    let export = ExportRequest { image: pulled.id.as_str().into(), name: None };
    let refused = node.store().begin_export(&[export]);
    assert!(matches!(refused, Err(ExportError::Incomplete { .. })), "{refused:?}");
    let removed = node.store().remove(pulled.id.as_str(), &RemoveOptions::default()).unwrap().unwrap();
    assert_eq!(removed.layers.len(), 1);
    assert!(node.store().filling_layers().is_empty());
    let reclaimed = async {
        while node.store().reclaim(ReclaimTrigger::Request, &ClockReading::now()).freed.downloads.inodes == 0
        {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LONGEST_WAIT, reclaimed).await.expect("what came of the blob goes, too");
    assert_eq!(node.store().leases(&ClockReading::now()).unwrap(), []);
    node.store().empty_trash().unwrap();
    registry.clear_faults();
    let again = node.pull(&image).await;
    node.complete(&image).await;
    assert!(!node.is_partial(&again));
}

#[tokio::test(flavor = "multi_thread")]
async fn all_incomplete_layers_of_an_image_are_removed_with_it() {
    let Some(node) = LazyNode::new().await else { return };
    let registry = FaultRegistry::start();
    let layers = [("below", 1), ("above", 3)].map(|(name, seed)| Fixture::made(name, &two_files(seed)));
    let image = put_image(&registry, &[&layers[0], &layers[1]]);
    for layer in &layers {
        hold_background(&registry, layer);
    }
    let pulled = node.pull(&image).await;
    let removed = node.store().remove(pulled.id.as_str(), &RemoveOptions::default()).unwrap().unwrap();
    assert_eq!(removed.layers.len(), 2, "the fill of a layer holds none below it");
}

/// A pull that ends with its process while a container runs from the image.
struct Killed {
    dir: TempDir,
    target: PathBuf,
    image: Reference,
    pulled: ImageRecord,
    /// Reads the first file since before the end.
    reader: Option<std::thread::JoinHandle<io::Result<Vec<u8>>>>,
}

impl Killed {
    /// `None` where layers cannot be read before they are complete.
    fn while_mounted(
        keeper: &Arc<KeepHere>,
        registry: &FaultRegistry,
        fixture: &Fixture,
        has_reader: bool,
    ) -> Option<Killed> {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let (dir, keeper) = (tempfile::tempdir().unwrap(), Arc::clone(keeper));
        let (node, _) = runtime.block_on(LazyNode::in_dir(dir, keeper, LONGEST_WAIT))?;
        let image = fixture.put(registry);
        registry.fault(
            FaultTrigger::path(digest(&fixture.blob)).ranged().nth(2..=99),
            ResponseFault::StallAfter(0),
        );
        let pulled = runtime.block_on(node.pull(&image));
        let target = node.mount_at(&pulled, "app");
        let first = target.join("first");
        let reader = has_reader.then(|| std::thread::spawn(move || fs_err::read(first)));
        let waits = async {
            while has_reader && node.store().filling_layers().iter().all(|(_, fill)| fill.waiting == 0) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        runtime.block_on(async { tokio::time::timeout(LONGEST_WAIT, waits).await.unwrap() });
        let LazyNode { dir, puller } = node;
        drop(puller);
        runtime.shutdown_timeout(LONGEST_WAIT);
        Some(Killed { dir, target, image, pulled, reader })
    }
}

#[test]
fn readers_wait_through_a_restart() {
    let keeper = Arc::<KeepHere>::default();
    let (registry, fixture) = (FaultRegistry::start(), Fixture::made("app", &two_files(1)));
    let Some(killed) = Killed::while_mounted(&keeper, &registry, &fixture, true) else { return };
    let Killed { dir, target, image, pulled, reader } = killed;
    assert!(!reader.as_ref().unwrap().is_finished());
    registry.clear_faults();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (node, before) = runtime.block_on(LazyNode::in_dir(dir, keeper, LONGEST_WAIT)).unwrap();
    assert_eq!(before, GuardedBefore { layers: 1, lost: Vec::new() });
    assert!(reader.unwrap().join().unwrap().unwrap() == fixture.files()[0].1);
    assert!(fs_err::read(target.join("second")).unwrap() == fixture.files()[1].1);
    runtime.block_on(node.complete(&image));
    assert!(!node.is_partial(&pulled));
    node.store().umount(&target).unwrap();
}

#[test]
fn a_lost_guard_is_reported_and_new_mounts_have_the_right_bytes() {
    let keeper = Arc::<KeepHere>::default();
    let (registry, fixture) = (FaultRegistry::start(), Fixture::made("app", &two_files(1)));
    let Some(killed) = Killed::while_mounted(&keeper, &registry, &fixture, false) else { return };
    let Killed { dir, target, image, pulled, .. } = killed;
    *keeper.0.lock() = None;
    let command = Store::open(&dir.path().join("store"), StoreConfig::default()).unwrap();
    let beside = dir.path().join("beside");
    fs_err::create_dir(&beside).unwrap();
    let refused = command.mount(pulled.id.as_str(), &beside, MountOptions::default(), SystemTime::now());
    let refused = refused.unwrap_err();
    assert!(matches!(refused, MountError::Incomplete { .. }), "{refused:?}");
    let (shown, hint) = (refused.to_string(), refused.hint().unwrap().to_string());
    assert!(
        shown.starts_with(&format!("{} is incomplete (layer ", pulled.id)),
        "as it was asked for: {shown}"
    );
    assert!(hint.starts_with(&format!("larder complete {} ", pulled.id)), "{hint}");
    drop(command);
    assert!(fs_err::read(target.join("first")).unwrap() != fixture.files()[0].1, "nothing guards it");
    registry.clear_faults();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (node, before) = runtime.block_on(LazyNode::in_dir(dir, Arc::clone(&keeper), LONGEST_WAIT)).unwrap();
    assert_eq!(before.lost.iter().map(|image| &image.id).collect::<Vec<_>>(), [&pulled.id]);
    let suspects = node.store().suspects().unwrap();
    assert!(matches!(&suspects[..], [Suspect::Mount(_, at)] if *at == target), "{suspects:?}");
    let mounted = node.mount(&pulled, "again");
    assert_eq!(node.store().suspects().unwrap(), suspects, "what is mounted from now on is none");
    assert!(runtime.block_on(mounted.read(Path::new("first"))).unwrap() == fixture.files()[0].1);
    runtime.block_on(node.complete(&image));
    node.store().umount(&target).unwrap();
}

#[test]
fn what_has_come_is_read_after_a_restart_without_the_registry() {
    let keeper = Arc::<KeepHere>::default();
    let (registry, fixture) = (FaultRegistry::start(), Fixture::made("app", &two_files(1)));
    let image = fixture.put(&registry);
    hold_background(&registry, &fixture);
    let Some((runtime, node)) = LazyNode::start(&keeper) else { return };
    let pulled = runtime.block_on(node.pull(&image));
    let mounted = node.mount(&pulled, "app");
    assert!(runtime.block_on(mounted.read(Path::new("first"))).unwrap() == fixture.files()[0].1);
    drop(mounted);
    let dir = node.stop(runtime);

    registry.fault(FaultTrigger::path("/"), ResponseFault::Hangup);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (node, before) = runtime.block_on(LazyNode::in_dir(dir, keeper, LONGEST_WAIT)).unwrap();
    assert_eq!(before, GuardedBefore { layers: 1, lost: Vec::new() });
    let reclaimed = node.store().reclaim(ReclaimTrigger::Pressure, &ClockReading::now());
    assert!(reclaimed.error.is_none(), "{reclaimed:?}");
    let summary = node.store().image_summary(pulled.id.as_str()).unwrap().unwrap();
    assert!(summary.fill.is_some(), "it is incomplete still");
    let mounted = node.mount(&pulled, "again");
    assert!(runtime.block_on(mounted.read(Path::new("first"))).unwrap() == fixture.files()[0].1);
    registry.clear_faults();
    runtime.block_on(node.complete(&image));
}

#[test]
fn a_layer_that_only_containers_have_is_completed_after_a_restart() {
    let keeper = Arc::<KeepHere>::default();
    let registry = FaultRegistry::start();
    let dir = TarBuilderEntry::dir("data/").mode(0o700);
    let below =
        TarBuilder::new().with(dir).with(TarBuilderEntry::file("data/below", noise(50_000, 1))).finish();
    // It implies the directory, which has the mode of the layer below.
    let above = TarBuilder::new().with(TarBuilderEntry::file("data/above", noise(50_000, 2))).finish();
    let [below, above] = [("below", below), ("above", above)].map(|(name, tar)| Fixture::made(name, &tar));
    let image = put_image(&registry, &[&below, &above]);
    hold_background(&registry, &below);
    hold_background(&registry, &above);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let first = runtime.block_on(LazyNode::in_dir(dir, Arc::clone(&keeper), LONGEST_WAIT));
    let Some((node, _)) = first else { return };
    let pulled = runtime.block_on(node.pull(&image));
    let mut parent = String::new();
    let snapshot = |key: &str, parent: &str| NewSnapshot {
        key: key.into(),
        parent: parent.into(),
        labels: BTreeMap::new(),
    };
    for chain in pulled.chain_ids() {
        let adopted = node.store().adopt_layer(&chain, snapshot("", &parent), SystemTime::now());
        parent = adopted.unwrap().unwrap();
    }
    node.store().create_snapshot(snapshot("container", &parent), true, SystemTime::now()).unwrap();
    node.store().remove(pulled.id.as_str(), &RemoveOptions::default()).unwrap().unwrap();
    let dir = node.stop(runtime);

    registry.clear_faults();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (node, before) = runtime.block_on(LazyNode::in_dir(dir, keeper, LONGEST_WAIT)).unwrap();
    assert_eq!(before, GuardedBefore { layers: 2, lost: Vec::new() });
    let filled = async {
        while !node.store().filling_layers().is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    runtime.block_on(async { tokio::time::timeout(LONGEST_WAIT, filled).await.unwrap() });
    for layer in &pulled.layers {
        let layer = node.store().layer(&layer.key).unwrap().unwrap();
        assert!(!layer.record().damaged && layer.record().partial.is_none(), "{:?}", layer.record());
    }
    node.store().remove_snapshot("container").unwrap();
}

#[test]
fn a_registry_that_does_not_answer_delays_no_start() {
    let keeper = Arc::<KeepHere>::default();
    let (registry, fixture) = (FaultRegistry::start(), Fixture::made("app", &two_files(1)));
    let Some(killed) = Killed::while_mounted(&keeper, &registry, &fixture, false) else { return };
    let Killed { dir, target, image, pulled, .. } = killed;
    // As after a power cut.
    fs_err::remove_dir_all(dir.path().join("store/ingest")).unwrap();
    registry.fault(FaultTrigger::path(digest(&fixture.blob)), ResponseFault::StallAfter(0));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let began = Instant::now();
    let (node, before) = runtime.block_on(LazyNode::in_dir(dir, keeper, LONGEST_WAIT)).unwrap();
    assert_eq!((before.layers, node.store().filling_layers().len()), (1, 0));
    // With its repetitions, a request that stalls takes five seconds.
    assert!(began.elapsed() < Duration::from_millis(2500), "{:?}", began.elapsed());
    registry.clear_faults();
    let resumed = async {
        while !node.is_partial(&pulled) && node.try_complete(&image).await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        node.complete(&image).await;
    };
    runtime.block_on(async { tokio::time::timeout(LONGEST_WAIT, resumed).await.unwrap() });
    assert!(fs_err::read(target.join("second")).unwrap() == fixture.files()[1].1);
    node.store().umount(&target).unwrap();
}
