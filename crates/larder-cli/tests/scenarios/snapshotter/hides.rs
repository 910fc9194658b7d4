//! Images of the store that containerd does not get before kubelet has pulled them.

use larder_testkit_peers as peers;
use larder_testkit_peers::process::wait_until;

use super::{IMAGE, SnapshotterFixture};
use crate::hidden::log_in;

#[test]
fn a_prefetched_private_image_is_not_published_before_kubelet_has_pulled_it() {
    let Some(mut fixture) = SnapshotterFixture::new("k8s.io") else { return };
    peers::ImageBuilder::small(1, 50_000).push(&fixture.world.registry, IMAGE).unwrap();
    peers::ImageBuilder::small(2, 50_000).push(&fixture.world.registry, "shop/public:1").unwrap();
    log_in(&fixture.world);
    fixture.kill_larder();
    let socket = format!("  socket: {}\n", fixture.containerd.endpoint());
    fixture.start_larder_with(&format!("{socket}prefetch: [{{image: '{}', jitter: 0s}}]\n", fixture.image()));
    fixture.daemon().wait_for_log("Successfully pulled", 1);
    let published = |fixture: &SnapshotterFixture| fixture.ctr(&["images", "ls", "-q"]);
    assert_eq!(published(&fixture).trim(), "");

    // The store has an image that containerd lacks: the next daemon publishes that one alone.
    let public = fixture.world.registry.image("shop/public:1");
    fixture.kill_larder();
    fixture.world.larder(&["pull", &public]).expect(0);
    fixture.start_larder();
    wait_until("the other image is published", || published(&fixture).contains(&public));
    assert!(!published(&fixture).contains(&fixture.image()));

    fixture.daemon().pull(&fixture.image()).expect("kubelet's own pull");
    assert!(published(&fixture).contains(&fixture.image()), "when the pull returns");
    assert_eq!(fixture.daemon().list().len(), 2);
}
