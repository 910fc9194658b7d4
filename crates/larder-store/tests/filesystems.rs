//! Disk usage, and what a removal promises and frees, on the filesystems that nodes have.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use larder::backend::{Backend as _, ImageSpec, ProgressReporter, RemoveOptions};
use larder::reference::{Digest, Reference};
use larder_registry::{RegistryClient, RegistryConfig};
use larder_store::backend::StoreBackend;
use larder_store::disk::{DiskSpace, measure};
use larder_store::erofs::ErofsFile;
use larder_store::pull::{StorePullConfig, StorePuller};
use larder_store::store::{
    BlobSource, LAYER_FILE, LayerKey, LayerMetadata, Store, StoreConfig, StoreRemoval,
};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::fault_registry::FaultRegistry;
use larder_testkit_peers::process::poll;
use larder_testkit_peers::{LoopDisk, LoopFilesystem};

/// Files of all sizes: XFS reserves more blocks behind the end of an open file the larger it gets.
fn layer(seed: u8) -> Vec<u8> {
    let mut archive = TarBuilder::new();
    for number in 0..300_usize {
        let name = format!("usr/share/{seed}/{}/{number}", number % 20);
        archive = archive.with(TarBuilderEntry::file(name, vec![seed; number * 37]));
    }
    for (name, size) in [("lib.so", 300_000), ("tool", 3_000_000), ("model", 9_000_000)] {
        archive = archive.with(TarBuilderEntry::file(format!("usr/lib/{seed}/{name}"), vec![seed; size]));
    }
    archive.finish()
}

/// Three images: each has a layer of its own, and all have the base.
fn pull_three(store: &Store, registry: &FaultRegistry) -> Vec<String> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let config = StorePullConfig { reserve: DiskSpace::default(), ..StorePullConfig::default() };
    let puller = StorePuller::new(store.clone(), RegistryClient::new(RegistryConfig::default()), config);
    let pull = |seed: u8| {
        let name = format!("app-{seed}");
        let media_type = "application/vnd.oci.image.layer.v1.tar";
        registry.put_image(&name, "1", media_type, &[layer(0), layer(seed)], &[]);
        let name = Reference::parse(&format!("{}:1", registry.image(&name))).unwrap();
        runtime.block_on(puller.pull(&name, None, &ProgressReporter::unwatched())).unwrap().id.to_string()
    };
    [1, 2, 3].map(pull).to_vec()
}

fn open(disk: &LoopDisk) -> Store {
    let config = StoreConfig { background_deletion: false, ..StoreConfig::default() };
    Store::open(&disk.path().join("store"), config).unwrap()
}

/// Promised, said and measured, of one removal.
struct MeasuredRemoval {
    promised: DiskSpace,
    said: DiskSpace,
    freed: DiskSpace,
}

fn remove(disk: &LoopDisk, store: &Store, id: &str, estimated: bool) -> MeasuredRemoval {
    let promised = store.image_usages().unwrap().into_iter().find(|image| image.id.as_str() == id).unwrap();
    // The database grows now, if it has to.
    store.end_lease("none").unwrap();
    store.empty_trash().unwrap();
    let before = disk.free().unwrap().0;
    let StoreRemoval { freed: said, .. } = store.remove(id, &RemoveOptions::default()).unwrap().unwrap();
    store.empty_trash().unwrap();
    let freed = || {
        let after = disk.free().unwrap().0;
        DiskSpace {
            bytes: after.bytes.saturating_sub(before.bytes),
            inodes: after.inodes.saturating_sub(before.inodes),
        }
    };
    // XFS and btrfs free blocks in the background.
    let percent = if estimated { 90 } else { 99 };
    let enough = || Some(freed()).filter(|freed| freed.bytes >= promised.unique.bytes / 100 * percent);
    let freed = poll(Duration::from_secs(10), enough).unwrap_or_else(freed);
    MeasuredRemoval { promised: promised.unique, said, freed }
}

/// XFS reserves blocks behind the end of a file that is written in several parts.
fn assert_no_room_behind_the_end(layers: &Path) {
    for layer in fs_err::read_dir(layers).unwrap() {
        let layer = layer.unwrap().metadata().unwrap();
        assert!(layer.is_file() && layer.blocks() * 512 <= layer.len() + 65_536, "{layer:?}");
    }
}

