//! GC's view of the store; the bytes that its plans promise are those that removals free.

use std::time::Duration;

use larder::gc::{GcGoal, GcImage, GcPolicy, GcSnapshot, ImageLabels, UnixMillis, plan};
use larder_store::disk::{DiskSpace, measure};
use larder_store::store::{LeaseRecord, LeaseResources, RemoveOptions, Store};

use crate::help::*;

/// All images as they are, unused and old.
fn snapshot(store: &Store) -> GcSnapshot {
    let subject = |image: larder::backend::Image| GcImage {
        id: image.id,
        handler: String::new(),
        artifact_type: image.artifact_type,
        names: image.repo_tags.into(),
        size: image.size,
        pinned: image.pinned,
        first_seen: UnixMillis(0),
        last_used: None,
        retained_by: Vec::new(),
        failed: None,
    };
    let images = store.list().unwrap().into_iter().map(subject).collect();
    GcSnapshot {
        now: UnixMillis(1_000_000),
        began: UnixMillis(0),
        watched: UnixMillis(0),
        images,
        layers: store.layer_usage_index().unwrap(),
        labels: ImageLabels::new(),
        disk: None,
        reclaimed: DiskSpace::ZERO,
    }
}

/// Measures the directories of layers, blobs and copies of records, counted from outside.
fn images_take(scratch: &TempStore) -> DiskSpace {
    ["layers", "blobs", "images"].map(|dir| measure(&scratch.root().join(dir)).unwrap()).into_iter().sum()
}

fn policy() -> GcPolicy {
    GcPolicy { minimum_age: Duration::ZERO, ..GcPolicy::default() }
}

#[test]
fn a_plan_promises_what_the_store_then_frees() {
    let scratch = TempStore::new();
    commit(&scratch.store, "a", &["one"]);
    commit(&scratch.store, "b", &["one", "two"]);
    commit(&scratch.store, "c", &["one", "two", "three"]);
    commit(&scratch.store, "d", &["two", "four", "two"]);
    let plan = plan(&snapshot(&scratch.store), &policy(), GcGoal::AllUnused);
    assert_eq!(plan.removals.len(), 4);
    for removal in plan.removals {
        let before = images_take(&scratch);
        let removed = scratch.store.remove(&removal.id, &RemoveOptions::default()).unwrap().unwrap();
        assert_eq!(removal.frees, removed.freed, "{:?}", removal.names);
        let after = images_take(&scratch);
        assert_eq!(before.bytes - after.bytes, removal.frees.bytes, "{:?}", removal.names);
        assert_eq!(before.inodes - after.inodes, removal.frees.inodes, "{:?}", removal.names);
        assert!(!removal.estimated);
    }
}

#[test]
fn a_layer_that_a_lease_holds_is_not_promised() {
    let scratch = TempStore::new();
    commit(&scratch.store, "a", &["one", "two"]);
    let before = plan(&snapshot(&scratch.store), &policy(), GcGoal::AllUnused);
    let leased = LeaseResources { layers: vec![key("one")], ..LeaseResources::default() };
    let lease = LeaseRecord::granted("l", leased, Duration::MAX, &noon().into());
    scratch.store.lease(&lease).unwrap();
    let after = plan(&snapshot(&scratch.store), &policy(), GcGoal::AllUnused);
    assert!(after.expected_freed.bytes < before.expected_freed.bytes && after.expected_freed.bytes > 0);
    let removed = scratch.store.remove("a", &RemoveOptions::default()).unwrap().unwrap();
    assert_eq!(after.expected_freed.bytes, removed.freed.bytes);
}
