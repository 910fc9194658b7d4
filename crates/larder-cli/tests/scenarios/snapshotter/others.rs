//! Images that other programs put into containerd: they are images for kubelet, and larder's to collect.

use std::path::PathBuf;

use larder_testkit_peers::containerd::pods::pause_image;
use larder_testkit_peers::process::{WAIT_LIMIT, poll, wait_until};
use larder_testkit_peers::{self as peers, ImageBuilder};

use super::SnapshotterFixture;

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

    /// Imports an image with `ctr` under [`NAME`], and returns its ID.
    fn import(&self, image: &ImageBuilder) -> String {
        let (archive, id) = self.archive(image);
        self.ctr(&["images", "import", "--no-unpack", "--index-name", NAME, &archive]);
        id
    }
}

#[test]
fn an_image_that_ctr_imported_is_present_for_kubelet_and_removed_for_it() {
    let Some(mut fixture) = SnapshotterFixture::new("k8s.io") else { return };
    let layer = peers::LayerFiles::new().noise("srv/data", 300_000, 1);
    let id = fixture.import(&pause_image().layer(layer));
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
    let listed = |id: &str| {
        let has_name =
            |image: &larder::backend::Image| image.id.as_str() == id && image.repo_tags == [fixture.image()];
        poll(WAIT_LIMIT, || fixture.daemon().list().iter().any(has_name).then_some(()))
    };
    let pull =
        || fixture.ctr(&["images", "pull", "--plain-http", "--snapshotter", "larder", &fixture.image()]);
    let first = push(1);
    pull();
    assert!(listed(&first).is_some(), "{:?}\n{}", fixture.daemon().list(), fixture.daemon().running.stderr());
    let second = push(2);
    pull();
    assert!(
        listed(&second).is_some(),
        "{:?}\n{}",
        fixture.daemon().list(),
        fixture.daemon().running.stderr()
    );
    fixture.run("first");
    fixture.stop("first");
}
