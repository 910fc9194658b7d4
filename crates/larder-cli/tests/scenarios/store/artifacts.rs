//! Artifacts: models and other files in registries, kept as images are.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use larder::reference::{Digest, Platform};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, ResponseFault};
use larder_testkit_peers::{Package, require};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::exports::run;
use super::may_mount;
use crate::world::{LarderOutput, LarderProcess, larder_in};

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
const WEIGHT: &str = "application/vnd.cncf.model.weight.v1.raw";
const MODEL_CONFIG: &str = "application/vnd.cncf.model.config.v1+json";
const MODEL: &str = "application/vnd.cncf.model.manifest.v1+json";

pub(super) struct ArtifactWorld {
    pub(super) registry: FaultRegistry,
    pub(super) home: TempDir,
}

impl ArtifactWorld {
    pub(super) fn new() -> ArtifactWorld {
        ArtifactWorld { registry: FaultRegistry::start(), home: tempfile::tempdir().unwrap() }
    }

    pub(super) fn larder(&self, arguments: &[&str]) -> LarderOutput {
        self.larder_with("store", arguments)
    }

    /// Runs larder on the store of this name.
    fn larder_with(&self, store: &str, arguments: &[&str]) -> LarderOutput {
        let mut command = larder_in(self.home.path());
        command.arg("--root").arg(self.home.path().join(store)).args(arguments);
        LarderProcess::start(command).finish()
    }

    fn path(&self, name: &str) -> String {
        self.home.path().join(name).display().to_string()
    }

    /// ID, type and name of each image of a store.
    fn listed(&self, store: &str) -> Vec<Value> {
        let images = self.larder_with(store, &["images", "-o", "json"]).expect(0).json();
        let keys = ["id", "type", "repository", "tag", "digest", "platform"];
        let fields = |image: &Value| json!(keys.map(|key| image[key].clone()));
        images.as_array().unwrap().iter().map(fields).collect()
    }

    pub(super) fn layer(&self, media_type: &str, content: &[u8], annotations: &Value) -> Value {
        let digest = self.registry.put_blob(content);
        json!({ "mediaType": media_type, "digest": digest, "size": content.len(), "annotations": annotations })
    }

    /// Puts an artifact with an empty config. Returns its name.
    fn put(&self, name: &str, artifact_type: &str, layers: &[Value]) -> String {
        let config = self.layer("application/vnd.oci.empty.v1+json", b"{}", &json!({}));
        self.put_with(name, artifact_type, &config, layers)
    }

    /// Puts a model in the CNCF format, whose config has these digests of uncompressed layers.
    fn put_model(&self, name: &str, layers: &[Value], diff_ids: &[&str]) -> String {
        let config = json!({
            "descriptor": { "name": "small" }, "config": { "architecture": "transformer" },
            "modelfs": { "type": "layers", "diffIds": diff_ids },
        });
        let config = self.layer(MODEL_CONFIG, config.to_string().as_bytes(), &json!({}));
        self.put_with(name, MODEL, &config, layers)
    }

    fn put_with(&self, name: &str, artifact_type: &str, config: &Value, layers: &[Value]) -> String {
        let document = json!({
            "schemaVersion": 2, "mediaType": MANIFEST, "artifactType": artifact_type, "config": config,
            "layers": layers,
        });
        let (repository, tag) = name.rsplit_once(':').unwrap();
        self.registry.put_manifest(repository, tag, MANIFEST, document.to_string());
        self.registry.image(name)
    }
}

/// Bytes that do not compress, which begin like an archive.
fn noise(size: usize) -> Vec<u8> {
    let mut state = 7_u64;
    let mut bytes = vec![0x1f, 0x8b, 8, 0];
    bytes.extend((0..size).map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state.to_le_bytes()[7]
    }));
    bytes
}

/// Inodes of the files in this directory of the store, and in those below it.
fn inodes(dir: &Path) -> Vec<u64> {
    let mut inodes = Vec::new();
    for entry in fs_err::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            inodes.extend(self::inodes(&entry.path()));
        } else {
            inodes.push(entry.metadata().unwrap().ino());
        }
    }
    inodes
}

