//! Pulls into the store, from a real registry.

use futures_util::future::join_all;
use larder::backend::{Backend as _, ImageSpec, Progress};
use larder::reference::Reference;
use larder_store::backend::StoreBackend;
use larder_store::pull::{PullConfig, Puller};
use larder_store::registry::{Client, RegistryConfig};
use larder_store::store::{Store, StoreConfig};
use larder_testkit::backend_suite::{self, Fixtures};
use larder_testkit::peers::{Image, Layer, Package, Registry, RegistryOptions, require};
use tempfile::TempDir;

/// A store in a new folder, and a registry; `None` where no registry can be had.
fn node() -> Option<(TempDir, StoreBackend, Registry)> {
    if !require(&[Package::DockerRegistry, Package::Skopeo]).is_available() {
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(&folder.path().join("store"), StoreConfig::default()).unwrap();
    let puller = Puller::new(store, Client::new(RegistryConfig::default()), PullConfig::default());
    Some((folder, StoreBackend::new(puller), Registry::start(RegistryOptions::default()).unwrap()))
}

async fn pull(backend: &StoreBackend, name: &str) -> String {
    let progress = Progress::unwatched();
    match backend.pull(&ImageSpec::named(name), None, None, &progress).await {
        Ok(id) => id,
        Err(error) => panic!("{name}: {error}"),
    }
}

/// How often the registry served each blob.
fn most_served(registry: &Registry) -> usize {
    let requests = registry.requests();
    let blobs: Vec<_> = requests
        .iter()
        .filter(|request| request.method == "GET" && request.path.contains("/blobs/"))
        .collect();
    let of = |digest: &str| blobs.iter().filter(|request| request.path.ends_with(digest)).count();
    blobs.iter().map(|request| of(request.path.rsplit('/').next().unwrap_or_default())).max().unwrap_or(0)
}

#[tokio::test]
async fn the_store_keeps_the_contract() {
    let Some((_folder, backend, registry)) = node() else { return };
    for name in ["team/app:v1", "team/app:stable"] {
        Image::small(1, 200_000).push(&registry, name).unwrap();
    }
    let fixtures = Fixtures {
        image: registry.image("team/app:v1"),
        alias: registry.image("team/app:stable"),
        unknown: registry.image("team/nothing:v1"),
    };
    let empty = async || {
        backend.remove(&ImageSpec::named(&fixtures.image)).await.unwrap();
        backend.remove(&ImageSpec::named(&fixtures.alias)).await.unwrap();
        backend.clone()
    };
    backend_suite::check(empty, &fixtures).await;
}

#[tokio::test]
async fn ten_pulls_that_share_a_base_fetch_each_blob_once() {
    let Some((_folder, backend, registry)) = node() else { return };
    for i in 0..10 {
        let image = Image::small(1, 500_000).layer(Layer::new().noise("srv/own", 50_000, 100 + i));
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
async fn what_is_pulled_lies_unpacked_and_goes_when_removed() {
    let Some((folder, backend, registry)) = node() else { return };
    let layout = Image::small(3, 100_000).push(&registry, "shop/web:1").unwrap();
    let name = registry.image("shop/web:1");
    assert_eq!(pull(&backend, &name).await, layout.image_id);
    let record = backend.store().image(&name).unwrap().expect("it is here");
    let fs = folder.path().join("store/layers").join(record.layers[0].key.as_str()).join("fs");
    assert_eq!(fs_err::metadata(fs.join("srv/data")).unwrap().len(), 100_000);
    assert!(record.tags.contains(&Reference::parse(&name).unwrap().to_string()));
    backend.remove(&ImageSpec::named(&name)).await.unwrap();
    assert!(backend.store().image(&name).unwrap().is_none());
    backend.store().empty_trash().unwrap();
    assert!(!fs.exists());
}

#[tokio::test]
async fn an_image_that_does_not_exist_is_not_found_and_leaves_nothing() {
    let Some((_folder, backend, registry)) = node() else { return };
    let image = ImageSpec::named(registry.image("no/such:v1"));
    let error = backend.pull(&image, None, None, &Progress::unwatched()).await.unwrap_err();
    assert!(error.to_string().contains("no/such"), "{error}");
    assert_eq!(backend.list().await.unwrap(), []);
}
