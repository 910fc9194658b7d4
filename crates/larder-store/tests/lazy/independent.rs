//! Images of independent writers: once complete, their trees are those of `umoci unpack`.
//!
//! `LARDER_LAZY_IMAGES=DIR` names a directory with OCI layouts of more of them, one in each directory in it, such as
//! Podman's `push --compression-format zstd:chunked IMAGE oci:DIR/NAME:image` makes them.

use std::process::Command;

use larder_testkit_peers::packages::Package;
use larder_testkit_peers::{ImageBuilder, LayerFiles, TreeListing, require};

use super::*;

impl Fixture {
    /// The layers of the only image of a layout.
    fn of_layout(layout: &Path) -> Vec<Fixture> {
        let json = |bytes: Vec<u8>| serde_json::from_slice::<serde_json::Value>(&bytes).unwrap();
        let blob = |descriptor: &serde_json::Value| {
            let digest = descriptor["digest"].as_str().unwrap().replace(':', "/");
            fs_err::read(layout.join("blobs").join(digest)).unwrap()
        };
        let index = json(fs_err::read(layout.join("index.json")).unwrap());
        let manifest = json(blob(&index["manifests"][0]));
        let layers = manifest["layers"].as_array().unwrap().iter().map(|descriptor| {
            let annotations = descriptor["annotations"].as_object().cloned().unwrap_or_default();
            Fixture::of_blob("app", blob(descriptor), annotations)
        });
        layers.collect()
    }
}

/// Pulls an image lazily, reads some of it, completes it, and compares its tree.
async fn compare(node: &LazyNode, name: &str, layers: &[Fixture], known: &[&str]) {
    let registry = FaultRegistry::start();
    let image = put_image(&registry, &layers.iter().collect::<Vec<_>>());
    compare_image(node, name, (&registry, &image), layers, known).await;
}

async fn compare_image(
    node: &LazyNode,
    name: &str,
    (registry, image): (&FaultRegistry, &Reference),
    layers: &[Fixture],
    known: &[&str],
) {
    for layer in layers {
        hold_background(registry, layer);
    }
    let pulled = node.pull(image).await;
    assert!(node.is_partial(&pulled), "{name} is not pulled lazily");
    let mounted = node.mount(&pulled, name);
    let some = layers.last().unwrap().files().into_iter().take(3);
    for (path, content) in some {
        assert!(mounted.read(&path).await.unwrap() == content, "{name}: {}", path.display());
    }
    registry.clear_faults();
    node.complete(image).await;
    let dir = tempfile::tempdir().unwrap();
    let (layout, bundle) = (dir.path().join("layout"), dir.path().join("bundle"));
    let archives = layers.iter().map(|layer| LayerFiles::archive(layer.plain.clone()));
    archives.fold(ImageBuilder::new(), ImageBuilder::layer).write(&layout).unwrap();
    let mut umoci = Command::new("umoci");
    umoci.args(["unpack", "--image", &format!("{}:image", layout.display())]).arg(&bundle);
    let unpacked = umoci.output().unwrap();
    assert!(unpacked.status.success(), "{}", String::from_utf8_lossy(&unpacked.stderr));
    let ours = TreeListing::of(&mounted.target);
    ours.assert_equal(name, &TreeListing::of(&bundle.join("rootfs")), known);
    eprintln!("{name}: {} paths in {} layers equal", ours.len(), layers.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn complete_trees_of_independent_writers_equal_umoci() {
    if !require(&[Package::Umoci]).is_available() {
        return;
    }
    let Some(node) = LazyNode::new().await else { return };
    for name in FIXTURES {
        // umoci makes no directory for whiteouts alone.
        compare(&node, name, &[Fixture::load(name)], &["opt"]).await;
    }
    for name in soci::FIXTURES {
        // Both have the same archive.
        let Some(node) = LazyNode::new().await else { return };
        let (registry, indexed) = (FaultRegistry::start(), soci::Indexed::load(name));
        let image = indexed.put(&registry);
        compare_image(&node, name, (&registry, &image), &[indexed.layer], &["opt"]).await;
    }
    let Some(more) = std::env::var_os("LARDER_LAZY_IMAGES") else { return };
    for layout in fs_err::read_dir(PathBuf::from(more)).unwrap() {
        let layout = layout.unwrap().path();
        let name = layout.file_name().unwrap().to_string_lossy().into_owned();
        compare(&node, &name, &Fixture::of_layout(&layout), &[]).await;
    }
}
