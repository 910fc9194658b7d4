//! Content that a pull or a load may take from the store: only what its own source has sent before.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

use std::path::Path;
use std::time::Duration;

use larder::backend::ProgressReporter;
use larder::credentials::Credential;
use larder::reference::{Digest, Reference};
use larder_registry::{Proxy, RegistryClient, RegistryConfig};
use larder_store::pull::{LoadOptions, LoadedImage, PullError, StorePullConfig, StorePuller};
use larder_store::store::import::ImportSource;
use larder_store::store::{ImageRecord, Store, StoreConfig};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, PutImage, ResponseFault};
use proptest::prelude::*;
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

fn puller_of(store: Store) -> StorePuller {
    let config = RegistryConfig { config_dirs: Vec::new(), proxy: Proxy::None, ..RegistryConfig::default() };
    StorePuller::new(store, RegistryClient::new(config), StorePullConfig::default())
}

/// The registry hangs up after so many bytes of a blob, and sends nothing more of it.
fn interrupt(registry: &FaultRegistry, blob: &str, bytes: usize) {
    registry.fault(FaultTrigger::path(blob).once(), ResponseFault::CloseAfter(bytes as u64));
    registry.fault(FaultTrigger::path(blob), ResponseFault::StallAfter(0));
}

impl Tenants {
    async fn new() -> Tenants {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store"), StoreConfig::default()).unwrap();
        let puller = puller_of(store);
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

    /// Pulls from the victim's registry until so many bytes are downloaded, and gives the pull up.
    async fn pull_until_downloaded(&self, name: &str, bytes: u64) {
        let store = self.puller.store();
        let downloaded = async {
            while store.usage().unwrap().ingest.bytes < bytes {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::select! {
            pulled = self.pull(&self.victim, name) => panic!("{pulled:?}"),
            () = downloaded => {}
        }
    }

    /// A config of the victim's registry. It is no secret.
    fn victim_blob(&self, digest: &str) -> Vec<u8> {
        let config = self.puller.store().blob(&Digest::parse(digest).unwrap()).unwrap();
        config.unwrap_or_else(|| self.victim.blob(digest))
    }

    /// Puts a manifest with the private image's config and these layers into the attacker's registry.
    fn name_private_config(&self, layers: &[(&str, usize)]) {
        let size = self.puller.store().blob(&self.id()).unwrap().unwrap().len();
        self.name_config(&self.image.config, size, layers);
    }

    /// Puts a manifest with a config and layers into the attacker's registry.
    fn name_config(&self, config: &str, size: usize, layers: &[(&str, usize)]) {
        let layers: Vec<_> = layers
            .iter()
            .map(|(digest, size)| json!({"mediaType": PLAIN, "digest": digest, "size": size}))
            .collect();
        let config = json!({"mediaType": CONFIG, "digest": config, "size": size});
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

/// The files of an artifact are reused as layers are: path, size and digest of a private one are no secrets.
#[tokio::test]
async fn a_registry_without_a_private_file_gets_no_artifact_with_it() {
    let tenants = Tenants::new().await;
    let weights = vec![9; 30_000];
    let empty =
        json!({"mediaType": "application/vnd.oci.empty.v1+json", "digest": Digest::sha256("{}"), "size": 2});
    let layer = json!({"mediaType": "application/octet-stream", "digest": Digest::sha256(&weights),
        "size": weights.len(), "annotations": {"org.opencontainers.image.title": "weights"}});
    let model =
        json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": empty, "layers": [layer]}).to_string();
    for registry in [&tenants.victim, &tenants.attacker] {
        registry.put_blob("{}");
        registry.put_manifest("private/model", "1", MANIFEST, model.clone());
    }
    let digest = tenants.victim.put_blob(weights.clone());
    tenants.pull(&tenants.victim, "private/model:1").await.unwrap();
    tenants.pull(&tenants.attacker, "private/model:1").await.unwrap_err();
    tenants.attacker.put_blob_as(&digest, vec![0; weights.len()]);
    tenants.pull(&tenants.attacker, "private/model:1").await.unwrap_err();
    tenants.attacker.put_blob(weights.clone());
    tenants.attacker.forget_requests();
    let pulled = tenants.pull(&tenants.attacker, "private/model:1").await.unwrap();
    assert_eq!(tenants.attacker.bytes_sent(&digest), weights.len() as u64, "it was sent");
    assert_eq!(pulled.tags.len(), 2, "it is kept once");
}

#[tokio::test]
async fn a_registry_that_invents_answers_gets_no_private_layer() {
    let tenants = Tenants::new().await;
    let before = tenants.record();
    tenants.copy_to_attacker(&[&tenants.image.config]);
    let size = archive("base", 1).len();
    let [base, secret] = [0, 1].map(|at: usize| tenants.image.layers[at].clone());
    // Status, length and ranges are those of the private layers; only the bytes are not.
    for digest in [&base, &secret] {
        tenants.attacker.put_blob_as(digest, vec![0; size]);
    }
    tenants.name_private_config(&[(&base, size), (&secret, size)]);
    for fault in
        [None, Some(ResponseFault::status(416)), Some(ResponseFault::ContentRange("bytes 0-0/*".into()))]
    {
        tenants.attacker.clear_faults();
        if let Some(fault) = fault {
            tenants.attacker.fault(FaultTrigger::path("/blobs/").ranged(), fault);
        }
        tenants.pull(&tenants.attacker, "free/app:1").await.unwrap_err();
        assert_eq!(tenants.record(), before);
        let name = Reference::parse(&tenants.attacker.image("free/app:1")).unwrap();
        let fetched = tenants.puller.fetch_layers(&name, None, Duration::from_secs(20)).await;
        fetched.expect_err("the registry does not have the layers");
    }
}

#[tokio::test]
async fn a_registry_does_not_complete_the_download_of_another() {
    let tenants = Tenants::new().await;
    let layer = archive("half", 8);
    let private = tenants.victim.put_image("private/half", "1", PLAIN, std::slice::from_ref(&layer), &[]);
    let most = layer.len() - 100;
    interrupt(&tenants.victim, &private.layers[0], most);
    tenants.pull_until_downloaded("private/half:1", most as u64).await;
    // The end of an archive is known: it is zeros.
    let config = tenants.victim_blob(&private.config);
    tenants.attacker.put_blob(config.clone());
    tenants.attacker.put_blob_as(&private.layers[0], vec![0; layer.len()]);
    tenants.name_config(&private.config, config.len(), &[(&private.layers[0], layer.len())]);
    let error = tenants.pull(&tenants.attacker, "free/app:1").await.unwrap_err();
    assert!(matches!(error, PullError::Unpack { .. }), "{error}");
    // Nor does it take the bytes away.
    tenants.victim.clear_faults();
    tenants.victim.forget_requests();
    tenants.pull(&tenants.victim, "private/half:1").await.unwrap();
    assert!(tenants.victim.bytes_sent(&private.layers[0]) < 1000);
}

#[tokio::test]
async fn a_layer_is_fetched_once_from_each_registry_and_stored_once() {
    let tenants = Tenants::new().await;
    let before = tenants.record();
    let layers = [archive("base", 1), archive("own", 5)];
    let image = tenants.attacker.put_image("free/app", "1", PLAIN, &layers, &[]);
    let pulled = tenants.pull(&tenants.attacker, "free/app:1").await.unwrap();
    assert_eq!(tenants.attacker.bytes_sent(&image.layers[0]), layers[0].len() as u64);
    assert_eq!(pulled.layers[0].key, before.layers[0].key, "it is stored once");
    // Another image of the registry, with another layer on top.
    tenants.attacker.forget_requests();
    let layers = [archive("base", 1), archive("more", 6)];
    let image = tenants.attacker.put_image("free/other", "1", PLAIN, &layers, &[]);
    tenants.pull(&tenants.attacker, "free/other:1").await.unwrap();
    assert_eq!(tenants.attacker.requests_for(&image.layers[0]), [], "the registry has sent it");
}

#[tokio::test]
async fn a_layer_that_another_credential_got_is_fetched_again_from_another_repository() {
    let tenants = Tenants::new().await;
    let image = tenants.victim.put_image("free/app", "1", PLAIN, &[archive("base", 1)], &[]);
    let name = Reference::parse(&tenants.victim.image("free/app:1")).unwrap();
    let credential = Credential { username: "me".into(), hash: "a1".into(), ..Credential::default() };
    let size = archive("base", 1).len() as u64;
    for sent in [size, 0] {
        tenants.victim.forget_requests();
        tenants.puller.pull(&name, Some(&credential), &ProgressReporter::unwatched()).await.unwrap();
        assert_eq!(tenants.victim.bytes_sent(&image.layers[0]), sent);
    }
}

#[tokio::test]
async fn transfers_are_known_after_a_restart_and_a_rebuild() {
    let tenants = Tenants::new().await;
    let root = tenants.puller.store().root().to_owned();
    let Tenants { _dir: dir, puller, victim, image, attacker } = tenants;
    drop(puller);
    for damage in [false, true] {
        if damage {
            fs_err::remove_file(root.join("larder.db")).unwrap();
            fs_err::remove_file(root.join("larder.db-wal")).unwrap();
        }
        let store = Store::open(&root, StoreConfig::default()).unwrap();
        let again = puller_of(store);
        let name = Reference::parse(&victim.image("private/app:1")).unwrap();
        victim.forget_requests();
        again.pull(&name, None, &ProgressReporter::unwatched()).await.unwrap();
        assert_eq!(victim.requests_for(&image.layers[0]), [], "damage: {damage}");
    }
    drop((dir, attacker));
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
    tenants.pull_until_downloaded("private/other:1", layers[1].len() as u64).await;
    let own = tenants.attacker.put_image("free/app", "1", PLAIN, &layers[1..], &[]);
    tenants.attacker.fault(FaultTrigger::path(&own.layers[0]), ResponseFault::status(404));
    let error = tenants.pull(&tenants.attacker, "free/app:1").await.unwrap_err();
    assert!(matches!(&error, PullError::Fetch(_) | PullError::Blob(_)), "{error}");
    tenants.attacker.clear_faults();
    tenants.pull(&tenants.attacker, "free/app:1").await.unwrap();
    assert_eq!(tenants.attacker.bytes_sent(&own.layers[0]), layers[1].len() as u64);
}

/// Writes an OCI layout with this config, and with these bytes under these digests.
fn write_layout(dir: &Path, name: &str, config: &[u8], layers: &[(String, Vec<u8>)]) {
    let blobs = dir.join("blobs/sha256");
    fs_err::create_dir_all(&blobs).unwrap();
    let put = |digest: &str, bytes: &[u8]| {
        fs_err::write(blobs.join(digest.trim_start_matches("sha256:")), bytes).unwrap();
    };
    let described: Vec<_> = layers
        .iter()
        .map(|(digest, bytes)| json!({"mediaType": PLAIN, "digest": digest, "size": bytes.len()}))
        .collect();
    for (digest, bytes) in layers {
        put(digest, bytes);
    }
    let document = |media_type: &str, bytes: &[u8]| {
        let digest = Digest::sha256(bytes).to_string();
        put(&digest, bytes);
        json!({"mediaType": media_type, "digest": digest, "size": bytes.len()})
    };
    let config = document(CONFIG, config);
    let manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": described});
    let mut entry = document(MANIFEST, manifest.to_string().as_bytes());
    entry["annotations"] = json!({"io.containerd.image.name": name});
    let index = json!({"schemaVersion": 2, "manifests": [entry]});
    fs_err::write(dir.join("index.json"), index.to_string()).unwrap();
    fs_err::write(dir.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
}

/// Loads a layout from its directory, or as a stream.
async fn load(puller: &StorePuller, layout: &Path, as_stream: bool) -> Result<Vec<LoadedImage>, PullError> {
    if !as_stream {
        return Ok(puller.load(ImportSource::Path(layout.to_owned()), &LoadOptions::default()).await?.images);
    }
    let mut archive = tar::Builder::new(Vec::new());
    archive.append_dir_all(".", layout).unwrap();
    let archive = std::io::Cursor::new(archive.into_inner().unwrap());
    Ok(puller.load(ImportSource::Stream(Box::new(archive)), &LoadOptions::default()).await?.images)
}

#[tokio::test]
async fn an_archive_gets_no_layer_by_its_diff_id_or_digest() {
    let tenants = Tenants::new().await;
    let before = tenants.record();
    let config = tenants.victim_blob(&tenants.image.config);
    let junk = |byte| archive("junk", byte);
    let own_digests = [3, 4].map(|byte| (Digest::sha256(junk(byte)).to_string(), junk(byte))).to_vec();
    let private = [0, 1].map(|at: usize| tenants.image.layers[at].clone());
    let private_digests = private.map(|digest| (digest, junk(5))).to_vec();
    for (layers, as_stream) in
        [(&own_digests, false), (&own_digests, true), (&private_digests, false), (&private_digests, true)]
    {
        let dir = tempfile::tempdir().unwrap();
        write_layout(dir.path(), "example.com/evil:1", &config, layers);
        let error = load(&tenants.puller, dir.path(), as_stream).await.unwrap_err();
        let PullError::Unpack { digest, .. } = &error else { panic!("{error}") };
        assert!(layers.iter().any(|(layer, _)| layer == digest.as_str()), "{error}");
        assert_eq!(tenants.record(), before);
    }
    // An archive that has the layers gets the image, and they are stored once.
    let layers = [archive("base", 1), archive("secret", 2)];
    let layers = layers.map(|layer| (Digest::sha256(&layer).to_string(), layer)).to_vec();
    for as_stream in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        write_layout(dir.path(), "example.com/good:1", &config, &layers);
        load(&tenants.puller, dir.path(), as_stream).await.unwrap();
        assert_eq!(tenants.record().layers, before.layers);
    }
}

/// A layer as a registry, or an archive, has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holding {
    Bytes,
    /// Other bytes, of the same length and under the same digest.
    Lie,
    Nothing,
}

/// A step of a random life of a node with hostile registries and archives.
#[derive(Debug, Clone)]
enum ReuseStep {
    /// A pull of an image of these layers from a registry, into a repository, with a credential or none.
    Pull { registry: usize, repository: usize, login: usize, form: Form, layers: Vec<usize> },
    /// A pull from a registry that hangs near the end of each layer, and is given up.
    Interrupted { registry: usize, form: Form, layers: Vec<usize> },
    /// Layers for containerd.
    Fetch { registry: usize, layers: Vec<usize> },
    /// An archive.
    Load { holdings: Vec<Holding>, as_stream: bool, layers: Vec<usize> },
    /// The node starts again.
    Restart,
}

/// The kind of manifest that has the layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Image,
    /// Each layer is a file.
    Artifact,
}

const LAYERS: usize = 3;
const REGISTRIES: usize = 3;

fn holding() -> impl Strategy<Value = Holding> {
    prop_oneof![3 => Just(Holding::Bytes), 3 => Just(Holding::Lie), 1 => Just(Holding::Nothing)]
}

fn holdings() -> impl Strategy<Value = Vec<Holding>> {
    prop::collection::vec(holding(), LAYERS)
}

fn reuse_step() -> impl Strategy<Value = ReuseStep> {
    let layers = || prop::sample::subsequence((0..LAYERS).collect::<Vec<_>>(), 1..=LAYERS).prop_shuffle();
    let registry = || 0..REGISTRIES;
    let form = || prop_oneof![Just(Form::Image), Just(Form::Artifact)];
    prop_oneof![
        5 => (registry(), 0..2_usize, 0..3_usize, form(), layers()).prop_map(
            |(registry, repository, login, form, layers)| {
                ReuseStep::Pull { registry, repository, login, form, layers }
            }
        ),
        1 => (registry(), form(), layers())
            .prop_map(|(registry, form, layers)| ReuseStep::Interrupted { registry, form, layers }),
        1 => (registry(), layers()).prop_map(|(registry, layers)| ReuseStep::Fetch { registry, layers }),
        2 => (holdings(), any::<bool>(), layers())
            .prop_map(|(holdings, as_stream, layers)| ReuseStep::Load { holdings, as_stream, layers }),
        1 => Just(ReuseStep::Restart),
    ]
}

/// A node, and registries of which some claim layers that they do not have.
struct ReuseWorld {
    dir: TempDir,
    puller: Option<StorePuller>,
    registries: Vec<(FaultRegistry, Vec<Holding>)>,
}

impl ReuseWorld {
    fn new(holdings: &[Vec<Holding>]) -> ReuseWorld {
        let dir = tempfile::tempdir().unwrap();
        let registry = |holdings: &Vec<Holding>| {
            let registry = FaultRegistry::start();
            for (layer, holding) in holdings.iter().enumerate() {
                let bytes = random_layer(layer);
                match holding {
                    Holding::Bytes => drop(registry.put_blob(bytes)),
                    Holding::Lie => registry.put_blob_as(&layer_digest(layer), lie(&bytes)),
                    Holding::Nothing => {}
                }
            }
            (registry, holdings.clone())
        };
        let registries = holdings.iter().map(registry).collect();
        let mut world = ReuseWorld { dir, puller: None, registries };
        world.restart();
        world
    }

    fn restart(&mut self) {
        self.puller = None;
        let store = Store::open(&self.dir.path().join("store"), StoreConfig::default()).unwrap();
        self.puller = Some(puller_of(store));
    }

    fn puller(&self) -> &StorePuller {
        self.puller.as_ref().unwrap()
    }

    /// Puts an image or artifact of these layers into a registry.
    fn put(&self, registry: usize, repository: &str, form: Form, layers: &[usize]) -> Reference {
        let registry = &self.registries[registry].0;
        let (media_type, config) = match form {
            Form::Image => (CONFIG, config_of(layers)),
            Form::Artifact => ("application/vnd.oci.empty.v1+json", b"{}".to_vec()),
        };
        let size = config.len();
        let config = json!({"mediaType": media_type, "digest": registry.put_blob(config), "size": size});
        let layers: Vec<_> = layers
            .iter()
            .map(|layer| {
                let size = random_layer(*layer).len();
                json!({"mediaType": PLAIN, "digest": layer_digest(*layer), "size": size})
            })
            .collect();
        let manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers});
        registry.put_manifest(repository, "1", MANIFEST, manifest.to_string());
        Reference::parse(&registry.image(&format!("{repository}:1"))).unwrap()
    }

    /// Makes the step. Returns whether an image, or layers, became present, and what the source really has.
    async fn make(&mut self, step: &ReuseStep) -> Option<(bool, bool)> {
        let has = |holdings: &[Holding], layers: &[usize]| {
            layers.iter().all(|layer| holdings[*layer] == Holding::Bytes)
        };
        let progress = ProgressReporter::unwatched();
        match step {
            ReuseStep::Restart => {
                self.restart();
                None
            }
            ReuseStep::Pull { registry, repository, login, form, layers } => {
                let name = self.put(*registry, &format!("repository{repository}"), *form, layers);
                let credential =
                    Credential { username: "me".into(), hash: format!("{login}"), ..Credential::default() };
                let credential = Some(&credential).filter(|_| *login > 0);
                let pulled = self.puller().pull(&name, credential, &progress).await;
                Some((pulled.is_ok(), has(&self.registries[*registry].1, layers)))
            }
            ReuseStep::Fetch { registry, layers } => {
                let name = self.put(*registry, "fetched", Form::Image, layers);
                let fetched = self.puller().fetch_layers(&name, None, Duration::from_secs(60)).await;
                Some((fetched.is_ok(), has(&self.registries[*registry].1, layers)))
            }
            ReuseStep::Interrupted { registry, form, layers } => {
                let name = self.put(*registry, "interrupted", *form, layers);
                let registry = &self.registries[*registry].0;
                for layer in layers {
                    interrupt(registry, &layer_digest(*layer), random_layer(*layer).len() - 600);
                }
                let pull = self.puller().pull(&name, None, &progress);
                let _ = tokio::time::timeout(Duration::from_millis(100), pull).await;
                self.puller().wait_for_ending_pulls().await;
                registry.clear_faults();
                None
            }
            ReuseStep::Load { holdings, as_stream, layers } => {
                let dir = tempfile::tempdir().unwrap();
                let held = |layer: &usize| {
                    let bytes = random_layer(*layer);
                    let bytes = match holdings[*layer] {
                        Holding::Bytes => bytes,
                        Holding::Lie => lie(&bytes),
                        Holding::Nothing => Vec::new(),
                    };
                    (layer_digest(*layer), bytes)
                };
                let held: Vec<_> = layers.iter().map(held).collect();
                write_layout(dir.path(), "example.com/loaded:1", &config_of(layers), &held);
                let loaded = load(self.puller(), dir.path(), *as_stream).await;
                Some((loaded.is_ok(), has(holdings, layers)))
            }
        }
    }
}

fn random_layer(number: usize) -> Vec<u8> {
    archive("file", 1 + u8::try_from(number).unwrap())
}

fn layer_digest(number: usize) -> String {
    Digest::sha256(random_layer(number)).to_string()
}

/// Zeros, with the last bytes of the layer: they may complete an interrupted download.
fn lie(bytes: &[u8]) -> Vec<u8> {
    let mut lie = vec![0; bytes.len()];
    let end = bytes.len() - 1000;
    lie[end..].copy_from_slice(&bytes[end..]);
    lie
}

fn config_of(layers: &[usize]) -> Vec<u8> {
    let diff_ids: Vec<_> = layers.iter().map(|layer| layer_digest(*layer)).collect();
    json!({"os": "linux", "architecture": "amd64", "rootfs": {"type": "layers", "diff_ids": diff_ids}})
        .to_string()
        .into_bytes()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, max_shrink_iters: 200, ..ProptestConfig::default() })]

    /// Reuse without proof: no layer becomes part of an image unless the source of the image has sent the bytes. An
    /// archive is a source like a registry: what one archive has sent, another need not.
    #[test]
    fn no_layer_crosses_to_an_image_without_a_transfer_from_its_source(
        holdings in prop::collection::vec(holdings(), REGISTRIES),
        steps in prop::collection::vec(reuse_step(), 1..10),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut world = ReuseWorld::new(&holdings);
            let mut archived = [false; LAYERS];
            for step in &steps {
                let Some((present, has)) = world.make(step).await else { continue };
                if let ReuseStep::Load { holdings, layers, .. } = step {
                    let may = layers.iter().all(|layer| archived[*layer] || holdings[*layer] == Holding::Bytes);
                    prop_assert!(!present || may, "{step:?}: the archive has not sent these layers");
                    prop_assert!(present || !has, "{step:?}: the archive has the layers");
                    for layer in layers {
                        // Layers below one that fails may be kept for a retry.
                        archived[*layer] |= holdings[*layer] == Holding::Bytes;
                    }
                } else {
                    prop_assert_eq!(present, has, "{:?}", step);
                }
            }
            Ok(())
        })?;
    }
}
