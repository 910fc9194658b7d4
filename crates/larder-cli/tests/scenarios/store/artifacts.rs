//! Artifacts: models and other files in registries, kept as images are.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, ResponseFault};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::may_mount;
use crate::world::{LarderOutput, LarderProcess, larder_in};

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const WEIGHT: &str = "application/vnd.cncf.model.weight.v1.raw";
const MODEL: &str = "application/vnd.cncf.model.manifest.v1+json";

struct ArtifactWorld {
    registry: FaultRegistry,
    home: TempDir,
}

impl ArtifactWorld {
    fn new() -> ArtifactWorld {
        ArtifactWorld { registry: FaultRegistry::start(), home: tempfile::tempdir().unwrap() }
    }

    fn larder(&self, arguments: &[&str]) -> LarderOutput {
        let mut command = larder_in(self.home.path());
        command.arg("--root").arg(self.home.path().join("store")).args(arguments);
        LarderProcess::start(command).finish()
    }

    fn layer(&self, media_type: &str, content: &[u8], annotations: &Value) -> Value {
        let digest = self.registry.put_blob(content);
        json!({ "mediaType": media_type, "digest": digest, "size": content.len(), "annotations": annotations })
    }

    /// Puts an artifact with an empty config. Returns its name.
    fn put(&self, name: &str, artifact_type: &str, layers: &[Value]) -> String {
        let config = self.layer("application/vnd.oci.empty.v1+json", b"{}", &json!({}));
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

fn path_of(home: &Path, name: &str) -> String {
    home.join(name).display().to_string()
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
    let dir = path_of(world.home.path(), "files");
    world.larder(&["export", &name, &dir]).expect(0);
    let read = |file: &str| fs_err::read(Path::new(&dir).join(file)).unwrap();
    assert!(read("weights/model.safetensors") == weights, "not inflated, not changed");
    assert_eq!((read("README.md"), read("empty")), (readme, Vec::new()));

    let listed = world.larder(&["images", "-o", "json"]).expect(0).json();
    assert_eq!((&listed[0]["id"], &listed[0]["type"]), (&json!(id), &json!(MODEL)));
    let size = listed[0]["sizeBytes"].as_u64().unwrap();
    assert!(size < weights.len() as u64 + 100_000, "once on the disk: {size}");
    assert!(world.larder(&["images"]).expect(0).stdout.contains("TYPE"), "a column of its own");
    world.larder(&["fsck"]).expect(0);

    world.registry.forget_requests();
    world.larder(&["ensure", &name]).expect(0);
    assert!(world.registry.requests().is_empty(), "it is present");
    let refused = world.larder(&["save", "-o", &path_of(world.home.path(), "a.tar"), &name]).expect(1);
    assert!(refused.stderr.contains("is an artifact"), "{refused:?}");
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
    let dir = path_of(world.home.path(), "files");
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

    let target = path_of(world.home.path(), "mnt");
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
    world.registry.put_false_blob(&false_digest, "x");
    let mut layer = titled("file");
    layer["digest"] = json!(false_digest);
    let name = world.put("hostile/digest:1", "text/plain", &[layer]);
    world.larder(&["pull", &name]).expect(1);
    assert_eq!(world.larder(&["images", "-q"]).expect(0).stdout, "");
    world.larder(&["fsck"]).expect(0);
}

#[test]
fn an_archive_of_an_artifact_is_unpacked() {
    let world = ArtifactWorld::new();
    let tar = larder_testkit::archive::TarBuilder::new()
        .with(larder_testkit::archive::TarBuilderEntry::file("conf/model.json", "{}"))
        .finish();
    let layers = [world.layer("application/vnd.cncf.model.weight.config.v1.tar", &tar, &json!({}))];
    let name = world.put("models/packed:1", MODEL, &layers);
    world.larder(&["pull", &name]).expect(0);
    let dir = path_of(world.home.path(), "files");
    world.larder(&["export", &name, &dir]).expect(0);
    assert_eq!(fs_err::read_to_string(Path::new(&dir).join("conf/model.json")).unwrap(), "{}");
}