#[test]
fn a_model_is_its_files_byte_for_byte_and_takes_the_disk_once() {
    let world = ArtifactWorld::new();
    let (weights, readme) = (noise(3_000_000), b"# a model\n".to_vec());
    let name = world.put(
        "models/small:v1",
        MODEL,
        &[
            world.layer(WEIGHT, &weights, &json!({ "org.cncf.model.filepath": "weights/model.safetensors" })),
            world.layer("text/markdown", &readme, &json!({ "org.opencontainers.image.title": "README.md" })),
            world.layer(
                "application/octet-stream",
                b"",
                &json!({ "org.opencontainers.image.title": "empty" }),
            ),
        ],
    );
    let id = world.larder(&["pull", "-q", &name]).expect(0).stdout.trim().to_owned();
    let dir = world.path("files");
    world.larder(&["export", &name, &dir]).expect(0);
    let read = |file: &str| fs_err::read(Path::new(&dir).join(file)).unwrap();
    assert!(read("weights/model.safetensors") == weights, "not inflated, not changed");
    assert_eq!((read("README.md"), read("empty")), (readme, Vec::new()));

    let listed = world.larder(&["images", "-o", "json"]).expect(0).json();
    assert_eq!((&listed[0]["id"], &listed[0]["type"]), (&json!(id), &json!("model")));
    let size = listed[0]["sizeBytes"].as_u64().unwrap();
    assert!(size < weights.len() as u64 + 100_000, "once on the disk: {size}");
    assert!(world.larder(&["images"]).expect(0).stdout.contains("TYPE"), "a column of its own");
    world.larder(&["fsck"]).expect(0);

    world.registry.forget_requests();
    world.larder(&["ensure", &name]).expect(0);
    assert!(world.registry.requests().is_empty(), "it is present");
    world.larder(&["rm", &name]).expect(0);
    assert_eq!(world.larder(&["images", "-q"]).expect(0).stdout, "");
}

#[test]
fn a_file_becomes_a_layer_where_it_was_downloaded_also_by_a_second_pull() {
    let world = ArtifactWorld::new();
    let weights = noise(5_000_123);
    let layer = world.layer(WEIGHT, &weights, &json!({ "org.cncf.model.filepath": "w" }));
    let name = world.put("models/resumed:1", MODEL, std::slice::from_ref(&layer));
    let blob = layer["digest"].as_str().unwrap().to_owned();
    world.registry.fault(FaultTrigger::path(&blob), ResponseFault::StallAfter(3 << 20));
    world.larder(&["pull", "--pull-timeout", "2s", &name]).expect(1);
    let store = world.home.path().join("store");
    let downloaded = inodes(&store.join("ingest"));
    world.registry.clear_faults();
    let sent = world.registry.bytes_sent(&blob);
    world.larder(&["pull", &name]).expect(0);
    assert!(world.registry.bytes_sent(&blob) - sent < weights.len() as u64 - (2 << 20), "it goes on");

    let layers = inodes(&store.join("layers"));
    assert!(layers.len() == 1 && downloaded.contains(&layers[0]), "{layers:?} {downloaded:?}");
    assert!(inodes(&store.join("ingest")).is_empty());
    let dir = world.path("files");
    world.larder(&["export", &name, &dir]).expect(0);
    assert!(fs_err::read(Path::new(&dir).join("w")).unwrap() == weights);
    world.larder(&["fsck"]).expect(0);
}

