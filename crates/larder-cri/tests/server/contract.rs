//! The whole contract of a backend, through the client, a socket, and the server: nothing may get lost on the way.

use std::cell::RefCell;
use std::sync::Arc;

use larder::backend::{FilesystemUsage, Filesystems};
use larder::gc::Gate as Leases;
use larder::pull::{ManagedBackend, Manager, PullConfig};
use larder_cri::{CriBackend, proto};
use larder_registry::{Client, RegistryConfig};
use larder_store::backend::StoreBackend;
use larder_store::pull::{PullConfig as StorePulls, Puller};
use larder_store::store::{Store, StoreConfig};
use larder_testkit::backend_suite::{Fixture, Names, check};
use larder_testkit::fake_backend::{FakeBackend, Pull, image};
use larder_testkit_peers::fake_cri::FakeCri;
use larder_testkit_peers::{Gate, Image, Package, Registry, RegistryOptions, require};

use crate::world::Server;

/// Containers that run in a runtime of their own, as kubelet has it when it names an image service.
struct Containers(FakeCri);

impl Containers {
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
struct InMemory {
    names: Names,
    containers: Containers,
    made: RefCell<Vec<(FakeBackend, Server)>>,
}

impl InMemory {
    fn last(&self) -> FakeBackend {
        self.made.borrow().last().expect("a backend was made").0.clone()
    }
}

impl Fixture for InMemory {
    type Backend = CriBackend;

    fn names(&self) -> &Names {
        &self.names
    }

    async fn empty(&self) -> CriBackend {
        let fake = FakeBackend::new();
        fake.offer(&self.names.image, image("sha256:app", 10));
        fake.offer(&self.names.alias, image("sha256:app", 10));
        fake.offer(&self.names.untouched, image("sha256:other", 10));
        let usage = FilesystemUsage { mountpoint: "/images".into(), ..FilesystemUsage::default() };
        fake.set_filesystems(Filesystems { image: vec![usage], container: Vec::new() });
        let server = Server::start(fake.clone());
        let client = server.client_beside(self.containers.0.socket());
        self.made.borrow_mut().push((fake, server));
        client
    }

    async fn hold_next_pull(&self) {
        self.last().on_pull(Pull::ok("sha256:other", 10).held().0);
    }

    async fn pull_held(&self) {
        self.last().until(|counts| counts.running == 1).await;
    }

    async fn let_pulls_go(&self) {}

    async fn run_container(&self, image_id: &str) -> bool {
        self.containers.run(image_id);
        true
    }
}

/// Servers in front of new stores, and a registry behind a gate that holds pulls.
struct InStores {
    names: Names,
    gate: Arc<Gate>,
    containers: Containers,
    folder: tempfile::TempDir,
    /// Whether calls go through a manager, as in the daemon.
    managed: bool,
    servers: RefCell<Vec<Server>>,
}

impl InStores {
    /// `None` where no registry can be had.
    fn new(managed: bool) -> Option<(InStores, Registry)> {
        if !require(&[Package::DockerRegistry, Package::Skopeo]).is_available() {
            return None;
        }
        let registry = Registry::start(RegistryOptions::default()).unwrap();
        for name in ["contract/app:v1", "contract/app:stable"] {
            Image::small(1, 200_000).push(&registry, name).unwrap();
        }
        Image::small(2, 200_000).push(&registry, "contract/other:v1").unwrap();
        let gate = Gate::in_front_of(registry.port()).unwrap();
        let names = Names {
            image: gate.image("contract/app:v1"),
            alias: gate.image("contract/app:stable"),
            untouched: gate.image("contract/other:v1"),
            unknown: gate.image("contract/nothing:v1"),
        };
        let stores = InStores {
            names,
            gate: Arc::new(gate),
            containers: Containers(FakeCri::start()),
            folder: tempfile::tempdir().unwrap(),
            managed,
            servers: RefCell::default(),
        };
        Some((stores, registry))
    }
}

impl Fixture for InStores {
    type Backend = CriBackend;

    fn names(&self) -> &Names {
        &self.names
    }

    async fn empty(&self) -> CriBackend {
        let root = self.folder.path().join(format!("store-{}", self.servers.borrow().len()));
        let store = Store::open(&root, StoreConfig::default()).unwrap();
        let puller = Puller::new(store, Client::new(RegistryConfig::default()), StorePulls::default());
        let backend = StoreBackend::new(puller);
        let server = if self.managed {
            let config = PullConfig { registry_pull_qps: 0, ..PullConfig::default() };
            let leases = Arc::new(Leases::default());
            let lease = std::time::Duration::from_secs(60);
            let manager = Manager::builder(Arc::new(backend)).config(config).lease(leases, lease).build();
            Server::start(ManagedBackend::new(Arc::new(manager)))
        } else {
            Server::start(backend)
        };
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

    async fn let_pulls_go(&self) {
        self.gate.open();
    }

    async fn run_container(&self, image_id: &str) -> bool {
        self.containers.run(image_id);
        true
    }
}

#[tokio::test]
async fn a_backend_in_memory_keeps_the_contract_behind_the_server() {
    let names = Names {
        image: "registry.example/app:v1".into(),
        alias: "registry.example/app:stable".into(),
        untouched: "registry.example/other:v1".into(),
        unknown: "registry.example/nothing:v1".into(),
    };
    check(&InMemory { names, containers: Containers(FakeCri::start()), made: RefCell::default() }).await;
}

#[tokio::test]
async fn the_store_keeps_the_contract_behind_the_server() {
    let Some((stores, _registry)) = InStores::new(false) else { return };
    check(&stores).await;
}

#[tokio::test]
async fn the_store_keeps_the_contract_behind_a_manager_and_the_server() {
    let Some((stores, _registry)) = InStores::new(true) else { return };
    check(&stores).await;
}
