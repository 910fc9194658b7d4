//! larder is killed at random moments of a pull, a load and a removal, a hundred times on one store.
//!
//! `LARDER_KILLS=ROUNDS` and `LARDER_KILLS_SEED=NUMBER` try more, or others. The seed decides what is done and how long
//! it may run; where exactly that kills it is the machine's affair, so the moments are counted and printed.

use std::collections::BTreeMap;
use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit::fault_registry::{FaultRegistry, FaultTrigger, ResponseFault};
use larder_testkit_peers::{ImageBuilder, LayerFiles};
use tempfile::TempDir;
use tokio::time::Instant;

use crate::world::{LarderOutput, LarderProcess, larder_in};

const ROUNDS: u64 = 100;
const SEED: u64 = 20_260_101;

/// Bytes of the layer that takes long to fetch.
const BIG: usize = 4 << 20;

/// Bytes of its fetches that a killed process may lose: those not yet recorded (1 MiB), and those in transit and in its
/// memory. Far less than one range (16 MiB). Of a finished layer it loses nothing.
const LOST: u64 = 4 << 20;

/// The name of the image from a layout, where its tag is `image`.
const LOADED: &str = "registry.example/shop/other:image";

/// Command that is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum KilledCommand {
    Pull,
    Load,
    Remove,
}

/// A machine with a permanent image and one that is pulled and removed. They share a layer.
struct KillMachine {
    registry: FaultRegistry,
    home: TempDir,
    kept: String,
    pulled: String,
    layout: PathBuf,
    big: String,
    /// Commands that are killed, each as often as it is here.
    commands: [KilledCommand; 4],
    /// The layers that only the second image has, and their bytes.
    layers: Vec<String>,
    bytes: u64,
}

impl KillMachine {
    fn of_images() -> KillMachine {
        let shared = many_files("shared", 150);
        let kept = ImageBuilder::new().layer(shared.clone()).layer(many_files("kept", 50));
        let other = ImageBuilder::new()
            .layer(shared)
            .layer(many_files("app", 300))
            .layer(LayerFiles::new().noise("srv/big", BIG, 1))
            .layer(many_files("top", 200));
        let commands = [KilledCommand::Pull, KilledCommand::Pull, KilledCommand::Load, KilledCommand::Remove];
        KillMachine::new(&kept, &other, commands)
    }

    /// Each file is a layer.
    fn of_artifacts() -> KillMachine {
        let artifact =
            |files: LayerFiles| ImageBuilder::new().layer(files).artifact("application/vnd.example");
        let shared = || LayerFiles::new().noise("shared", 150_000, 3);
        let kept = artifact(shared().file("kept", "kept"));
        let other = shared().noise("app", 300_000, 4).noise("big", BIG, 1).noise("top", 200_000, 5);
        let commands = [KilledCommand::Pull, KilledCommand::Pull, KilledCommand::Pull, KilledCommand::Remove];
        KillMachine::new(&kept, &artifact(other), commands)
    }

    /// The images share their first layer.
    fn new(kept: &ImageBuilder, other: &ImageBuilder, commands: [KilledCommand; 4]) -> KillMachine {
        let (registry, home) = (FaultRegistry::start(), in_memory());
        let layout = home.path().join("layout");
        serve(&registry, kept, "shop/kept", &home.path().join("kept"));
        let blobs = serve(&registry, other, "shop/other", &layout);
        // The big layer takes a while, so that some kills meet its fetch.
        let big = blobs[3].clone();
        registry.fault(FaultTrigger::path(&big), ResponseFault::Trickle(128 << 10, Duration::from_millis(1)));
        // The one on top ends last, so that some kills meet a pull that has finished its other layers.
        registry.fault(FaultTrigger::path(&blobs[4]), ResponseFault::SlowHeaders(Duration::from_millis(60)));
        let (kept, pulled) = (registry.image("shop/kept:1"), registry.image("shop/other:1"));
        let layers = blobs[2..].to_vec();
        let size = |blob: &String| {
            let path = layout.join("blobs/sha256").join(blob.trim_start_matches("sha256:"));
            fs_err::metadata(path).unwrap().len()
        };
        let bytes = layers.iter().map(size).sum();
        KillMachine { registry, home, kept, pulled, layout, big, commands, layers, bytes }
    }

    /// Bytes of layers that the registry sent.
    fn sent(&self) -> u64 {
        self.layers.iter().map(|layer| self.registry.bytes_sent(layer)).sum()
    }

