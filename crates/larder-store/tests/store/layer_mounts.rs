//! Layers in the store: their damage, and how they are mounted.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use larder_store::disk::DiskSpace;
use larder_store::erofs::LayerMountKind;
use larder_store::fsck::{FsckOptions, StoreDamage};
use larder_store::mounts::MountOptions;
use larder_store::store::{Store, StoreConfig};

use larder_testkit::archive::TarBuilderEntry;
use larder_testkit_peers::faulty_disk::{DiskFault, FaultyDisk, UnsyncedData};

use crate::fsck::{breaks_app, layer_dir, two_images, unpacked_entries};
use crate::help::*;
use crate::mounting::{MountTarget, can_mount};

/// EROFS filesystems that are mounted below a directory.
fn mounted_layers(root: &Path) -> Vec<PathBuf> {
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
fn damage_of_a_layer_is_found_by_its_digest() {
    let scratch = two_images();
    damage_layer(&layer_dir(&scratch.store, "app"));
    let quick = FsckOptions { contents: false, ..FsckOptions::default() };
    assert!(scratch.store.fsck(&quick).unwrap().problems.is_empty(), "it has its size");
    breaks_app(
        &scratch,
        |damage| matches!(damage, StoreDamage::LayerDamaged { damage, .. } if damage == "EROFS: content differs"),
    );
}

#[test]
fn a_layer_that_is_cut_or_missing_is_found() {
    let scratch = two_images();
    let layer = layer_dir(&scratch.store, "app");
    std::fs::File::options().write(true).open(&layer).unwrap().set_len(4096).unwrap();
    breaks_app(&scratch, |damage| damage.to_string().contains("EROFS: size differs"));
    fs_err::remove_file(layer).unwrap();
    breaks_app(&scratch, |damage| matches!(damage, StoreDamage::LayerMissing { .. }));
}

/// Lists the kinds of mounts that this kernel supports: mounts from files need Linux 6.12.
fn mount_kinds() -> Vec<LayerMountKind> {
    let mut kinds = vec![LayerMountKind::LoopDevice];
    if TempStore::new().store.erofs_mount().unwrap() == LayerMountKind::File {
        kinds.push(LayerMountKind::File);
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
        if kind == LayerMountKind::File {
            let table = fs_err::read_to_string("/proc/self/mountinfo").unwrap();
            let ours = table.lines().filter(|line| line.contains(&format!("{}/lowers/", root.display())));
            let mut sources = ours.filter_map(|line| line.split_once(" - erofs ")?.1.split(' ').next());
            assert!(sources.all(|source| Path::new(source).starts_with(root.join("layers"))), "{table}");
        }
        assert_eq!(mounted_layers(&root).len(), 3, "{kind:?}");
        let devices = if kind == LayerMountKind::LoopDevice { 3 } else { 0 };
        assert_eq!(loop_devices(&root), devices, "{kind:?}");
        let TempStore { store, dir } = scratch;
        drop(store);
        let store = Store::open(&root, config()).unwrap();
        assert_eq!(mounted_layers(&root).len(), 3, "found again, {kind:?}");
        store.umount(&one.0).unwrap();
        store.umount(&three.0).unwrap();
        assert_eq!(fs_err::read_to_string(two.0.join("etc/name")).unwrap(), "b");
        assert_eq!(mounted_layers(&root).len(), 2, "{kind:?}");
        store.umount(&two.0).unwrap();
        assert_eq!((mounted_layers(&root).len(), loop_devices(&root)), (0, 0), "{kind:?}");
        assert!(entries(&root.join("lowers")).is_empty());
        drop(dir);
    }
}

#[test]
fn layers_that_cannot_be_mounted_are_extracted_until_their_last_use() {
    if !can_mount() {
        return;
    }
    let config = || StoreConfig { erofs_mount: Some(LayerMountKind::Extracted), ..config() };
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("store"), config()).unwrap();
    let lower = [
        TarBuilderEntry::dir(".").mode(0o711),
        TarBuilderEntry::file("etc/gone", "gone"),
        TarBuilderEntry::file("etc/kept", "kept").mode(0o4755).owner(7, 8),
        TarBuilderEntry::hard_link("etc/again", "etc/kept"),
        TarBuilderEntry::file("opaque/gone", "gone"),
    ];
    let upper = [
        TarBuilderEntry::dir(".").mode(0o711),
        TarBuilderEntry::file("etc/.wh.gone", ""),
        TarBuilderEntry::file("opaque/.wh..wh..opq", ""),
        TarBuilderEntry::file("opaque/new", "new"),
    ];
    let layers = [unpacked_entries(&store, lower), unpacked_entries(&store, upper)];
    store.commit(&image(&["app"], &layers), noon()).unwrap();
    drop(layers);
    let before = store.usage().unwrap().extracted;
    let scratch = TempStore { store, dir };
    let [one, two] = ["one", "two"].map(|name| MountTarget::new(&scratch, name));
    mount(&scratch.store, &one);
    let TempStore { store, dir } = scratch;
    assert!(mounted_layers(store.root()).is_empty());
    assert!(store.describe_layers().contains("extracted"));
    let names = |path: &str| entries(&one.0.join(path));
    assert_eq!(
        (names("etc"), names("opaque")),
        (vec!["again".into(), "kept".into()], vec!["new".to_owned()])
    );
    let meta = fs_err::metadata(one.0.join("etc/kept")).unwrap();
    assert_eq!((meta.mode() & 0o7777, meta.uid(), meta.gid(), meta.nlink()), (0o4755, 7, 8, 2));
    assert_eq!(fs_err::metadata(&one.0).unwrap().mode() & 0o7777, 0o711);
    assert!(store.usage().unwrap().extracted.inodes > before.inodes + 8, "extracted layers count");
    let root = store.root().to_owned();
    drop(store);
    let store = Store::open(&root, config()).unwrap();
    let extracted = || entries(&root.join("extracted"));
    assert_eq!(extracted().len(), 2, "found again");
    store.mount("app", &two.0, MountOptions::default(), noon()).unwrap();
    store.umount(&one.0).unwrap();
    assert_eq!(fs_err::read_to_string(two.0.join("etc/kept")).unwrap(), "kept");
    store.umount(&two.0).unwrap();
    assert!(extracted().is_empty());
    drop(dir);
}

