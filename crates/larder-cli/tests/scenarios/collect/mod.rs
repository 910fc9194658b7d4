//! Collection on a real disk: a small filesystem that holds the images, measured by `statvfs` from outside.

mod containerd;
mod docker;
mod failed_pulls;
mod real_family;
mod sandboxes;
mod store;

use std::path::{Path, PathBuf};
use std::process::Command;

use larder_store::store::{Store, StoreConfig};
use larder_testkit_peers::{ImageBuilder, LayerFiles, LoopDisk, LoopFilesystem};
use serde_json::Value;

use crate::world::{LarderOutput, LarderProcess, end_leases, larder_in};

/// So much may be written beside: the database, the journal, directories.
const SLACK: u64 = 1 << 20;

/// A small filesystem, and a home beside it.
pub(crate) struct MountedDisk(LoopDisk);

impl MountedDisk {
    /// An ext4; `None`, after a loud message, where it cannot be mounted.
    pub(crate) fn new(mib: u64) -> Option<MountedDisk> {
        let kind = LoopFilesystem::Ext4;
        kind.is_available().then(|| MountedDisk(LoopDisk::new(kind, mib, &["-i", "16384"]).unwrap()))
    }

    /// One of the kind that `LARDER_TEST_FILESYSTEM` names, ext4 without it.
    fn of_environment(mib: u64) -> Option<MountedDisk> {
        match LoopFilesystem::of_environment() {
            LoopFilesystem::Ext4 => MountedDisk::new(mib),
            kind => kind.is_available().then(|| MountedDisk(LoopDisk::new(kind, mib, &[]).unwrap())),
        }
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.0.path()
    }

    /// Whether what its files take can only be estimated.
    fn estimates_sizes(&self) -> bool {
        const BTRFS: i64 = 0x9123_683e;
        rustix::fs::statfs(self.path()).unwrap().f_type == BTRFS
    }

    /// Checks an amount with what was measured: a removal frees metadata, too, which btrfs does not count for a file.
    #[track_caller]
    fn agree(&self, what: &str, said: u64, measured: u64) {
        if !self.estimates_sizes() {
            return agree(what, said, measured);
        }
        let off = said.abs_diff(measured);
        assert!(off <= (4 * SLACK).max(measured / 10), "{what}: estimated {said}, measured {measured}");
    }

    pub(crate) fn home(&self) -> &Path {
        self.0.dir()
    }

    /// Bytes that are free, and all bytes.
    fn free(&self) -> (u64, u64) {
        let (free, all) = self.0.free().unwrap();
        (free.bytes, all)
    }

    /// Other data, so that so many percent are in use; larder itself leaves a reserve.
    pub(crate) fn fill_to(&self, percent: u64) {
        self.empty_trash();
        let (free, all) = self.free();
        let bytes = free.saturating_sub(all / 100 * (100 - percent));
        let filler = fs_err::File::create(self.path().join("filler")).unwrap();
        rustix::fs::fallocate(&filler, rustix::fs::FallocateFlags::empty(), 0, bytes).unwrap();
    }

    /// Deletes what a command that has ended may have left to the next one: it must not count.
    fn empty_trash(&self) {
        if self.path().join("store").exists() {
            self.store().empty_trash().unwrap();
        }
    }

    fn used_percent(&self) -> f64 {
        let (free, all) = self.free();
        #[expect(clippy::cast_precision_loss, reason = "percents")]
        let used = (all - free) as f64 / all as f64;
        used * 100.0
    }

    fn larder(&self, arguments: &[&str]) -> LarderOutput {
        let mut command = larder_in(self.home());
        command.arg("--root").arg(self.path().join("store")).args(arguments);
        LarderProcess::start(command).finish()
    }

    /// Loads an image under a name of its own.
    fn load(&self, name: &str, image: &ImageBuilder) {
        let layout = self.home().join("layout");
        image.write(&layout).unwrap();
        self.larder(&["load", &layout.to_string_lossy(), "--name", name]).expect(0);
        fs_err::remove_dir_all(layout).unwrap();
    }

    fn store(&self) -> Store {
        Store::open(&self.path().join("store"), StoreConfig::default()).unwrap()
    }

    /// Ends the leases of the loaded images.
    fn end_leases(&self) {
        end_leases(&self.path().join("store/collect"));
    }
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn number(value: &Value, field: &str) -> u64 {
    value[field].as_u64().unwrap_or_else(|| panic!("{field} in {value}"))
}

/// Returns the removals of a report, with their promised bytes.
fn removals(report: &Value) -> Vec<(String, u64)> {
    let all = report["removals"].as_array().unwrap().iter();
    all.map(|removal| (removal["id"].as_str().unwrap().to_owned(), number(removal, "promisedBytes")))
        .collect()
}

#[track_caller]
fn agree(what: &str, said: u64, measured: u64) {
    let off = said.abs_diff(measured);
    assert!(off <= SLACK.max(measured / 100), "{what}: said {said}, measured {measured}");
}

/// A dry run, and the round right after it.
struct MeasuredGc {
    planned: Value,
    done: Value,
    /// Bytes free before and after, and all bytes of the filesystem.
    before: u64,
    after: u64,
    all: u64,
}

impl MeasuredGc {
    /// With the marks of [`MARKS`].
    #[track_caller]
    fn run(disk: &MountedDisk, larder: impl Fn(&[&str]) -> LarderOutput) -> MeasuredGc {
        let planned = larder(&gc(&["--dry-run"])).expect(0).json();
        disk.empty_trash();
        let (before, all) = disk.free();
        let done = larder(&gc(&[])).expect(0).json();
        let (after, _) = disk.free();
        let round = MeasuredGc { planned, done, before, after, all };
        round.print();
        round
    }

