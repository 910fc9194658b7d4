//! Commits, and finding what was committed.

use larder::reference::Reference;
use larder_store::store::{ImageCommit, StoreError};

use crate::help::*;

const APP: &str = "registry.example/app:v1";

#[test]
fn a_committed_image_is_found_by_each_spelling_of_its_name() {
    let scratch = TempStore::new();
    let record = commit(&scratch.store, "busybox", &["a", "b"]);
    let hex = record.id.hex();
    let digest = format!("busybox@{}", record.manifests[0]);
    for name in [
        "busybox",
        "busybox:latest",
        "docker.io/library/busybox",
        &digest,
        &format!("busybox:other@{}", record.manifests[0]),
        record.id.as_str(),
        hex,
        &hex[..12],
        &format!("sha256:{}", &hex[..12]),
    ] {
        let found = scratch.store.image(name).unwrap().unwrap_or_else(|| panic!("{name}"));
        assert_eq!(found.id, record.id, "{name}");
    }
    for absent in ["busybox:1", "box", &hex[..3], "", "Not A Name", &"0".repeat(64)] {
        assert_eq!(scratch.store.image(absent).unwrap(), None, "{absent}");
    }
}

#[test]
fn an_image_looks_as_a_client_of_cri_expects() {
    let scratch = TempStore::new();
    let record = commit(&scratch.store, APP, &["a"]);
    let [image] = &scratch.store.list().unwrap()[..] else { panic!("one image") };
    assert_eq!(image.id, record.id.as_str());
    assert_eq!(image.repo_tags, [APP]);
    assert_eq!(image.repo_digests, [format!("registry.example/app@{}", record.manifests[0])]);
    assert_eq!((image.uid, image.username.as_str()), (Some(1000), ""));
    assert!(image.size > 4096, "{}", image.size);
    assert_eq!(*image, scratch.store.to_image(&record));
}

#[test]
fn a_pull_by_digest_gives_no_tag() {
    let scratch = TempStore::new();
    let layers = [layer(&scratch.store, "a")];
    let mut commit = image(&[], &layers);
    let by_digest = format!("registry.example/app:v1@{}", commit.manifests[0].0);
    commit.names = vec![Reference::parse(&by_digest).unwrap()];
    let record = scratch.store.commit(&commit, noon()).unwrap();
    assert!(record.tags.is_empty(), "{:?}", record.tags);
    assert_eq!(record.digests, [format!("registry.example/app@{}", commit.manifests[0].0)]);
    assert!(scratch.store.image(&by_digest).unwrap().is_some());
    assert!(scratch.store.image(APP).unwrap().is_none());
}

#[test]
fn one_image_has_all_its_names() {
    let scratch = TempStore::new();
    let first = commit(&scratch.store, APP, &["a"]);
    let second = commit(&scratch.store, "registry.example/app:stable", &["a"]);
    assert_eq!(first.id, second.id);
    assert_eq!(tags(&scratch.store), ["registry.example/app:stable", APP]);
    assert_eq!(scratch.store.images().unwrap().len(), 1);
}

#[test]
fn a_moved_tag_is_removed_from_its_previous_image() {
    let scratch = TempStore::new();
    let old = commit(&scratch.store, APP, &["a"]);
    let new = commit(&scratch.store, APP, &["b"]);
    assert_eq!(scratch.store.image(APP).unwrap().unwrap().id, new.id);
    let old = scratch.store.image(old.id.as_str()).unwrap().expect("the old one stays");
    assert!(old.tags.is_empty());
    assert_eq!(old.digests.len(), 1);
    let scratch = scratch.reopen();
    assert_eq!(scratch.store.image(APP).unwrap().unwrap().id, new.id);
}

#[test]
fn nothing_is_visible_before_the_commit() {
    let scratch = TempStore::new();
    let layers = [layer(&scratch.store, "a")];
    assert!(scratch.store.list().unwrap().is_empty());
    let root = scratch.root();
    assert_eq!(entries(&root.join("layers")), [key("a").as_str()]);
    drop(layers);
    assert!(entries(&root.join("layers")).is_empty(), "a layer that no image was committed with goes");
}

#[test]
fn a_layer_outlives_its_handles_once_it_is_committed() {
    let scratch = TempStore::new();
    let record = commit(&scratch.store, APP, &["a"]);
    let layer = scratch.store.layer(&record.layers[0].key).unwrap().expect("the layer");
    assert_eq!(name_in(&layer), "a");
    drop(layer);
    let scratch = scratch.reopen();
    let layer = scratch.store.layer(&record.layers[0].key).unwrap().expect("the layer");
    assert_eq!(name_in(&layer), "a");
}

#[test]
fn an_image_of_an_index_is_found_by_the_manifest_of_its_platform() {
    let scratch = TempStore::new();
    let store = &scratch.store;
    let mut commit = image(&["r.example/app:1"], &[layer(store, "a")]);
    let (platform, index) = (commit.manifests[0].0.clone(), b"an index".to_vec());
    commit.manifests.insert(0, (digest(&index), index));
    let id = store.commit(&commit, noon()).unwrap().id;
    for name in [format!("r.example/app@{}", digest("an index")), format!("r.example/app@{platform}")] {
        assert_eq!(store.image(name.as_str()).unwrap().map(|image| image.id), Some(id.clone()), "{name}");
    }
    for name in [format!("r.example/ap@{platform}"), format!("r.example/app@{}", digest("another"))] {
        assert!(store.image(name.as_str()).unwrap().is_none(), "{name}");
    }
}

