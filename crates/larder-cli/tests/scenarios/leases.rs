//! Leases that people list and end, and room that they make for a pull.

use std::io::Write as _;
use std::process::{Command, Stdio};

use larder_testkit_peers::{ImageBuilder, LayerFiles, LoopDisk, LoopFilesystem, RegistryOptions};

use crate::world::{LarderProcess, RuntimeFixture, larder_in};

const NOW: [&str; 3] = ["--minimum-image-ttl-duration", "0", "--yes"];

#[test]
fn leases_are_listed_with_owner_and_end_and_end_before_their_time() {
    for world in RuntimeFixture::of_each_backend(RegistryOptions::default()) {
        let names = ["shop/web:1", "shop/api:1"].map(|name| world.registry.image(name));
        for (number, name) in (1..).zip(["shop/web:1", "shop/api:1"]) {
            ImageBuilder::small(number, 50_000).push(&world.registry, name).unwrap();
        }
        world.larder(&["pull", "-q", &names[0], &names[1]]).expect(0);
        world.larder(&["lease", &names[0], "2h"]).expect(0);
        let run = world.larder(&["lease"]).expect(0);
        assert_eq!(run.lines_with(&[&names[1], "ensure, pull or load"]), 1, "{run:?}");
        assert_eq!(run.lines_with(&[&names[0], "larder lease", "1h59m"]), 1, "{run:?}");
        let most = [&["gc", "--free", "1TB"][..], &NOW].concat();
        world.larder(&most).expect(1);
        assert_eq!(world.images().len(), 2, "both are leased");

        for text in ["ended the leases on ", "no leases on "] {
            let run = world.larder(&["lease", "rm", &names[1]]).expect(0);
            assert_eq!(run.stdout, format!("{text}{}\n", names[1]), "{run:?}");
        }
        let left = world.larder(&["lease", "ls", "-o", "json"]).expect(0).json();
        assert_eq!(left.as_array().unwrap().len(), 1, "{left}");
        assert_eq!(left[0]["owner"], "lease", "{left}");
        world.larder(&["pull", "-q", &names[1]]).expect(0);
        world.larder(&["prune", "-a", "--force"]).expect(0);
        assert_eq!(world.images(), [names[0].as_str()], "the lease of a person, not that of a pull");

        let dry = [&["gc", "--all-unused", "--force-leases", "--dry-run"][..], &NOW].concat();
        let run = world.larder(&dry).expect(0);
        assert!(run.stdout.contains(&names[0]), "{run:?}");
        let asks = ["gc", "--all-unused", "--force-leases", "--minimum-image-ttl-duration", "0"];
        let run = world.larder(&asks).expect(2);
        assert!(run.stderr.contains("remove 1 unused image") && run.stderr.contains("--force"), "{run:?}");
        assert_eq!(world.images(), [names[0].as_str()], "the question has no answer");
        // Also one that is younger than the minimum age.
        world.larder(&["gc", "--all-unused", "--force-leases", "--yes"]).expect(0);
        assert_eq!(world.images(), [""; 0]);
    }
}

#[test]
fn a_lease_has_a_unit_and_an_ensure_after_its_end_leases_again() {
    let Some(world) = RuntimeFixture::with_store(RegistryOptions::default()) else { return };
    let web = world.registry.image("shop/web:1");
    ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
    world.larder(&["pull", "-q", &web]).expect(0);
    world.larder(&["lease", &web, "1h"]).expect(0);
    let run = world.larder(&["lease", &web, "10"]).expect(2);
    assert!(run.stderr.contains("no unit: write 10s, 10m, 10h or 10d"), "{run:?}");
    assert!(world.larder(&["lease"]).expect(0).stdout.contains("59m"), "it is as long as before");
    world.larder(&["tag", &web, "copy:1"]).expect(0);
    world.larder(&["rm", "copy:1"]).expect(0);
    assert!(world.larder(&["lease"]).expect(0).stdout.contains("59m"), "only a name was removed");
    world.larder(&["lease", &web, "0"]).expect(0);
    assert_eq!(world.larder(&["lease", "ls"]).expect(0).stdout.lines().count(), 1, "a heading");
    world.larder(&["ensure", &web]).expect(0);
    assert_eq!(world.larder(&["lease", "ls"]).expect(0).lines_with(&[&web]), 1);
}

