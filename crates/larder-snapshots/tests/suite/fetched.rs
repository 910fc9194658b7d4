//! Layers that the store lacks, which containerd announces with their image.

use std::sync::Arc;
use std::time::Duration;

use larder::backend::ProgressReporter;
use larder::gc::ClockReading;
use larder::reference::{Digest, Reference};
use larder_registry::{Proxy, RegistryClient, RegistryConfig};
use larder_snapshots::LayerFetcher;
use larder_store::pull::{FetchedImage, StorePullConfig, StorePuller};
use larder_store::store::{ImageRecord, Store};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, PutImage, ResponseFault};
use tonic::{Code, async_trait};

use crate::world::SuiteWorld;

const PLAIN: &str = "application/vnd.oci.image.layer.v1.tar";

/// Fetches anonymously. Images of the repository `app` are accessible.
struct AnonymousFetcher(StorePuller);

#[async_trait]
impl LayerFetcher for AnonymousFetcher {
    fn is_enabled(&self) -> bool {
        true
    }

    async fn wait_for_layer(&self, chain: &Digest) -> bool {
        self.0.wait_for_layer(chain, Duration::from_secs(2)).await
    }

    async fn is_one_accessible(&self, images: &[ImageRecord]) -> bool {
        images.iter().flat_map(|image| &image.tags).any(|tag| tag.ends_with("/app:1"))
    }

    async fn fetch(&self, image: &Reference) -> Result<FetchedImage, String> {
        self.0.fetch_layers(image, None, Duration::from_secs(2)).await.map_err(|error| error.to_string())
    }
}

fn puller(store: Store) -> StorePuller {
    let config = RegistryConfig { config_dirs: Vec::new(), proxy: Proxy::None, ..RegistryConfig::default() };
    StorePuller::new(store, RegistryClient::new(config), StorePullConfig::default())
}

/// A registry with an image of three layers.
struct FetchWorld {
    world: SuiteWorld,
    registry: FaultRegistry,
    image: PutImage,
    puller: StorePuller,
}

impl FetchWorld {
    fn new() -> Option<FetchWorld> {
        let mut world = SuiteWorld::new()?;
        let mut own = None;
        world.fetch_with(|store| {
            let puller = own.insert(puller(store));
            Arc::new(AnonymousFetcher(puller.clone()))
        });
        let registry = FaultRegistry::start();
        let layer = |name: &str| {
            TarBuilder::new().with(TarBuilderEntry::file(name, name.repeat(20_000).into_bytes())).finish()
        };
        let image = registry.put_image("app", "1", PLAIN, &["a", "b", "c"].map(layer), &[]);
        Some(FetchWorld { world, registry, image, puller: own.unwrap() })
    }

    fn chain(&self, at: usize) -> String {
        let next = |below: String, layer: &String| Digest::sha256(format!("{below} {layer}")).to_string();
        self.image.layers[1..=at].iter().fold(self.image.layers[0].clone(), next)
    }

    /// Prepares as containerd's unpacker does. Returns the name of the snapshot that it finds then; `None`: it unpacks
    /// itself.
    fn prepare(&self, at: usize, parent: &str) -> Option<String> {
        self.prepare_archive(at, parent, &self.image.layers[at])
    }

    fn prepare_archive(&self, at: usize, parent: &str, archive: &str) -> Option<String> {
        let chain = self.chain(at);
        let labels = [
            ("containerd.io/snapshot.ref", chain.as_str()),
            ("containerd.io/snapshot/cri.image-ref", &self.registry.image("app:1")),
            ("containerd.io/snapshot/cri.manifest-digest", &self.image.manifest),
            ("containerd.io/snapshot/cri.layer-digest", archive),
        ];
        match self.world.prepare_with(&format!("default/{at}/extract-1 {chain}"), parent, &labels) {
            Ok(mounts) => {
                assert_eq!(mounts.len(), 1);
                None
            }
            Err(status) => {
                assert_eq!(status.code(), Code::AlreadyExists, "{status}");
                let filter =
                    format!("labels.\"containerd.io/snapshot.ref\"==\"{chain}\",parent==\"{parent}\"");
                Some(self.world.list(&[&filter]).unwrap().pop().expect("a snapshot").name)
            }
        }
    }

    /// How often each blob was requested.
    fn blob_requests(&self) -> Vec<usize> {
        let requests = self.registry.requests();
        let count = |digest: &String| {
            requests
                .iter()
                .filter(|request| request.method == "GET" && request.path.ends_with(digest))
                .count()
        };
        self.image.layers.iter().map(count).collect()
    }

    fn layers(&self) -> usize {
        fs_err::read_dir(self.world.root().join("layers")).unwrap().count()
    }
}

