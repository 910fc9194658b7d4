//! One test for each kind of damage: found, named, and put right as far as it can be.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder_store::export::{ExportError, ExportRequest};
use larder_store::fsck::{FsckOptions, FsckReport, MissingContent, RepairState, StoreDamage};
use larder_store::mounts::{MountError, MountOptions};
use larder_store::store::{
    BlobSource, ClaimOutcome, LAYER_FILE, LayerHandle, LayerKey, LayerMetadata, Store, StoreOpenError,
};
use larder_store::unpack::{ExpectedLayer, MergedLayers, UnpackOptions, unpack_layer};

use larder_testkit::archive::{TarBuilder, TarBuilderEntry};

use crate::help::*;
use crate::mounting::can_mount;

/// An image of one layer that was really unpacked.
pub(crate) fn unpacked(store: &Store, name: &str, files: &[(&str, &str)]) {
    let layer = unpacked_layer(store, files);
    store.commit(&image(&[name], &[layer]), noon()).unwrap();
}

/// Such a layer, before its commit.
pub(crate) fn unpacked_layer(store: &Store, files: &[(&str, &str)]) -> LayerHandle {
    unpacked_entries(store, files.iter().map(|(path, content)| TarBuilderEntry::file(*path, *content)))
}

/// Like [`unpacked_layer`], of an archive of these entries.
pub(crate) fn unpacked_entries(
    store: &Store,
    entries: impl IntoIterator<Item = TarBuilderEntry>,
) -> LayerHandle {
    let archive = TarBuilder::new().extend(entries).finish();
    let diff_id = digest(&archive);
    let staging = store.begin_layer().unwrap();
    let expected = ExpectedLayer { digest: Some(&diff_id), size: None, diff_id: &diff_id };
    let facts = LayerMetadata {
        digest: diff_id.clone(),
        diff_id: diff_id.clone(),
        compressed_bytes: archive.len() as u64,
        plain_bytes: archive.len() as u64,
        skipped_xattrs: 0,
    };
    let file = staging.dir().join(LAYER_FILE);
    let (_, layer) = unpack_layer(&archive[..], &expected, &file, &UnpackOptions::default()).unwrap();
    let layer = layer.finish(&MergedLayers::default(), &Arc::default()).unwrap();
    let blob = blob(&facts);
    staging.finish(&LayerKey::from(&diff_id), facts, layer.file, &blob).unwrap()
}

pub(crate) fn two_images() -> TempStore {
    let scratch = TempStore::new();
    unpacked(&scratch.store, "app", &[("bin/tool", "#!tool"), ("etc/conf", "a=1")]);
    unpacked(&scratch.store, "web", &[("bin/server", "#!server")]);
    scratch
}

pub(crate) fn check(store: &Store) -> FsckReport {
    store.fsck(&FsckOptions::default()).unwrap()
}

pub(crate) fn repair(store: &Store) -> FsckReport {
    store.fsck(&FsckOptions { repair: true, ..FsckOptions::default() }).unwrap()
}

/// The directory of the layer of this image.
pub(crate) fn layer_dir(store: &Store, image: &str) -> PathBuf {
    let key = store.image(image).unwrap().unwrap().layers[0].key.clone();
    store.root().join("layers").join(key.as_str())
}

/// Finds the one problem, repairs it, and checks that the image is hidden until it is pulled again.
pub(crate) fn breaks_app(scratch: &TempStore, what: impl Fn(&StoreDamage) -> bool) {
    let store = &scratch.store;
    let report = check(store);
    assert_eq!(report.problems.len(), 1, "{report:?}");
    assert!(what(&report.problems[0].found) && report.problems[0].repair == RepairState::Open, "{report:?}");
    assert!(!report.is_sound());
    assert_eq!(tags(store).len(), 2, "checking changes nothing");

    let report = repair(store);
    assert!(
        what(&report.problems[0].found) && report.problems[0].repair == RepairState::AwaitsPull,
        "{report:?}"
    );
    assert_eq!(report.refetch.len(), 1, "{report:?}");
    assert_eq!(report.refetch[0].names[0], "docker.io/library/app:latest");
    if matches!(report.problems[0].found, StoreDamage::LayerDamaged { .. }) {
        assert_eq!(tags(store).len(), 2, "what is damaged stays until another is there");
        assert!(layer_dir(store, "app").exists());
        assert_eq!(repair(store).refetch, report.refetch);
    } else {
        assert_eq!(
            tags(store),
            ["docker.io/library/web:latest"],
            "what lacks something is hidden, the rest is not"
        );
        assert_eq!(repair(store).problems, []);
    }
    assert!(!check(store).is_sound(), "something is still to be fetched");
    assert_eq!(store.missing().unwrap(), report.refetch);

    unpacked(store, "app", &[("bin/tool", "#!tool"), ("etc/conf", "a=1")]);
    let report = check(store);
    assert!(report.is_sound() && report.problems.is_empty(), "{report:?}");
    assert_eq!(tags(store).len(), 2);
}

