//! Removal.

use std::time::Duration;

use larder_store::store::{RemoveOptions, Store, StoreConfig};

use crate::help::*;

fn remove(store: &Store, image: &str) -> Option<larder_store::store::StoreRemoval> {
    store.remove(image, &RemoveOptions::default()).expect("a removal")
}

#[test]
fn removing_by_one_name_removes_all() {
    let scratch = TempStore::new();
    commit(&scratch.store, "app:v1", &["a"]);
    commit(&scratch.store, "app:v2", &["a"]);
    let removed = remove(&scratch.store, "app:v2").expect("it was there");
    assert_eq!(removed.image.tags.len(), 2);
    assert!(scratch.store.list().unwrap().is_empty());
    assert!(scratch.store.image("app:v1").unwrap().is_none());
    assert!(remove(&scratch.store, "app:v1").is_none(), "again is no error");
    let root = scratch.root();
    for dir in ["layers", "blobs/sha256", "images"] {
        assert!(entries(&root.join(dir)).is_empty(), "{dir}");
    }
    assert!(!entries(&root.join("trash")).is_empty());
    scratch.store.empty_trash().unwrap();
    assert!(entries(&root.join("trash")).is_empty());
}

#[test]
fn a_shared_layer_is_removed_with_its_last_image() {
    let scratch = TempStore::new();
    commit(&scratch.store, "app", &["base", "app"]);
    commit(&scratch.store, "web", &["base", "web"]);
    let removed = remove(&scratch.store, "app").unwrap();
    assert_eq!(removed.layers, [key("app")]);
    assert!(scratch.store.layer(&key("base")).unwrap().is_some());
    let removed = remove(&scratch.store, "web").unwrap();
    assert_eq!(removed.layers.len(), 2);
}

#[test]
fn a_removal_frees_what_it_reports() {
    let scratch = TempStore::new();
    commit(&scratch.store, "app", &["base", "app"]);
    commit(&scratch.store, "web", &["base", "web"]);
    let unique = scratch.store.image_usages().unwrap();
    let app = unique.iter().find(|usage| usage.tags[0].contains("app")).unwrap();
    let before = scratch.store.usage().unwrap();
    let removed = remove(&scratch.store, "app").unwrap();
    scratch.store.empty_trash().unwrap();
    let after = scratch.store.usage().unwrap();
    assert_eq!(removed.freed, app.unique);
    assert_eq!(before.layers, after.layers + app.own.shortfall_to(app.unique));
    assert_eq!(before.blobs, after.blobs + app.own);
}

#[test]
fn a_layer_that_a_pull_works_with_survives_the_removal_of_its_image() {
    let scratch = TempStore::new();
    commit(&scratch.store, "app", &["a"]);
    let held = scratch.store.layer(&key("a")).unwrap().unwrap();
    let removed = remove(&scratch.store, "app").unwrap();
    assert!(removed.layers.is_empty());
    assert!(held.path().exists());
    scratch.store.sweep(&noon().into()).unwrap();
    assert!(held.path().exists(), "held still");
    scratch.store.commit(&image(&["other"], std::slice::from_ref(&held)), noon()).expect("a commit with it");
    remove(&scratch.store, "other");
    drop(held);
    scratch.store.sweep(&noon().into()).unwrap();
    assert!(entries(&scratch.root().join("layers")).is_empty());
}

#[test]
fn a_removed_image_can_be_pulled_again_before_the_trash_is_emptied() {
    let scratch = TempStore::new();
    for _ in 0..3 {
        commit(&scratch.store, "app", &["a"]);
        remove(&scratch.store, "app").expect("it was there");
    }
    commit(&scratch.store, "app", &["a"]);
    scratch.store.empty_trash().unwrap();
    let layer = scratch.store.layer(&key("a")).unwrap().unwrap();
    assert_eq!(name_in(&layer), "a");
}

#[test]
fn removed_layers_are_deleted_in_the_background_without_being_asked() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("store");
    let store = Store::open(&root, StoreConfig::default()).unwrap();
    for round in 0..5 {
        commit(&store, "app", &["a", &format!("b{round}")]);
        remove(&store, "app");
    }
    let mut looks = 0;
    while !entries(&root.join("trash")).is_empty() {
        looks += 1;
        assert!(looks < 10_000, "the trash is never emptied");
        std::thread::yield_now();
        // A look at the disk takes its time; this bounds the wait to some seconds.
        std::thread::park_timeout(Duration::from_millis(1));
    }
    drop(store);
    open(&root);
}

#[test]
fn trash_of_a_closed_store_is_removed_at_the_next_start() {
    let scratch = TempStore::new();
    commit(&scratch.store, "app", &["a"]);
    remove(&scratch.store, "app");
    let root = scratch.root();
    assert!(!entries(&root.join("trash")).is_empty());
    let scratch = scratch.reopen();
    scratch.store.empty_trash().unwrap();
    assert!(entries(&root.join("trash")).is_empty());
}

#[test]
fn pulls_and_removals_of_images_that_share_layers_do_not_disturb_each_other() {
    let scratch = TempStore::new();
    std::thread::scope(|scope| {
        for number in 0..4 {
            let store = scratch.store.clone();
            scope.spawn(move || {
                let name = format!("app:{number}");
                for _ in 0..10 {
                    let record = commit(&store, &name, &["base", &format!("own{}", number % 2)]);
                    // Another thread may have removed the image, which is the same for two of them.
                    if let Some(image) = store.image(&name).unwrap() {
                        assert_eq!(image.layers, record.layers);
                    }
                    remove(&store, &name);
                }
            });
        }
    });
    scratch.store.sweep(&noon().into()).unwrap();
    assert!(scratch.store.list().unwrap().is_empty());
    assert!(entries(&scratch.root().join("layers")).is_empty());
}
