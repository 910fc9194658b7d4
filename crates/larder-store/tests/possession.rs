//! Content that a pull may take from the store: only what its own repository proves to have, to this pull's
//! credential.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::time::Duration;

use larder::backend::ProgressReporter;
use larder::reference::{Digest, Reference};
use larder_registry::{Proxy, RegistryClient, RegistryConfig};
use larder_store::pull::{PullError, StorePullConfig, StorePuller};
use larder_store::store::{ImageRecord, Store, StoreConfig};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, PutImage, ResponseFault};
use serde_json::json;
use tempfile::TempDir;

const PLAIN: &str = "application/vnd.oci.image.layer.v1.tar";
const GZIP: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";

/// A node with the image of one tenant, and the registry of another tenant.
struct Tenants {
    _dir: TempDir,
    puller: StorePuller,
    victim: FaultRegistry,
    image: PutImage,
    attacker: FaultRegistry,
}

fn archive(name: &str, byte: u8) -> Vec<u8> {
    TarBuilder::new().with(TarBuilderEntry::file(name, vec![byte; 20_000])).finish()
}

fn gzip(plain: &[u8]) -> Vec<u8> {
    use std::io::Write as _;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(plain).unwrap();
    encoder.finish().unwrap()
}

impl Tenants {
    async fn new() -> Tenants {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store"), StoreConfig::default()).unwrap();
        let config =
            RegistryConfig { config_dirs: Vec::new(), proxy: Proxy::None, ..RegistryConfig::default() };
        let puller = StorePuller::new(store, RegistryClient::new(config), StorePullConfig::default());
        let (victim, attacker) = (FaultRegistry::start(), FaultRegistry::start());
        let layers = [archive("base", 1), archive("secret", 2)];
        let image = victim.put_image("private/app", "1", PLAIN, &layers, &[]);
        let tenants = Tenants { _dir: dir, puller, victim, image, attacker };
        tenants.pull(&tenants.victim, "private/app:1").await.unwrap();
        tenants.victim.forget_requests();
        tenants
    }

    async fn pull(&self, registry: &FaultRegistry, name: &str) -> Result<ImageRecord, PullError> {
        let name = Reference::parse(&registry.image(name)).unwrap();
        self.puller.pull(&name, None, &ProgressReporter::unwatched()).await
    }

    /// Puts a manifest with the private image's config and these layers into the attacker's registry.
    fn name_private_config(&self, layers: &[(&str, usize)]) {
        let layers: Vec<_> = layers
            .iter()
            .map(|(digest, size)| json!({"mediaType": PLAIN, "digest": digest, "size": size}))
            .collect();
        let size = self.puller.store().blob(&self.id()).unwrap().unwrap().len();
        let config = json!({"mediaType": CONFIG, "digest": self.image.config, "size": size});
        let manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers});
        self.attacker.put_manifest("free/app", "1", MANIFEST, manifest.to_string());
    }

    fn id(&self) -> Digest {
        Digest::parse(&self.image.config).unwrap()
    }

    fn record(&self) -> ImageRecord {
        self.puller.store().image(self.id()).unwrap().unwrap()
    }

    /// The config and the layers of the private image, for a repository that has them.
    fn copy_to_attacker(&self, blobs: &[&str]) {
        for digest in blobs {
            let config = self.puller.store().blob(&Digest::parse(digest).unwrap()).unwrap();
            self.attacker.put_blob(config.unwrap());
        }
    }
}

#[tokio::test]
async fn a_manifest_that_names_a_private_config_does_not_get_the_image() {
    let tenants = Tenants::new().await;
    let before = tenants.record();
    let junk = [archive("junk", 3), archive("junk", 4)];
    let junk = junk.map(|layer| (tenants.attacker.put_blob(layer.clone()), layer.len()));
    tenants.name_private_config(&[(&junk[0].0, junk[0].1), (&junk[1].0, junk[1].1)]);

    let error = tenants.pull(&tenants.attacker, "free/app:1").await.unwrap_err();
    assert!(error.to_string().contains(&tenants.image.config), "{error}");
    assert_eq!(tenants.record(), before);
}