#[test]
fn a_mounted_artifact_stays_until_it_is_unmounted_from_a_registry_without_ranges() {
    if !may_mount() {
        return;
    }
    let world = ArtifactWorld::new();
    let weights = noise(20_000_000);
    let layer = world.layer(WEIGHT, &weights, &json!({ "org.cncf.model.filepath": "w" }));
    let blob = layer["digest"].as_str().unwrap().to_owned();
    let name = world.put("models/mounted:1", MODEL, &[layer]);
    world.registry.fault(FaultTrigger::path(&blob), ResponseFault::IgnoreRange);
    world.larder(&["pull", &name]).expect(0);
    assert_eq!(world.registry.bytes_sent(&blob), weights.len() as u64);

    let target = world.path("mnt");
    fs_err::create_dir(&target).unwrap();
    world.larder(&["mount", &name, &target]).expect(0);
    let read = || fs_err::read(Path::new(&target).join("w")).unwrap() == weights;
    assert!(read());
    world.larder(&["rm", &name]).expect(1);
    world.larder(&["gc", "--all-unused", "--force-leases", "--force"]).expect(0);
    assert!(world.larder(&["images", "-q"]).expect(0).stdout.starts_with("sha256:"));
    // Removed by force, and pulled again.
    world.larder(&["rm", "--force", &name]).expect(0);
    world.larder(&["pull", &name]).expect(0);
    assert!(read());
    world.larder(&["umount", &target]).expect(0);
    world.larder(&["gc", "--all-unused", "--force-leases", "--force"]).expect(0);
    assert_eq!(world.larder(&["images", "-q"]).expect(0).stdout, "");
    world.larder(&["fsck"]).expect(0);
}

#[test]
fn files_of_one_content_are_fetched_once() {
    let world = ArtifactWorld::new();
    let content = noise(100_000);
    let paths = ["a", "b", "c/a", "c/d/e", "f", "g", "h", "i"];
    let titled = |title| world.layer(WEIGHT, &content, &json!({ "org.opencontainers.image.title": title }));
    let name = world.put("models/copies:1", MODEL, &paths.map(titled));
    world.larder(&["pull", &name]).expect(0);
    let blob = Digest::sha256(&content);
    assert_eq!(world.registry.requests_for(blob.as_str()).len(), 1, "{:?}", world.registry.requests());
    let dir = world.path("files");
    world.larder(&["export", &name, &dir]).expect(0);
    for path in paths {
        assert!(fs_err::read(Path::new(&dir).join(path)).unwrap() == content, "{path}");
    }
    let ingests = fs_err::read_dir(world.path("store/ingest")).unwrap().count();
    assert_eq!(ingests, 0, "what was fetched is removed");
}

#[test]
fn an_artifact_with_hostile_content_is_refused_by_name() {
    let world = ArtifactWorld::new();
    let titled =
        |title: &str| world.layer("text/plain", b"x", &json!({ "org.opencontainers.image.title": title }));
    for title in ["../../etc/passwd", "/etc/passwd", "a//b", "a/./b"] {
        let name = world.put("hostile/paths:1", "text/plain", &[titled(title)]);
        let refused = world.larder(&["pull", &name]).expect(1);
        assert!(refused.stderr.contains(title), "{refused:?}");
    }
    let name = world.put("hostile/below:1", "text/plain", &[titled("a"), titled("a/b")]);
    assert!(world.larder(&["pull", &name]).expect(1).stderr.contains("a is a file"));

    // A blob of another size or content than the manifest says.
    for size in [2, 400] {
        let mut layer = titled("file");
        layer["size"] = json!(size);
        let name = world.put(&format!("hostile/size:{size}"), "text/plain", &[layer]);
        world.larder(&["pull", &name]).expect(1);
    }
    let false_digest = format!("sha256:{}", "ab".repeat(32));
    world.registry.put_blob_as(&false_digest, "x");
    let mut layer = titled("file");
    layer["digest"] = json!(false_digest);
    let name = world.put("hostile/digest:1", "text/plain", &[layer]);
    world.larder(&["pull", &name]).expect(1);
    assert_eq!(world.larder(&["images", "-q"]).expect(0).stdout, "");
    world.larder(&["fsck"]).expect(0);
}

#[test]
fn files_and_directories_of_oras_are_told_apart_by_title_and_compression() {
    let world = ArtifactWorld::new();
    let tar = TarBuilder::new().with(TarBuilderEntry::file("conf/model.json", "{}")).finish();
    let (directory, file) = (gzip(&tar), gzip(b"any"));
    let packed_type = format!("{LAYER}+gzip");
    let titled = |title: &str| json!({ "org.opencontainers.image.title": title });
    let name = world.put(
        "files/mixed:1",
        "",
        &[
            world.layer(LAYER, b"no archive", &titled("notes.txt")),
            world.layer(&packed_type, &directory, &titled("conf")), // its plain digest is not noted
            world.layer(&packed_type, &file, &titled("conf.tar.gz")),
        ],
    );
    world.larder(&["pull", &name]).expect(0);
    let dir = world.path("files");
    world.larder(&["export", &name, &dir]).expect(0);
    let read = |file: &str| fs_err::read(Path::new(&dir).join(file)).unwrap();
    assert_eq!((read("notes.txt"), read("conf/model.json")), (b"no archive".to_vec(), b"{}".to_vec()));
    assert!(read("conf.tar.gz") == file, "as it is");
    world.larder(&["fsck"]).expect(0);
}

