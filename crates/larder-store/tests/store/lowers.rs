//! Layers that take something from the layers below: how they are checked in the store.

use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::PathBuf;
use std::time::Duration;

use larder::reference::Reference;
use larder_registry::{RegistryClient, RegistryConfig};
use larder_store::erofs::ErofsFile;
use larder_store::fsck::{FsckOptions, StoreDamage};
use larder_store::pull::{LoadOptions, StorePullConfig, StorePuller};
use larder_store::store::import::ImportSource;
use larder_store::store::{LeaseRecord, LeaseResources, Store, StoreError};
use larder_testkit_peers::{ImageBuilder, LayerFiles};

use crate::fsck::unpacked_layer;
use crate::help::*;
use crate::mounting::can_mount;
use crate::snapshots::{adopt_all, new};

/// Directories of the layers of an image, the lowest first.
fn layers_of(store: &Store, image: &str) -> Vec<PathBuf> {
    let image = store.image(image).unwrap().unwrap();
    image.layers.iter().map(|layer| store.root().join("layers").join(layer.key.as_str())).collect()
}

fn puller(store: &Store) -> StorePuller {
    StorePuller::new(
        store.clone(),
        RegistryClient::new(RegistryConfig::default()),
        StorePullConfig::default(),
    )
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Stores an image as `registry.example/app:image`.
fn load(scratch: &TempStore, image: &ImageBuilder) {
    let layout = scratch.dir.path().join("layout");
    image.write(&layout).unwrap();
    let name = Reference::parse("registry.example/app:image").unwrap();
    runtime()
        .block_on(puller(&scratch.store).load(ImportSource::Path(layout), &LoadOptions::named(name)))
        .unwrap();
}

/// Size and digest of the layer of [`loaded`].
fn erofs_file(store: &Store) -> ErofsFile {
    let key = store.image("registry.example/app:image").unwrap().unwrap().layers[0].key.clone();
    store.layer(&key).unwrap().unwrap().record().erofs.clone()
}

/// An image whose layer has a list of implied directories.
fn loaded() -> TempStore {
    let scratch = TempStore::new();
    load(&scratch, &ImageBuilder::new().layer(LayerFiles::new().file("bin/tool", "#!tool")));
    scratch
}

#[test]
fn damage_of_what_follows_the_files_is_found() {
    let scratch = loaded();
    let layer = layers_of(&scratch.store, "registry.example/app:image").remove(0);
    let (sound, file) = (fs_err::read(&layer).unwrap(), erofs_file(&scratch.store));
    assert_ne!(file.implied_bytes, 0);
    let implied = sound.windows(8).position(|bytes| bytes == b"implied1").unwrap();
    let [mut list, mut record] = [sound.clone(), sound.clone()];
    list[implied] ^= 1;
    *record.last_mut().unwrap() ^= 1;
    for (content, expected, quick) in [(&list, "EROFS: ", 0), (&record, "record: ", 1)] {
        fs_err::write(&layer, content).unwrap();
        for (contents, problems) in [(false, quick), (true, 1)] {
            let report = scratch.store.fsck(&FsckOptions { contents, ..FsckOptions::default() }).unwrap();
            assert_eq!(report.problems.len(), problems, "{report:?}");
            for problem in &report.problems {
                let StoreDamage::LayerDamaged { damage, .. } = &problem.found else { panic!("{report:?}") };
                assert!(damage.starts_with(expected), "{damage}");
            }
        }
    }
    fs_err::write(&layer, &list).unwrap();
    let (root, TempStore { store, dir }) = (scratch.root(), scratch);
    drop(store);
    let (_, rebuilt) = Store::rebuild(&root, config()).unwrap();
    assert!(rebuilt.damaged[0].contains(": EROFS: "), "{:?}", rebuilt.damaged);
    drop(dir);
}

#[test]
fn a_kept_layer_without_what_it_takes_from_below_is_not_committed() {
    let scratch = TempStore::new();
    let layer = unpacked_layer(&scratch.store, &[("bin/tool", "#!tool")]);
    assert_ne!(layer.record().erofs.implied_bytes, 0);
    let ingests = vec![blob(&layer.record().facts).ingest_id()];
    let leased = LeaseResources { ingests, ..LeaseResources::default() };
    let lease = LeaseRecord::granted("pull/app", leased, Duration::MAX, &noon().into());
    scratch.store.lease(&lease).unwrap();
    let (key, path) = (layer.key().clone(), layer.path().to_owned());
    let end = layer.record().erofs.bytes;
    drop(layer);
    let scratch = scratch.reopen();
    let written = std::fs::File::options().write(true).open(&path).unwrap();
    written.write_all_at(b"\xff", end - 1).unwrap();
    let kept = scratch.store.layer(&key).unwrap().expect("it is kept");
    let error = scratch.store.commit(&image(&["app"], &[kept]), noon()).unwrap_err();
    assert!(matches!(error, StoreError::LostWrites { .. }), "{error}");
}

#[test]
fn a_probe_that_failed_for_lack_of_something_is_repeated() {
    if !can_mount() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), config()).unwrap();
    let (staging, away) = (dir.path().join("staging"), dir.path().join("away"));
    fs_err::rename(&staging, &away).unwrap();
    store.erofs_mount().expect_err("there is no place for the probe");
    assert!(store.describe_layers().contains("cannot be mounted"), "{}", store.describe_layers());
    fs_err::rename(&away, &staging).unwrap();
    store.erofs_mount().expect("it is tried again");
    assert!(entries(&staging).is_empty());
}

#[test]
fn a_layer_that_was_replaced_is_mounted_instead_of_the_earlier_one() {
    if !can_mount() {
        return;
    }
    let temp = TempStore::new();
    commit(&temp.store, "app", &["a"]);
    let keys = adopt_all(&temp.store, "app");
    temp.store.create_snapshot(new("k8s.io/9/c", &keys[0]), true, noon()).unwrap();
    let lower = temp.root().join("lowers").join(key("a").as_str());
    let earlier = fs_err::File::open(&lower).unwrap();
    fs_err::remove_file(temp.root().join("layers").join(key("a").as_str())).unwrap();
    let temp = temp.reopen();
    commit(&temp.store, "app", &["a"]);
    assert_ne!(fs_err::metadata(&lower).unwrap().dev(), earlier.metadata().unwrap().dev());
    assert_eq!(fs_err::read_to_string(lower.join("etc/name")).unwrap(), "a");
    temp.store.remove_snapshot("k8s.io/9/c").unwrap();
}
