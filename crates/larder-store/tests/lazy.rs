//! Layers that containers read before they are complete.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use larder::backend::ProgressReporter;
use larder::reference::Reference;
use larder::retention::Selector;
use larder_registry::{RegistryClient, RegistryConfig};
use larder_store::export::ExportRequest;
use larder_store::fsck::FsckOptions;
use larder_store::lazy::{GroupKeeper, KeptGroup};
use larder_store::mounts::MountOptions;
use larder_store::pull::{LazyPulls, StorePullConfig, StorePuller};
use larder_store::store::{ImageRecord, Store, StoreConfig};
use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, ResponseFault, digest};
use serde_json::json;
use tempfile::TempDir;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const LONGEST_WAIT: Duration = Duration::from_secs(20);

/// Keeps nothing: the group ends with the test.
#[derive(Debug)]
struct NoKeeper;

impl GroupKeeper for NoKeeper {
    fn take(&self) -> io::Result<Option<KeptGroup>> {
        Ok(None)
    }

    fn keep(&self, _: &KeptGroup) -> io::Result<()> {
        Ok(())
    }

    fn release(&self) -> io::Result<()> {
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
    fn load(name: &'static str) -> Fixture {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/toc");
        let blob = fs_err::read(dir.join(format!("{name}.blob"))).unwrap();
        let annotations = fs_err::read_to_string(dir.join(format!("{name}.annotations"))).unwrap();
        let pairs = annotations.lines().map(|line| line.split_once('=').unwrap());
        let annotations = pairs.map(|(key, value)| (key.to_owned(), value.into())).collect();
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
        let layer = registry.put_blob(self.blob.clone());
        let config = json!({"architecture": "amd64", "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": [digest(&self.plain)]}});
        let config = config.to_string();
        let media = "application/vnd.oci.image.layer.v1.tar+zstd";
        let manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST,
            "config": {"mediaType": "application/vnd.oci.image.config.v1+json", "size": config.len(),
                "digest": registry.put_blob(config)},
            "layers": [{"mediaType": media, "digest": layer, "size": self.blob.len(),
                "annotations": self.annotations}]});
        registry.put_manifest("lazy/app", self.name, MANIFEST, manifest.to_string());
        Reference::parse(&registry.image(&format!("lazy/app:{}", self.name))).unwrap()
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

/// A store whose puller is lazy.
struct LazyNode {
    dir: TempDir,
    puller: StorePuller,
}

impl LazyNode {
    async fn new() -> Option<LazyNode> {
        if !rustix::process::geteuid().is_root() {
            assert!(std::env::var_os("CI").is_none(), "CI must not skip mounts: run the tests as root");
            eprintln!("==== SKIPPED, NOT TESTED: mounting needs root; run the tests as root ====");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let puller = LazyNode::puller(dir.path());
        match puller.guard_reads(Arc::new(NoKeeper), LONGEST_WAIT).await {
            Ok(_) => Some(LazyNode { dir, puller }),
            Err(error) => {
                let error = larder::error_chain(&error);
                eprintln!("==== SKIPPED, NOT TESTED: {error} ====");
                None
            }
        }
    }

    fn puller(dir: &Path) -> StorePuller {
        let store = Store::open(&dir.join("store"), StoreConfig::default()).unwrap();
        let registry =
            RegistryConfig { stall_window: Duration::from_millis(500), ..RegistryConfig::default() };
        let lazy = LazyPulls { images: vec![Selector::Name("*".into())], minimum_size: 0 };
        let config = StorePullConfig { lazy, ..StorePullConfig::default() };
        StorePuller::new(store, RegistryClient::new(registry), config)
    }

    fn store(&self) -> &Store {
        self.puller.store()
    }

    async fn pull(&self, name: &Reference) -> ImageRecord {
        let pulled = self.puller.pull(name, None, &ProgressReporter::unwatched()).await;
        pulled.unwrap_or_else(|error| panic!("{name}: {}", larder::error_chain(&error)))
    }

    fn mount(&self, image: &ImageRecord, at: &str) -> Mounted {
        let target = self.dir.path().join(at);
        fs_err::create_dir(&target).unwrap();
        self.store().mount(image.id.as_str(), &target, MountOptions::default(), SystemTime::now()).unwrap();
        Mounted { store: self.store().clone(), target }
    }

    fn is_partial(&self, image: &ImageRecord) -> bool {
        !self.store().filling_layers().is_empty()
            && image.layers.iter().any(|layer| {
                let layer = self.store().layer(&layer.key).unwrap().unwrap();
                layer.record().partial.is_some()
            })
    }

    async fn complete(&self, name: &Reference) {
        let complete = self.puller.completely().pull(name, None, &ProgressReporter::unwatched()).await;
        complete.unwrap_or_else(|error| panic!("{name}: {}", larder::error_chain(&error)));
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
        self.store.umount(&self.target).unwrap();
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
        assert!(node.is_partial(&pulled), "{name}");
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
