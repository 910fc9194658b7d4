//! Snapshots of containerd: layers of the store as snapshots, and what retains what.

use std::collections::BTreeMap;
use std::path::Path;

use larder_store::snapshots::{NewSnapshot, SnapshotError, SnapshotMount};
use larder_store::store::{RemoveOptions, SnapshotKind, Store};

use crate::help::{TempStore, commit, config, digest, entries, key, noon, remove_layer};
use crate::mounting::can_mount;

fn new(key: &str, parent: &str) -> NewSnapshot {
    NewSnapshot { key: key.into(), parent: parent.into(), labels: BTreeMap::new() }
}

/// Adopts the layers of an image; returns the keys of their snapshots.
fn adopt_all(store: &Store, image: &str) -> Vec<String> {
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
    assert!(temp.store.format() >= 4, "earlier versions know no snapshots");
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
fn a_damaged_layer_is_no_part_of_a_mount() {
    let temp = TempStore::new();
    commit(&temp.store, "r.example/app:1", &["a"]);
    let keys = adopt_all(&temp.store, "r.example/app:1");
    let root = temp.root();
    let dir = temp.dir;
    drop(temp.store);
    remove_layer(&root.join("layers").join(key("a").as_str()));
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
