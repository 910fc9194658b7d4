//! Pulls of the same layers in different orders, and one that gives up: no pull waits forever.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::time::Duration;

use larder::backend::{Backend as _, ImageSpec, ProgressReporter};
use larder::reference::{Digest, Reference};
use larder_registry::{Proxy, RegistryClient, RegistryConfig};
use larder_store::backend::StoreBackend;
use larder_store::pull::{StorePullConfig, StorePuller};
use larder_store::store::{BlobSource, ClaimOutcome, LayerClaim, Store, StoreConfig, TransferLogin};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::fault_registry::FaultRegistry;
use larder_testkit_peers::process::poll;

const PLAIN: &str = "application/vnd.oci.image.layer.v1.tar";

fn claim(store: &Store, (layer, blob): &(Digest, BlobSource)) -> Option<LayerClaim> {
    match store.claim(blob, layer, layer).unwrap() {
        ClaimOutcome::Fetch(claim) => Some(claim),
        ClaimOutcome::Wait(_) => None,
        ClaimOutcome::Present(_) => panic!("{layer} is here already"),
    }
}

/// Waits for the claim of a layer that another pull has.
async fn claim_or_wait(store: &Store, layer: &(Digest, BlobSource)) -> LayerClaim {
    let (store, layer) = (store.clone(), layer.clone());
    let wait = move || poll(Duration::from_secs(20), || claim(&store, &layer));
    tokio::task::spawn_blocking(wait).await.unwrap().expect("the layer is given back")
}

#[tokio::test]
async fn a_pull_that_waits_out_of_order_gives_back_what_it_holds() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("store"), StoreConfig::default()).unwrap();
    let registry = FaultRegistry::start();
    let layer = |name: &str| TarBuilder::new().with(TarBuilderEntry::file(name, vec![7; 100_000])).finish();
    let image = registry.put_image("app", "1", PLAIN, &[layer("lower"), layer("upper")], &[]);
    // They are not compressed, so their digests are their diff ids.
    let name = Reference::parse(&registry.image("app")).unwrap();
    let size = layer("lower").len() as u64;
    let [lower, upper] = [0, 1].map(|at: usize| {
        let digest = Digest::parse(&image.layers[at]).unwrap();
        (digest.clone(), BlobSource::registry(&name, TransferLogin::Anonymous, digest, size))
    });
    let config = RegistryConfig { config_dirs: Vec::new(), proxy: Proxy::None, ..RegistryConfig::default() };
    let puller = StorePuller::new(store.clone(), RegistryClient::new(config), StorePullConfig::default());
    let backend = StoreBackend::new(puller);

    // Another pull has the lower layer, so this one waits for it, with the upper layer in its hands.
    let gives_up = claim(&store, &lower).unwrap();
    let spec = ImageSpec::named(registry.image("app:1"));
    let pulling =
        tokio::spawn(async move { backend.pull(&spec, None, None, &ProgressReporter::unwatched()).await });
    let (held, of) = (store.clone(), upper.clone());
    let taken = move || poll(Duration::from_secs(20), || claim(&held, &of).is_none().then_some(()));
    tokio::task::spawn_blocking(taken).await.unwrap().expect("the pull claims the upper layer");

    // It gives up, and a third pull, which wants the upper layer next, is the first to claim the lower one.
    drop(gives_up);
    let lower = claim(&store, &lower).expect("this thread is the first");
    let upper = claim_or_wait(&store, &upper).await;
    drop((lower, upper));
    pulling.await.unwrap().expect("the pull goes on once no other pull has a claim");
}
