//! Images that become far more than what is fetched are refused by layer and setting; legal extremes are pulled.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::io::Write as _;

use larder::backend::ProgressReporter;
use larder::error_chain;
use larder::reference::Reference;
use larder_registry::{Proxy, RegistryClient, RegistryConfig};
use larder_store::disk::measure;
use larder_store::pull::{PullError, StorePullConfig, StorePuller};
use larder_store::store::{ImageRecord, Store, StoreConfig};
use larder_store::unpack::UnpackLimits;
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::fault_registry::{FaultRegistry, digest};

const MIB: usize = 1 << 20;
const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";

/// A layer with one file, and its diff ID.
fn layer(name: &str, content: Vec<u8>) -> (Vec<u8>, String) {
    gzip(&TarBuilder::new().with(TarBuilderEntry::file(name, content)).finish())
}

fn gzip(plain: &[u8]) -> (Vec<u8>, String) {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(plain).unwrap();
    (encoder.finish().unwrap(), digest(plain))
}

/// Bytes that do not compress.
fn noise(bytes: usize, mut state: u64) -> Vec<u8> {
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..bytes / 8).flat_map(|_| next().to_le_bytes()).collect()
}

/// Pulls an image of these layers into a new store. Returns the result, the layers' digests, and the bytes that the
/// store's layers take.
async fn pull(
    layers: &[(Vec<u8>, String)],
    limits: UnpackLimits,
) -> (Result<ImageRecord, PullError>, Vec<String>, u64) {
    let dir = tempfile::tempdir().unwrap();
    let registry = FaultRegistry::start();
    let (layers, diff_ids): (Vec<_>, Vec<_>) = layers.iter().cloned().unzip();
    let digests = registry.put_image("app", "1", GZIP, &layers, &diff_ids).layers;
    let store = Store::open(&dir.path().join("store"), StoreConfig::default()).unwrap();
    let config = RegistryConfig { config_dirs: Vec::new(), proxy: Proxy::None, ..RegistryConfig::default() };
    let client = RegistryClient::new(config);
    let puller =
        StorePuller::new(store.clone(), client, StorePullConfig { limits, ..StorePullConfig::default() });
    let name = Reference::parse(&registry.image("app:1")).unwrap();
    let outcome = puller.pull(&name, None, &ProgressReporter::unwatched()).await;
    assert_eq!(store.list().unwrap().len(), usize::from(outcome.is_ok()));
    (outcome, digests, measure(&dir.path().join("store/layers")).unwrap().bytes)
}

#[tokio::test]
async fn what_becomes_too_large_is_refused_by_layer_and_setting() {
    let limits = UnpackLimits {
        max_plain_bytes: 4 << 20,
        max_image_bytes: 6 << 20,
        max_expansion: 10,
        expansion_free_bytes: 1 << 20,
        ..UnpackLimits::default()
    };
    let x = |name: &str, kib: usize| layer(name, vec![b'x'; kib << 10]);
    for (what, layers, setting, message) in [
        (
            "a layer",
            vec![layer("a", noise(5 * MIB, 1))],
            "store.maxLayerBytes",
            "more than 4194304 bytes of file content",
        ),
        (
            "an image",
            (1..4).map(|seed| layer("a", noise(3 * MIB, seed))).collect(),
            "store.maxImageBytes",
            "more than 6291456 plain bytes in all layers of the image",
        ),
        (
            "a packed layer",
            vec![x("a", 3 << 10)],
            "store.maxExpansion",
            "more than 10 plain bytes for each compressed byte",
        ),
        (
            "many packed layers",
            (0..30).map(|n| x(&n.to_string(), 100)).collect(),
            "store.maxExpansion",
            "more than 10 plain bytes for each compressed byte",
        ),
    ] {
        let (pulled, digests, _) = pull(&layers, limits.clone()).await;
        let error = pulled.expect_err(what);
        let text = error_chain(&error);
        assert!(text.contains(message), "{what}: {text}");
        assert!(digests.iter().any(|digest| text.contains(digest)), "{what}: {text}");
        let hint = error.hint().map(|hint| hint.to_string()).unwrap_or_default();
        assert!(hint.contains(setting), "{what}: {hint}");
    }
}

#[tokio::test]
async fn an_image_within_the_limits_may_have_as_much_as_they_allow() {
    let limits = UnpackLimits {
        max_image_bytes: 7 << 20,
        max_expansion: 2,
        expansion_free_bytes: 0,
        ..UnpackLimits::default()
    };
    let layers = [layer("a", noise(3 * MIB, 1)), layer("b", noise(3 * MIB, 2))];
    pull(&layers, limits).await.0.unwrap();
}

#[tokio::test]
async fn zeros_take_no_space_and_count_as_no_expansion() {
    let limits = UnpackLimits { max_expansion: 10, expansion_free_bytes: 1 << 20, ..UnpackLimits::default() };
    let (pulled, _, bytes) = pull(&[layer("disk.img", vec![0; 16 * MIB])], limits).await;
    pulled.unwrap();
    assert!(bytes < MIB as u64, "{bytes} bytes");
}

#[tokio::test]
async fn a_sparse_file_of_ten_gigabytes_is_pulled() {
    let sparse = TarBuilderEntry::file("sparse", vec![b'x'; 5])
        .pax("GNU.sparse.map", "0,5")
        .pax("GNU.sparse.size", "10000000000")
        .pax("GNU.sparse.name", "sparse");
    let (pulled, _, bytes) =
        pull(&[gzip(&TarBuilder::new().with(sparse).finish())], UnpackLimits::default()).await;
    pulled.unwrap();
    assert!(bytes < 4 * MIB as u64, "{bytes} bytes");
}
