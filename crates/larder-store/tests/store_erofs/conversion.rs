//! Directories that become EROFS images.

use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::sync::Arc;

use larder_store::disk::DiskSpace;
use larder_store::fsck::FsckOptions;
use larder_store::mounts::MountOptions;
use larder_store::pull::{StorePullConfig, StorePuller};
use larder_store::store::import::ImportSource;
use larder_store::store::{LayerFormat, LayerHandle, Store, StoreConfig};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry, edge_case_layers};
use larder_testkit_peers::faulty_disk::{DiskFault, FaultyDisk, UnsyncedData};
use larder_testkit_peers::{ImageBuilder, LayerFiles};

use crate::help::*;
use crate::mounting::{MountTarget, can_mount};

fn with_directories() -> StoreConfig {
    StoreConfig { layer_format: LayerFormat::Directory, ..config() }
}

/// Loads an image into a store of directories.
fn load(root: &Path, scratch: &Path, image: &ImageBuilder) {
    let store = Store::open(root, with_directories()).unwrap();
    let layout = scratch.join("layout");
    image.write(&layout).unwrap();
    let client = larder_registry::RegistryClient::new(larder_registry::RegistryConfig::default());
    let puller = StorePuller::new(store, client, StorePullConfig::default());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let name = larder::reference::Reference::parse("registry.example/app").unwrap();
    runtime.block_on(puller.load(ImportSource::Path(layout), Some(name))).unwrap();
}

const APP: &str = "registry.example/app:image";

/// Everything that conversion has to carry over.
fn of_all_kinds() -> ImageBuilder {
    let lower = TarBuilder::new()
        .with(TarBuilderEntry::dir("etc").mode(0o750).owner(7, 70_000))
        .with(TarBuilderEntry::file("etc/old", "old"))
        .with(TarBuilderEntry::file("etc/linked", "linked"))
        .with(TarBuilderEntry::file("var/log/a", "a"))
        .finish();
    let upper = TarBuilder::new()
        .with(TarBuilderEntry::file("etc/.wh.old", ""))
        .with(TarBuilderEntry::file("var/log/.wh..wh..opq", ""))
        .with(TarBuilderEntry::file("var/log/b", "b").mode(0o4755))
        .with(TarBuilderEntry::hard_link("var/log/c", "var/log/b"))
        .with(TarBuilderEntry::symlink("usr/bin/sh", "../../bin/busybox"))
        .with(
            TarBuilderEntry::file("srv/large", vec![3; 300_000])
                .xattr("security.capability", b"\x01\0\0\x02\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"),
        )
        .finish();
    let [first, second] = edge_case_layers();
    let archives = [first, second, lower, upper];
    archives.into_iter().map(LayerFiles::archive).fold(ImageBuilder::new(), ImageBuilder::layer)
}

/// Kinds, modes, owners, times, links, attributes and content of a tree.
fn describe(root: &Path) -> String {
    let script = "find . -printf '%P %y %m %U %G %n %l %T@\\n' | sort; find . -type f | sort | xargs sha256sum; \
                  getfattr -Rhd -m - . 2>/dev/null";
    let output = std::process::Command::new("sh").args(["-c", script]).current_dir(root).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

fn target() -> (tempfile::TempDir, MountTarget) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mnt");
    fs_err::create_dir(&path).unwrap();
    (dir, MountTarget(path))
}

fn mounted(store: &Store) -> String {
    let (_dir, target) = target();
    store.mount(APP, &target.0, MountOptions { suid: true, ..MountOptions::default() }, noon()).unwrap();
    let described = describe(&target.0);
    store.umount(&target.0).unwrap();
    described
}

fn are_images(store: &Store) -> Vec<bool> {
    let image = store.image(APP).unwrap().unwrap();
    let layer = |key| -> LayerHandle { store.layer(key).unwrap().unwrap() };
    image.layers.iter().map(|found| layer(&found.key).image().is_some()).collect()
}

