//! What only layers have that are EROFS images.

use std::path::{Path, PathBuf};

use larder_store::erofs::ErofsMountKind;
use larder_store::fsck::{FsckOptions, StoreDamage};
use larder_store::mounts::MountOptions;
use larder_store::store::{LayerFormat, Store, StoreConfig};

use crate::fsck::{breaks_app, layer_dir, two_images};
use crate::help::*;
use crate::mounting::{MountTarget, can_mount};

/// EROFS images that are mounted below a directory.
fn mounted_images(root: &Path) -> Vec<PathBuf> {
    let table = fs_err::read_to_string("/proc/self/mountinfo").unwrap();
    let erofs = table.lines().filter(|line| line.contains(" - erofs "));
    let targets = erofs.map(|line| PathBuf::from(line.split(' ').nth(4).unwrap()));
    targets.filter(|target| target.starts_with(root)).collect()
}

/// Loop devices whose file is below a directory.
fn loop_devices(root: &Path) -> usize {
    let devices = fs_err::read_dir("/sys/block").unwrap().map(|entry| entry.unwrap().path());
    let files = devices.filter_map(|device| fs_err::read_to_string(device.join("loop/backing_file")).ok());
    files.filter(|file| Path::new(file.trim()).starts_with(root)).count()
}

fn mount(store: &Store, target: &MountTarget) {
    store.mount("app", &target.0, MountOptions::default(), noon()).unwrap();
}

#[test]
fn damage_of_an_image_is_found_by_its_digest() {
    let scratch = two_images();
    damage_layer(&layer_dir(&scratch.store, "app"));
    let quick = FsckOptions { contents: false, ..FsckOptions::default() };
    assert!(scratch.store.fsck(&quick).unwrap().problems.is_empty(), "it has its size");
    breaks_app(
        &scratch,
        |damage| matches!(damage, StoreDamage::LayerDamaged { first, count: 1, .. } if first[0] == "image: content differs"),
    );
}

#[test]
fn an_image_that_is_cut_or_missing_is_found() {
    let scratch = two_images();
    let image = layer_dir(&scratch.store, "app");
    std::fs::File::options().write(true).open(&image).unwrap().set_len(4096).unwrap();
    breaks_app(&scratch, |damage| damage.to_string().contains("image: size differs"));
    fs_err::remove_file(image).unwrap();
    breaks_app(&scratch, |damage| matches!(damage, StoreDamage::LayerMissing { .. }));
}

/// Those that this kernel supports: mounts from files need Linux 6.12.
fn mount_kinds() -> Vec<ErofsMountKind> {
    let mut kinds = vec![ErofsMountKind::LoopDevice];
    if TempStore::new().store.erofs_mount().unwrap() == ErofsMountKind::File {
        kinds.push(ErofsMountKind::File);
    } else {
        eprintln!("==== SKIPPED, NOT TESTED: EROFS mounts from files need Linux 6.12 ====");
    }
    kinds
}

#[test]
fn layers_are_mounted_once_for_all_and_unmounted_with_their_last_use() {
    if !can_mount() {
        return;
    }
    for kind in mount_kinds() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("store");
        let config = || StoreConfig { erofs_mount: Some(kind), ..config() };
        let store = Store::open(&root, config()).unwrap();
        commit(&store, "app", &["a", "b"]);
        commit(&store, "other", &["a", "c"]);
        let scratch = TempStore { store, dir };
        let [one, two, three] = ["one", "two", "three"].map(|name| MountTarget::new(&scratch, name));
        mount(&scratch.store, &one);
        mount(&scratch.store, &two);
        scratch.store.mount("other", &three.0, MountOptions::default(), noon()).unwrap();
        assert_eq!(mounted_images(&root).len(), 3, "{kind:?}");
        let devices = if kind == ErofsMountKind::LoopDevice { 3 } else { 0 };
        assert_eq!(loop_devices(&root), devices, "{kind:?}");
        let TempStore { store, dir } = scratch;
        drop(store);
        let store = Store::open(&root, config()).unwrap();
        assert_eq!(mounted_images(&root).len(), 3, "found again, {kind:?}");
        store.umount(&one.0).unwrap();
        store.umount(&three.0).unwrap();
        assert_eq!(fs_err::read_to_string(two.0.join("etc/name")).unwrap(), "b");
        assert_eq!(mounted_images(&root).len(), 2, "{kind:?}");
        store.umount(&two.0).unwrap();
        assert_eq!((mounted_images(&root).len(), loop_devices(&root)), (0, 0), "{kind:?}");
        assert!(entries(&root.join("lowers")).is_empty());
        drop(dir);
    }
}

#[test]
fn mounts_that_a_dead_process_left_behind_are_removed() {
    if !can_mount() {
        return;
    }
    let scratch = TempStore::new();
    commit(&scratch.store, "app", &["a", "b"]);
    let target = MountTarget::new(&scratch, "mnt");
    mount(&scratch.store, &target);
    // As if it had died before the overlay, or the overlay had been unmounted by another program.
    rustix::mount::unmount(&target.0, rustix::mount::UnmountFlags::empty()).unwrap();
    assert_eq!(mounted_images(&scratch.root()).len(), 2);
    let scratch = scratch.reopen();
    assert!(mounted_images(&scratch.root()).is_empty());
    assert!(scratch.store.mounts().unwrap().is_empty());
}

#[test]
fn directories_and_images_are_layers_of_one_mount() {
    if !can_mount() {
        return;
    }
    let scratch = TempStore::new();
    let staging = scratch.store.begin_layer().unwrap();
    let fs = staging.dir().join(larder_store::store::FS);
    fs_err::create_dir_all(fs.join("etc")).unwrap();
    fs_err::write(fs.join("etc/name"), "directory").unwrap();
    fs_err::write(fs.join("etc/below"), "directory").unwrap();
    let directory = staging.finish(&key("directory"), facts("directory"), None).unwrap();
    let layers = [directory, layer(&scratch.store, "a")];
    scratch.store.commit(&image(&["app"], &layers), noon()).unwrap();
    let target = MountTarget::new(&scratch, "mnt");
    mount(&scratch.store, &target);
    let read = |path| fs_err::read_to_string(target.0.join(path)).unwrap();
    assert_eq!((read("etc/name"), read("etc/below")), ("a".into(), "directory".into()));
    scratch.store.umount(&target.0).unwrap();
}

#[test]
fn a_store_describes_how_new_layers_are_stored() {
    let described = |layer_format, erofs_mount| {
        let dir = tempfile::tempdir().unwrap();
        let config = StoreConfig { layer_format, erofs_mount, ..config() };
        Store::open(dir.path(), config).unwrap().describe_layers()
    };
    assert_eq!(described(LayerFormat::Directory, None), "directories");
    let file = Some(ErofsMountKind::File);
    assert_eq!(described(LayerFormat::Auto, file), "EROFS images, mounted from files");
    let device = Some(ErofsMountKind::LoopDevice);
    assert_eq!(described(LayerFormat::Erofs, device), "EROFS images, mounted through loop devices");
    if can_mount() {
        // Tried on this kernel, whichever way it is.
        assert!(described(LayerFormat::Auto, None).starts_with("EROFS images, mounted "));
    }
}
