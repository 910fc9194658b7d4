//! A pull that returned an error has released everything: its threads, directories and open files.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::path::{Path, PathBuf};
use std::time::Duration;

use larder::backend::ProgressReporter;
use larder::reference::{Digest, Reference};
use larder_registry::{Proxy, RegistryClient, RegistryConfig};
use larder_store::pull::{StorePullConfig, StorePuller};
use larder_store::store::{BlobSource, Store, StoreConfig, TransferLogin};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, ResponseFault};

const PLAIN: &str = "application/vnd.oci.image.layer.v1.tar";

fn entries(dir: &Path) -> Vec<PathBuf> {
    fs_err::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// Lists the files that this process has open below a directory.
fn open_below(dir: &Path) -> Vec<PathBuf> {
    let files = entries(Path::new("/proc/self/fd"));
    files.iter().filter_map(|fd| fs_err::read_link(fd).ok()).filter(|file| file.starts_with(dir)).collect()
}

/// On one thread, so that no stopped task can end before the error is returned.
#[tokio::test]
async fn a_failed_pull_releases_everything_before_it_returns() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("store");
    let store =
        Store::open(&root, StoreConfig { background_deletion: false, ..StoreConfig::default() }).unwrap();
    let registry = FaultRegistry::start();
    let layer = |name: &str| TarBuilder::new().with(TarBuilderEntry::file(name, vec![7; 300_000])).finish();
    let layers = [layer("stalls"), layer("fails")];
    let image = registry.put_image("shop/web", "1", PLAIN, &layers, &[]);
    let [stalls, fails] = [0, 1].map(|at: usize| image.layers[at].clone());
    registry.fault(FaultTrigger::path(&stalls), ResponseFault::StallAfter(100_000));
    registry.fault(FaultTrigger::path(&fails), ResponseFault::RetryAfter(429, "1".into()));
    let config = RegistryConfig { config_dirs: Vec::new(), proxy: Proxy::None, ..RegistryConfig::default() };
    let puller = StorePuller::new(store.clone(), RegistryClient::new(config), StorePullConfig::default());
    let name = Reference::parse(&registry.image("shop/web:1")).unwrap();
    let (staging, progress) = (root.join("staging"), ProgressReporter::unwatched());
    let mut pull = Box::pin(puller.pull(&name, None, &progress));
    while entries(&staging).is_empty() {
        tokio::select! {
            ended = &mut pull => panic!("it ended before anything was unpacked: {ended:?}"),
            () = tokio::time::sleep(Duration::from_millis(1)) => {}
        }
    }
    registry.clear_faults();
    registry.fault(FaultTrigger::path(&fails), ResponseFault::status(404));
    pull.as_mut().await.unwrap_err();

    let nothing: &[PathBuf] = &[];
    assert_eq!(entries(&staging), nothing, "no directory is left in which a layer was unpacked");
    for place in ["staging", "trash", "ingest"] {
        assert_eq!(open_below(&root.join(place)), nothing, "open below {place}");
    }
    let (digest, size) = (Digest::parse(&stalls).unwrap(), layers[0].len() as u64);
    let blob = BlobSource::registry(&name, TransferLogin::Anonymous, digest, size);
    store.ingest(&blob).expect("the ingest file is not in use");
}
