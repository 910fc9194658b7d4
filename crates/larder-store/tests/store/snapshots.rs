//! Snapshots of containerd: layers of the store as snapshots, and what retains what.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use larder_store::disk::{Disk as _, FileOpenMode};
use larder_store::fsck::{FsckReport, RepairState, StoreDamage};
use larder_store::mounts::MountOptions;
use larder_store::snapshots::{NewSnapshot, SnapshotError, SnapshotMount};
use larder_store::store::{RemoveOptions, SnapshotKind, Store};
use larder_testkit_peers::faulty_disk::{FaultyDisk, UnsyncedData};

use crate::fsck::{check, layer_dir, rebuild, repair, two_images, unpacked};
use crate::help::{TempStore, commit, config, damage_layer, digest, entries, is_damaged, key, noon};
use crate::mounting::can_mount;

pub(crate) fn new(key: &str, parent: &str) -> NewSnapshot {
    NewSnapshot { key: key.into(), parent: parent.into(), labels: BTreeMap::new() }
}

/// Adopts the layers of an image; returns the keys of their snapshots.
pub(crate) fn adopt_all(store: &Store, image: &str) -> Vec<String> {
    let chains = store.image(image).unwrap().expect("an image").chain_ids();
    let mut keys: Vec<String> = Vec::new();
    for chain in chains {
        let parent = keys.last().cloned().unwrap_or_default();
        keys.push(store.adopt_layer(&chain, new("", &parent), noon()).unwrap().expect("the store has it"));
    }
    keys
}

fn remove_image(store: &Store, image: &str) -> Vec<String> {
    let removed = store.remove(image, &RemoveOptions::default()).unwrap().expect("an image");
    removed.layers.iter().map(|key| key.as_str().to_owned()).collect()
}

#[test]
fn layers_of_snapshots_are_retained_until_containerd_removes_these() {
    let temp = TempStore::new();
    commit(&temp.store, "r.example/app:1", &["a", "b"]);
    let keys = adopt_all(&temp.store, "r.example/app:1");
    assert_eq!(adopt_all(&temp.store, "r.example/app:1"), keys, "they exist");
    let top = temp.store.snapshot(&keys[1]).unwrap();
    assert_eq!(
        (top.parent.as_str(), top.kind, top.layer),
        (keys[0].as_str(), SnapshotKind::Committed, Some(key("b")))
    );
    assert!(top.usage.bytes > 0);

    assert_eq!(
        remove_image(&temp.store, "r.example/app:1"),
        Vec::<String>::new(),
        "snapshots have its layers"
    );
    let temp = temp.reopen();
    assert_eq!(entries(&temp.root().join("layers")).len(), 2);
    assert!(matches!(temp.store.remove_snapshot(&keys[0]), Err(SnapshotError::Precondition { .. })));
    temp.store.remove_snapshot(&keys[1]).unwrap();
    assert_eq!(entries(&temp.root().join("layers")), [key("a").as_str()]);
    temp.store.remove_snapshot(&keys[0]).unwrap();
    assert_eq!(entries(&temp.root().join("layers")), Vec::<String>::new());
    assert_eq!(temp.store.snapshots().unwrap(), []);
}

#[test]
fn only_the_layer_in_the_place_of_the_chain_is_adopted() {
    let temp = TempStore::new();
    commit(&temp.store, "r.example/app:1", &["a", "b"]);
    commit(&temp.store, "r.example/other:1", &["b"]);
    let chains = temp.store.image("r.example/app:1").unwrap().unwrap().chain_ids();
    let unknown = digest("of nothing");
    assert_eq!(temp.store.adopt_layer(&unknown, new("", ""), noon()).unwrap(), None);
    // One chain on two parents is two snapshots, which containerd distinguishes by their parent.
    temp.store.create_snapshot(new("k8s.io/1/extract", ""), true, noon()).unwrap();
    temp.store.commit_snapshot("k8s.io/1/extract", new("k8s.io/2/unpacked", ""), noon()).unwrap();
    let keys = adopt_all(&temp.store, "r.example/app:1");
    let on_other = temp.store.adopt_layer(&chains[1], new("", "k8s.io/2/unpacked"), noon()).unwrap().unwrap();
    assert_ne!(on_other, keys[1]);
    assert_eq!(temp.store.snapshot(&on_other).unwrap().parent, "k8s.io/2/unpacked");
    let missing = temp.store.adopt_layer(&chains[1], new("", "none"), noon());
    assert!(matches!(missing, Err(SnapshotError::NotFound { .. })), "{missing:?}");
}

/// The lower directories of an overlay, as the kernel would find them.
fn lowers(mounts: &[SnapshotMount]) -> Vec<String> {
    let lowers = mounts[0].options.iter().find_map(|option| option.strip_prefix("lowerdir=")).unwrap();
    let name = |lower: &str| fs_err::read_to_string(Path::new(lower).join("etc/name")).unwrap();
    lowers.split(':').map(name).collect()
}

