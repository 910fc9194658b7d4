//! Images that other programs put into containerd: they are images for kubelet, and larder's to collect.

use std::path::PathBuf;

use larder::backend::Image;
use larder_testkit_peers::containerd::pods::pause_image;
use larder_testkit_peers::process::{WAIT_LIMIT, poll, wait_until};
use larder_testkit_peers::{self as peers, ImageBuilder};

use super::SnapshotterFixture;
use super::shares::{number, removal_of};

const NAME: &str = "registry.example/shop/web:1";

impl SnapshotterFixture {
    /// An archive of an image, and the ID of the image.
    fn archive(&self, image: &ImageBuilder) -> (String, String) {
        let dir = PathBuf::from(self.world.path("layout"));
        let layout = image.write(&dir).unwrap();
        let archive = self.world.path("image.tar");
        let mut writer = tar::Builder::new(fs_err::File::create(&archive).unwrap());
        writer.append_dir_all(".", &dir).unwrap();
        writer.finish().unwrap();
        (archive, layout.image_id)
    }

    /// Imports an image with `ctr` under a name, and returns its ID.
    fn import(&self, image: &ImageBuilder, name: &str) -> String {
        let (archive, id) = self.archive(image);
        self.ctr(&["images", "import", "--no-unpack", "--index-name", name, &archive]);
        id
    }

    /// Waits until larder lists an image under this name alone.
    fn wait_for(&self, id: &str, name: &str) {
        let has_name = |image: &Image| image.id.as_str() == id && image.repo_tags == [name];
        let found = poll(WAIT_LIMIT, || self.daemon().list().iter().any(has_name).then_some(()));
        assert!(found.is_some(), "{:?}\n{}", self.daemon().list(), self.daemon().running.stderr());
    }
}

#[test]
fn an_image_that_ctr_imported_is_present_for_kubelet_and_removed_for_it() {
    let Some(mut fixture) = SnapshotterFixture::new("k8s.io") else { return };
    let layer = peers::LayerFiles::new().noise("srv/data", 300_000, 1);
    let id = fixture.import(&pause_image().layer(layer), NAME);
    let found = fixture.daemon().status(NAME).expect("it is present, and no registry has it");
    assert_eq!(found.id.as_str(), id);
    assert_eq!(found.repo_tags, [NAME]);
    assert_eq!(fixture.daemon().list(), [found], "one record");
    let name = fixture.id("first");
    fixture.ctr(&["run", "--detach", "--snapshotter", "larder", NAME, &name, "/bin/true"]);
    fixture.stop("first");

    fixture.daemon().remove(NAME);
    assert_eq!(fixture.ctr(&["images", "ls", "-q"]).trim(), "");
    wait_until("containerd has removed its content", || {
        fixture.ctr(&["content", "ls", "-q"]).trim().is_empty()
    });
    fixture.wait_until_removed(&["snapshots", "layers", "lowers"]);
    assert_eq!(fixture.daemon().status(NAME), None);
    fixture.daemon.take().expect("larder runs").stop().expect(0);
}

#[test]
fn an_image_that_ctr_pulled_or_moved_is_seen_without_being_asked_for() {
    let Some(fixture) = SnapshotterFixture::new("k8s.io") else { return };
    let push = |seed| {
        let layer = peers::LayerFiles::new().noise("srv/data", 100_000, seed);
        pause_image().layer(layer).push(&fixture.world.registry, super::IMAGE).unwrap().image_id
    };
    let pull =
        || fixture.ctr(&["images", "pull", "--plain-http", "--snapshotter", "larder", &fixture.image()]);
    let first = push(1);
    pull();
    fixture.wait_for(&first, &fixture.image());
    let second = push(2);
    pull();
    fixture.wait_for(&second, &fixture.image());
    fixture.run("first");
    fixture.stop("first");
}