    /// The layers of the second image that are in their place, each with its bytes that the registry sent.
    fn finished(&self) -> Vec<(&String, u64)> {
        let Ok(dirs) = fs_err::read_dir(self.root().join("layers")) else { return Vec::new() };
        // An image has the record of the layer at its end.
        let read = |layer: PathBuf| fs_err::read(layer.join("layer.json")).or_else(|_| fs_err::read(layer));
        let notes = dirs.map(|layer| read(layer.unwrap().path())).filter_map(Result::ok);
        let notes: String = notes.map(|note| String::from_utf8_lossy(&note).into_owned()).collect();
        let there = self.layers.iter().filter(|layer| notes.contains(layer.as_str()));
        there.map(|layer| (layer, self.registry.bytes_sent(layer))).collect()
    }

    fn root(&self) -> PathBuf {
        self.home.path().join("store")
    }

    fn start(&self, arguments: &[&str]) -> LarderProcess {
        let mut command: Command = larder_in(self.home.path());
        command.arg("--root").arg(self.root()).args(arguments);
        LarderProcess::start(command)
    }

    fn larder(&self, arguments: &[&str]) -> LarderOutput {
        self.start(arguments).finish().expect(0)
    }

    /// Gets the store to where the deed can be done.
    fn prepare(&self, deed: KilledCommand, there: &[String]) {
        if deed == KilledCommand::Remove && !there.contains(&self.pulled) {
            self.larder(&["pull", "-q", &self.pulled]);
        }
        // A removal is of the last name.
        let stays =
            |name: &String| *name == self.kept || (deed == KilledCommand::Remove && *name == self.pulled);
        for name in there.iter().filter(|name| !stays(name)) {
            self.larder(&["rm", "--force", "--ignore-not-found", name]);
        }
    }

    fn begin(&self, deed: KilledCommand) -> LarderProcess {
        match deed {
            KilledCommand::Pull => self.start(&["pull", "-q", &self.pulled]),
            KilledCommand::Load => self.start(&[
                "load",
                &self.layout.to_string_lossy(),
                "--name",
                LOADED.trim_end_matches(":image"),
            ]),
            KilledCommand::Remove => self.start(&["rm", "--force", "--ignore-not-found", &self.pulled]),
        }
    }

    /// How long the command takes without interference.
    fn length_of(&self, deed: KilledCommand) -> Duration {
        self.prepare(deed, &self.images());
        let start = Instant::now();
        self.begin(deed).finish().expect(0);
        start.elapsed()
    }

    /// The names of all images with their tags, as `larder images` lists them.
    fn images(&self) -> Vec<String> {
        let listed = self.larder(&["images", "-o", "json"]).json();
        let images = listed.as_array().unwrap().iter();
        images.map(|image| format!("{}:{}", image["repository"], image["tag"]).replace('"', "")).collect()
    }

    fn entries(&self, dir: &str) -> usize {
        let path = self.root().join(dir);
        fs_err::read_dir(path).map_or(0, Iterator::count)
    }

    /// Returns how far a killed process had come, in one word.
    fn moment(&self) -> &'static str {
        if self.registry.bytes_sent(&self.big) > 0 && self.has_ingest() {
            return "fetch";
        }
        match (self.entries("staging"), self.entries("ingest"), self.entries("trash")) {
            (0, 0, 0) => "nothing begun, or all done",
            (0, 0, _) => "deletion",
            (0, _, _) => "documents, or fetch of a small layer",
            _ => "unpacking",
        }
    }

    fn has_ingest(&self) -> bool {
        let hex = self.big.trim_start_matches("sha256:");
        let dir = self.root().join("ingest");
        fs_err::read_dir(dir).is_ok_and(|mut entries| {
            entries.any(|entry| entry.unwrap().file_name().to_string_lossy().contains(hex))
        })
    }
}

/// A directory that needs no disk, where there is one: a killed process loses nothing that it gave to the kernel, and
/// to sync a busy disk some hundred times would take minutes.
fn in_memory() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

fn many_files(name: &str, count: usize) -> LayerFiles {
    let mut archive = TarBuilder::new().with(TarBuilderEntry::dir(name));
    for number in 0..count {
        let path = format!("{name}/{}/file-{number}", number % 7);
        archive = archive.with(TarBuilderEntry::file(path, format!("{name} {number} ").repeat(number % 200)));
    }
    LayerFiles::archive(archive.finish())
}

