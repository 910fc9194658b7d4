//! Pulls of containerd itself, whose layers larder fetches.

use larder::backend::{Backend as _, ImageSpec, ProgressReporter};
use larder_testkit_peers::containerd::pods::pause_image;
use larder_testkit_peers::process::{WAIT_LIMIT, poll};
use larder_testkit_peers::registry::AccessLogLine;
use larder_testkit_peers::{self as peers, ContainerdOptions};

use super::{IMAGE, SnapshotterFixture};
use crate::served::client_of;

/// A containerd that says of which image a layer is.
fn fixture() -> Option<SnapshotterFixture> {
    let options = ContainerdOptions { announces_layers: true, ..ContainerdOptions::default() };
    SnapshotterFixture::with("k8s.io", options)
}

impl SnapshotterFixture {
    fn pull_by_containerd(&self) -> String {
        let cri = client_of(self.containerd.socket());
        let (spec, progress) = (ImageSpec::named(self.image()), ProgressReporter::unwatched());
        let pull = || self.daemon().runtime.block_on(cri.pull(&spec, None, None, &progress));
        // containerd's connection may be that to a daemon that was killed.
        poll(WAIT_LIMIT, || pull().ok()).expect("a pull").as_str().to_owned()
    }
}

#[test]
fn layers_of_a_pull_by_containerd_are_fetched_once_by_larder() {
    let Some(mut fixture) = fixture() else { return };
    let layer = |seed| peers::LayerFiles::new().noise(format!("srv/data{seed}"), 200_000, seed);
    let layout = pause_image().layer(layer(1)).layer(layer(2)).push(&fixture.world.registry, IMAGE).unwrap();
    fixture.world.registry.forget_requests();
    assert_eq!(fixture.pull_by_containerd(), layout.image_id);

    let requests = fixture.world.registry.requests();
    let fetches = |digest: &str| -> Vec<&AccessLogLine> {
        let of_blob = |request: &&AccessLogLine| request.is_blob_fetch() && request.path.ends_with(digest);
        requests.iter().filter(of_blob).collect()
    };
    for blob in layout.blobs.iter().filter(|blob| **blob != layout.image_id) {
        let [only] = fetches(blob)[..] else { panic!("{blob} once: {requests:?}") };
        assert!(only.user_agent.starts_with("larder/"), "{only:?}");
    }
    assert_eq!(fixture.snapshots().len(), 3);
    let content = fixture.ctr(&["content", "ls", "-q"]);
    assert_eq!(content.split_whitespace().count(), 2, "manifest and config: {content}");

    let root = fixture.run("first");
    assert_eq!(fs_err::read(root.join("srv/data2")).unwrap().len(), 200_000);
    let socket = fixture.world.path("larder.sock");
    let collected = fixture.world.larder(&["--daemon", &socket, "gc", "--all-unused", "--force"]);
    assert_eq!(collected.code, 0, "{}", collected.stderr);
    assert_eq!(fs_err::read(root.join("srv/data1")).unwrap().len(), 200_000);
    fixture.stop("first");
    for name in fixture.ctr(&["images", "ls", "-q"]).lines() {
        fixture.ctr(&["images", "rm", "--sync", name]);
    }
    fixture.wait_until_removed(&["snapshots", "layers"]);
    let ended = fixture.daemon.take().expect("larder runs").stop();
    assert_eq!(ended.code, 0, "{}", ended.stderr);
}

#[test]
fn containerd_pulls_what_larder_must_not_fetch() {
    let Some(mut fixture) = fixture() else { return };
    let layout = pause_image().push(&fixture.world.registry, IMAGE).unwrap();
    fixture.kill_larder();
    fixture.start_larder_with("  fetchLayers: false\n");
    fixture.world.registry.forget_requests();
    assert_eq!(fixture.pull_by_containerd(), layout.image_id);
    let requests = fixture.world.registry.requests();
    assert!(requests.iter().all(|request| !request.user_agent.starts_with("larder/")), "{requests:?}");
    fixture.run("first");
    fixture.stop("first");
}