#[test]
fn a_sound_store_has_no_problems() {
    let scratch = two_images();
    let report = check(&scratch.store);
    assert!(report.is_sound() && report.problems.is_empty(), "{report:?}");
    assert_eq!((report.images, report.layers), (2, 2));
}

#[test]
fn a_missing_layer_is_found() {
    let scratch = two_images();
    fs_err::remove_file(layer_dir(&scratch.store, "app")).unwrap();
    breaks_app(&scratch, |damage| matches!(damage, StoreDamage::LayerMissing { .. }));
}

#[test]
fn a_missing_config_is_found() {
    let scratch = two_images();
    let id = scratch.store.image("app").unwrap().unwrap().id;
    fs_err::remove_file(scratch.root().join("blobs/sha256").join(id.hex())).unwrap();
    breaks_app(&scratch, |damage| matches!(damage, StoreDamage::BlobMissing { digest, .. } if *digest == id));
}

#[test]
fn a_damaged_manifest_is_found() {
    let scratch = two_images();
    let digest = scratch.store.image("app").unwrap().unwrap().manifests[0].clone();
    fs_err::write(scratch.root().join("blobs/sha256").join(digest.hex()), "{}").unwrap();
    breaks_app(
        &scratch,
        |damage| matches!(damage, StoreDamage::BlobDamaged { digest: found, .. } if *found == digest),
    );
}

#[test]
fn the_list_of_files_to_fetch_names_its_place() {
    let scratch = two_images();
    let layer = scratch.store.image("app").unwrap().unwrap().layers[0].clone();
    fs_err::remove_file(layer_dir(&scratch.store, "app")).unwrap();
    let report = repair(&scratch.store);
    let MissingContent::Layer { key, digest, size, diff_id, .. } = &report.refetch[0].lacks else {
        panic!("{report:?}");
    };
    assert_eq!((key, digest, size, diff_id), (&layer.key, &layer.digest, &layer.size, &layer.diff_id));
    assert_eq!(scratch.store.missing().unwrap(), report.refetch);
}

#[test]
fn leftovers_are_found_and_removed() {
    let scratch = two_images();
    let root = scratch.root();
    let leftovers = [
        root.join("layers").join(key("x").as_str()),
        root.join("layers/rubbish"),
        root.join("blobs/sha256").join(digest("x").hex()),
        root.join("blobs/md5"),
        root.join("ingest/rubbish"),
        root.join("mounts/000042"),
    ];
    for leftover in &leftovers {
        fs_err::create_dir(leftover).unwrap();
    }
    // What is on its way is none.
    let arriving = layer(&scratch.store, "arriving");
    let fetching = scratch.store.ingest(&blob_of("blob", 10)).unwrap();
    let mut found: Vec<PathBuf> = check(&scratch.store)
        .problems
        .into_iter()
        .map(|problem| match problem.found {
            StoreDamage::Leftover { path } => path,
            other => panic!("{other}"),
        })
        .collect();
    found.sort();
    let mut expected = leftovers.to_vec();
    expected.retain(|path| path != &root.join("blobs/md5")); // an empty directory for an algorithm
    expected.sort();
    assert_eq!(found, expected);
    repair(&scratch.store);
    assert!(check(&scratch.store).problems.is_empty());
    assert!(arriving.path().exists());
    drop(fetching);
}

#[test]
fn a_damaged_layer_in_use_is_replaced_by_a_pull() {
    let scratch = two_images();
    let path = layer_dir(&scratch.store, "app");
    let key = scratch.store.image("app").unwrap().unwrap().layers[0].key.clone();
    let held = scratch.store.layer(&key).unwrap();
    let [before, after] = ["before", "after"].map(|name| scratch.dir.path().join(name));
    let mount = |target: &Path| {
        fs_err::create_dir(target).unwrap();
        scratch.store.mount("app", target, MountOptions::default(), noon()).unwrap();
    };
    if can_mount() {
        mount(&before);
    }
    damage_layer(&path);
    assert_eq!(repair(&scratch.store).problems[0].repair, RepairState::AwaitsPull);
    assert!(path.exists());
    assert_eq!(scratch.store.missing().unwrap().len(), 1);
    unpacked(&scratch.store, "app", &[("bin/tool", "#!tool"), ("etc/conf", "a=1")]);
    assert!(!is_damaged(&path));
    if can_mount() {
        mount(&after);
        assert_eq!(fs_err::read_to_string(after.join("bin/tool")).unwrap(), "#!tool");
        for target in [before, after] {
            scratch.store.umount(&target).unwrap();
        }
    }
    drop(held);
    assert!(check(&scratch.store).is_sound());
}

