//! A real containerd reports the containers that it creates.

#![allow(clippy::unwrap_used, reason = "a test that cannot be set up has failed")]

mod common;

use std::time::{Duration, SystemTime};

use larder::backend::{Backend as _, ImageSpec, ProgressReporter};
use larder::gc::{ActivityFeed as _, ActivityKind, UnixMillis};
use larder_containerd::ContainerdActivity;
use larder_cri::{CriBackend, CriConfig, Endpoint};
use larder_testkit_peers::ImageBuilder;

const LIMIT: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_container_that_was_created_and_removed_is_a_use_of_its_image() {
    let Some((containerd, registry)) = common::containerd_and_registry() else { return };
    let backend = CriBackend::new(Endpoint::at(containerd.socket()), CriConfig::default());
    let mut names = Vec::new();
    for repository in ["shop/web", "shop/other"] {
        ImageBuilder::small(names.len() as u64, 50_000).push(&registry, &format!("{repository}:1")).unwrap();
        let name = registry.image(&format!("{repository}:1"));
        let progress = ProgressReporter::unwatched();
        names.push((backend.pull(&ImageSpec::named(&*name), None, None, &progress).await.unwrap(), name));
    }
    let images = backend.list().await.unwrap();
    let activity = ContainerdActivity::new(backend.runtime_channel(), LIMIT);
    let snapshotter = if containerd.has_overlay() { "overlayfs" } else { "native" };
    let (id, name) = &names[0];
    let began = UnixMillis::from(SystemTime::now());
    let found = async {
        // Events before the stream begins are not sent.
        for container in 0.. {
            let container = format!("demo-{container}");
            let create = ["containers", "create", "--snapshotter", snapshotter, name, &container];
            containerd.ctr("k8s.io", &create).unwrap();
            containerd.ctr("k8s.io", &["containers", "rm", &container]).unwrap();
            tokio::time::sleep(Duration::from_millis(100)).await;
            let found = activity.take_activity(&images).await.unwrap();
            if !found.is_empty() {
                return found;
            }
        }
        unreachable!()
    };
    let found = tokio::time::timeout(LIMIT, async {
        tokio::select! {
            () = activity.follow() => panic!("containerd has events"),
            found = found => found,
        }
    });
    let found = found.await.expect("the container is reported");
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((&found[0].image, found[0].what), (id, ActivityKind::Used));
    assert!(found[0].at >= began, "{found:?}");
    assert_eq!(activity.take_activity(&images).await.unwrap(), [], "it is reported once");
}