#[test]
fn an_archive_of_an_artifact_is_unpacked() {
    let world = ArtifactWorld::new();
    let tar = TarBuilder::new().with(TarBuilderEntry::file("conf/model.json", "{}")).finish();
    let layers = [world.layer("application/vnd.cncf.model.weight.config.v1.tar", &tar, &json!({}))];
    let name = world.put("models/packed:1", MODEL, &layers);
    world.larder(&["pull", &name]).expect(0);
    let dir = world.path("files");
    world.larder(&["export", &name, &dir]).expect(0);
    assert_eq!(fs_err::read_to_string(Path::new(&dir).join("conf/model.json")).unwrap(), "{}");
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// The files of an archive by their names.
fn files_of_archive(path: &str) -> BTreeMap<String, Vec<u8>> {
    let mut archive = tar::Archive::new(fs_err::File::open(path).unwrap());
    let files = archive.entries().unwrap().map(|entry| {
        let mut entry = entry.unwrap();
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        (entry.path().unwrap().display().to_string(), bytes)
    });
    files.filter(|(name, _)| !name.ends_with('/')).collect()
}

/// The blob of a digest in an archive.
fn blob_name(digest: &str) -> String {
    format!("blobs/{}", digest.replace(':', "/"))
}

#[test]
fn a_saved_artifact_has_its_own_manifest_and_blobs_and_loads_as_it_was_pulled() {
    let world = ArtifactWorld::new();
    let tar = TarBuilder::new().with(TarBuilderEntry::file("conf/model.json", "{}")).finish();
    let weights = noise(200_000);
    let layers = [
        world.layer(WEIGHT, &weights, &json!({ "org.cncf.model.filepath": "w.bin" })),
        world.layer("application/vnd.cncf.model.weight.config.v1.tar", &tar, &json!({})),
        // The content of an empty config.
        world.layer("text/plain", b"{}", &json!({ "org.opencontainers.image.title": "a" })),
    ];
    let model = world.put_model("models/small:v1", &layers, &[]);
    let same = world.put("models/same:v1", "text/plain", &layers[..1]);
    world.registry.put_image("app", "1", LAYER, std::slice::from_ref(&tar), &[]);
    let app = world.registry.image("app:1");
    for name in [&model, &same, &app] {
        world.larder(&["pull", name]).expect(0);
    }
    world.registry.forget_requests();
    world.larder(&["pull", &model]).expect(0);
    assert!(world.registry.requests_for("/blobs/").is_empty(), "the config is present");

    let archive = world.path("saved.tar");
    world.larder(&["save", "-o", &archive, &model, &same, &app]).expect(0);
    let files = files_of_archive(&archive);
    let index: Value = serde_json::from_slice(&files["index.json"]).unwrap();
    for (entry, name) in index["manifests"].as_array().unwrap().iter().zip([&model, &same]) {
        assert_eq!(entry["annotations"]["io.containerd.image.name"], json!(name));
        let manifest = &files[&blob_name(entry["digest"].as_str().unwrap())];
        let manifest: Value = serde_json::from_slice(manifest).unwrap();
        let blobs = manifest["layers"].as_array().unwrap().iter().chain([&manifest["config"]]);
        for digest in blobs.map(|blob| blob["digest"].as_str().unwrap()) {
            assert!(files[&blob_name(digest)] == world.registry.blob(digest), "{digest}");
        }
    }
    let docker: Value = serde_json::from_slice(&files["manifest.json"]).unwrap();
    assert_eq!(docker.as_array().unwrap().len(), 1, "docker load takes the image only");

    // From the file, and from a stream, which is read once.
    let packed = world.path("saved.tar.gz");
    fs_err::write(&packed, gzip(&fs_err::read(&archive).unwrap())).unwrap();
    let loads = [("from-file", &archive), ("from-stream", &packed), ("from-stream", &packed)];
    for (round, (store, archive)) in loads.into_iter().enumerate() {
        world.larder_with(store, &["load", "-i", archive]).expect(0);
        assert_eq!(world.listed(store), world.listed("store"), "{archive}");
        world.larder_with(store, &["fsck"]).expect(0);
        let dir = world.path(&format!("files-{round}"));
        world.larder_with(store, &["export", &model, &dir]).expect(0);
        assert!(fs_err::read(Path::new(&dir).join("w.bin")).unwrap() == weights);
        assert_eq!(fs_err::read(Path::new(&dir).join("conf/model.json")).unwrap(), b"{}");
    }
    // What was loaded is saved as it was.
    let again = world.path("again.tar");
    world.larder_with("from-file", &["save", "-o", &again, &model, &same, &app]).expect(0);
    assert!(files_of_archive(&again) == files);
}

#[test]
fn an_artifact_with_a_compressed_archive_is_not_saved_and_its_layer_is_named() {
    let world = ArtifactWorld::new();
    let tar = TarBuilder::new().with(TarBuilderEntry::file("conf/model.json", "{}")).finish();
    let packed = gzip(&tar);
    let layer = world.layer("application/vnd.cncf.model.weight.v1.tar+gzip", &packed, &json!({}));
    let name =
        world.put_model("models/packed:1", std::slice::from_ref(&layer), &[Digest::sha256(&tar).as_str()]);
    world.larder(&["pull", &name]).expect(0);
    let dir = world.path("files");
    world.larder(&["export", &name, &dir]).expect(0);
    assert_eq!(fs_err::read(Path::new(&dir).join("conf/model.json")).unwrap(), b"{}");
    let archive = world.path("a.tar");
    let refused = world.larder(&["save", "-o", &archive, &name]).expect(1);
    assert!(refused.stderr.contains(layer["digest"].as_str().unwrap()), "{refused:?}");
    assert!(!Path::new(&archive).exists());
}

/// An OCI layout in a directory.
struct Layout<'a>(&'a ArtifactWorld, PathBuf);