#[test]
fn a_damaged_layer_is_fetched_again_by_a_pull_and_survives_a_restart() {
    let scratch = two_images();
    let layer = scratch.store.image("app").unwrap().unwrap().layers[0].clone();
    damage_layer(&layer_dir(&scratch.store, "app"));
    let blob = BlobSource::archive(layer.digest.clone(), layer.size);
    let claimed = |store: &Store| store.claim(&blob, &layer.diff_id, &layer.diff_id).unwrap();
    assert!(matches!(claimed(&scratch.store), ClaimOutcome::Present(_)), "the damage is unknown");
    repair(&scratch.store);
    let scratch = scratch.reopen();
    assert!(matches!(claimed(&scratch.store), ClaimOutcome::Fetch(_)));
    assert_eq!(tags(&scratch.store).len(), 2);
    assert!(scratch.store.layer(&layer.key).unwrap().is_some(), "a mount may have it");
    // Put right by hand, or by a process that died before it could note it.
    fs_err::remove_file(layer_dir(&scratch.store, "app")).unwrap();
    unpacked(&scratch.store, "app", &[("bin/tool", "#!tool"), ("etc/conf", "a=1")]);
    assert!(matches!(claimed(&scratch.store), ClaimOutcome::Present(_)));
}

#[test]
fn an_image_with_a_damaged_layer_is_listed_and_neither_usable_nor_mounted() {
    let scratch = two_images();
    let store = &scratch.store;
    let usable = || store.usable_image_summary("app").unwrap();
    damage_layer(&layer_dir(store, "app"));
    check(store);
    assert_eq!(usable(), store.image_summary("app").unwrap(), "a check changes nothing");
    let report = repair(store);
    let shown = report.problems[0].to_string();
    assert!(
        shown.ends_with("(marked as damaged; the next pull or load of its image replaces it)"),
        "{shown}"
    );
    assert_eq!(usable(), None);
    assert!(store.usable_image_summary("web").unwrap().is_some());
    assert!(store.image_summary("app").unwrap().is_some(), "GC and rm can remove it");
    let damaged = store.damaged_images().unwrap();
    let key = store.image("app").unwrap().unwrap().layers[0].key.clone();
    assert_eq!(damaged.len(), 1, "{damaged:?}");
    assert_eq!((&*damaged[0].name, &damaged[0].layers), ("docker.io/library/app:latest", &vec![key]));
    let target = scratch.dir.path().join("mnt");
    fs_err::create_dir(&target).unwrap();
    if can_mount() {
        let refused = store.mount("app", &target, MountOptions::default(), noon()).unwrap_err();
        assert!(matches!(refused, MountError::Damaged { .. }), "{refused}");
        assert!(refused.hint().unwrap().to_string().starts_with("larder pull app "), "{refused:?}");
    }
    unpacked(store, "app", &[("bin/tool", "#!tool"), ("etc/conf", "a=1")]);
    assert!(usable().is_some());
    assert_eq!(store.damaged_images().unwrap(), []);
}

#[test]
fn an_export_that_meets_damage_records_it_and_names_the_image() {
    let scratch = two_images();
    let store = &scratch.store;
    damage_layer(&layer_dir(store, "app"));
    let request = |image: &str| ExportRequest { image: image.into(), name: None };
    let both = [request("web"), request("app")];
    let failed = store.begin_export(&both).unwrap().write_oci(&mut std::io::sink()).unwrap_err();
    assert!(matches!(failed, ExportError::Damaged { .. }), "{failed:?}");
    let layer = store.image("app").unwrap().unwrap().layers[0].diff_id.clone();
    assert_eq!(failed.to_string(), format!("docker.io/library/app:latest is damaged: layer {layer}"));
    let hint = failed.hint().unwrap().to_string();
    assert!(hint.starts_with("larder pull docker.io/library/app:latest "), "{hint}");
    assert_eq!(store.damaged_images().unwrap().len(), 1, "it is recorded");
    let refused = store.begin_export(&both).unwrap_err();
    assert_eq!(refused.to_string(), failed.to_string());
    let failed = store.begin_export(&[request("web")]).unwrap().write_oci(&mut std::io::sink()).unwrap_err();
    assert!(matches!(failed, ExportError::Layer { .. }), "it lacks the record of its archive: {failed:?}");
    assert_eq!(store.damaged_images().unwrap().len(), 1, "which is no damage");
}