#[track_caller]
fn assert_within_one_percent(what: &str, a: u64, b: u64) {
    assert!(a.abs_diff(b) <= a / 100, "{what}: {a} and {b}");
}

#[test]
fn a_removal_frees_what_was_promised() {
    let kinds = LoopFilesystem::ALL.into_iter().filter(|kind| kind.is_available());
    for kind in kinds {
        let (disk, registry) = (LoopDisk::new(kind, 256, &[]).unwrap(), FaultRegistry::start());
        let store = open(&disk);
        let images = pull_three(&store, &registry);
        let usage = store.usage().unwrap();
        disk.sync().unwrap();
        let on_disk = measure(store.root()).unwrap();
        assert_within_one_percent(&format!("{kind}: df and du"), usage.total().bytes, on_disk.bytes);
        assert_eq!(usage.total().inodes, on_disk.inodes, "{kind}");
        assert_no_room_behind_the_end(&store.root().join("layers"));
        let index = store.layer_usage_index().unwrap();
        let estimated = kind == LoopFilesystem::Btrfs;
        assert!(index.all().iter().all(|layer| layer.estimated == estimated), "{kind}: {index:?}");
        for id in &images {
            let MeasuredRemoval { promised, said, freed } = remove(&disk, &store, id, estimated);
            eprintln!("{kind}: promised {promised}, said {said}, freed {freed}");
            if estimated {
                continue;
            }
            // XFS also frees the blocks of inodes.
            let inodes = if kind == LoopFilesystem::Xfs { 512 * promised.inodes } else { 0 };
            for reported in [promised, said] {
                let off = reported.bytes.abs_diff(freed.bytes);
                assert!(off <= promised.bytes / 100 + inodes, "{kind}: {reported}, freed {freed}");
            }
            // XFS frees inodes in chunks of 64.
            if kind == LoopFilesystem::Ext4 {
                assert_eq!((promised.inodes, said.inodes), (freed.inodes, freed.inodes), "{kind}");
            }
        }
    }
}

#[test]
fn a_layer_on_xfs_is_measured_when_its_file_is_closed_and_synced() {
    let kind = LoopFilesystem::Xfs;
    if !kind.is_available() {
        return;
    }
    let disk = LoopDisk::new(kind, 256, &[]).unwrap();
    let store = open(&disk);
    let staging = store.begin_layer().unwrap();
    let file = staging.dir().join(LAYER_FILE);
    fs_err::write(&file, vec![1; 9_000_000]).unwrap();
    let digest = Digest::sha256("layer");
    let (key, diff_id) = (LayerKey::from(&digest), digest.clone());
    let blob = BlobSource::archive(digest.clone(), 1);
    let facts = LayerMetadata { diff_id, digest, compressed_bytes: 1, plain_bytes: 1, skipped_xattrs: 0 };
    let layer = staging.finish(&key, facts, ErofsFile::of(&file).unwrap(), &blob).unwrap();
    store.commit_layers(std::slice::from_ref(&layer), None).unwrap();
    let committed = store.layer(&key).unwrap().unwrap();
    assert_eq!(committed.record().usage, measure(layer.path()).unwrap());
}

#[test]
fn gc_gets_the_size_of_removed_files_unless_it_is_an_estimate() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let kinds = [LoopFilesystem::Ext4, LoopFilesystem::Btrfs].into_iter().filter(|kind| kind.is_available());
    for kind in kinds {
        let (disk, registry) = (LoopDisk::new(kind, 256, &[]).unwrap(), FaultRegistry::start());
        let store = open(&disk);
        let id = pull_three(&store, &registry).remove(0);
        store.end_lease("none").unwrap();
        let usages = store.image_usages().unwrap();
        let promised = usages.into_iter().find(|image| image.id.as_str() == id).unwrap().unique;
        let client = RegistryClient::new(RegistryConfig::default());
        let backend = StoreBackend::new(StorePuller::new(store.clone(), client, StorePullConfig::default()));
        let counted =
            runtime.block_on(backend.remove(&ImageSpec::named(&*id), &RemoveOptions::default())).unwrap();
        assert_eq!(counted.freed(), (kind == LoopFilesystem::Ext4).then_some(promised), "{kind}");
    }
}