/// Writes an image to a directory and lets a registry serve it; the digests of its blobs, the config first.
pub(crate) fn serve(
    registry: &FaultRegistry,
    image: &ImageBuilder,
    repository: &str,
    dir: &Path,
) -> Vec<String> {
    let layout = image.write(dir).unwrap();
    let blob = |digest: &str| {
        fs_err::read(dir.join("blobs/sha256").join(digest.trim_start_matches("sha256:"))).unwrap()
    };
    for digest in &layout.blobs {
        assert_eq!(&registry.put_blob(blob(digest)), digest);
    }
    let manifest = blob(&layout.manifest_digest);
    registry.put_manifest(repository, "1", "application/vnd.oci.image.manifest.v1+json", manifest);
    layout.blobs
}

/// The next random number (xorshift64*).
pub(crate) fn random(state: &mut u64) -> u64 {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    state.wrapping_mul(0x2545_F491_4F6C_DD1D)
}

pub(crate) fn number(variable: &str, default: u64) -> u64 {
    env::var(variable).map_or(default, |text| text.parse().unwrap())
}

#[test]
fn a_hundred_kills_leave_every_image_whole_or_invisible() {
    kill(&KillMachine::of_images(), number("LARDER_KILLS", ROUNDS));
}

#[test]
fn forty_kills_leave_every_artifact_whole_or_invisible() {
    kill(&KillMachine::of_artifacts(), number("LARDER_KILLS", ROUNDS * 2 / 5));
}

fn kill(machine: &KillMachine, rounds: u64) {
    let seed = number("LARDER_KILLS_SEED", SEED);
    machine.larder(&["pull", "-q", &machine.kept]);
    let mut lengths: BTreeMap<_, _> =
        machine.commands.iter().map(|deed| (*deed, machine.length_of(*deed))).collect();
    eprintln!("seed {seed}, undisturbed: {lengths:?}");

    let mut there = machine.images();
    let (mut state, mut killed, mut tries, mut most, mut some) = (seed, 0, 0, 0, 0);
    let mut moments: BTreeMap<(KilledCommand, &str), u32> = BTreeMap::new();
    while killed < rounds {
        tries += 1;
        assert!(tries < rounds * 3, "hardly anything was killed: {moments:?}");
        let deed = machine.commands[usize::try_from(random(&mut state) % 4).unwrap()];
        let length = lengths.get_mut(&deed).unwrap();
        let delay = length.mul_f64(f64::from(u32::try_from(random(&mut state) % 1000).unwrap()) / 1000.0);
        let round = format!("round {killed} of seed {seed}: {deed:?} killed after {delay:?}");

        machine.prepare(deed, &there);
        machine.registry.forget_requests();
        if machine.begin(deed).kill_after(delay) {
            killed += 1;
            *moments.entry((deed, machine.moment())).or_default() += 1;
        } else {
            // It was timed when the machine was slower.
            *length = delay;
        }
        let (sent, finished) = (machine.sent(), machine.finished());
        let images = machine.images();
        assert!(images.contains(&machine.kept), "{round}: {images:?}");
        machine.larder(&["fsck"]);

        // Trying again succeeds, whether it had been done or not.
        machine.begin(deed).finish().expect(0);
        there = machine.images();
        assert_eq!(there.len(), if deed == KilledCommand::Remove { 1 } else { 2 }, "{round}: {there:?}");
        machine.larder(&["fsck", "--quick"]);
        let left = ["staging", "ingest", "trash"].map(|dir| machine.entries(dir));
        assert_eq!(left, [0, 0, 0], "{round}");
        assert_eq!(machine.entries("layers"), if deed == KilledCommand::Remove { 2 } else { 5 }, "{round}");
        if deed == KilledCommand::Pull {
            let (all, whole) = (machine.sent(), machine.bytes);
            most = most.max(all.saturating_sub(whole));
            assert!(all <= whole + LOST, "{round}: {sent} bytes, then {} of {whole}", all - sent);
            for (layer, sent) in &finished {
                assert_eq!(machine.registry.bytes_sent(layer), *sent, "{round}: {layer} was finished");
            }
            some += u32::from((1..machine.layers.len()).contains(&finished.len()));
        }
    }
    eprintln!(
        "{killed} kills in {tries} tries, {some} with some layers finished, at most {most} bytes fetched twice: \
         {moments:?}"
    );
    assert!(some > 0, "no kill met a pull that had finished some of its layers");
}