#[test]
fn an_image_is_fetched_with_its_first_layer_and_freed_with_its_last_snapshot() {
    let Some(fetch) = FetchWorld::new() else { return };
    let first = fetch.prepare(0, "").expect("fetched");
    assert_eq!((fetch.blob_requests(), fetch.layers()), (vec![1, 1, 1], 3), "the whole image");
    let second = fetch.prepare(1, &first).expect("fetched");
    let third = fetch.prepare(2, &second).expect("fetched");
    assert_eq!(fetch.blob_requests(), [1, 1, 1]);
    assert!(fetch.puller.store().images().unwrap().is_empty(), "the image is containerd's");
    assert_eq!(fetch.puller.store().leases(&ClockReading::now()).unwrap(), []);
    let mounted = fetch.world.prepare_mount("default/9/container", &third);
    assert_eq!(fs_err::read(mounted.path().join("a")).unwrap().len(), 20_000);
    drop(mounted);

    for key in ["default/9/container", &third, &second, &first] {
        fetch.world.remove(key).unwrap();
    }
    assert_eq!(fetch.layers(), 0, "nothing else needs them");
}

#[test]
fn a_layer_that_cannot_be_fetched_is_unpacked_by_containerd() {
    let Some(fetch) = FetchWorld::new() else { return };
    fetch.registry.fault(FaultTrigger::path(&fetch.image.layers[1]), ResponseFault::status(404));
    assert_eq!(fetch.prepare(0, ""), None);
    assert_eq!(fetch.blob_requests()[1], 1);
    fetch.registry.forget_requests();
    let own = fetch.world.layer("default/7/own", "", |_| ());
    assert_eq!(fetch.prepare(1, &own), None);
    assert_eq!(fetch.registry.requests().len(), 0, "not tried again for each layer");
}

#[test]
fn a_registry_that_sends_nothing_delays_containerd_for_a_bounded_time() {
    let Some(fetch) = FetchWorld::new() else { return };
    fetch.registry.fault(FaultTrigger::path(&fetch.image.layers[1]), ResponseFault::StallAfter(100));
    let begun = tokio::time::Instant::now();
    assert_eq!(fetch.prepare(0, ""), None);
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

#[test]
fn a_layer_of_another_archive_than_announced_is_unpacked_by_containerd() {
    let Some(fetch) = FetchWorld::new() else { return };
    assert_eq!(fetch.prepare_archive(0, "", &fetch.image.layers[1]), None);
}

impl FetchWorld {
    /// Pulls through larder what the registry sends slowly, and returns once that has begun.
    fn begin_pull(&self) -> tokio::task::JoinHandle<()> {
        let slow = ResponseFault::Trickle(2_000, Duration::from_millis(20));
        self.registry.fault(FaultTrigger::path(&self.image.layers[2]), slow);
        let name = Reference::parse(&self.registry.image("app:1")).unwrap();
        let puller = self.puller.clone();
        let pulling = self.world.runtime().spawn(async move {
            puller.pull(&name, None, &ProgressReporter::unwatched()).await.unwrap();
        });
        let begun = tokio::time::Instant::now();
        while self.blob_requests()[2] == 0 {
            assert!(begun.elapsed() < Duration::from_secs(20), "the pull begins");
            self.world.runtime().block_on(async { tokio::time::sleep(Duration::from_millis(2)).await });
        }
        pulling
    }

    /// Prepares without the labels that name the image. Returns whether containerd has nothing to unpack.
    fn is_adopted(&self, namespace: &str) -> bool {
        let labels = [("containerd.io/snapshot.ref", self.chain(0))];
        let labels = labels.each_ref().map(|(label, chain)| (*label, chain.as_str()));
        let answer = self.world.prepare_with(&format!("{namespace}/1/extract"), "", &labels);
        answer.is_err_and(|status| status.code() == Code::AlreadyExists)
    }
}

#[test]
fn a_layer_that_a_pull_fetches_is_waited_for() {
    let Some(fetch) = FetchWorld::new() else { return };
    let pulling = fetch.begin_pull();
    assert!(fetch.prepare(0, "").is_some());
    fetch.world.runtime().block_on(pulling).unwrap();
    assert_eq!(fetch.blob_requests(), [1, 1, 1]);
}

#[test]
fn a_layer_that_a_pull_fetches_is_waited_for_without_the_name_of_its_image() {
    let Some(fetch) = FetchWorld::new() else { return };
    let pulling = fetch.begin_pull();
    assert!(fetch.is_adopted("k8s.io"));
    assert!(!fetch.puller.store().images().unwrap().is_empty(), "after the pull");
    fetch.world.runtime().block_on(pulling).unwrap();
}

#[test]
fn another_namespace_has_the_layers_of_accessible_images_only() {
    let Some(fetch) = FetchWorld::new() else { return };
    let pull = |name: &str| {
        let name = Reference::parse(&fetch.registry.image(name)).unwrap();
        let progress = ProgressReporter::unwatched();
        fetch.world.runtime().block_on(fetch.puller.pull(&name, None, &progress)).unwrap();
    };
    let layer = TarBuilder::new().with(TarBuilderEntry::file("a", b"a".repeat(20_000))).finish();
    fetch.registry.put_image("private", "1", PLAIN, &[layer], &[]);
    pull("private:1");
    assert!(!fetch.is_adopted("default"));
    fetch.world.remove("default/1/extract").unwrap();
    pull("app:1");
    assert!(fetch.is_adopted("default"), "another image with this layer is accessible");
    assert!(fetch.is_adopted("k8s.io"));
}