impl Layout<'_> {
    fn blob(&self, bytes: &[u8]) -> String {
        let digest = Digest::sha256(bytes);
        let path = self.1.join(blob_name(digest.as_str()));
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(path, bytes).unwrap();
        digest.to_string()
    }

    /// Adds a manifest of the registry with its blobs, as an entry of the index with this name.
    fn add(&self, name: &str, annotations: &Value) -> Value {
        let raw = self.0.registry.manifest(name);
        let manifest: Value = serde_json::from_slice(&raw).unwrap();
        for blob in manifest["layers"].as_array().unwrap().iter().chain([&manifest["config"]]) {
            self.blob(&self.0.registry.blob(blob["digest"].as_str().unwrap()));
        }
        let digest = self.blob(&raw);
        json!({ "mediaType": MANIFEST, "digest": digest, "size": raw.len(), "annotations": annotations })
    }

    fn finish(&self, entries: &[Value]) -> String {
        fs_err::write(self.1.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
        let index = json!({ "schemaVersion": 2, "manifests": entries });
        fs_err::write(self.1.join("index.json"), index.to_string()).unwrap();
        self.1.display().to_string()
    }
}

#[test]
fn layouts_of_other_programs_load_artifacts_with_a_name_and_leave_signatures_out() {
    let world = ArtifactWorld::new();
    let titled = |title: &str| {
        let layer =
            world.layer("text/plain", title.as_bytes(), &json!({ "org.opencontainers.image.title": title }));
        world.put(&format!("files/{title}:v1"), "application/vnd.example", &[layer])
    };
    let (named, signature) = (titled("file"), titled("signature"));
    world.registry.put_image("app", "1", LAYER, &[TarBuilder::new().finish()], &[]);
    world.larder(&["pull", &named]).expect(0);

    let layout = Layout(&world, world.home.path().join("layout"));
    let image = layout.add("app:1", &json!({ "org.opencontainers.image.ref.name": "r.example/app:1" }));
    let file = layout.add("files/file:v1", &json!({ "org.opencontainers.image.ref.name": named }));
    let unnamed = layout.add("files/signature:v1", &json!({}));
    let dir = layout.finish(&[image, file.clone(), unnamed.clone()]);
    let loaded = world.larder_with("all", &["load", &dir]).expect(0);
    let digest = unnamed["digest"].as_str().unwrap();
    assert!(loaded.stderr.contains(digest), "it says what was left out: {loaded:?}");
    let artifacts = |store| -> Vec<Value> {
        world.listed(store).into_iter().filter(|listed| listed[1] != "image").collect()
    };
    assert_eq!(artifacts("all"), world.listed("store"), "as it is pulled");
    // A tag is a name, too; an artifact alone needs none.
    let file = layout.add("files/file:v1", &json!({ "org.opencontainers.image.ref.name": "v1" }));
    for (store, entries) in [("tag", vec![unnamed.clone(), file]), ("alone", vec![unnamed])] {
        let dir = layout.finish(&entries);
        let repository = if store == "tag" { world.registry.image("files/file") } else { signature.clone() };
        world.larder_with(store, &["load", &dir, "--name", &repository]).expect(0);
    }
    assert_eq!(world.listed("tag"), world.listed("store"));
    world.larder_with("pulled", &["pull", &signature]).expect(0);
    assert_eq!(world.listed("alone"), world.listed("pulled"));
}

