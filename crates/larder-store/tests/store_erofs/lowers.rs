//! Images that take something from the layers below: how they come into the store, and how they are checked there.

use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::PathBuf;

use larder::backend::ProgressReporter;
use larder::reference::Reference;
use larder_registry::{RegistryClient, RegistryConfig};
use larder_store::erofs::ErofsFile;
use larder_store::fsck::{FsckOptions, ManifestLayerChecker, StoreDamage};
use larder_store::pull::{StorePullConfig, StorePuller};
use larder_store::store::import::ImportSource;
use larder_store::store::{
    FS, LayerFormat, LeaseKind, LeaseRecord, LeaseResources, Store, StoreConfig, StoreError,
};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::fault_registry::FaultRegistry;
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
    runtime().block_on(puller(&scratch.store).load(ImportSource::Path(layout), Some(name))).unwrap();
}

/// A root directory with attributes for which the root of an EROFS image has no room, and a layer that only implies it.
fn with_large_root() -> ImageBuilder {
    let root = TarBuilderEntry::dir(".").mode(0o711).xattr("trusted.large", vec![b'x'; 3000]);
    let base = TarBuilder::new().with(root).with(TarBuilderEntry::file("etc/base", "base")).finish();
    ImageBuilder::new()
        .layer(LayerFiles::archive(base))
        .layer(LayerFiles::new().file("etc/top", "top"))
        .layer(LayerFiles::archive(
            TarBuilder::new()
                .with(TarBuilderEntry::dir("."))
                .with(TarBuilderEntry::file("own", "own"))
                .finish(),
        ))
}

/// The layer that takes the root from below is a directory, the one that does not is an image.
fn assert_stored(store: &Store, image: &str) {
    let layers = layers_of(store, image);
    for (layer, file) in [(&layers[0], "etc/base"), (&layers[1], "etc/top")] {
        let content = fs_err::read_to_string(layer.join(FS).join(file)).unwrap();
        assert_eq!(content, file.trim_start_matches("etc/"));
    }
    let mut value = vec![0; 4000];
    let length = rustix::fs::lgetxattr(layers[1].join(FS), "trusted.large", &mut value[..]).unwrap();
    assert_eq!(length, 3000, "that of the layer below");
    assert!(layers[2].is_file());
    for dir in ["staging", "ingest"] {
        assert_eq!(entries(&store.root().join(dir)), [""; 0], "left in {dir}");
    }
    let report = store.fsck(&FsckOptions::default()).unwrap();
    assert!(report.is_sound() && report.problems.is_empty(), "{report:?}");
}

#[test]
fn a_loaded_layer_whose_lowers_do_not_fit_into_an_image_becomes_a_directory() {
    if !can_mount() {
        return;
    }
    let scratch = TempStore::new();
    load(&scratch, &with_large_root());
    assert_stored(&scratch.store, "registry.example/app:image");
}

#[test]
fn a_pulled_layer_whose_lowers_do_not_fit_into_an_image_becomes_a_directory() {
    if !can_mount() {
        return;
    }
    let scratch = TempStore::new();
    let registry = FaultRegistry::start();
    let layout = with_large_root().write(&scratch.dir.path().join("layout")).unwrap();
    let blob = |digest: &str| {
        let name = digest.trim_start_matches("sha256:");
        fs_err::read(scratch.dir.path().join("layout/blobs/sha256").join(name)).unwrap()
    };
    for digest in &layout.blobs {
        registry.put_blob(blob(digest));
    }
    let manifest_type = "application/vnd.oci.image.manifest.v1+json";
    registry.put_manifest("app", "1", manifest_type, blob(&layout.manifest_digest));
    let name = Reference::parse(&format!("{}:1", registry.image("app"))).unwrap();
    let pull = async { puller(&scratch.store).pull(&name, None, &ProgressReporter::unwatched()).await };
    runtime().block_on(pull).unwrap();
    assert_stored(&scratch.store, &name.to_string());
}

