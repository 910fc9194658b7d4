//! Images whose documents and blobs are named by other digests than SHA-256.

use larder::reference::{Digest, DigestHasher};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::fault_registry::FaultRegistry;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::world::{LarderOutput, LarderProcess, larder_in};

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

struct DigestWorld {
    registry: FaultRegistry,
    home: TempDir,
}

fn sha512(bytes: &[u8]) -> Digest {
    let mut hasher = DigestHasher::like(&Digest::parse(&format!("sha512:{}", "0".repeat(128))).unwrap());
    hasher.update(bytes);
    hasher.finish()
}

fn layer_of(file: &str) -> Vec<u8> {
    TarBuilder::new()
        .with(TarBuilderEntry::dir("srv"))
        .with(TarBuilderEntry::file(format!("srv/{file}"), vec![7; 50_000]))
        .finish()
}

impl DigestWorld {
    fn new() -> DigestWorld {
        DigestWorld { registry: FaultRegistry::start(), home: tempfile::tempdir().unwrap() }
    }

    fn larder(&self, store: &str, arguments: &[&str]) -> LarderOutput {
        let mut command = larder_in(self.home.path());
        command.arg("--root").arg(self.home.path().join(store)).args(arguments);
        LarderProcess::start(command).finish()
    }

    fn path(&self, name: &str) -> String {
        self.home.path().join(name).display().to_string()
    }

    /// Puts a blob under the digest of this algorithm. Returns its descriptor.
    fn blob(&self, media_type: &str, bytes: &[u8], digest: impl Fn(&[u8]) -> Digest) -> Value {
        let digest = digest(bytes);
        self.registry.put_blob_as(digest.as_str(), bytes);
        json!({ "mediaType": media_type, "digest": digest.as_str(), "size": bytes.len() })
    }

    /// Puts a manifest or an index under its SHA-512 digest and a tag.
    fn put(&self, name: &str, media_type: &str, document: &Value) -> (String, Value) {
        let (repository, tag) = name.rsplit_once(':').unwrap();
        let raw = document.to_string();
        let digest = sha512(raw.as_bytes());
        self.registry.put_manifest_as(repository, tag, media_type, digest.as_str(), raw.clone());
        let entry = json!({ "mediaType": media_type, "digest": digest.as_str(), "size": raw.len() });
        (self.registry.image(name), entry)
    }

    fn listed(&self, store: &str) -> Vec<Value> {
        let images = self.larder(store, &["images", "-o", "json"]).expect(0).json();
        let keys = ["id", "repository", "tag", "digest"];
        images.as_array().unwrap().iter().map(|image| json!(keys.map(|key| image[key].clone()))).collect()
    }
}

#[test]
fn an_image_by_sha512_is_pulled_saved_loaded_and_checked() {
    let world = DigestWorld::new();
    let [lower, upper] = ["lower", "upper"].map(layer_of);
    let config = json!({ "architecture": larder::reference::Platform::host().architecture, "os": "linux",
        "rootfs": { "type": "layers", "diff_ids": [sha512(&lower).as_str(), Digest::sha256(&upper).as_str()] } });
    // The config and the layers differ in algorithm, and so do blobs and diff IDs.
    let manifest = json!({ "schemaVersion": 2, "mediaType": MANIFEST,
        "config": world.blob(CONFIG, config.to_string().as_bytes(), sha512),
        "layers": [world.blob(LAYER, &lower, |bytes| Digest::sha256(bytes)), world.blob(LAYER, &upper, sha512)] });
    let (name, entry) = world.put("app:1", MANIFEST, &manifest);
    let by_digest = format!("{}@{}", world.registry.image("app"), entry["digest"].as_str().unwrap());
    world.larder("store", &["pull", &name]).expect(0);
    world.larder("store", &["pull", &by_digest]).expect(0);
    let listed = world.listed("store");
    assert_eq!(listed[0][0], manifest["config"]["digest"], "{listed:?}");
    assert_eq!(listed[0][3], entry["digest"], "{listed:?}");

    let archive = world.path("saved.tar");
    world.larder("store", &["save", "-o", &archive, &name]).expect(0);
    world.larder("loaded", &["load", "-i", &archive]).expect(0);
    assert_eq!(world.listed("loaded"), listed);
    for store in ["store", "loaded"] {
        world.larder(store, &["fsck"]).expect(0);
        let dir = world.path(&format!("files-{store}"));
        world.larder(store, &["export", &by_digest, &dir]).expect(0);
        for file in ["lower", "upper"] {
            assert_eq!(fs_err::read(format!("{dir}/srv/{file}")).unwrap(), vec![7; 50_000]);
        }
    }

    // Damage is found by each algorithm.
    let id = Digest::parse(listed[0][0].as_str().unwrap()).unwrap();
    fs_err::write(world.path(&format!("store/blobs/sha512/{}", id.hex())), "{}").unwrap();
    let damaged = world.larder("store", &["fsck"]).expect(1);
    assert!(damaged.stdout.contains(id.as_str()), "{damaged:?}");
    let id = &id.hex()[..12];
    world.larder("loaded", &["rm", "--force", id]).expect(0);
    assert_eq!(world.listed("loaded"), Vec::<Value>::new());
}

