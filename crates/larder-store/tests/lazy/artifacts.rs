//! Files of artifacts: their blob is their content.

use super::verified_reads::{flip, verifying};
use super::*;

const MIB: u64 = 1 << 20;
const MODEL: &str = "application/vnd.example.model";

/// Puts an artifact into a registry: one file with two names.
fn put_model(registry: &FaultRegistry, content: &[u8]) -> Reference {
    let blob = registry.put_blob(content.to_vec());
    let file = |name| {
        json!({"mediaType": "application/octet-stream", "digest": blob, "size": content.len(),
            "annotations": {"org.opencontainers.image.title": name}})
    };
    let config = json!({"mediaType": "application/vnd.oci.empty.v1+json", "size": 2,
        "digest": registry.put_blob(b"{}".to_vec())});
    let manifest = json!({"schemaVersion": 2, "mediaType": MANIFEST, "artifactType": MODEL, "config": config,
        "layers": [file("weights"), file("also/weights")]});
    registry.put_manifest("lazy/model", "v1", MANIFEST, manifest.to_string());
    Reference::parse(&registry.image("lazy/model:v1")).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_of_a_file_is_repaired_before_it_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let Some(node) = verifying(dir, &Arc::default(), LONGEST_WAIT).await else { return };
    let (registry, content) = (FaultRegistry::start(), noise(40 << 20, 1));
    let image = put_model(&registry, &content);
    let pulled = node.pull(&image).await;
    let layer = node.store().layer(&pulled.layers[0].key).unwrap().unwrap();
    let blob = digest(&content);
    // More damage than half of it needs the whole blob.
    for (name, places) in
        [("piece", vec![20 * MIB + 7]), ("most", (0..40).map(|at| at * MIB + 4100).collect())]
    {
        for at in &places {
            flip(layer.path(), at * 8);
        }
        let (requests, sent) = (registry.requests_for(&blob).len(), registry.bytes_sent(&blob));
        let mounted = node.mount(&pulled, name);
        for path in ["weights", "also/weights"] {
            assert!(mounted.read(Path::new(path)).await.unwrap() == content, "{name}: {path}");
        }
        let requests = registry.requests_for(&blob).len() - requests;
        let sent = registry.bytes_sent(&blob) - sent;
        assert_eq!(
            (requests == 1, sent < 10 * MIB),
            (name == "piece", name == "piece"),
            "{requests}, {sent}"
        );
        let verification = node.store().read_verification().unwrap();
        assert_eq!(verification.repaired_pieces, verification.damaged_pieces);
        drop(mounted);
        node.wait_until_verified().await;
        node.assert_sound();
    }
}

#[test]
fn an_artifact_that_was_removed_is_read_before_it_is_complete() {
    let keeper = Arc::<KeepHere>::default();
    let dir = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let Some(node) = runtime.block_on(remnants::start(dir, Arc::clone(&keeper))) else { return };
    let (registry, content) = (FaultRegistry::start(), noise(40 << 20, 1));
    let (image, blob) = (put_model(&registry, &content), digest(&content));
    runtime.block_on(remnants::pull_and_remove(&node, &image));
    registry.fault(FaultTrigger::path(&blob).from(0), ResponseFault::StallAfter(0));
    let pulled = runtime.block_on(node.pull(&image));
    assert!(node.is_partial(&pulled));
    let target = node.mount_at(&pulled, "model");
    let read = |name: &str, at: u64| {
        let file = fs_err::File::open(target.join(name)).unwrap();
        let mut bytes = vec![0; 100_000];
        std::os::unix::fs::FileExt::read_exact_at(file.file(), &mut bytes, at).unwrap();
        let at = usize::try_from(at).unwrap();
        assert!(bytes == content[at..at + bytes.len()], "{name} at {at}");
    };
    let last = content.len() as u64 - 100_000;
    read("weights", 30 * MIB);
    read("also/weights", last);
    assert!(node.is_partial(&pulled), "its reads did not wait for all of it");
    let dir = node.stop(runtime);

    let runtime = tokio::runtime::Runtime::new().unwrap();
    let node = runtime.block_on(remnants::start(dir, keeper)).unwrap();
    assert!(node.is_partial(&pulled));
    read("weights", 10 * MIB);
    registry.clear_faults();
    runtime.block_on(node.complete(&image));
    assert!(!node.is_partial(&pulled));
    assert!(fs_err::read(target.join("weights")).unwrap() == content);
    node.store().umount(&target).unwrap();
    node.assert_sound();
}