/// The image file of the layer of [`loaded`].
fn image_file(store: &Store) -> ErofsFile {
    let key = store.image("registry.example/app:image").unwrap().unwrap().layers[0].key.clone();
    store.layer(&key).unwrap().unwrap().record().erofs.clone().unwrap()
}

/// An image whose layer has a manifest, since its archive only implies directories.
fn loaded() -> TempStore {
    let scratch = TempStore::new();
    load(&scratch, &ImageBuilder::new().layer(LayerFiles::new().file("bin/tool", "#!tool")));
    scratch
}

#[test]
fn damage_of_what_an_image_takes_from_below_is_found() {
    if !can_mount() {
        return;
    }
    let scratch = loaded();
    let layer = layers_of(&scratch.store, "registry.example/app:image").remove(0);
    let (sound, file) = (fs_err::read(&layer).unwrap(), image_file(&scratch.store));
    let start = usize::try_from(file.bytes).unwrap();
    let [mut manifest, mut record] = [sound.clone(), sound.clone()];
    manifest[start + 12] ^= 1;
    *record.last_mut().unwrap() ^= 1;
    for (content, expected) in [(&manifest, "manifest: "), (&record, "record: ")] {
        fs_err::write(&layer, content).unwrap();
        for contents in [false, true] {
            let report = scratch.store.fsck(&FsckOptions { contents, ..FsckOptions::default() }).unwrap();
            let found: Vec<_> = report.problems.iter().map(|problem| &problem.found).collect();
            let [StoreDamage::LayerDamaged { first, count: 1, .. }] = found[..] else { panic!("{report:?}") };
            assert!(first[0].starts_with(expected), "{first:?}");
        }
    }
    fs_err::write(&layer, &manifest).unwrap();
    let (root, TempStore { store, dir }) = (scratch.root(), scratch);
    drop(store);
    let (_, rebuilt) = Store::rebuild(&root, config(), &ManifestLayerChecker).unwrap();
    assert!(rebuilt.damaged[0].contains(": manifest: "), "{:?}", rebuilt.damaged);
    drop(dir);
}

#[test]
fn a_kept_layer_without_what_it_takes_from_below_is_not_committed() {
    let scratch = TempStore::new();
    let layer = unpacked_layer(&scratch.store, &[("bin/tool", "#!tool")]);
    assert!(layer.record().facts.pending);
    let leased =
        LeaseResources { ingests: vec![layer.record().facts.digest.clone()], ..LeaseResources::default() };
    let (id, kind) = ("pull/app".to_owned(), LeaseKind::Pull);
    scratch.store.lease(&LeaseRecord { id, kind, leased, ends_at: u64::MAX, granted: None }).unwrap();
    let (key, path) = (layer.key().clone(), layer.path().to_owned());
    let end_of_image = layer.record().erofs.as_ref().unwrap().bytes;
    drop(layer);
    let scratch = scratch.reopen();
    let written = std::fs::File::options().write(true).open(&path).unwrap();
    written.write_all_at(b"\xff", end_of_image + 12).unwrap();
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
    let store = Store::open(dir.path(), StoreConfig { layer_format: LayerFormat::Auto, ..config() }).unwrap();
    let (staging, away) = (dir.path().join("staging"), dir.path().join("away"));
    fs_err::rename(&staging, &away).unwrap();
    assert!(store.erofs_mount().is_err() && !store.uses_images().unwrap());
    assert!(store.describe_layers().starts_with("directories (cannot mount"), "{}", store.describe_layers());
    fs_err::rename(&away, &staging).unwrap();
    assert!(store.uses_images().unwrap(), "{}", store.describe_layers());
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
    remove_layer(&temp.root().join("layers").join(key("a").as_str()));
    let temp = temp.reopen();
    commit(&temp.store, "app", &["a"]);
    assert_ne!(fs_err::metadata(&lower).unwrap().dev(), earlier.metadata().unwrap().dev());
    assert_eq!(fs_err::read_to_string(lower.join("etc/name")).unwrap(), "a");
    temp.store.remove_snapshot("k8s.io/9/c").unwrap();
}
