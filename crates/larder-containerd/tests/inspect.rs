//! Lists the contents of a real containerd in namespaces beside that of CRI.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod common;

use larder_containerd::ContainerdInspector;
use larder_cri::{CriBackend, CriConfig, Endpoint};
use larder_testkit_peers::ImageBuilder;

#[tokio::test]
async fn containers_and_images_of_all_namespaces_are_found() {
    let Some((containerd, registry)) = common::containerd_and_registry() else { return };
    ImageBuilder::small(1, 50_000).push(&registry, "shop/web:1").unwrap();
    let name = registry.image("shop/web:1");
    let ctr = |arguments: &[&str]| containerd.ctr("other", arguments).unwrap();
    ctr(&["images", "pull", "--plain-http", "--snapshotter", "native", &name]);
    ctr(&["containers", "create", "--snapshotter", "native", &name, "demo"]);
    let inspector =
        ContainerdInspector::new(&CriBackend::new(Endpoint::at(containerd.socket()), CriConfig::default()));
    assert_eq!(inspector.containers_on("native").await, Ok(vec!["demo (namespace other)".to_owned()]));
    assert_eq!(inspector.containers_on("larder").await, Ok(Vec::new()));
    assert_eq!(inspector.images_without_layers("native").await, Ok(Vec::new()), "containerd has the layers");

    for line in ctr(&["content", "ls"]).lines().filter(|line| line.contains("containerd.io/uncompressed=")) {
        ctr(&["content", "rm", line.split_whitespace().next().unwrap()]);
    }
    let lacking = vec![format!("{name} (namespace other)")];
    assert_eq!(inspector.images_without_layers("native").await, Ok(lacking));
}