    /// For the log of a failed test, and for `docs/benchmarks.md`.
    fn print(&self) {
        let MeasuredGc { planned, done, before, after, all } = self;
        for (what, report) in [("planned", planned), ("done", done)] {
            let (needed, promised) = (number(report, "neededBytes"), number(report, "promisedBytes"));
            let removals = removals(report).len();
            eprintln!("{what}: {removals} removals, {needed} bytes needed, {promised} promised");
        }
        eprintln!("{before} bytes were free, then {after} of {all}: {} more", after - before);
        for removal in done["removals"].as_array().unwrap() {
            let (promised, freed) = (number(removal, "promisedBytes"), number(removal, "freedBytes"));
            eprintln!("  {}: {promised} promised, {freed} freed", removal["names"][0]);
        }
    }

    /// It ended at or below the low mark, and no image was removed beyond that.
    #[track_caller]
    fn ends_at_the_low_mark(&self) {
        let wanted = self.all / 100 * 55;
        assert!(self.after >= wanted, "{} bytes are free, {wanted} were wanted", self.after);
        let last = self.done["removals"].as_array().unwrap().last().unwrap();
        let (over, last) = (self.after - wanted, number(last, "freedBytes"));
        assert!(over < last, "{over} bytes beyond the mark; the last image freed {last}");
    }

    /// The report and the journal have the freed bytes of the filesystem.
    #[track_caller]
    fn prints_freed_bytes(&self, larder: impl Fn(&[&str]) -> LarderOutput) {
        let freed = self.after - self.before;
        agree("the report", number(&self.done, "freedBytes"), freed);
        let history = larder(&["gc", "log", "-o", "json"]).expect(0).json();
        let journal: u64 = history.as_array().unwrap().iter().map(|entry| number(entry, "freedBytes")).sum();
        agree("the journal", journal, freed);
    }
}

/// One layer of noise.
fn layer(seed: u64, size: usize) -> LayerFiles {
    LayerFiles::new().noise(format!("srv/{seed}"), size, seed)
}

/// Forty applications on two bases.
fn family(base: usize, app: usize) -> impl Iterator<Item = (String, ImageBuilder)> {
    (0..40_u64).map(move |number| {
        let image = ImageBuilder::new().layer(layer(1000 + number % 2, base)).layer(layer(number, app));
        (format!("registry.example/family/app-{number:02}"), image)
    })
}

const MARKS: [&str; 5] = [
    "--image-gc-high-threshold=65",
    "--image-gc-low-threshold=45",
    "--minimum-image-ttl-duration=0",
    "-o",
    "json",
];

/// `gc` with the marks, and more.
fn gc<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let mut arguments: Vec<&'a str> = vec!["gc"];
    arguments.extend(&MARKS);
    arguments.extend(more);
    arguments
}

/// Kills rounds that would remove the twelve images that `load` makes present, after some removals each, counted in
/// their journal: order and ages are kept.
#[track_caller]
fn killed_rounds_change_nothing(journal: &Path, load: impl Fn(), command: impl Fn(&[&str]) -> Command) {
    let all = ["gc", "--all-unused", "--force", "--minimum-image-ttl-duration=0", "-o", "json"];
    let plan = || {
        let run = LarderProcess::start(command(&[&all[..], &["--dry-run"]].concat())).finish();
        ages(&run.expect(0).json())
    };
    let mut known = Vec::new();
    let lines = || fs_err::read_to_string(journal).map_or(0, |journal| journal.lines().count());
    let mut killed_within = 0;
    for removals in [0, 1, 2, 1, 3] {
        // A round may have removed all before it was killed.
        if known.is_empty() {
            load();
            known = plan();
            assert_eq!(known.len(), 12);
        }
        let enough = lines() + removals;
        LarderProcess::start(command(&all)).kill_when(|| lines() >= enough);
        let left = plan();
        assert!(known.ends_with(&left), "killed after {removals} removals: {known:?} became {left:?}");
        killed_within += usize::from(left.len() < known.len() && !left.is_empty());
        known = left;
    }
    assert!(killed_within > 0, "no round was killed between two removals");
}

/// Ids in the order in which they would go, with what is known of their age.
fn ages(report: &Value) -> Vec<(String, [Value; 2])> {
    let removals = report["removals"].as_array().unwrap().iter();
    let images = report["images"].as_array().unwrap();
    let age = |id: &Value| {
        images
            .iter()
            .find(|image| image["id"] == *id)
            .map(|image| [image["firstSeen"].clone(), image["lastUsed"].clone()])
    };
    removals
        .map(|removal| (removal["id"].as_str().unwrap().to_owned(), age(&removal["id"]).unwrap()))
        .collect()
}
