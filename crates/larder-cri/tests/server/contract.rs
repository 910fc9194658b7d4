//! The whole contract of a backend, through the client, a socket, and the server: nothing may get lost on the way.

use std::cell::RefCell;
use std::sync::Arc;

use larder::backend::{FilesystemUsage, Filesystems};
use larder_cri::{CriBackend, proto};
use larder_registry::{RegistryClient, RegistryConfig};
use larder_store::backend::StoreBackend;
use larder_store::pull::{StorePullConfig as StorePulls, StorePuller};
use larder_store::store::{Store, StoreConfig};
use larder_testkit::backend_suite::{BackendFixture, FixtureImages, check};
use larder_testkit::fake_backend::{FakeBackend, ScriptedPull, image};
use larder_testkit_peers::fake_cri::FakeCri;
use larder_testkit_peers::{HoldingProxy, ImageBuilder, Package, RegistryOptions, RegistryProcess, require};

use crate::world::CriTestServer;

/// Containers that run in a runtime of their own, as kubelet has it when it names an image service.
struct ContainerRuntime(FakeCri);

impl ContainerRuntime {
    fn run(&self, image_id: &str) {
        self.0.change(|contents| {
            let image = Some(proto::ImageSpec { image: image_id.into(), ..proto::ImageSpec::default() });
            contents.mounts.insert("c".into(), vec![proto::Mount { image, ..proto::Mount::default() }]);
            contents.containers =
                vec![proto::Container { id: "c".into(), image_ref: image_id.into(), ..Default::default() }];
        });
    }
}

/// Servers in front of fakes, the newest last.
struct FakeServerFixture {
    names: FixtureImages,
    containers: ContainerRuntime,
    made: RefCell<Vec<(FakeBackend, CriTestServer)>>,
}

impl FakeServerFixture {
    fn last(&self) -> FakeBackend {
        self.made.borrow().last().expect("a backend was made").0.clone()
    }
}

impl BackendFixture for FakeServerFixture {
    type Backend = CriBackend;

    fn names(&self) -> &FixtureImages {
        &self.names
    }

    async fn empty(&self) -> CriBackend {
        let fake = FakeBackend::new();
        fake.offer(&self.names.image, image("sha256:app", 10));
        fake.offer(&self.names.alias, image("sha256:app", 10));
        fake.offer(&self.names.untouched, image("sha256:other", 10));
        let usage = FilesystemUsage { mountpoint: "/images".into(), ..FilesystemUsage::default() };
        fake.set_filesystems(Filesystems { image: vec![usage], container: Vec::new() });
        let server = CriTestServer::start(fake.clone());
        let client = server.client_beside(self.containers.0.socket());
        self.made.borrow_mut().push((fake, server));
        client
    }

    async fn hold_next_pull(&self) {
        self.last().on_pull(ScriptedPull::ok("sha256:other", 10).held().0);
    }

    async fn pull_held(&self) {
        self.last().until(|counts| counts.running == 1).await;
    }

    async fn release_pulls(&self) {}

    async fn run_container(&self, image_id: &str) -> bool {
        self.containers.run(image_id);
        true
    }
}

/// Servers in front of new stores, and a registry behind a gate that holds pulls.
struct StoreServerFixture {
    names: FixtureImages,
    gate: Arc<HoldingProxy>,
    containers: ContainerRuntime,
    dir: tempfile::TempDir,
    servers: RefCell<Vec<CriTestServer>>,
}

impl StoreServerFixture {
    /// `None` where no registry can be had.
    fn new() -> Option<(StoreServerFixture, RegistryProcess)> {
        if !require(&[Package::DockerRegistry, Package::Skopeo]).is_available() {
            return None;
        }
        let registry = RegistryProcess::start(RegistryOptions::default()).unwrap();
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
        let stores = StoreServerFixture {
            names,
            gate: Arc::new(gate),
            containers: ContainerRuntime(FakeCri::start()),
            dir: tempfile::tempdir().unwrap(),
            servers: RefCell::default(),
        };
        Some((stores, registry))
    }
}

impl BackendFixture for StoreServerFixture {
    type Backend = CriBackend;

    fn names(&self) -> &FixtureImages {
        &self.names
    }

    async fn empty(&self) -> CriBackend {
        let root = self.dir.path().join(format!("store-{}", self.servers.borrow().len()));
        let store = Store::open(&root, StoreConfig::default()).unwrap();
        let puller =
            StorePuller::new(store, RegistryClient::new(RegistryConfig::default()), StorePulls::default());
        let server = CriTestServer::start(StoreBackend::new(puller));
        let client = server.client_beside(self.containers.0.socket());
        self.servers.borrow_mut().push(server);
        client
    }

    async fn hold_next_pull(&self) {
        self.gate.hold_blobs_after(0);
    }

    async fn pull_held(&self) {
        let gate = Arc::clone(&self.gate);
        let waiting = tokio::task::spawn_blocking(move || gate.wait_until_held(1));
        waiting.await.expect("the pull comes to the gate");
    }

    async fn release_pulls(&self) {
        self.gate.open();
    }

    async fn run_container(&self, image_id: &str) -> bool {
        self.containers.run(image_id);
        true
    }
}

#[tokio::test]
async fn a_backend_in_memory_keeps_the_contract_behind_the_server() {
    let names = FixtureImages {
        image: "registry.example/app:v1".into(),
        alias: "registry.example/app:stable".into(),
        untouched: "registry.example/other:v1".into(),
        unknown: "registry.example/nothing:v1".into(),
    };
    check(&FakeServerFixture {
        names,
        containers: ContainerRuntime(FakeCri::start()),
        made: RefCell::default(),
    })
    .await;
}

#[tokio::test]
async fn the_store_keeps_the_contract_behind_the_server() {
    let Some((stores, _registry)) = StoreServerFixture::new() else { return };
    check(&stores).await;
}