#[test]
fn layers_below_an_active_snapshot_are_mounted_again_after_a_reboot() {
    if !can_mount() {
        return;
    }
    let temp = TempStore::new();
    commit(&temp.store, "r.example/app:1", &["a", "b", "a"]);
    let keys = adopt_all(&temp.store, "r.example/app:1");
    let mounts = temp.store.create_snapshot(new("k8s.io/9/c", &keys[2]), true, noon()).unwrap();
    assert_eq!(lowers(&mounts), ["a", "b"], "a layer that is there twice is named once");
    // What a reboot ends.
    let root = temp.root();
    for name in entries(&root)
        .contains(&"lowers".to_owned())
        .then(|| entries(&root.join("lowers")))
        .into_iter()
        .flatten()
    {
        rustix::mount::unmount(root.join("lowers").join(name), rustix::mount::UnmountFlags::DETACH).unwrap();
    }
    let temp = temp.reopen();
    assert_eq!(temp.store.snapshot_mounts("k8s.io/9/c").unwrap(), mounts);
    assert_eq!(lowers(&mounts), ["a", "b"]);
    remove_image(&temp.store, "r.example/app:1");
    assert_eq!(lowers(&mounts), ["a", "b"]);
    for key in ["k8s.io/9/c", &keys[2], &keys[1], &keys[0]] {
        temp.store.remove_snapshot(key).unwrap();
    }
    assert!(entries(&root.join("snapshots")).is_empty() && entries(&root.join("layers")).is_empty());
    let mounted = fs_err::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounted.contains(&root.display().to_string()), "{mounted}");
}

#[test]
fn an_image_that_a_container_or_a_mount_begins_to_use_is_reported_once() {
    if !can_mount() {
        return;
    }
    let temp = TempStore::new();
    commit(&temp.store, "r.example/base:1", &["a"]);
    commit(&temp.store, "r.example/app:1", &["a", "b"]);
    let used = || -> Vec<String> {
        let used = temp.store.take_begun_uses().unwrap().into_iter();
        used.map(|activity| activity.image.to_string()).collect()
    };
    let id = |name: &str| temp.store.image(name).unwrap().expect("an image").id.to_string();
    let keys = adopt_all(&temp.store, "r.example/app:1");
    // containerd unpacks the layer of another image on those of this one.
    let mut unpacked = new("k8s.io/8/extract", &keys[0]);
    unpacked.labels.insert("containerd.io/snapshot.ref".into(), digest("of another").to_string());
    temp.store.create_snapshot(unpacked, true, noon()).unwrap();
    assert_eq!(used(), [""; 0]);
    temp.store.create_snapshot(new("k8s.io/9/container", &keys[1]), true, noon()).unwrap();
    temp.store.remove_snapshot("k8s.io/9/container").unwrap();
    assert_eq!(used(), [id("r.example/app:1")]);
    assert_eq!(used(), [""; 0]);
    let target = temp.root().with_file_name("target");
    fs_err::create_dir(&target).unwrap();
    temp.store.mount("r.example/base:1", &target, MountOptions::default(), noon()).unwrap();
    temp.store.umount(&target).unwrap();
    assert_eq!(used(), [id("r.example/base:1")]);
    temp.store.remove_snapshot("k8s.io/8/extract").unwrap();
}

#[test]
fn a_damaged_layer_is_no_part_of_a_mount() {
    let temp = TempStore::new();
    commit(&temp.store, "r.example/app:1", &["a"]);
    let keys = adopt_all(&temp.store, "r.example/app:1");
    let root = temp.root();
    let dir = temp.dir;
    drop(temp.store);
    fs_err::remove_file(root.join("layers").join(key("a").as_str())).unwrap();
    let store = Store::open(&root, config()).unwrap();
    let refused = store.create_snapshot(new("k8s.io/9/c", &keys[0]), true, noon()).unwrap_err();
    assert!(refused.to_string().contains("not found in the store"), "{refused}");
    assert!(
        matches!(store.snapshot("k8s.io/9/c"), Err(SnapshotError::NotFound { .. })),
        "nothing is left of it"
    );
    // The row stays: containerd has it, and another pull of the image brings its files back.
    assert_eq!(store.snapshot(&keys[0]).unwrap().key, keys[0]);
    commit(&store, "r.example/app:1", &["a"]);
    if can_mount() {
        store.create_snapshot(new("k8s.io/9/c", &keys[0]), true, noon()).unwrap();
        store.remove_snapshot("k8s.io/9/c").unwrap();
    }
    drop(dir);
}

