//! Collection on a real disk: a small file system that holds the images, measured by `statvfs` from outside.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use larder_store::store::{Store, StoreConfig};
use larder_testkit::peers::packages::find_program;
use larder_testkit::peers::{
    Containerd, ContainerdOptions, Image, Layer, Package, Registry, RegistryOptions, require,
};
use serde_json::Value;
use tempfile::TempDir;

use crate::world::{Run, Running, larder_in};

/// So much may be written beside: the database, the journal, folders.
const SLACK: u64 = 1 << 20;

/// An ext4 in a file, mounted as long as this lives, and a home.
struct Disk {
    folder: TempDir,
}

impl Disk {
    /// `None`, after a loud message, where it cannot be mounted.
    fn new(mib: u64) -> Option<Disk> {
        if !rustix::process::geteuid().is_root() || find_program("mkfs.ext4").is_none() {
            assert!(std::env::var_os("CI").is_none(), "CI must not skip collection: run the tests as root");
            eprintln!("==== SKIPPED, NOT TESTED: collection on a disk needs root and mkfs.ext4 ====");
            return None;
        }
        let disk = Disk { folder: tempfile::tempdir().unwrap() };
        let image = disk.folder.path().join("image");
        fs_err::File::create(&image).unwrap().set_len(mib << 20).unwrap();
        run(Command::new("mkfs.ext4").args(["-q", "-F", "-m", "0", "-N", "8192"]).arg(&image));
        fs_err::create_dir(disk.path()).unwrap();
        run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(disk.path()));
        Some(disk)
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("disk")
    }

    /// Bytes that are free, and all bytes.
    fn free(&self) -> (u64, u64) {
        rustix::fs::syncfs(fs_err::File::open(self.path()).unwrap()).unwrap();
        let stat = rustix::fs::statvfs(self.path()).unwrap();
        (stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize)
    }

    /// Other data, so that so many percent are in use; larder itself leaves a reserve.
    fn fill_to(&self, percent: u64) {
        let (free, all) = self.free();
        let bytes = free.saturating_sub(all / 100 * (100 - percent));
        let filler = fs_err::File::create(self.path().join("filler")).unwrap();
        rustix::fs::fallocate(&filler, rustix::fs::FallocateFlags::empty(), 0, bytes).unwrap();
    }

    fn used_percent(&self) -> f64 {
        let (free, all) = self.free();
        #[expect(clippy::cast_precision_loss, reason = "percents")]
        let used = (all - free) as f64 / all as f64;
        used * 100.0
    }

    fn larder(&self, arguments: &[&str]) -> Run {
        let mut command = larder_in(self.folder.path());
        command.arg("--root").arg(self.path().join("store")).args(arguments);
        Running::start(command).finish()
    }

    /// Loads an image under a name of its own.
    fn load(&self, name: &str, image: &Image) {
        let layout = self.folder.path().join("layout");
        image.write(&layout).unwrap();
        self.larder(&["load", &layout.to_string_lossy(), "--name", name]).expect(0);
        fs_err::remove_dir_all(layout).unwrap();
    }

    /// As if those who loaded the images had lost their interest long ago.
    fn end_leases(&self) {
        let store = Store::open(&self.path().join("store"), StoreConfig::default()).unwrap();
        for lease in store.leases(SystemTime::now()).unwrap() {
            store.end_lease(&lease.id).unwrap();
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.path(), rustix::mount::UnmountFlags::DETACH);
    }
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn number(value: &Value, field: &str) -> u64 {
    value[field].as_u64().unwrap_or_else(|| panic!("{field} in {value}"))
}

/// What identifies a removal, and what it promises.
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

/// The dry run listed what the round did. What larder itself writes meanwhile may decide about the last image, where the
/// others free nearly what is needed.
#[track_caller]
fn same_plan(planned: &Value, done: &Value) {
    let (listed, gone) = (removals(planned), removals(done));
    let both = listed.len().min(gone.len());
    assert_eq!(listed[..both], gone[..both]);
    if listed.len() != gone.len() {
        assert_eq!(listed.len().abs_diff(gone.len()), 1, "{} planned, {} done", listed.len(), gone.len());
        let freed: u64 = gone[..both].iter().map(|(_, bytes)| bytes).sum();
        agree("what all but the last free, and what is needed", freed, number(planned, "neededBytes"));
    }
}

/// One layer of noise.
fn layer(seed: u64, size: usize) -> Layer {
    Layer::new().noise(format!("srv/{seed}"), size, seed)
}