#[test]
fn an_artifact_by_sha512_is_pulled_by_platform_saved_and_loaded() {
    let world = DigestWorld::new();
    let mut file = world.blob("text/plain", b"content", sha512);
    file["annotations"] = json!({ "org.opencontainers.image.title": "file" });
    let manifest = json!({ "schemaVersion": 2, "mediaType": MANIFEST, "artifactType": "application/vnd.example",
        "config": world.blob("application/vnd.oci.empty.v1+json", b"{}", sha512),
        "layers": [file, world.blob("application/vnd.cncf.model.code.v1.tar", &layer_of("x"), sha512)] });
    let (_, entry) = world.put("files:only", MANIFEST, &manifest);
    let (name, index) =
        world.put("files:1", INDEX, &json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [entry] }));
    world.larder("store", &["pull", &name]).expect(0);
    assert_eq!(world.listed("store")[0][3], index["digest"]);
    let archive = world.path("saved.tar");
    world.larder("store", &["save", "-o", &archive, &name]).expect(0);
    world.larder("loaded", &["load", "-i", &archive]).expect(0);
    assert_eq!(world.listed("loaded"), world.listed("store"));
    for store in ["store", "loaded"] {
        world.larder(store, &["fsck"]).expect(0);
        let dir = world.path(&format!("files-{store}"));
        world.larder(store, &["export", &name, &dir]).expect(0);
        assert_eq!(fs_err::read(format!("{dir}/file")).unwrap(), b"content");
        assert_eq!(fs_err::read(format!("{dir}/srv/x")).unwrap(), vec![7; 50_000]);
    }
}

#[test]
fn a_layer_under_two_digests_is_one_file() {
    let world = DigestWorld::new();
    let layer = layer_of("shared");
    let config = json!({ "architecture": larder::reference::Platform::host().architecture, "os": "linux",
        "rootfs": { "type": "layers", "diff_ids": [Digest::sha256(&layer).as_str()] } });
    let image = |name: &str, digest: fn(&[u8]) -> Digest| {
        let manifest = json!({ "schemaVersion": 2, "mediaType": MANIFEST,
            "config": world.blob(CONFIG, config.to_string().as_bytes(), digest),
            "layers": [world.blob(LAYER, &layer, digest)] });
        world.put(name, MANIFEST, &manifest).0
    };
    let names = [image("one:1", |bytes| Digest::sha256(bytes)), image("other:1", sha512)];
    for name in &names {
        world.larder("store", &["pull", name]).expect(0);
    }
    let listed = world.listed("store");
    assert_ne!(listed[0][0], listed[1][0], "the configs have two digests, which are two IDs");
    assert_eq!(fs_err::read_dir(world.path("store/layers")).unwrap().count(), 1);
    let df = world.larder("store", &["df", "-o", "json"]).expect(0).json();
    let layers = &df["store"]["disk"]["sharedLayers"]["sizeBytes"];
    assert!(layers.as_u64().is_some_and(|bytes| bytes > 50_000 && bytes < 100_000), "{df}");
}