#[test]
fn a_damaged_layer_of_a_committed_snapshot_is_replaced_by_a_pull() {
    let temp = two_images();
    let path = layer_dir(&temp.store, "app");
    let keys = adopt_all(&temp.store, "app");
    damage_layer(&path);
    let found = |report: FsckReport| report.problems.into_iter().next().unwrap();
    let problem = found(repair(&temp.store));
    assert!(
        problem.repair == RepairState::AwaitsPull
            && matches!(problem.found, StoreDamage::LayerDamaged { .. }),
        "{problem:?}"
    );
    let again = || unpacked(&temp.store, "app", &[("bin/tool", "#!tool"), ("etc/conf", "a=1")]);
    again();
    assert!(!is_damaged(&path) && check(&temp.store).is_sound());
    if !can_mount() {
        return;
    }
    // A container runs from it.
    temp.store.create_snapshot(new("k8s.io/9/c", &keys[0]), true, noon()).unwrap();
    damage_layer(&path);
    assert_eq!(found(repair(&temp.store)).repair, RepairState::AwaitsPull);
    again();
    assert!(!is_damaged(&path) && check(&temp.store).is_sound());
    temp.store.remove_snapshot("k8s.io/9/c").unwrap();
    assert!(check(&temp.store).is_sound());
}

#[test]
fn a_damaged_layer_that_only_a_snapshot_has_is_not_reported_as_repaired() {
    let temp = two_images();
    let path = layer_dir(&temp.store, "app");
    adopt_all(&temp.store, "app");
    remove_image(&temp.store, "app");
    damage_layer(&path);
    for report in [check(&temp.store), repair(&temp.store)] {
        let [problem] = report.problems.as_slice() else { panic!("{report:?}") };
        assert!(
            problem.repair == RepairState::Open && !report.is_sound(),
            "nothing can fetch it: {problem:?}"
        );
        assert!(problem.found.hint().to_string().contains("pull the image again"), "{problem:?}");
    }
}

#[test]
fn a_rebuild_retains_the_files_of_a_snapshot_without_a_record() {
    let temp = TempStore::new();
    let root = temp.root();
    for name in ["written", "empty", "known"] {
        temp.store.create_snapshot(new(name, ""), true, noon()).unwrap();
    }
    fs_err::write(root.join("snapshots/1/fs/data"), "of a container").unwrap();
    let (temp, rebuilt) = rebuild(temp, |root| {
        for id in ["1", "2"] {
            fs_err::write(root.join("snapshots").join(id).join("snapshot.json"), "").unwrap();
        }
    });
    assert!(rebuilt.left_out.len() == 1 && rebuilt.left_out[0].ends_with("lost-snapshots/1"), "{rebuilt:?}");
    assert_eq!(entries(&root.join("snapshots")), ["3"], "nothing was in the other one");
    assert_eq!(temp.store.snapshots().unwrap().len(), 1);
    for report in [check(&temp.store), repair(&temp.store)] {
        let [problem] = report.problems.as_slice() else { panic!("{report:?}") };
        assert!(
            matches!(problem.found, StoreDamage::LostSnapshot { .. }) && !report.is_sound(),
            "{report:?}"
        );
    }
    let temp = temp.reopen();
    let lost = root.join("lost-snapshots");
    assert_eq!(fs_err::read_to_string(lost.join("1/fs/data")).unwrap(), "of a container");
    fs_err::remove_dir_all(&lost).unwrap();
    assert!(check(&temp.store).is_sound());
}

#[test]
fn a_snapshot_survives_a_power_cut_and_the_loss_of_the_database() {
    let disk = FaultyDisk::new();
    let store = Store::open_on(Arc::new(disk.clone()), &disk.root().join("store"), config()).unwrap();
    store.create_snapshot(new("k8s.io/9/c", ""), true, noon()).unwrap();
    drop(store);
    let disk = disk.restarted(UnsyncedData::Nothing);
    let root = disk.root().join("store");
    fs_err::write(root.join("larder.db"), "lost").unwrap();
    let (store, rebuilt) = Store::rebuild(&root, config()).unwrap();
    assert!(store.snapshot("k8s.io/9/c").is_ok(), "{rebuilt:?}");
}

#[test]
fn a_commit_syncs_the_files_of_the_snapshot_only() {
    let disk = FaultyDisk::new();
    let store = Store::open_on(Arc::new(disk.clone()), &disk.root().join("store"), config()).unwrap();
    store.create_snapshot(new("k8s.io/9/c", ""), true, noon()).unwrap();
    let write = |path: &str| {
        let file = disk.open(&disk.root().join(path), FileOpenMode::CreateNew).unwrap();
        file.write_all_at(b"content", 0).unwrap();
    };
    let dir = "store/snapshots/1/fs/dir";
    disk.create_dir(&disk.root().join(dir)).unwrap();
    write(&format!("{dir}/file"));
    write("of-another-process");
    store.commit_snapshot("k8s.io/9/c", new("k8s.io/10/layer", ""), noon()).unwrap();
    drop(store);
    let disk = disk.restarted(UnsyncedData::Nothing);
    assert_eq!(fs_err::read(disk.root().join(dir).join("file")).unwrap(), b"content");
    assert!(!disk.root().join("of-another-process").exists());
}