#[test]
fn the_content_of_an_imported_image_is_counted_and_collected_unless_it_is_pinned() {
    const LAYER: u64 = 1 << 20;
    let Some(mut fixture) = SnapshotterFixture::new("k8s.io") else { return };
    fixture.kill_larder();
    let socket = format!("  socket: {}\npull:\n  ensuredLease: 0s\n", fixture.containerd.endpoint());
    fixture.start_larder_with(&socket);
    let image = |seed| ImageBuilder::new().layer(peers::LayerFiles::new().noise("data", 1 << 20, seed));
    let (free, pinned) = ("registry.example/free:1", "registry.example/pinned:1");
    for (seed, name) in [(1, free), (2, pinned)] {
        let id = fixture.import(&image(seed), name);
        fixture.wait_for(&id, name);
    }
    fixture.ctr(&["images", "label", pinned, "io.cri-containerd.pinned=pinned"]);
    let is_pinned = |name| fixture.daemon().status(name).expect("an image").pinned;
    assert!(is_pinned(pinned) && !is_pinned(free));

    let socket = fixture.world.path("larder.sock");
    let larder = |arguments: &[&str]| {
        let global = ["--daemon", &*socket];
        fixture.world.larder(&[&global, arguments, &["-o", "json"]].concat()).expect(0).json()
    };
    let explained = larder(&["explain", free]);
    assert!(number(&explained, "containerdBytes").abs_diff(LAYER) < 100_000, "{explained}");
    assert!(number(&explained, "sizeBytes").abs_diff(2 * LAYER) < 200_000, "both: {explained}");
    assert!(number(&larder(&["df"]), "containerdBytes").abs_diff(2 * LAYER) < 200_000);
    let collected = larder(&["gc", "--all-unused", "--force", "--minimum-image-ttl-duration=0"]);
    let promised = number(removal_of(&collected, free), "promisedBytes");
    assert!(promised.abs_diff(2 * LAYER) < 200_000, "{collected}");

    let left: Vec<_> = fixture.daemon().list().into_iter().flat_map(|image| image.repo_tags).collect();
    assert_eq!(left, [pinned]);
    let names = fixture.ctr(&["images", "ls", "-q"]);
    assert!(names.contains(pinned) && !names.contains(free), "{names}");
    let content = fixture.ctr(&["content", "ls", "-q"]);
    assert_eq!(content.lines().count(), 4, "index, manifest, config and layer of the other: {content}");
    fixture.daemon.take().expect("larder runs").stop().expect(0);
}

#[test]
fn images_that_came_while_larder_or_its_subscription_was_down_are_seen_and_incomplete_ones_are_not() {
    let Some(mut fixture) = SnapshotterFixture::new("k8s.io") else { return };
    let image = |seed| ImageBuilder::new().layer(peers::LayerFiles::new().noise("data", 100_000, seed));
    fixture.kill_larder();
    let whole = fixture.import(&image(1), NAME);
    let blobs = fixture.ctr(&["content", "ls", "-q"]);
    let broken = "registry.example/shop/broken:1";
    fixture.import(&image(2), broken);
    let content = fixture.ctr(&["content", "ls"]);
    let is_layer = |line: &&str| line.contains("kB") && !blobs.lines().any(|digest| line.starts_with(digest));
    let layer = content.lines().find(is_layer).and_then(|line| line.split_whitespace().next());
    fixture.ctr(&["content", "rm", layer.unwrap_or_else(|| panic!("a layer in {content}"))]);
    fixture.start_larder();
    fixture.wait_for(&whole, NAME);
    assert_eq!(fixture.daemon().status(broken), None);
    assert_eq!(fixture.daemon().list().len(), 1);

    fixture.containerd.stop();
    fixture.containerd.start_again().unwrap();
    let second = fixture.import(&image(3), "registry.example/shop/later:1");
    fixture.wait_for(&second, "registry.example/shop/later:1");
    let stderr = fixture.daemon().running.stderr();
    assert!(!stderr.contains("cannot load image"), "{stderr}");
    fixture.daemon.take().expect("larder runs").stop().expect(0);
}