#[test]
fn an_artifact_that_skopeo_copies_loads_as_it_is_pulled() {
    if !require(&[Package::Skopeo]).is_available() {
        return;
    }
    let world = ArtifactWorld::new();
    let layer = world.layer(WEIGHT, &noise(10_000), &json!({ "org.cncf.model.filepath": "w.bin" }));
    let digest = layer["digest"].as_str().unwrap().to_owned();
    let name = world.put_model("models/small:v1", &[layer], &[&digest]);
    world.larder(&["pull", &name]).expect(0);
    let (archive, tagged) = (world.path("copy.tar"), world.path("tagged.tar"));
    let copy = |to: &str| {
        let from = format!("docker://{name}");
        run("skopeo", &["copy", "--insecure-policy", "--src-tls-verify=false", &from, to])
    };
    copy(&format!("oci-archive:{archive}"));
    copy(&format!("oci-archive:{tagged}:{name}"));
    world.larder_with("unnamed", &["load", "-i", &archive, "--name", &name]).expect(0);
    world.larder_with("named", &["load", "-i", &tagged]).expect(0);
    assert_eq!(world.listed("unnamed"), world.listed("store"));
    assert_eq!(world.listed("named"), world.listed("store"));

    // It takes what larder saves.
    let saved = world.path("saved.tar");
    world.larder(&["save", "-o", &saved, &name]).expect(0);
    let inspected = run("skopeo", &["inspect", "--raw", &format!("oci-archive:{saved}")]);
    assert_eq!(inspected.as_bytes(), world.registry.manifest("models/small:v1"));
    let dir = world.path("copied");
    run("skopeo", &["copy", "--insecure-policy", &format!("oci-archive:{saved}"), &format!("dir:{dir}")]);
    assert!(fs_err::read(Path::new(&dir).join(&digest[7..])).unwrap() == world.registry.blob(&digest));
}

#[test]
fn an_index_of_artifacts_is_pulled_and_saved_by_platform() {
    let world = ArtifactWorld::new();
    let host = Platform::host();
    let other = if host.architecture == "arm64" { "amd64" } else { "arm64" };
    let entries = [&*host.architecture, other].map(|architecture| {
        let layer = world.layer("text/plain", architecture.as_bytes(), &json!({}));
        world.put(&format!("files/built:{architecture}"), "application/vnd.example", &[layer]);
        let raw = world.registry.manifest(&format!("files/built:{architecture}"));
        json!({ "mediaType": MANIFEST, "digest": Digest::sha256(&raw).as_str(), "size": raw.len(),
            "platform": { "os": "linux", "architecture": architecture } })
    });
    let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": entries }).to_string();
    let digest = world.registry.put_manifest("files/built", "1", INDEX, index);
    let name = world.registry.image("files/built:1");
    let foreign = format!("{name}#linux/{other}");
    world.larder(&["pull", &name, &foreign]).expect(0);
    let listed = world.listed("store");
    assert_eq!(listed.len(), 2);
    assert!(listed.iter().all(|image| image[4] == json!(digest)), "that of the index: {listed:?}");

    let (all, one) = (world.path("all.tar"), world.path("one.tar"));
    world.larder(&["save", "-o", &all, &name, &foreign]).expect(0);
    world.larder(&["save", "-o", &one, &name]).expect(0);
    world.larder_with("all", &["load", "-i", &all]).expect(0);
    world.larder_with("all", &["load", "-i", &all, "--platform", &format!("linux/{other}")]).expect(0);
    assert_eq!(world.listed("all"), listed);
    world.larder_with("one", &["load", "-i", &one]).expect(0);
    assert!(listed.contains(&world.listed("one")[0]));
}