/// Overlayfs lists a directory that only one layer has as it is in the layer.
#[test]
fn a_mount_does_not_list_the_whiteouts_of_a_directory_that_only_one_layer_has() {
    if !can_mount() {
        return;
    }
    let mut kinds: Vec<_> = mount_kinds().into_iter().map(Some).collect();
    kinds.push(Some(LayerMountKind::Extracted));
    for kind in kinds {
        let dir = tempfile::tempdir().unwrap();
        let store =
            Store::open(&dir.path().join("store"), StoreConfig { erofs_mount: kind, ..config() }).unwrap();
        let lower = [TarBuilderEntry::file("both/gone", "1"), TarBuilderEntry::file("both/kept", "2")];
        let names = ["only/.wh.gone", "only/kept", "only/below/.wh.gone", "both/.wh.gone", ".wh.gone"];
        let upper = names.map(|name| TarBuilderEntry::file(name, ""));
        let layers = [unpacked_entries(&store, lower), unpacked_entries(&store, upper)];
        store.commit(&image(&["app"], &layers), noon()).unwrap();
        store.commit(&image(&["alone"], &layers[1..]), noon()).unwrap();
        let scratch = TempStore { store, dir };
        for (image, names_in_both) in [("app", vec!["kept".to_owned()]), ("alone", vec![])] {
            let target = MountTarget::new(&scratch, image);
            scratch.store.mount(image, &target.0, MountOptions::default(), noon()).unwrap();
            let names = |path: &str| entries(&target.0.join(path));
            assert_eq!(names(""), ["both", "only"], "{image} {kind:?}");
            assert_eq!(names("only"), ["below", "kept"], "{image} {kind:?}");
            assert_eq!(names("only/below"), [""; 0], "{image} {kind:?}");
            assert_eq!(names("both"), names_in_both, "{image} {kind:?}");
            scratch.store.umount(&target.0).unwrap();
        }
    }
}