/// Everything but the bytes of the old database, which is gone.
pub(crate) fn rebuild(
    scratch: TempStore,
    damage: impl Fn(&Path),
) -> (TempStore, larder_store::fsck::RebuildReport) {
    let TempStore { store, dir } = scratch;
    let root = store.root().to_owned();
    drop(store);
    fs_err::write(root.join("larder.db"), "lost").unwrap();
    fs_err::write(root.join("larder.db-wal"), "lost").unwrap();
    damage(&root);
    assert!(matches!(Store::open_for_check(&root, config()), Err(StoreOpenError::Database { .. })));
    let (store, rebuilt) = Store::rebuild(&root, config()).expect("a new database");
    (TempStore { store, dir }, rebuilt)
}

#[test]
fn a_lost_database_is_rebuilt_from_blobs_and_layers() {
    let scratch = two_images();
    unpacked(&scratch.store, "app:v2", &[("bin/tool", "#!tool"), ("etc/conf", "a=1")]);
    unpacked(&scratch.store, "moved", &[("old", "old")]);
    unpacked(&scratch.store, "moved", &[("new", "new")]);
    let before = (scratch.store.images().unwrap(), scratch.store.usage().unwrap().layers);
    let (scratch, rebuilt) = rebuild(scratch, |_| ());
    assert_eq!((rebuilt.images, rebuilt.incomplete, rebuilt.layers), (4, 0, 4), "{rebuilt:?}");
    assert_eq!(before, (scratch.store.images().unwrap(), scratch.store.usage().unwrap().layers));
    assert_eq!(check(&scratch.store).problems, []);
    assert_eq!(fs_err::read_to_string(rebuilt.old.unwrap()).unwrap(), "lost");
    let scratch = scratch.reopen();
    assert_eq!(tags(&scratch.store).len(), 4);
}

#[test]
fn a_rebuild_completes_no_image_that_waits_for_a_pull_of_its_own() {
    for is_rebuilt_before in [false, true] {
        let scratch = TempStore::new();
        commit(&scratch.store, "app", &["base", "app"]);
        commit(&scratch.store, "web", &["base", "web"]);
        fs_err::remove_file(scratch.root().join("layers").join(key("app").as_str())).unwrap();
        let scratch = if is_rebuilt_before { rebuild(scratch, |_| {}).0 } else { scratch.reopen() };
        // As the pull of another image with the layer.
        scratch.store.commit_layers(&[layer(&scratch.store, "app")], None).unwrap();
        let (scratch, rebuilt) = rebuild(scratch, |_| {});
        assert_eq!((rebuilt.images, rebuilt.incomplete), (1, 1), "{rebuilt:?}");
        assert_eq!(tags(&scratch.store), ["docker.io/library/web:latest"]);
        commit(&scratch.store, "app", &["base", "app"]);
        assert_eq!(tags(&scratch.store).len(), 2);
    }
}

#[test]
fn a_rebuild_loses_nothing_that_is_damaged_and_says_so() {
    let scratch = two_images();
    unpacked(&scratch.store, "third", &[("third", "3")]);
    let (damaged, no_record, config_of_third) = {
        let store = &scratch.store;
        let record = layer_dir(store, "web");
        (layer_dir(store, "app"), record, store.image("third").unwrap().unwrap().id)
    };
    let (scratch, rebuilt) = rebuild(scratch, |root| {
        damage_layer(&damaged);
        fs_err::write(&no_record, "{").unwrap();
        fs_err::write(root.join("blobs/sha256").join(config_of_third.hex()), "{}").unwrap();
    });
    assert_eq!((rebuilt.images, rebuilt.incomplete, rebuilt.layers), (2, 1, 3), "{rebuilt:?}");
    // The lost record had the digest of the layer.
    let unknown = 1;
    assert_eq!((rebuilt.damaged.len(), rebuilt.left_out.len()), (2 + unknown, 0), "{rebuilt:?}");
    assert_eq!(tags(&scratch.store), ["docker.io/library/app:latest", "docker.io/library/web:latest"]);
    assert_eq!(scratch.store.missing().unwrap().len(), 1 + unknown, "the layer of app");
    assert!(!check(&scratch.store).is_sound());
    assert_eq!(entries(&scratch.root().join("layers")).len(), 3, "nothing was removed");
    unpacked(&scratch.store, "app", &[("bin/tool", "#!tool"), ("etc/conf", "a=1")]);
    unpacked(&scratch.store, "third", &[("third", "3")]);
    unpacked(&scratch.store, "web", &[("bin/server", "#!server")]);
    assert!(check(&scratch.store).is_sound());
}