/// Forty applications on two bases.
fn family(base: usize, app: usize) -> impl Iterator<Item = (String, Image)> {
    (0..40_u64).map(move |number| {
        let image = Image::new().layer(layer(1000 + number % 2, base)).layer(layer(number, app));
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

#[test]
fn one_round_reaches_the_low_mark_as_the_dry_run_said() {
    let Some(disk) = Disk::new(256) else { return };
    for (name, image) in family(6 << 20, 3 << 19) {
        disk.load(&name, &image);
    }
    disk.fill_to(68);
    let run = disk.larder(&gc(&[])).expect(1);
    assert!(run.stderr.contains("40 images just ensured or leased"), "{run:?}");
    disk.end_leases();
    assert!(disk.used_percent() > 65.0, "{}", disk.used_percent());
    let planned = disk.larder(&gc(&["--dry-run"])).expect(0).json();
    assert_eq!(planned["images"].as_array().unwrap().len(), 40);
    let (before, _) = disk.free();
    let done = disk.larder(&gc(&[])).expect(0).json();
    let (after, all) = disk.free();

    same_plan(&planned, &done);
    assert!(disk.used_percent() <= 45.0, "{}", disk.used_percent());
    let largest = removals(&done).iter().map(|(_, bytes)| *bytes).max().unwrap();
    let over = after - all / 100 * 55;
    assert!(over < largest + SLACK, "overshoot {over}, the largest image frees {largest}");
    agree("the promise", number(&done, "promisedBytes"), after - before);
    let history = disk.larder(&["history", "-o", "json"]).expect(0).json();
    let freed: u64 = history.as_array().unwrap().iter().map(|entry| number(entry, "freedBytes")).sum();
    agree("the journal", freed, after - before);
    assert_eq!(disk.larder(&gc(&[])).expect(0).json()["removals"].as_array().unwrap().len(), 0);
    disk.larder(&["fsck"]).expect(0);
}

#[test]
fn what_images_stacked_on_each_other_free_is_told_right() {
    let Some(disk) = Disk::new(192) else { return };
    let stack = |height: u64| (0..height).fold(Image::new(), |image, seed| image.layer(layer(seed, 4 << 20)));
    for height in 1..=3 {
        disk.load(&format!("registry.example/stack-{height}"), &stack(height));
    }
    disk.end_leases();
    let free = |size: &str| {
        let run =
            disk.larder(&["gc", "--dry-run", "-o", "json", "--free", size, "--minimum-image-ttl-duration=0"]);
        removals(&run.expect(0).json())
    };
    assert_eq!(free("3MiB").len(), 1, "only the tallest has a layer of its own");
    assert_eq!(free("10MiB").len(), 3, "the lowest layer goes with the last of the three");
    let (before, _) = disk.free();
    let done =
        disk.larder(&["gc", "--free=10MiB", "--minimum-image-ttl-duration=0", "-o", "json"]).expect(0).json();
    let (after, _) = disk.free();
    agree("the promise", number(&done, "promisedBytes"), after - before);
    assert!(after - before >= 10 << 20);
}

#[test]
fn whatever_layers_images_share_each_removal_frees_what_was_promised() {
    for seed in 1..=3_u64 {
        let Some(disk) = Disk::new(192) else { return };
        let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut next = |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below
        };
        for number in 0..10 {
            let some: Vec<u64> = (0..8).filter(|_| next(3) == 0).collect();
            let image = some.iter().fold(Image::new(), |image, &seed| {
                image.layer(layer(seed, (2 << 20) + usize::try_from(seed).unwrap() * 300_000))
            });
            disk.load(&format!("registry.example/random-{number}"), &image.user(format!("{number}")));
        }
        disk.end_leases();
        for kept in 0..2 {
            disk.larder(&["keep", &format!("registry.example/random-{kept}:*")]).expect(0);
        }
        let all = ["gc", "--all-unused", "--minimum-image-ttl-duration=0", "-o", "json"];
        let planned = disk.larder(&[&all[..], &["--dry-run"]].concat()).expect(0).json();
        let (before, _) = disk.free();
        let done = disk.larder(&all).expect(0).json();
        let (after, _) = disk.free();
        assert_eq!(removals(&planned), removals(&done), "seed {seed}");
        assert_eq!(removals(&done).len(), 8, "seed {seed}");
        agree(&format!("seed {seed}, in all"), number(&done, "promisedBytes"), after - before);
        for removal in done["removals"].as_array().unwrap() {
            agree(&format!("seed {seed}"), number(removal, "promisedBytes"), number(removal, "freedBytes"));
        }
        disk.larder(&["fsck"]).expect(0);
    }
}

/// Ids in the order in which they would go, with what is known of their age.
fn ages(report: &Value) -> Vec<(String, Value)> {
    let removals = report["removals"].as_array().unwrap().iter();
    let images = report["images"].as_array().unwrap();
    let age =
        |id: &Value| images.iter().find(|image| image["id"] == *id).map(|image| image["firstSeen"].clone());
    removals
        .map(|removal| (removal["id"].as_str().unwrap().to_owned(), age(&removal["id"]).unwrap()))
        .collect()
}

#[test]
fn a_killed_round_changes_neither_ages_nor_order() {
    let Some(disk) = Disk::new(192) else { return };
    for number in 0..12 {
        disk.load(&format!("registry.example/app-{number}"), &Image::new().layer(layer(number, 1 << 20)));
    }
    disk.end_leases();
    let all = ["gc", "--all-unused", "--minimum-image-ttl-duration=0", "-o", "json"];
    let plan = || ages(&disk.larder(&[&all[..], &["--dry-run"]].concat()).expect(0).json());
    let mut known = plan();
    assert_eq!(known.len(), 12);
    for milliseconds in [20, 40, 60, 90, 120, 200] {
        let mut command = larder_in(disk.folder.path());
        command.arg("--root").arg(disk.path().join("store")).args(all);
        Running::start(command).kill_after(Duration::from_millis(milliseconds));
        let left = plan();
        assert!(known.ends_with(&left), "killed after {milliseconds} ms: {known:?} became {left:?}");
        known = left;
    }
    disk.larder(&["fsck"]).expect(0);
}

/// larder on a containerd whose root and state are on the disk.
fn on(containerd: &Containerd, home: &Path, arguments: &[&str]) -> Run {
    let mut command = larder_in(home);
    command.args(["--backend", &containerd.endpoint(), "--state"]).arg(home.join("state")).args(arguments);
    Running::start(command).finish()
}

#[test]
fn one_round_reaches_the_low_mark_on_containerd() {
    if !require(&[Package::Containerd, Package::DockerRegistry, Package::Skopeo]).is_available() {
        return;
    }
    let Some(disk) = Disk::new(192) else { return };
    let home = disk.folder.path();
    let registry = Registry::start(RegistryOptions::default()).unwrap();
    let options = ContainerdOptions { below: Some(disk.path()), ..ContainerdOptions::default() };
    let mut containerd = Containerd::start_with(options).unwrap();
    containerd.knows(&registry).unwrap();
    let names: Vec<String> = family(6 << 20, 3 << 19)
        .enumerate()
        .map(|(number, (_, image))| {
            let name = format!("family/app-{number:02}:1");
            image.push(&registry, &name).unwrap();
            registry.image(&name)
        })
        .collect();
    // Collection begins before the images come, so that what is wanted is written down.
    on(&containerd, home, &gc(&[])).expect(0);
    for name in &names {
        on(&containerd, home, &["pull", name]).expect(0);
    }
    assert!(disk.used_percent() > 65.0, "{}", disk.used_percent());
    let planned = on(&containerd, home, &gc(&["--dry-run"])).expect(0).json();
    containerd.stop();
    containerd.start_again().unwrap();
    let again = on(&containerd, home, &gc(&["--dry-run"])).expect(0).json();
    assert_eq!(ages(&planned), ages(&again), "a restart changes neither order nor ages");

    let (before, _) = disk.free();
    let done = on(&containerd, home, &gc(&[])).expect(0).json();
    let (after, all) = disk.free();
    assert!(disk.used_percent() <= 45.0 + 0.5, "{}", disk.used_percent());
    let largest = done["removals"]
        .as_array()
        .unwrap()
        .iter()
        .map(|removal| number(removal, "freedBytes"))
        .max()
        .unwrap();
    let over = after.saturating_sub(all / 100 * 55);
    assert!(over < largest + SLACK, "overshoot {over}, the largest image frees {largest}");
    let (planned, done) = (removals(&planned), removals(&done));
    eprintln!("planned {} removals, did {}", planned.len(), done.len());
    // Containerd does not tell what layers take: how many must go is a guess, in which order is not.
    let ids = |removals: &[(String, u64)]| removals.iter().map(|(id, _)| id.clone()).collect::<Vec<_>>();
    let both = planned.len().min(done.len());
    assert_eq!(ids(&planned[..both]), ids(&done[..both]));
    let history = on(&containerd, home, &["history", "-o", "json"]).expect(0).json();
    let freed: u64 = history.as_array().unwrap().iter().map(|entry| number(entry, "freedBytes")).sum();
    agree("the journal", freed, after - before);
}