/// Settings of a store that extracts layers for mounts.
fn extracting() -> StoreConfig {
    StoreConfig { erofs_mount: Some(LayerMountKind::Extracted), ..config() }
}

/// Commits an image of one layer whose root cannot be written to.
fn commit_read_only_root(store: &Store) {
    let entries = [
        TarBuilderEntry::dir(".").mode(0o555),
        TarBuilderEntry::file("etc/name", "content").mode(0o444).owner(7, 8),
        TarBuilderEntry::char_device("dev/null", 1, 3),
        TarBuilderEntry::hard_link("dev/other", "dev/null"),
    ];
    let layers = [unpacked_entries(store, entries)];
    store.commit(&image(&["app"], &layers), noon()).unwrap();
}

#[test]
fn an_extraction_survives_power_loss_at_any_step() {
    if !can_mount() {
        return;
    }
    let open = |disk: &FaultyDisk| {
        Store::open_on(Arc::new(disk.clone()), &disk.root().join("store"), extracting()).unwrap()
    };
    let prepared = FaultyDisk::new();
    commit_read_only_root(&open(&prepared));
    for survives in [UnsyncedData::Nothing, UnsyncedData::Everything, UnsyncedData::Some(1)] {
        for step in 0.. {
            let what = format!("power lost at step {step}, {survives:?} survives");
            let disk = prepared.restarted(UnsyncedData::Everything);
            let store = open(&disk);
            let scratch = TempStore { store, dir: tempfile::tempdir().unwrap() };
            let target = MountTarget::new(&scratch, "mnt");
            disk.arm(DiskFault::LosesPowerAt(step));
            let _ = scratch.store.mount("app", &target.0, MountOptions::default(), noon());
            let has_failed = disk.has_failed();
            let _ = rustix::mount::unmount(&target.0, rustix::mount::UnmountFlags::DETACH);
            let TempStore { store, dir } = scratch;
            drop(store);
            let disk = disk.restarted(survives);
            let scratch = TempStore { store: open(&disk), dir };
            let report = scratch.store.fsck(&FsckOptions::default()).unwrap();
            assert!(report.is_sound() && report.problems.is_empty(), "{what}: {report:?}");
            mount(&scratch.store, &target);
            assert_eq!(fs_err::read_to_string(target.0.join("etc/name")).unwrap(), "content", "{what}");
            scratch.store.umount(&target.0).unwrap();
            assert!(entries(&scratch.store.root().join("extracted")).is_empty(), "{what}");
            assert!(entries(&scratch.store.root().join("staging")).is_empty(), "{what}");
            if !has_failed {
                assert!(step > 3, "something was done");
                break;
            }
        }
    }
}

#[test]
fn an_extraction_leaves_the_reserve_free() {
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let reserve = DiskSpace { bytes: u64::MAX / 2, inodes: 0 };
    let store = Store::open(&dir.path().join("store"), StoreConfig { reserve, ..extracting() }).unwrap();
    commit_read_only_root(&store);
    let scratch = TempStore { store, dir };
    let target = MountTarget::new(&scratch, "mnt");
    let error = scratch.store.mount("app", &target.0, MountOptions::default(), noon()).unwrap_err();
    let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
    assert!(cause.contains("insufficient space"), "{error}: {cause}");
    assert!(entries(&scratch.store.root().join("extracted")).is_empty());
    scratch.store.empty_trash().unwrap();
    assert!(entries(&scratch.store.root().join("staging")).is_empty());
}