#[tokio::test]
async fn a_config_alone_does_not_prove_its_layers() {
    let tenants = Tenants::new().await;
    let before = tenants.record();
    tenants.copy_to_attacker(&[&tenants.image.config]);
    // The right digests, but the repository does not have the blobs.
    let size = archive("base", 1).len();
    let [base, secret] = [0, 1].map(|at: usize| tenants.image.layers[at].clone());
    tenants.name_private_config(&[(&base, size), (&secret, size)]);
    let error = tenants.pull(&tenants.attacker, "free/app:1").await.unwrap_err();
    assert!(error.to_string().contains("sha256:"), "{error}");
    assert_eq!(tenants.record(), before);

    // Blobs that it has, which are not those layers.
    let junk = [archive("junk", 3), archive("junk", 4)];
    let junk = junk.map(|layer| (tenants.attacker.put_blob(layer.clone()), layer.len()));
    tenants.name_private_config(&[(&junk[0].0, junk[0].1), (&junk[1].0, junk[1].1)]);
    let error = tenants.pull(&tenants.attacker, "free/app:1").await.unwrap_err();
    assert!(matches!(error, PullError::Unpack { .. }), "{error}");
    assert_eq!(tenants.record(), before);
}

#[tokio::test]
async fn layers_that_the_repository_has_are_not_fetched_again() {
    let tenants = Tenants::new().await;
    let layers = [archive("base", 1), archive("own", 5)];
    let image = tenants.attacker.put_image("free/app", "1", PLAIN, &layers, &[]);
    tenants.pull(&tenants.attacker, "free/app:1").await.unwrap();
    assert_eq!(tenants.attacker.bytes_sent(&image.layers[0]), 0);
    let proof = tenants.attacker.requests_for(&format!("/blobs/{}", image.layers[0]));
    assert_eq!(proof.iter().map(|request| request.method.as_str()).collect::<Vec<_>>(), ["HEAD"]);
}

#[tokio::test]
async fn a_repeated_pull_requests_manifests_only() {
    let tenants = Tenants::new().await;
    tenants.pull(&tenants.victim, "private/app:1").await.unwrap();
    let requests = tenants.victim.requests();
    assert!(requests.iter().all(|request| request.path.contains("/manifests/")), "{requests:?}");
}

#[tokio::test]
async fn a_layer_compressed_in_another_way_is_fetched_and_verified_and_kept_once() {
    let tenants = Tenants::new().await;
    let before = tenants.record();
    let plain = [archive("base", 1), archive("secret", 2)];
    let layers = [gzip(&plain[0]), gzip(&plain[1])];
    let image = tenants.attacker.put_image("free/app", "1", GZIP, &layers, &tenants.image.layers);
    assert_eq!(image.config, tenants.image.config);
    tenants.pull(&tenants.attacker, "free/app:1").await.unwrap();
    for (digest, layer) in image.layers.iter().zip(&layers) {
        assert_eq!(tenants.attacker.bytes_sent(digest), layer.len() as u64);
    }
    assert_eq!(tenants.record().layers, before.layers);
}

#[tokio::test]
async fn a_blob_that_an_interrupted_pull_fetched_is_not_unpacked_for_another_repository() {
    let tenants = Tenants::new().await;
    let layers = [archive("stalled", 6), archive("fetched", 7)];
    let image = tenants.victim.put_image("private/other", "1", PLAIN, &layers, &[]);
    tenants.victim.fault(FaultTrigger::path(&image.layers[0]), ResponseFault::StallAfter(0));
    let store = tenants.puller.store();
    let fetched = async {
        while store.usage().unwrap().ingest.bytes < layers[1].len() as u64 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::select! {
        pulled = tenants.pull(&tenants.victim, "private/other:1") => panic!("{pulled:?}"),
        () = fetched => {}
    }
    let own = tenants.attacker.put_image("free/app", "1", PLAIN, &layers[1..], &[]);
    tenants.attacker.fault(FaultTrigger::path(&own.layers[0]), ResponseFault::status(404));
    let error = tenants.pull(&tenants.attacker, "free/app:1").await.unwrap_err();
    assert!(matches!(&error, PullError::Fetch(_) | PullError::Blob(_)), "{error}");
    tenants.attacker.clear_faults();
    tenants.pull(&tenants.attacker, "free/app:1").await.unwrap();
    assert_eq!(tenants.attacker.bytes_sent(&own.layers[0]), 0, "it has the blob, and need not send it again");
}
