//! Loads: streams that the disk has no room for, and warnings.

use std::io::{Cursor, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use larder_registry::{RegistryClient, RegistryConfig};
use larder_store::disk::DiskSpace;
use larder_store::pull::{LoadOptions, LoadOutcome, PullError, StorePullConfig, StorePuller};
use larder_store::store::Store;
use larder_store::store::admission::RemovableSpace;
use larder_store::store::import::ImportSource;
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use serde_json::json;

use crate::help::*;
use crate::imports::{amd64, tar_of};

/// Counts what is read of it.
struct CountingReader(Cursor<Vec<u8>>, Arc<AtomicUsize>);

impl Read for CountingReader {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let length = self.0.read(buffer)?;
        self.1.fetch_add(length, Ordering::Relaxed);
        Ok(length)
    }
}

/// Loads an archive where so much must stay free. Returns how much was read, too.
fn load(store: &Store, archive: Vec<u8>, reserve: DiskSpace) -> (Result<LoadOutcome, PullError>, usize) {
    let config = StorePullConfig { reserve, platform: amd64(), ..StorePullConfig::default() };
    let puller = StorePuller::new(store.clone(), RegistryClient::new(RegistryConfig::default()), config);
    let count = Arc::new(AtomicUsize::new(0));
    let from = ImportSource::Stream(Box::new(CountingReader(Cursor::new(archive), Arc::clone(&count))));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let loaded = runtime.block_on(puller.load(from, &LoadOptions::default()));
    (loaded, count.load(Ordering::Relaxed))
}

#[test]
fn a_load_reports_the_attributes_that_a_layer_leaves_out() {
    let scratch = TempStore::new();
    let file = TarBuilderEntry::file("a", "").xattr("user.overlay.opaque", "y").xattr("user.kept", "1");
    let layer = TarBuilder::new().with(file).finish();
    let rootfs = json!({ "type": "layers", "diff_ids": [digest(&layer).as_str()] });
    let config = json!({ "os": "linux", "architecture": "amd64", "rootfs": rootfs }).to_string();
    let config_name = format!("{}.json", digest(&config).hex());
    let tags = ["registry.example/app:1"];
    let manifest = json!([{ "Config": config_name, "RepoTags": tags, "Layers": ["layer.tar"] }]).to_string();
    let archive = tar_of(&[
        (config_name, config.into_bytes()),
        ("layer.tar".to_owned(), layer),
        ("manifest.json".to_owned(), manifest.into_bytes()),
    ]);
    // The second load has the layer already.
    for _ in 0..2 {
        let (loaded, _) = load(&scratch.store, archive.clone(), DiskSpace::default());
        let warnings = loaded.unwrap().images.pop().unwrap().warnings;
        assert_eq!(warnings, ["1 extended attributes that no kernel takes were left out"]);
    }
}

#[test]
fn a_stream_keeps_the_reserve_free() {
    let scratch = TempStore::new();
    let store = &scratch.store;
    commit(store, "app", &["a"]);
    let large = tar_of(&[("large".to_owned(), vec![0; 32 << 20])]);
    let many: Vec<_> = (0..3000).map(|number| (number.to_string(), Vec::new())).collect();
    for (archive, reserve) in [
        (large, DiskSpace { bytes: u64::MAX, inodes: 0 }),
        (tar_of(&many), DiskSpace { bytes: 0, inodes: u64::MAX }),
    ] {
        let length = archive.len();
        let (loaded, read) = load(store, archive, reserve);
        let error = loaded.expect_err("there is no room");
        let PullError::InsufficientSpace(full) = &error else { panic!("{error:?}") };
        assert_ne!(full.removable, RemovableSpace::NONE, "that of app");
        assert!(error.hint().is_some(), "{error}");
        assert!(read < length / 2 + (1 << 20) && read < 8 << 20, "{read} of {length}: {error}");
        for dir in ["staging", "trash"] {
            assert_eq!(entries(&store.root().join(dir)), [""; 0], "left in {dir}");
        }
    }
}