#[test]
fn artifacts_beyond_the_limits_are_refused_by_name_before_a_blob_is_fetched() {
    let world = ArtifactWorld::new();
    let mut layer = world.layer("text/plain", b"x", &json!({}));
    let refused = |name: &str, text: &str| {
        let refused = world.larder(&["pull", name]).expect(1);
        assert!(refused.stderr.contains(text), "{refused:?}");
    };
    refused(&world.put("files/many:1", "text/plain", &vec![layer.clone(); 10_000]), "more than 500 elements");

    layer["size"] = json!(200_000_000_000_000_u64);
    refused(&world.put("files/huge:1", "text/plain", std::slice::from_ref(&layer)), "needs about 200TB");

    let mut config = world.layer(MODEL_CONFIG, b"{}", &json!({}));
    config["size"] = json!(5 << 20);
    config["digest"] = json!(Digest::sha256("config").as_str());
    refused(&world.put_with("files/config:1", MODEL, &config, &[]), "config sha256:");
    assert!(world.registry.requests_for("/blobs/").is_empty(), "{:?}", world.registry.requests());

    // What says to be the config of an image, and is none.
    let config = world.layer("application/vnd.oci.image.config.v1+json", b"not JSON", &json!({}));
    let layer = world.layer(LAYER, b"x", &json!({}));
    let name = world.put_with("files/garbage:1", "", &config, &[layer]);
    refused(&name, &format!("config {}", config["digest"].as_str().unwrap()));
}

#[test]
fn an_artifact_is_no_image_of_a_container_and_is_one_of_a_volume() {
    let world = ArtifactWorld::new();
    let layer = world.layer("text/plain", b"content", &json!({}));
    let config = world.layer("application/vnd.example.config", b"config", &json!({}));
    let name = world.put_with("files/one:1", "application/vnd.example", &config, &[layer]);
    world.registry.put_image("app", "1", LAYER, &[TarBuilder::new().finish()], &[]);
    let write = |file: &str, spec: &Value| {
        let metadata = json!({ "name": "web", "namespace": "shop", "uid": file });
        let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec });
        fs_err::write(world.path(file), pod.to_string()).unwrap();
        world.path(file)
    };
    let container = write("container.yaml", &json!({ "containers": [{ "name": "web", "image": name }] }));
    let volume = write(
        "volume.yaml",
        &json!({
            "containers": [{ "name": "web", "image": world.registry.image("app:1") }],
            "volumes": [{ "name": "files", "image": { "reference": name, "pullPolicy": "IfNotPresent" } }],
        }),
    );
    let refused = |arguments: &[&str]| {
        let refused = world.larder(&[&["ensure", "-f", &container], arguments].concat()).expect(1);
        let text = r#"not a container image, but an artifact of the type "application/vnd.example""#;
        assert!((refused.stderr + &refused.stdout).contains(text), "{arguments:?}");
    };
    for arguments in [&[][..], &["--dry-run"]] {
        refused(arguments);
        assert!(world.registry.requests_for("/blobs/").is_empty(), "{:?}", world.registry.requests());
    }
    world.larder(&["ensure", "-f", &volume]).expect(0);
    // Also where it is present.
    refused(&[]);
    refused(&["--dry-run"]);
    world.larder(&["ensure", &name]).expect(0);
}
