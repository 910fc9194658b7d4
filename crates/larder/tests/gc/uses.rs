//! Uses of images, by kubelet's rule and by larder's.

use std::sync::Arc;

use larder::backend::{Container, ContainerInventory, Image, Sandbox};
use larder::gc::GcStrategy;
use larder::retention::{BackendRetentions, RetentionPurpose, RetentionSet, RetentionSource as _};
use larder_testkit::fake_backend::FakeBackend;

fn container(image: &str, mounted: &[&str]) -> Container {
    Container {
        id: "c".into(),
        sandbox_id: "s".into(),
        image_id: image.into(),
        mounted_images: mounted.iter().map(|&image| image.into()).collect(),
        ..Container::default()
    }
}

async fn uses(container: Container, strategy: GcStrategy) -> RetentionSet {
    let fake = FakeBackend::new();
    let sandbox = Sandbox { id: "s".into(), runtime_handler: "kata".into(), ..Sandbox::default() };
    fake.set_in_use(ContainerInventory { containers: vec![container], sandboxes: vec![sandbox] });
    let images = [
        Image { id: "sha256:a".into(), repo_tags: vec!["r.example/a:1".into()], ..Image::default() },
        Image {
            id: "sha256:b".into(),
            repo_digests: vec!["r.example/b@sha256:bb".into()],
            ..Image::default()
        },
    ];
    let found = BackendRetentions::new(Arc::new(fake)).retentions().await.expect("the fake answers");
    RetentionSet::new(found, &images, strategy)
}

fn is_used(uses: &RetentionSet, id: &str, handler: &str) -> bool {
    uses.of_image(id, handler).next().is_some()
}

#[tokio::test]
async fn an_image_is_used_by_id_for_the_handler_of_its_sandbox() {
    for strategy in [GcStrategy::Kubelet, GcStrategy::Larder] {
        let uses = uses(container("sha256:a", &[]), strategy).await;
        assert!(is_used(&uses, "sha256:a", "") && is_used(&uses, "sha256:a", "kata"));
        assert!(!is_used(&uses, "sha256:a", "runc") && !is_used(&uses, "sha256:b", ""));
    }
}

#[tokio::test]
async fn names_count_by_our_rule_only() {
    let named = container("r.example/a:1", &["r.example/b@sha256:bb"]);
    let ours = uses(named.clone(), GcStrategy::Larder).await;
    assert!(is_used(&ours, "sha256:a", "kata") && is_used(&ours, "sha256:b", "runc"));
    let kubelets = uses(named, GcStrategy::Kubelet).await;
    assert!(!is_used(&kubelets, "sha256:a", "") && !is_used(&kubelets, "sha256:b", ""));
}

#[tokio::test]
async fn a_mount_counts_for_all_handlers_by_our_rule() {
    let mounting = container("sha256:a", &["sha256:b"]);
    let ours = uses(mounting.clone(), GcStrategy::Larder).await;
    assert!(is_used(&ours, "sha256:b", "runc"));
    let volume = ours.of_image("sha256:b", "").next().expect("a purpose");
    assert!(matches!(volume, RetentionPurpose::Volume { .. }));
    let container = ours.of_image("sha256:a", "").next().expect("a purpose");
    assert_eq!(volume.to_string(), format!("volume of {container}"));
    let kubelets = uses(mounting, GcStrategy::Kubelet).await;
    assert!(is_used(&kubelets, "sha256:b", "") && !is_used(&kubelets, "sha256:b", "runc"));
}

#[tokio::test]
async fn a_mount_of_the_store_is_shown_as_one() {
    for (running, text) in [(true, "mount at /srv/app"), (false, "files of an ended mount at /srv/app")] {
        let mount =
            Container { name: "/srv/app".into(), is_mount: true, running, ..container("sha256:a", &[]) };
        let uses = uses(mount, GcStrategy::Larder).await;
        assert_eq!(uses.of_image("sha256:a", "").next().unwrap().to_string(), text);
    }
}

#[tokio::test]
async fn the_image_of_a_sandbox_is_in_use() {
    let fake = FakeBackend::new();
    let sandbox = |image: &str| Sandbox { pod: "ns/web".into(), image: image.into(), ..Sandbox::default() };
    let sandboxes = vec![sandbox("sha256:a"), sandbox("")];
    fake.set_in_use(ContainerInventory { sandboxes, ..ContainerInventory::default() });
    let found = BackendRetentions::new(Arc::new(fake)).retentions().await.expect("the fake answers");
    let [used] = &found[..] else { panic!("the runtime reports one image: {found:?}") };
    assert_eq!((used.image.as_str(), used.purpose.to_string().contains("ns/web")), ("sha256:a", true));
}

#[tokio::test]
async fn a_container_whose_mounts_are_unknown_ends_the_round() {
    let fake = FakeBackend::new();
    let mounts_error = Some("rpc error: code = Unknown desc = boom".to_owned());
    let containers = vec![Container { mounts_error, ..container("sha256:a", &[]) }];
    fake.set_in_use(ContainerInventory { containers, sandboxes: Vec::new() });
    let error =
        BackendRetentions::new(Arc::new(fake)).retentions().await.expect_err("anything may be mounted");
    assert_eq!(error.to_string(), "get container status: rpc error: code = Unknown desc = boom");
}
