//! Pulls into the store, from a real registry.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::join_all;
use larder::backend::{
    Backend as _, BackendError, CallErrorKind, ImageSpec, ProgressReporter, RemoveOptions,
};
use larder::credentials::{Credential, Secret};
use larder::reference::Reference;
use larder_erofs::ErofsInode;
use larder_registry::{RegistryClient, RegistryConfig};
use larder_store::backend::StoreBackend;
use larder_store::pull::{StorePullConfig, StorePuller};
use larder_store::store::{ImageRecord, Store, StoreConfig};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::backend_suite::{self, BackendFixture, FixtureImages};
use larder_testkit::fault_registry::{FaultRegistry, FaultRegistryAuth};
use larder_testkit_peers::{
    HoldingProxy, ImageBuilder, LayerFiles, Package, RegistryOptions, RegistryProcess, require,
};
use tempfile::TempDir;

/// A store in a new directory, and a registry; `None` where no registry can be had.
fn node() -> Option<(TempDir, StoreBackend, RegistryProcess)> {
    if !require(&[Package::DockerRegistry, Package::Skopeo]).is_available() {
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let backend = backend(&dir.path().join("store"));
    Some((dir, backend, RegistryProcess::start(RegistryOptions::default()).unwrap()))
}

fn backend(root: &Path) -> StoreBackend {
    let store = Store::open(root, StoreConfig::default()).unwrap();
    StoreBackend::new(StorePuller::new(
        store,
        RegistryClient::new(RegistryConfig::default()),
        StorePullConfig::default(),
    ))
}

async fn pull(backend: &StoreBackend, name: &str) -> String {
    let progress = ProgressReporter::unwatched();
    match backend.pull(&ImageSpec::named(name), None, None, &progress).await {
        Ok(id) => id.into(),
        Err(error) => panic!("{name}: {error}"),
    }
}

/// Attributes of a path in a layer of an image.
fn inode_in(backend: &StoreBackend, image: &ImageRecord, layer: usize, path: &str) -> ErofsInode {
    let layer = backend.store().layer(&image.layers[layer].key).unwrap().expect("the layer");
    layer.open().unwrap().find(path.as_bytes()).unwrap().expect("the file")
}

/// How often the registry served each blob.
fn most_served(registry: &RegistryProcess) -> usize {
    let requests = registry.requests();
    let blobs: Vec<_> = requests
        .iter()
        .filter(|request| request.method == "GET" && request.path.contains("/blobs/"))
        .collect();
    let of = |digest: &str| blobs.iter().filter(|request| request.path.ends_with(digest)).count();
    blobs.iter().map(|request| of(request.path.rsplit('/').next().unwrap_or_default())).max().unwrap_or(0)
}

/// New stores, and a registry behind a gate that holds pulls.
struct StoreFixture {
    names: FixtureImages,
    gate: Arc<HoldingProxy>,
    dir: TempDir,
    stores: AtomicUsize,
}

impl BackendFixture for StoreFixture {
    type Backend = StoreBackend;

    fn names(&self) -> &FixtureImages {
        &self.names
    }

    async fn empty(&self) -> StoreBackend {
        let number = self.stores.fetch_add(1, Ordering::Relaxed);
        backend(&self.dir.path().join(format!("store-{number}")))
    }

    async fn hold_next_pull(&self) {
        self.gate.hold_blobs_after(0);
    }

    async fn pull_held(&self) {
        let gate = Arc::clone(&self.gate);
        tokio::task::spawn_blocking(move || gate.wait_until_held(1))
            .await
            .expect("the pull comes to the gate");
    }

    async fn release_pulls(&self) {
        self.gate.open();
    }

    async fn run_container(&self, _: &str) -> bool {
        false // mounts are uses, and have tests of their own
    }
}

#[tokio::test]
async fn the_store_keeps_the_contract() {
    let Some((dir, _, registry)) = node() else { return };
    for name in ["contract/app:v1", "contract/app:stable"] {
        ImageBuilder::small(1, 200_000).push(&registry, name).unwrap();
    }
    ImageBuilder::small(2, 200_000).push(&registry, "contract/other:v1").unwrap();
    let gate = HoldingProxy::for_registry(registry.port()).unwrap();
    let names = FixtureImages {
        image: gate.image("contract/app:v1"),
        alias: gate.image("contract/app:stable"),
        untouched: gate.image("contract/other:v1"),
        unknown: gate.image("contract/nothing:v1"),
    };
    backend_suite::check(&StoreFixture { names, gate: Arc::new(gate), dir, stores: AtomicUsize::new(0) })
        .await;
}

#[tokio::test]
async fn ten_pulls_that_share_a_base_fetch_each_blob_once() {
    let Some((_dir, backend, registry)) = node() else { return };
    for i in 0..10 {
        let image =
            ImageBuilder::small(1, 500_000).layer(LayerFiles::new().noise("srv/own", 50_000, 100 + i));
        image.push(&registry, &format!("family/member-{i}:v1")).unwrap();
    }
    registry.forget_requests();
    let names: Vec<_> = (0..10).map(|i| registry.image(&format!("family/member-{i}:v1"))).collect();
    let ids = join_all(names.iter().map(|name| pull(&backend, name))).await;
    assert_eq!(ids.len(), 10);
    assert_eq!(backend.list().await.unwrap().len(), 10);
    assert_eq!(most_served(&registry), 1, "each blob was fetched once");
}

#[tokio::test]
async fn a_pulled_image_is_unpacked_until_it_is_removed() {
    let Some((dir, backend, registry)) = node() else { return };
    let layout = ImageBuilder::small(3, 100_000).push(&registry, "shop/web:1").unwrap();
    let name = registry.image("shop/web:1");
    assert_eq!(pull(&backend, &name).await, layout.image_id);
    let record = backend.store().image(&name).unwrap().expect("it is here");
    assert_eq!(inode_in(&backend, &record, 0, "srv/data").size, 100_000);
    let layers = dir.path().join("store/layers");
    assert!(layers.join(record.layers[0].key.as_str()).is_file());
    assert!(record.tags.contains(&Reference::parse(&name).unwrap().to_string()));
    backend.remove(&ImageSpec::named(&name), &RemoveOptions::default()).await.unwrap();
    assert!(backend.store().image(&name).unwrap().is_none());
    backend.store().empty_trash().unwrap();
    assert_eq!(fs_err::read_dir(layers).unwrap().count(), 0);
}

#[tokio::test]
async fn an_image_that_does_not_exist_is_not_found_and_leaves_nothing() {
    let Some((_dir, backend, registry)) = node() else { return };
    let image = ImageSpec::named(registry.image("no/such:v1"));
    let error = backend.pull(&image, None, None, &ProgressReporter::unwatched()).await.unwrap_err();
    assert!(error.to_string().contains("no/such"), "{error}");
    assert_eq!(backend.list().await.unwrap(), []);
}

#[tokio::test]
async fn a_layer_takes_implied_metadata_from_each_base() {
    let Some((_dir, backend, registry)) = node() else { return };
    // Two bases that differ in the mode of a directory, and one layer that puts a file there without naming it.
    let shared = LayerFiles::archive(TarBuilder::new().with(TarBuilderEntry::file("srv/x", "x")).finish());
    for (name, mode) in [("bases/open:v1", 0o755), ("bases/closed:v1", 0o700), ("bases/shut:v1", 0o500)] {
        let base = TarBuilder::new()
            .with(TarBuilderEntry::dir("srv").mode(mode))
            .with(TarBuilderEntry::file("base", name))
            .finish();
        ImageBuilder::new()
            .layer(LayerFiles::archive(base))
            .layer(shared.clone())
            .push(&registry, name)
            .unwrap();
    }
    let names = ["bases/open:v1", "bases/closed:v1", "bases/shut:v1"].map(|name| registry.image(name));
    join_all(names.iter().map(|name| pull(&backend, name))).await;
    for (name, mode) in names.iter().zip([0o755, 0o700, 0o500]) {
        let record = backend.store().image(name).unwrap().expect("it is here");
        let found = inode_in(&backend, &record, 1, "srv").mode;
        assert_eq!(format!("{found:o}"), format!("{mode:o}"), "{name}");
    }
}

#[tokio::test]
async fn a_rejected_credential_and_a_missing_one_are_both_a_denied_pull() {
    let (dir, registry) = (tempfile::tempdir().unwrap(), FaultRegistry::start());
    registry.require(FaultRegistryAuth::Basic { user: "u".into(), password: "right".into() });
    let (backend, name) = (backend(&dir.path().join("store")), registry.image("private/app:1"));
    let wrong = Credential { username: "u".into(), password: Secret::new("wrong"), ..Credential::default() };
    for (credential, text) in [(Some(&wrong), "rejected the credential"), (None, "pull access denied")] {
        let progress = ProgressReporter::unwatched();
        let error = backend.pull(&ImageSpec::named(&name), credential, None, &progress).await.unwrap_err();
        assert!(matches!(error, BackendError::Call { kind: CallErrorKind::Denied, .. }), "{error:?}");
        assert!(error.to_string().contains(text), "{error}");
    }
}
