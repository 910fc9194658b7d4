//! Pulls stay within a low limit of open files, however many of them there are. A binary of its own, since the limit is
//! the process's.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::future::join_all;
use larder::backend::ProgressReporter;
use larder::reference::Reference;
use larder_registry::{Proxy, RegistryClient, RegistryConfig};
use larder_store::pull::{StorePullConfig, StorePuller};
use larder_store::store::{Store, StoreConfig};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, ResponseFault};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const PLAIN: &str = "application/vnd.oci.image.layer.v1.tar";
const IMAGES: usize = 10;

/// Each file in another directory than the one before.
fn scattered(name: &str) -> Vec<u8> {
    let file = |at: usize| TarBuilderEntry::file(format!("{name}/{}/{at}", at % 300), vec![1; 4000]);
    (0..2000).fold(TarBuilder::new(), |archive, at| archive.with(file(at))).finish()
}

fn large(name: &str) -> Vec<u8> {
    let file = |at: usize| TarBuilderEntry::file(format!("{name}-{at}"), vec![2; 2 << 20]);
    (0..5).fold(TarBuilder::new(), |archive, at| archive.with(file(at))).finish()
}

fn small(name: &str, files: usize) -> Vec<u8> {
    let file = |at: usize| TarBuilderEntry::file(format!("a/{at}/{name}"), name.to_owned());
    (0..files).fold(TarBuilder::new(), |archive, at| archive.with(file(at))).finish()
}

fn open(root: &Path) -> (Store, StorePuller) {
    let config = RegistryConfig { config_dirs: Vec::new(), proxy: Proxy::None, ..RegistryConfig::default() };
    let store = Store::open(root, StoreConfig::default()).unwrap();
    (store.clone(), StorePuller::new(store, RegistryClient::new(config), StorePullConfig::default()))
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    fs_err::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// How many files this process has open below a directory.
fn open_below(dir: &Path) -> usize {
    let files = entries(Path::new("/proc/self/fd"));
    files.iter().filter(|fd| fs_err::read_link(fd).is_ok_and(|file| file.starts_with(dir))).count()
}

#[tokio::test]
async fn layers_that_wait_for_the_one_below_keep_no_file_open() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("store");
    let registry = FaultRegistry::start();
    let layers: Vec<Vec<u8>> = (0..40).map(|layer| small(&layer.to_string(), 1)).collect();
    let image = registry.put_image("app", "1", PLAIN, &layers, &[]);
    registry.fault(FaultTrigger::path(&image.layers[0]), ResponseFault::StallAfter(100));
    let (_store, puller) = open(&root);
    let name = Reference::parse(&registry.image("app:1")).unwrap();
    let progress = ProgressReporter::unwatched();
    let mut pull = Box::pin(puller.pull(&name, None, &progress));
    let ingests = root.join("ingest");
    let blobs = || registry.requests_for("/blobs/").len();
    // All but the first are unpacked then.
    let only_one_is_open = async {
        while blobs() < layers.len() || entries(&ingests).len() < layers.len() || open_below(&ingests) > 1 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        ended = &mut pull => panic!("it ended: {ended:?}"),
        () = only_one_is_open => {}
        () = tokio::time::sleep(Duration::from_secs(30)) => panic!("{} are open", open_below(&ingests)),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_concurrent_pulls_need_at_most_256_open_files() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: Some(256), maximum }).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let registry = FaultRegistry::start();
    // Layers of ten images, settled on up to thirty others each, many of their directories made at once.
    for image in 0..IMAGES {
        let first = small(&format!("first-{image}"), 1);
        let waiting = (0..30).map(|layer| small(&format!("{image}-{layer}"), 2));
        let mut layers: Vec<Vec<u8>> = std::iter::once(first).chain(waiting).collect();
        layers.push(if image % 2 == 0 { scattered(&image.to_string()) } else { large(&image.to_string()) });
        registry.put_image(&format!("app-{image}"), "1", PLAIN, &layers, &[]);
    }
    let (store, puller) = open(&dir.path().join("store"));
    let pulls = (0..IMAGES).map(|image| {
        let name = Reference::parse(&registry.image(&format!("app-{image}:1"))).unwrap();
        let puller = puller.clone();
        async move { puller.pull(&name, None, &ProgressReporter::unwatched()).await }
    });
    for pulled in join_all(pulls).await {
        pulled.unwrap();
    }
    assert_eq!(store.images().unwrap().len(), IMAGES);
}
