//! Remains of failed and interrupted pulls on a real disk: `df` shows them, GC reclaims them before any image, and a
//! pull that fails for lack of space leaves nothing.

use std::path::PathBuf;

use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, ResponseFault};
use larder_testkit_peers::ImageBuilder;
use serde_json::{Value, json};

use super::{MountedDisk, agree, layer, number};
use crate::kills::serve;
use crate::world::{LarderProcess, larder_in};

const MIB: u64 = 1 << 20;

/// A store with one unused image, and a pull that was killed when it had one layer and a part of the next.
struct InterruptedNode {
    disk: MountedDisk,
    registry: FaultRegistry,
    finished: String,
}

impl InterruptedNode {
    fn new() -> Option<InterruptedNode> {
        let (disk, registry) = (MountedDisk::new(192)?, FaultRegistry::start());
        disk.load("registry.example/innocent", &ImageBuilder::new().layer(layer(1, 8 << 20)));
        disk.end_leases();
        let image = ImageBuilder::new().layer(layer(2, 24 << 20)).layer(layer(3, 16 << 20));
        let blobs = serve(&registry, &image, "shop/cut", &disk.home().join("cut"));
        registry.fault(FaultTrigger::path(&blobs[2]), ResponseFault::StallAfter(6 * MIB));
        let node = InterruptedNode { disk, registry, finished: blobs[1].clone() };
        node.interrupt_pull();
        Some(node)
    }

    fn name(&self) -> String {
        self.registry.image("shop/cut:1")
    }

    fn interrupt_pull(&self) {
        let mut command = larder_in(self.disk.home());
        command.arg("--root").arg(self.disk.path().join("store")).args(["pull", "-q", &self.name()]);
        LarderProcess::start(command)
            .kill_when(|| self.entries("layers").len() == 2 && self.downloaded() > 5 * MIB);
        assert_eq!((self.entries("layers").len(), self.downloaded() > 5 * MIB), (2, true));
    }

    fn entries(&self, dir: &str) -> Vec<PathBuf> {
        let entries = fs_err::read_dir(self.disk.path().join("store").join(dir));
        entries.map_or_else(|_| Vec::new(), |entries| entries.map(|entry| entry.unwrap().path()).collect())
    }

    /// Bytes of downloads, as recorded by the pull.
    fn downloaded(&self) -> u64 {
        let dirs = self.entries("ingest");
        dirs.iter().map(|dir| larder_store::disk::measure(dir).map_or(0, |usage| usage.bytes)).sum()
    }

    fn json(&self, arguments: &[&str]) -> Value {
        self.disk.larder(&[arguments, &["-o", "json"]].concat()).expect(0).json()
    }

    /// Bytes that can be reclaimed beside images, of downloads and of layers.
    fn reclaimable(&self) -> (u64, u64) {
        let space = &self.json(&["df"])["reclaimableBesideImages"];
        assert_eq!(number(&space["total"], "sizeBytes"), total(space), "{space}");
        (number(&space["downloads"], "sizeBytes"), number(&space["layers"], "sizeBytes"))
    }

    fn images(&self) -> usize {
        self.json(&["images"]).as_array().unwrap().len()
    }
}

fn total(space: &Value) -> u64 {
    ["downloads", "layers", "remnants", "trash", "buildCache"]
        .map(|kind| number(&space[kind], "sizeBytes"))
        .iter()
        .sum()
}

#[test]
fn what_an_interrupted_pull_left_goes_before_images() {
    let Some(node) = InterruptedNode::new() else { return };
    let (downloads, layers) = node.reclaimable();
    assert!(downloads > 5 * MIB && layers > 24 * MIB, "{downloads} of downloads, {layers} of layers");
    let table = node.disk.larder(&["df", "-v"]).expect(0).stdout;
    assert!(table.contains("reclaimable, left by failed pulls"), "{table}");
    node.disk.larder(&["fsck"]).expect(0);

    let round = node.json(&["gc"]);
    assert_eq!(total(&round["reclaimed"]), 0, "no space is needed: the next pull resumes");
    assert_eq!(node.reclaimable(), (downloads, layers));

    let free = ["gc", "--free=20MiB", "--minimum-image-ttl-duration=0"];
    let planned = node.json(&[&free[..], &["--dry-run"]].concat());
    let (before, _) = node.disk.free();
    let done = node.json(&free);
    let (after, _) = node.disk.free();
    for report in [&planned, &done] {
        assert_eq!(report["removals"], json!([]), "{report}");
        assert_eq!((&report["reached"], &report["neededBytes"]), (&json!(true), &json!(0)), "{report}");
        assert_eq!(report["promisedBytes"], 0, "{report}");
        agree("what was left", total(&report["reclaimed"]), downloads + layers);
    }
    agree("the reclaimed space", total(&done["reclaimed"]), after - before);
    assert_eq!((node.reclaimable(), node.images()), ((0, 0), 1));
    node.disk.larder(&["fsck"]).expect(0);
}