#[test]
fn extracted_layers_that_no_mount_has_or_that_are_not_complete_are_leftovers() {
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("store"), extracting()).unwrap();
    commit_read_only_root(&store);
    let key = store.image("app").unwrap().unwrap().layers[0].key.to_string();
    let scratch = TempStore { store, dir };
    let target = MountTarget::new(&scratch, "mnt");
    mount(&scratch.store, &target);
    let extracted = scratch.store.root().join("extracted");
    let unknown = "f".repeat(64);
    for name in [&unknown, &format!("{key}.user"), "notes"] {
        fs_err::create_dir(extracted.join(name)).unwrap();
    }
    fs_err::create_dir(extracted.join(&unknown).join("fs")).unwrap();
    let repair = FsckOptions { repair: true, ..FsckOptions::default() };
    let report = scratch.store.fsck(&repair).unwrap();
    let leftovers = report.problems.iter().filter(|problem| problem.found.to_string().contains("extracted"));
    assert_eq!(leftovers.count(), 3, "{report:?}");
    assert_eq!(entries(&extracted), [key], "the one that is mounted stays");
    assert_eq!(fs_err::read_to_string(target.0.join("etc/name")).unwrap(), "content");
    scratch.store.umount(&target.0).unwrap();
}

const IN_NAMESPACE: &str = "LARDER_TEST_IN_USER_NAMESPACE";

#[test]
fn a_user_namespace_extracts_layers_and_mounts_them() {
    if std::env::var_os(IN_NAMESPACE).is_some() {
        return mount_in_user_namespace();
    }
    if !can_mount() {
        return;
    }
    let run = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "--propagation", "private"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "layer_mounts::a_user_namespace_extracts_layers_and_mounts_them", "--nocapture"])
        .env(IN_NAMESPACE, "1")
        .output()
        .unwrap();
    let output = String::from_utf8_lossy(&run.stdout).into_owned() + &String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success() && output.contains("1 passed"), "{output}");
}

fn mount_in_user_namespace() {
    let scratch = TempStore::new();
    commit_read_only_root(&scratch.store);
    assert!(scratch.store.describe_layers().contains("extracted"));
    let [one, two] = ["one", "two"].map(|name| MountTarget::new(&scratch, name));
    mount(&scratch.store, &one);
    mount(&scratch.store, &two);
    assert_eq!(fs_err::read_to_string(one.0.join("etc/name")).unwrap(), "content");
    assert_eq!(fs_err::metadata(&one.0).unwrap().mode() & 0o7777, 0o555);
    assert!(entries(&one.0.join("dev")).is_empty(), "a user namespace makes no devices");
    scratch.store.umount(&one.0).unwrap();
    let extracted = entries(&scratch.store.root().join("extracted"));
    assert!(extracted.len() == 1 && extracted[0].strip_suffix(".user").is_some(), "{extracted:?}");
    scratch.store.umount(&two.0).unwrap();
    assert!(entries(&scratch.store.root().join("extracted")).is_empty());
    scratch.store.empty_trash().unwrap();
    assert!(entries(&scratch.store.root().join("trash")).is_empty());
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
    assert_eq!(mounted_layers(&scratch.root()).len(), 2);
    let scratch = scratch.reopen();
    assert!(mounted_layers(&scratch.root()).is_empty());
    assert!(scratch.store.mounts().unwrap().is_empty());
}

#[test]
fn a_store_describes_how_layers_are_mounted() {
    let described = |erofs_mount| {
        let dir = tempfile::tempdir().unwrap();
        let config = StoreConfig { erofs_mount, ..config() };
        Store::open(dir.path(), config).unwrap().describe_layers()
    };
    assert_eq!(described(Some(LayerMountKind::File)), "EROFS, mounted from files");
    assert_eq!(described(Some(LayerMountKind::LoopDevice)), "EROFS, mounted through loop devices");
    if can_mount() {
        // Tried on this kernel, whichever way it is.
        assert!(described(None).starts_with("EROFS, mounted "));
    }
}