/// Runs larder on a terminal of its own that types `input`; returns what the terminal showed, and the exit code.
pub(crate) fn on_a_terminal(command: &Command, input: &str) -> (String, i32) {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let line: Vec<_> = words.map(|word| format!("'{}'", word.to_string_lossy())).collect();
    let mut script = Command::new("script");
    script
        .args(["-qec", &line.join(" "), "/dev/null"])
        .env_clear()
        .env("TERM", "dumb")
        .env("SHELL", "/bin/sh");
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            script.env(name, value);
        }
    }
    let mut child =
        script.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut typed = child.stdin.take().unwrap();
    typed.write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    drop(typed); // the end of input is Ctrl-D, so not before larder has ended
    (String::from_utf8_lossy(&output.stdout).into_owned(), output.status.code().unwrap_or(-1))
}

#[test]
fn a_pull_without_room_offers_what_gc_can_free_and_frees_it() {
    let Some(world) = RuntimeFixture::with_store(RegistryOptions::default()) else { return };
    if !LoopFilesystem::Ext4.is_available() {
        return;
    }
    let disk = LoopDisk::new(LoopFilesystem::Ext4, 96, &[]).unwrap();
    let settings = world.file(
        "small.yaml",
        "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\nimageMinimumGCAge: 1ms\n\
         pull: {ensuredLease: 0s}\nstore: {reserveBytes: 1MiB, reserveInodes: 10}\n",
    );
    let larder = |arguments: &[&str]| {
        let mut command = larder_in(std::path::Path::new(&world.path("")));
        command.env("LARDER_CONFIG", &settings);
        command.arg("--root").arg(disk.path().join("store")).args(arguments);
        command
    };
    let names = ["shop/old:1", "shop/new:1"].map(|name| {
        let noise = |seed: u32| -> Vec<u8> {
            let mut state = seed;
            std::iter::repeat_with(|| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 24) as u8
            })
            .take(20_000_000)
            .collect()
        };
        let seed = if name.contains("old") { 1 } else { 2 };
        let layer = LayerFiles::new().file("data", noise(seed));
        ImageBuilder::new().layer(layer).push(&world.registry, name).unwrap();
        world.registry.image(name)
    });
    LarderProcess::start(larder(&["pull", "-q", &names[0]])).finish().expect(0);
    // The second image fits only in place of the first.
    let stats = rustix::fs::statvfs(disk.path()).unwrap();
    let filler = stats.f_bavail * stats.f_frsize - 30_000_000;
    fs_err::write(disk.path().join("filler"), vec![1; usize::try_from(filler).unwrap()]).unwrap();
    let run = LarderProcess::start(larder(&["pull", "-q", &names[1]])).finish().expect(1);
    assert!(run.stderr.contains("insufficient space") && run.stderr.contains("gc --free "), "{run:?}");

    let (shown, code) = on_a_terminal(&larder(&["pull", "-q", &names[1]]), "n\n");
    assert!(shown.contains("remove 1 unused image") && code == 1, "{code}: {shown}");
    let (shown, code) = on_a_terminal(&larder(&["ensure", &names[1]]), "y\n");
    assert_eq!(code, 0, "{shown}");
    assert!(shown.contains("removed 1 images") || shown.contains("removed 1 image"), "{shown}");
    let left = LarderProcess::start(larder(&["images"])).finish().expect(0);
    assert_eq!(left.lines_with(&["shop/new"]), 1, "{left:?}");
    assert_eq!(left.lines_with(&["shop/old"]), 0, "{left:?}");
}