#[test]
fn more_than_an_interrupted_pull_left_comes_from_images() {
    let Some(node) = InterruptedNode::new() else { return };
    // The half-unpacked layer of the killed process is removed when the store is opened.
    node.json(&["gc"]);
    let (downloads, layers) = node.reclaimable();
    let (before, _) = node.disk.free();
    let free = format!("--free={}MiB", (downloads + layers) / MIB + 2);
    let done = node.json(&["gc", &free, "--minimum-image-ttl-duration=0"]);
    let (after, _) = node.disk.free();
    assert_eq!(done["removals"].as_array().unwrap().len(), 1, "{done}");
    agree("freed by images", number(&done, "freedBytes"), number(&done, "promisedBytes"));
    agree("in all", number(&done, "freedBytes") + total(&done["reclaimed"]), after - before);
}

#[test]
fn what_failed_pulls_left_is_removed_on_demand_and_no_image() {
    let Some(node) = InterruptedNode::new() else { return };
    let sent = node.registry.bytes_sent(&node.finished);
    node.interrupt_pull();
    assert_eq!(node.registry.bytes_sent(&node.finished), sent, "the pull resumed");
    let plan = node.disk.larder(&["gc", "--failed-pulls", "--dry-run"]).expect(0).stdout;
    assert!(plan.contains("\nwould reclaim ") && plan.contains("(downloads "), "{plan}");
    let done = node.disk.larder(&["gc", "--failed-pulls"]).expect(0).stdout;
    assert!(done.contains("goal: remove what failed pulls left\nreclaimed "), "{done}");
    assert_eq!((node.reclaimable(), node.images()), ((0, 0), 1));
    let again = node.disk.larder(&["gc", "--failed-pulls"]).expect(0).stdout;
    assert!(again.contains("removed nothing"), "{again}");

    node.interrupt_pull();
    let all = node.json(&["gc", "--all-unused", "--force", "--minimum-image-ttl-duration=0"]);
    assert!(total(&all["reclaimed"]) > 24 * MIB, "{all}");
    assert_eq!((node.reclaimable(), node.images()), ((0, 0), 0));
}

#[test]
fn a_pull_that_needs_more_than_there_is_leaves_nothing_and_the_reserve() {
    let Some(disk) = MountedDisk::new(192) else { return };
    let registry = FaultRegistry::start();
    // Each is fetched as a few megabytes, and takes a hundred.
    let swelling = |seed: u64| layer(seed, 6 << 20).file(format!("srv/ones{seed}"), vec![1; 96 << 20]);
    let image = (1..=2).fold(ImageBuilder::new(), |image, seed| image.layer(swelling(seed)));
    serve(&registry, &image, "shop/swelling", &disk.home().join("swelling"));
    serve(&registry, &ImageBuilder::small(9, 8 << 20), "shop/web", &disk.home().join("web"));
    let (before, _) = disk.free();
    let run = disk.larder(&["pull", &registry.image("shop/swelling:1")]).expect(1);
    assert!(
        run.stderr.contains("insufficient space: ") && run.stderr.contains("(67.1MB reserved)"),
        "{run:?}"
    );
    disk.empty_trash();
    let (after, _) = disk.free();
    agree("what is free", after, before);
    let usage = disk.larder(&["df", "-o", "json"]).expect(0).json();
    assert_eq!(total(&usage["reclaimableBesideImages"]), 0, "{usage}");
    disk.larder(&["pull", "-q", &registry.image("shop/web:1")]).expect(0);
    disk.larder(&["fsck"]).expect(0);
}