#[test]
fn converted_layers_show_what_the_directories_showed() {
    if !can_mount() {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let root = scratch.path().join("store");
    load(&root, scratch.path(), &of_all_kinds());
    let store = Store::open(&root, config()).unwrap();
    let (before, usage) = (mounted(&store), store.usage().unwrap().layers);
    assert!(before.contains("srv/large") && !before.contains("etc/old"), "{before}");
    assert_eq!(are_images(&store), [false; 4]);
    let report = store.convert_layers(DiskSpace::ZERO).unwrap();
    assert_eq!((report.converted, report.remaining), (4, vec![]));
    assert_eq!(are_images(&store), [true; 4]);
    assert_eq!(mounted(&store), before);
    let after = store.usage().unwrap().layers;
    assert_eq!(after.inodes, 4, "one for each layer");
    assert!(usage.inodes > 20);
    let checked = store.fsck(&FsckOptions::default()).unwrap();
    assert!(checked.is_sound() && checked.problems.is_empty(), "{checked:?}");
    assert_eq!(store.convert_layers(DiskSpace::ZERO).unwrap().converted, 0);
    drop(store);
    let (store, rebuilt) =
        Store::rebuild(&root, config(), &larder_store::fsck::ManifestLayerChecker).unwrap();
    assert_eq!((rebuilt.layers, rebuilt.damaged.len()), (4, 0), "{rebuilt:?}");
    assert_eq!(mounted(&store), before);
}

#[test]
fn a_directory_remains_while_it_is_mounted_or_if_it_is_damaged() {
    if !can_mount() {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let root = scratch.path().join("store");
    load(&root, scratch.path(), &of_all_kinds());
    let store = Store::open(&root, config()).unwrap();
    let (_dir, target) = target();
    store.mount(APP, &target.0, MountOptions::default(), noon()).unwrap();
    let report = store.convert_layers(DiskSpace::ZERO).unwrap();
    assert_eq!((report.converted, report.remaining.len()), (0, 4), "{report:?}");
    assert!(report.remaining.iter().all(|(_, reason)| reason == "in use"), "{report:?}");
    assert_eq!(fs_err::read_to_string(target.0.join("var/log/b")).unwrap(), "b");
    store.umount(&target.0).unwrap();
    let image = store.image(APP).unwrap().unwrap();
    let damaged = root.join("layers").join(image.layers[3].key.as_str()).join("fs/srv/large");
    let mut bytes = fs_err::read(&damaged).unwrap();
    bytes[7] ^= 1;
    fs_err::write(&damaged, bytes).unwrap();
    let report = store.convert_layers(DiskSpace::ZERO).unwrap();
    assert_eq!((report.converted, report.remaining.len()), (3, 1), "{report:?}");
    assert!(report.remaining[0].1.contains("srv/large: content differs"), "{report:?}");
    assert!(damaged.exists() && are_images(&store) == [true, true, true, false]);
}

#[test]
fn a_conversion_fails_before_it_uses_up_the_reserve() {
    if !can_mount() {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let root = scratch.path().join("store");
    load(&root, scratch.path(), &of_all_kinds());
    let store = Store::open(&root, config()).unwrap();
    let error = store.convert_layers(DiskSpace { bytes: 1 << 60, inodes: 0 }).unwrap_err();
    assert!(error.is_no_space() && error.hint().is_some(), "{error:?}");
    let shown = larder::error_chain(&error);
    assert!(shown.starts_with("cannot convert a layer: ") && shown.contains("insufficient space"), "{shown}");
    assert_eq!((are_images(&store), entries(&root.join("staging"))), (vec![false; 4], vec![]));
    // A layer that lacks a file is damaged, which does not end the conversion.
    let image = store.image(APP).unwrap().unwrap();
    let layer = root.join("layers").join(image.layers[3].key.as_str());
    fs_err::remove_file(layer.join("fs/srv/large")).unwrap();
    let report = store.convert_layers(DiskSpace::ZERO).unwrap();
    assert_eq!((report.converted, report.remaining.len()), (3, 1), "{report:?}");
}

#[test]
fn a_conversion_survives_power_loss_at_any_step() {
    if !can_mount() {
        return;
    }
    let disk = FaultyDisk::new();
    let scratch = tempfile::tempdir().unwrap();
    // Attributes do not survive on this disk.
    let files = LayerFiles::new().file("etc/motd", "kept").noise("srv/data", 50_000, 1);
    load(&disk.root().join("store"), scratch.path(), &ImageBuilder::new().layer(files));
    larder_store::disk::FilesystemSync::sync(&disk).unwrap();
    let open = |disk: &FaultyDisk| {
        // Its files are in memory, which only a loop device mounts.
        Store::open_on(Arc::new(disk.clone()), &disk.root().join("store"), config()).unwrap()
    };
    let mut images = [0; 2];
    for survives in
        [UnsyncedData::Nothing, UnsyncedData::Everything, UnsyncedData::Some(1), UnsyncedData::Some(2)]
    {
        for step in 0.. {
            let what = format!("power lost at step {step}, {survives:?} survives");
            let disk = disk.restarted(UnsyncedData::Everything);
            let store = open(&disk);
            store.erofs_mount().unwrap();
            disk.arm(DiskFault::LosesPowerAt(step));
            let done = store.convert_layers(DiskSpace::ZERO).is_ok_and(|report| report.converted == 1);
            let met = disk.has_failed();
            drop(store);
            let disk = disk.restarted(survives);
            let looked = Store::open_for_check(&disk.root().join("store"), config()).unwrap();
            let report = looked.fsck(&FsckOptions::default()).unwrap();
            assert!(report.is_sound() && report.problems.is_empty(), "{what}, before a repair: {report:?}");
            drop(looked);
            let store = open(&disk);
            let report = store.fsck(&FsckOptions::default()).unwrap();
            assert!(report.is_sound() && report.problems.is_empty(), "{what}: {report:?}");
            let image = are_images(&store);
            assert!(!done || image == [true], "{what}: it said that it was done");
            images[usize::from(image == [true])] += 1;
            let layer = store.image(APP).unwrap().unwrap().layers[0].key.clone();
            let root = store.layer(&layer).unwrap().unwrap().open_root().unwrap();
            let motd = format!("/proc/self/fd/{}/etc/motd", root.as_raw_fd());
            assert_eq!(fs_err::read_to_string(motd).unwrap(), "kept", "{what}");
            if image == [false] {
                assert_eq!(
                    store.convert_layers(DiskSpace::ZERO).unwrap().converted,
                    1,
                    "{what}: trying again"
                );
            }
            if !met {
                break;
            }
        }
    }
    assert!(images[0] > 4 && images[1] > 8, "{images:?} directories and images");
}