#[test]
fn bytes_with_another_digest_are_refused() {
    let scratch = TempStore::new();
    let mut commit = image(&[APP], &[layer(&scratch.store, "a")]);
    commit.manifests[0].1.push(b'!');
    let error = scratch.store.commit(&commit, noon()).expect_err("a wrong digest");
    assert!(matches!(error, StoreError::WrongDigest { .. }), "{error}");
    assert!(scratch.store.list().unwrap().is_empty());
}

#[test]
fn layers_that_are_not_those_of_the_config_are_refused() {
    let scratch = TempStore::new();
    let layers = [layer(&scratch.store, "a"), layer(&scratch.store, "b")];
    let mut commit = image(&[APP], &layers);
    commit.layers.swap(0, 1);
    let error = scratch.store.commit(&commit, noon()).expect_err("layers in another order");
    assert!(matches!(error, StoreError::WrongLayers { .. }), "{error}");
    commit.layers.pop();
    scratch.store.commit(&commit, noon()).expect_err("a layer is missing");
}

#[test]
fn a_tag_stands_for_what_its_repository_served_last() {
    let scratch = TempStore::new();
    let mut commit = image(&["registry.example/app:v1"], &[layer(&scratch.store, "a")]);
    let pull = |commit: &mut ImageCommit, served: &[&str]| {
        commit.manifests = served.iter().map(|text| (digest(text), text.as_bytes().to_vec())).collect();
        scratch.store.commit(commit, noon()).unwrap()
    };
    pull(&mut commit, &["an index", "a manifest"]);
    let again = pull(&mut commit, &["a newer index", "a manifest"]);
    assert_eq!(
        again.served_digest(&Reference::parse("registry.example/app").unwrap()),
        Some(&digest("a newer index"))
    );
    assert_eq!(again.served_digest(&Reference::parse("registry.example/other").unwrap()), None);
    let reverted = pull(&mut commit, &["an index", "a manifest"]);
    assert_eq!(
        reverted.served_digest(&Reference::parse("registry.example/app").unwrap()),
        Some(&digest("an index")),
        "as before"
    );
}

#[test]
fn pulling_again_and_again_under_new_manifests_does_not_fill_the_disk() {
    let scratch = TempStore::new();
    let layers = [layer(&scratch.store, "a")];
    for round in 0..100 {
        let mut commit = image(&[APP], &layers);
        let manifest = format!("manifest {round}").into_bytes();
        commit.manifests = vec![(digest(&manifest), manifest)];
        scratch.store.commit(&commit, noon()).unwrap();
    }
    drop(layers);
    let scratch = scratch.reopen();
    assert!(entries(&scratch.root().join("blobs/sha256")).len() < 50);
}

#[test]
fn an_image_may_have_the_same_layer_twice() {
    let scratch = TempStore::new();
    let record = commit(&scratch.store, APP, &["a", "b", "a"]);
    assert_eq!(record.layers.len(), 3);
    let usage = &scratch.store.image_usages().unwrap()[0];
    let twice = scratch.store.layer(&key("a")).unwrap().unwrap().record().usage.bytes;
    let once = scratch.store.layer(&key("b")).unwrap().unwrap().record().usage.bytes;
    assert_eq!(usage.total.bytes, twice + once + usage.own.bytes);
}

#[test]
fn concurrent_commits_all_succeed() {
    let scratch = TempStore::new();
    std::thread::scope(|scope| {
        for number in 0..8 {
            let store = scratch.store.clone();
            scope.spawn(move || {
                let (own, name) = (format!("own{number}"), format!("registry.example/app:{number}"));
                for _ in 0..3 {
                    commit(&store, &name, &["base", &own]);
                    assert!(store.image(&name).unwrap().is_some());
                }
            });
        }
    });
    assert_eq!(scratch.store.images().unwrap().len(), 8);
    assert_eq!(entries(&scratch.root().join("layers")).len(), 9);
}

#[test]
fn a_status_shows_what_a_list_shows_by_whatever_name_and_needs_no_config() {
    let scratch = TempStore::new();
    let store = &scratch.store;
    let record = commit(store, APP, &["a"]);
    fs_err::remove_dir_all(scratch.root().join("blobs")).unwrap();
    let listed = store.list().unwrap().remove(0);
    for name in [APP, record.id.as_str(), record.id.hex(), &record.id.hex()[..12]] {
        assert_eq!(store.image_summary(name).unwrap(), Some(listed.clone()), "{name}");
    }
    for name in ["no/such:1", &"0".repeat(64), &format!("sha256:{}", "0".repeat(64)), "sha256"] {
        assert_eq!(store.image_summary(name).unwrap(), None, "{name}");
    }
}
