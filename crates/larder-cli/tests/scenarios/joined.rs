//! Commands without a daemon: the first one has the images open, the others work through it.

mod settings;

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use larder_testkit_peers::process::wait_until;
use larder_testkit_peers::{HoldingProxy, ImageBuilder, LayerFiles, RegistryOptions};
use rustix::process::Signal;

use crate::timed::TimedCommand;
use crate::world::{LarderProcess, RuntimeFixture, larder_in};

fn store() -> Option<RuntimeFixture> {
    RuntimeFixture::with_store(RegistryOptions::default())
}

fn socket(world: &RuntimeFixture) -> PathBuf {
    world.place().join("control.sock")
}

/// Pushes an image of one layer that a closed gate holds, and returns its name behind the gate.
fn push(world: &RuntimeFixture, gate: &HoldingProxy, seed: u64, name: &str) -> String {
    ImageBuilder::small(seed, 200_000).push(&world.registry, name).unwrap();
    gate.image(name)
}

/// Pulls an image that has been pulled before.
fn present(world: &RuntimeFixture, seed: u64, name: &str) -> String {
    ImageBuilder::small(seed, 20_000).push(&world.registry, name).unwrap();
    let name = world.registry.image(name);
    world.larder(&["pull", &name]).expect(0);
    name
}

/// A command that is held in the middle of a pull.
fn held_pull(world: &RuntimeFixture, gate: &HoldingProxy, flags: &[&str], image: &str) -> LarderProcess {
    gate.hold_blobs_after(4_000);
    let running = world.start_larder(&[&["pull"], flags, &[image]].concat());
    gate.wait_until_held(1);
    running
}

/// A command that waits for its input from the returned file, which ends when the file is dropped.
fn held_load(world: &RuntimeFixture) -> (LarderProcess, File) {
    let pipe = world.path("archive");
    let made = rustix::fs::mknodat(
        rustix::fs::CWD,
        &pipe,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    );
    made.unwrap();
    let running = world.start_larder(&["-v", "load", &pipe]);
    // Opening for reading and writing does not wait for the other end; the reader sees the end once this is dropped.
    let input = File::options().read(true).write(true).open(&pipe).unwrap();
    wait_until("the command serves", || socket(world).exists());
    (running, input)
}

#[test]
fn every_command_works_through_the_one_that_has_the_store_open() {
    let Some(world) = store() else { return };
    let (old, third) = (present(&world, 1, "shop/old:1"), present(&world, 2, "shop/third:1"));
    let (gate, other_gate) = (world.gate(), world.gate());
    let big = push(&world, &gate, 3, "shop/big:1");
    let web = push(&world, &other_gate, 4, "shop/web:1");
    let missing = world.registry.image("no/such:1");
    gate.hold_blobs_after(4_000);
    let mut first = world.start_larder(&["pull", &big, &missing]);
    gate.wait_until_held(1);
    let mode = fs_err::metadata(socket(&world)).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);

    let listed = world.larder(&["-v", "images"]).expect(0);
    assert!(listed.stderr.contains("using another larder command"), "{listed:?}");
    assert_eq!((listed.lines_with(&["shop/old"]), listed.lines_with(&["shop/big"])), (1, 0), "{listed:?}");
    assert_eq!(world.larder(&["df", "-v"]).expect(0).lines_with(&["shop/old:1"]), 1);
    let plan = world.larder(&["gc", "--all-unused", "--dry-run", "-o", "json"]).expect(0);
    assert!(plan.stdout.contains("shop/old:1"), "{plan:?}");
    assert!(world.larder(&["explain", &old]).expect(0).stdout.contains("shop/old:1"));
    world.larder(&["keep", &old]).expect(0);
    assert_eq!(world.larder(&["keep"]).expect(0).lines_with(&["shop/old:1", "larder keep"]), 1);
    world.larder(&["rm", &third]).expect(0);
    world.larder(&["rm", &third]).expect(1);
    world.larder(&["ensure", &old]).expect(0);

    other_gate.hold_blobs_after(4_000);
    let second = world.start_larder(&["pull", "-o", "json", &web]);
    other_gate.wait_until_held(1);
    gate.open();
    wait_until("the first has done its own, and says that it waits", || {
        first.stderr().contains("waiting for calls of 1 other larder command")
    });
    assert!(first.stdout().starts_with("sha256:") && !first.is_finished(), "{}", first.stdout());
    assert_eq!(world.larder(&["images"]).expect(0).lines_with(&["shop/big"]), 1);
    other_gate.open();
    let second = second.finish().expect(0).json();
    assert_eq!(second[0]["result"], "Pulled", "{second}");
    let first = first.finish().expect(1);
    assert!(first.stderr.contains(&missing), "its own exit code, and its own errors: {first:?}");
    assert!(!socket(&world).exists());
    assert_eq!(world.images(), sorted(&[&old, &big, &web]));
    assert_eq!(world.larder(&["keep"]).expect(0).lines_with(&["shop/old:1"]), 1);
}

fn sorted(names: &[&str]) -> Vec<String> {
    let mut names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
    names.sort();
    names
}

/// Commands of each of the concurrent processes, one after the other.
const EACH: usize = 40;

#[test]
fn none_of_many_concurrent_commands_is_refused() {
    let Some(world) = store() else { return };
    let names: Vec<String> = (0..4)
        .map(|number| {
            let name = format!("shop/app-{number}:1");
            ImageBuilder::small(number + 1, 20_000).push(&world.registry, &name).unwrap();
            world.registry.image(&name)
        })
        .collect();
    // Eight processes at a time, each replaced by another one when it ends.
    let commands = |process: usize| {
        for number in 0..EACH {
            let name = &names[(process + number) % 4];
            match number % 8 {
                3 => world.larder(&["images"]).expect(0),
                6 => world.larder(&["df"]).expect(0),
                _ => world.larder(&["ensure", name]).expect(0),
            };
        }
    };
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..8)
            .map(|process| {
                scope.spawn({
                    let commands = &commands;
                    move || commands(process)
                })
            })
            .collect();
        for process in running {
            process.join().expect("every command succeeds");
        }
    });
    assert!(!socket(&world).exists());
    assert_eq!(world.images().len(), 4);
}

#[test]
fn an_ensured_image_is_not_removed_by_a_concurrent_round() {
    for world in [RuntimeFixture::plain(), store()].into_iter().flatten() {
        let names: Vec<String> = (0..4)
            .map(|number| {
                let name = format!("shop/app-{number}:1");
                ImageBuilder::small(number + 1, 20_000).push(&world.registry, &name).unwrap();
                world.registry.image(&name)
            })
            .collect();
        let running: Vec<LarderProcess> = (0..16)
            .map(|number| match number % 2 {
                0 => world.start_larder(&["ensure", &names[number / 2 % 4]]),
                _ => world.start_larder(&["gc", "--all-unused", "--force", "--minimum-image-ttl-duration=0"]),
            })
            .collect();
        for running in running {
            running.finish().expect(0);
        }
        assert_eq!(world.images(), names, "each was reported present");
    }
}

#[test]
fn an_interrupt_ends_the_commands_own_work_and_not_that_of_others() {
    let Some(world) = store() else { return };
    let (gate, other_gate) = (world.gate(), world.gate());
    let (big, web) = (push(&world, &gate, 1, "shop/big:1"), push(&world, &other_gate, 2, "shop/web:1"));
    let first = held_pull(&world, &gate, &[], &big);
    other_gate.hold_blobs_after(4_000);
    let second = world.start_larder(&["pull", &web]);
    other_gate.wait_until_held(1);
    first.interrupt();
    wait_until("its own work is canceled", || first.stderr().contains("interrupted; not finished"));
    other_gate.open();
    second.finish().expect(0);
    first.finish().expect(130);
    assert_eq!(world.images(), [web]);
    gate.open();
    world.larder(&["pull", &big]).expect(0);
}

#[test]
fn an_interrupt_of_a_command_that_handles_none_does_not_end_others() {
    let Some(world) = store() else { return };
    let gate = world.gate();
    let web = push(&world, &gate, 1, "shop/web:1");
    let (first, input) = held_load(&world);
    gate.hold_blobs_after(4_000);
    let second = world.start_larder(&["pull", &web]);
    gate.wait_until_held(1);
    first.interrupt();
    wait_until("it waits for the other", || {
        first.stderr().contains("waiting for calls of 1 other larder command")
    });
    gate.open();
    second.finish().expect(0);
    first.finish().expect(130);
    drop(input);

    let (alone, _input) = held_load_again(&world);
    alone.interrupt();
    alone.finish().expect(130);
    assert_eq!(world.images(), [web]);
}

/// Starts a load that is held, on an existing pipe.
fn held_load_again(world: &RuntimeFixture) -> (LarderProcess, File) {
    fs_err::remove_file(world.path("archive")).unwrap();
    held_load(world)
}

#[test]
fn a_pull_takes_over_when_the_command_that_it_works_through_is_ended() {
    let Some(world) = store() else { return };
    for signals in [&[Signal::INT, Signal::INT][..], &[Signal::KILL]] {
        let (gate, other_gate) = (world.gate(), world.gate());
        let (big, web) = (push(&world, &gate, 1, "shop/big:1"), push(&world, &other_gate, 2, "shop/web:1"));
        let first = held_pull(&world, &gate, &[], &big);
        other_gate.hold_blobs_after(4_000);
        let second = world.start_larder(&["pull", &web]);
        other_gate.wait_until_held(1);
        first.signal(signals[0]);
        if let Some(again) = signals.get(1) {
            wait_until("the first one is heard", || first.stderr().contains("interrupted; not finished"));
            first.signal(*again);
        }
        let first = first.finish();
        assert_eq!(first.code, if signals.len() == 2 { 130 } else { -1 });
        let calls = "calls of 1 other larder command";
        for note in [format!("note: {calls} in progress; interrupt again"), format!("note: ended {calls}")] {
            let is_printed = first.stderr.contains(&note);
            assert_eq!(is_printed, signals.len() == 2, "{note}: {first:?}");
        }
        other_gate.open();
        assert!(second.finish().expect(0).stdout.starts_with("sha256:"));
        assert!(!socket(&world).exists());
        world.larder(&["rm", &web]).expect(0);
        world.larder(&["fsck"]).expect(0);
    }
    drop(UnixListener::bind(socket(&world)).unwrap());
    world.larder(&["images"]).expect(0);
    assert!(!socket(&world).exists());
}

#[test]
fn a_pull_ends_at_its_time_limit_and_others_continue_theirs() {
    let Some(world) = store() else { return };
    let gate = world.gate();
    let big = push(&world, &gate, 1, "shop/big:1");
    let mut first = held_pull(&world, &gate, &["--pull-timeout", "3s"], &big);
    let second = world.start_larder(&["-v", "pull", "--pull-timeout", "60s", &big]);
    wait_until("it has joined", || second.stderr().contains("using another larder command"));
    wait_until("the first one ends, while the layer is held", || first.is_finished());
    assert!(first.finish().expect(1).stderr.contains("not finished within 3s"));
    gate.open();
    assert!(second.finish().expect(0).stdout.starts_with("sha256:"));
    assert_eq!(world.images(), [big]);
}

#[test]
fn a_change_that_may_have_been_made_is_not_repeated_when_the_other_command_is_ended() {
    let Some(world) = store() else { return };
    let gate = world.gate();
    let big = push(&world, &gate, 1, "shop/big:1");
    let first = held_pull(&world, &gate, &[], &big);
    let (load, input) = held_load(&world);
    wait_until("the load has joined", || load.stderr().contains("using another larder command"));
    first.signal(Signal::KILL);
    assert_eq!(first.finish().code, -1);
    drop(input);
    let lost = load.finish().expect(3);
    assert!(
        lost.stderr.contains("the larder command at ") && lost.stderr.contains(" ended before"),
        "{lost:?}"
    );
    assert!(lost.stderr.contains("hint: rerun the command to retry"), "{lost:?}");
    assert!(!lost.stderr.contains("daemon"), "{lost:?}");
}

#[test]
fn a_store_with_a_path_that_no_socket_may_have_is_joined_as_well() {
    let Some(world) = store() else { return };
    let gate = world.gate();
    let image = push(&world, &gate, 1, "shop/big:1");
    let home = PathBuf::from(world.path("home"));
    fs_err::create_dir(&home).unwrap();
    let root = home.join("d".repeat(100)).join("s".repeat(100));
    let start = |arguments: &[&str]| {
        let mut command = larder_in(&home);
        LarderProcess::start({
            command.args([OsStr::new("--root"), root.as_os_str()]).args(arguments);
            command
        })
    };
    gate.hold_blobs_after(4_000);
    let first = start(&["pull", &image]);
    gate.wait_until_held(1);
    let joined = start(&["-v", "images"]).finish().expect(0);
    assert!(joined.stderr.contains("using another larder command"), "{joined:?}");
    gate.open();
    first.finish().expect(0);
    assert!(!root.join("control.sock").exists());
    assert_eq!(start(&["images"]).finish().expect(0).lines_with(&["shop/big"]), 1);
}

#[test]
fn a_state_directory_of_a_runtime_is_shared_the_same_way() {
    for world in [RuntimeFixture::plain(), RuntimeFixture::with_docker(RegistryOptions::default())]
        .into_iter()
        .flatten()
    {
        let gate = world.gate();
        let old = present(&world, 1, "shop/old:1");
        let big = push(&world, &gate, 2, "shop/big:1");
        let first = held_pull(&world, &gate, &[], &big);
        let socket = PathBuf::from(world.path("state")).join("control.sock");
        assert_eq!(fs_err::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o600);
        let kept = world.larder(&["-v", "keep", &old]).expect(0);
        assert!(kept.stderr.contains("using another larder command"), "{kept:?}");
        world.larder(&["ensure", &old]).expect(0);
        world.larder(&["gc", "--all-unused", "--dry-run"]).expect(0);
        assert!(world.larder(&["explain", &old]).expect(0).stdout.contains("shop/old:1"));
        gate.open();
        first.finish().expect(0);
        assert!(!socket.exists());
        assert_eq!(world.larder(&["keep"]).expect(0).lines_with(&["shop/old:1"]), 1);
    }
}

#[test]
fn a_daemon_waits_for_a_command_that_has_the_images() {
    let Some(world) = store() else { return };
    let gate = world.gate();
    let image = push(&world, &gate, 1, "shop/big:1");
    let first = held_pull(&world, &gate, &[], &image);
    let mut daemon = world.start_larder(&["serve", "--metrics-address", ""]);
    wait_until("the daemon waits", || daemon.stderr().contains("waiting up to 10s: "));
    let holder = format!("is in use by process {} (larder)", first.pid());
    assert!(daemon.stderr().contains(&holder) && !daemon.is_finished(), "{}", daemon.stderr());
    gate.open();
    first.finish().expect(0);
    wait_until("the daemon says where it listens", || world.place().join("daemon").exists());
    let asked = world.larder(&["-v", "images"]).expect(0);
    assert!(asked.stderr.contains("info: using the daemon at "), "{asked:?}");
    let other = world.start_larder(&["serve", "--metrics-address", "", "--socket", &world.path("s")]);
    let refused = other.finish().expect(3);
    assert!(!refused.stderr.contains("waiting") && refused.stderr.contains("is in use by"), "{refused:?}");
    daemon.terminate();
    daemon.finish().expect(0);
}

/// The socket of a daemon that was killed a moment ago listens, and that of systemd for one that does not run.
#[test]
fn a_daemon_waits_though_a_socket_listens_that_nobody_answers() {
    let Some(world) = store() else { return };
    let gate = world.gate();
    let image = push(&world, &gate, 1, "shop/big:1");
    let first = held_pull(&world, &gate, &[], &image);
    let silent = world.path("silent.sock");
    let _listener = UnixListener::bind(&silent).unwrap();
    fs_err::write(world.place().join("daemon"), &silent).unwrap();
    let socket = world.path("s");
    let daemon = world.start_larder(&["serve", "--metrics-address", "", "--socket", &socket]);
    wait_until("the daemon waits", || daemon.stderr().contains("waiting up to 10s: "));
    gate.open();
    first.finish().expect(0);
    wait_until("the daemon serves", || UnixStream::connect(&socket).is_ok());
    daemon.terminate();
    daemon.finish().expect(0);
}

#[test]
fn a_daemon_does_not_wait_for_ever() {
    let Some(world) = store() else { return };
    let gate = world.gate();
    let image = push(&world, &gate, 1, "shop/big:1");
    let first = held_pull(&world, &gate, &[], &image);
    let refused = world.larder(&["serve", "--metrics-address", ""]).expect(3);
    let holder = format!("is in use by process {} (larder)", first.pid());
    assert!(refused.stderr.contains(&holder), "{refused:?}");
    gate.open();
    first.finish().expect(0);
}

#[test]
fn a_command_that_cannot_print_serves_others() {
    let Some(world) = store() else { return };
    let old = present(&world, 1, "shop/old:1");
    let (mut reader, writer) = std::io::pipe().unwrap();
    // Full but for nothing: the first line waits for a reader.
    let mut full = writer.try_clone().unwrap();
    rustix::io::ioctl_fionbio(&full, true).unwrap();
    while full.write(&[b'x'; 4096]).is_ok() {}
    while full.write(b"x").is_ok() {}
    rustix::io::ioctl_fionbio(&full, false).unwrap();
    let mut first = world.larder_into(&["images"], writer);
    drop(full);
    wait_until("it serves", || socket(&world).exists());
    let joined = world.larder(&["-v", "ensure", &old]).expect(0);
    assert!(joined.stderr.contains("using another larder command"), "{joined:?}");
    assert!(first.try_wait().unwrap().is_none());
    let mut printed = Vec::new();
    reader.read_to_end(&mut printed).unwrap();
    assert!(first.wait().unwrap().success());
    assert!(String::from_utf8_lossy(&printed).contains("shop/old"));
}

#[test]
fn a_check_waits_for_other_commands_or_fails_at_once() {
    let Some(world) = store() else { return };
    let gate = world.gate();
    let big = push(&world, &gate, 1, "shop/big:1");
    let first = held_pull(&world, &gate, &[], &big);
    let process = format!("in use by process {} (", first.pid());

    let refused = world.larder(&["fsck", "--no-wait"]).expect(3);
    assert!(
        refused.stderr.contains(&process) && refused.stderr.contains(&format!("pull {big})")),
        "{refused:?}"
    );
    assert!(refused.stderr.contains("fsck --wait waits"), "{refused:?}");
    let late = world.larder(&["fsck", "--timeout", "100ms"]).expect(3);
    assert!(late.stderr.contains("waited 100ms (--timeout)"), "{late:?}");

    let interrupted = world.start_larder(&["fsck", "--wait"]);
    let waiting = [&[][..], &["--wait"], &["--rebuild"]].map(|flags| {
        let running = world.start_larder(&[&["fsck", "--quick"], flags].concat());
        wait_until("it says for what it waits", || running.stderr().contains(&process));
        running
    });
    wait_until("it says for what it waits", || interrupted.stderr().contains(&process));
    interrupted.interrupt();
    interrupted.finish().expect(130);
    gate.open();
    first.finish().expect(0);
    for running in waiting {
        let run = running.finish().expect(0);
        assert!(run.stdout.contains("1 image"), "{run:?}");
    }
}

/// Files of the layer that is unpacked while others read.
const FILES: usize = 30_000;

#[test]
fn reads_do_not_wait_for_a_pull_of_many_files() {
    let Some(world) = store() else { return };
    let (old, third) = (present(&world, 1, "shop/old:1"), present(&world, 2, "shop/third:1"));
    // Whatever the disk of this machine has in use: otherwise the plan may fail for lack of images to remove.
    let plan = ["gc", "--dry-run", "--image-gc-high-threshold", "100"];
    let commands = [&["images"][..], &["df"], &plan, &["gc", "--all-unused", "--dry-run"]];
    let timed = commands.map(|command| {
        TimedCommand::new(&world, command.iter().map(|&argument| argument.to_owned()).collect())
    });

    // All files come before the bytes at which the gate holds the layer.
    let small = (0..FILES).fold(LayerFiles::new(), |layer, number| {
        layer.file(format!("srv/app/{}/{number}.js", number % 200), format!("module.exports = {number}"))
    });
    let layer = small.noise("srv/app/bundle", 8_000_000, 3);
    ImageBuilder::new().layer(layer).push(&world.registry, "shop/node:1").unwrap();
    let gate = world.gate();
    let node = gate.image("shop/node:1");
    gate.hold_blobs_after(6_000_000);
    let pull = world.start_larder(&["pull", &node]);
    gate.wait_until_held(1);
    wait_until("the files are unpacked", || {
        let disk = world.larder(&["df", "-o", "json"]).expect(0).json()["store"]["disk"]["unpacking"].clone();
        let [inodes, bytes] = ["inodes", "sizeBytes"].map(|name| disk[name].as_u64().unwrap());
        // An image has its files in one; what is in it of the last file is more than all others.
        inodes > FILES as u64 || (inodes < 10 && bytes > 4_000_000)
    });
    timed.iter().for_each(TimedCommand::assert_as_quick);
    world.larder(&["rm", &third]).expect(0);
    world.larder(&["pull", &old]).expect(0);
    pull.interrupt();
    pull.finish().expect(130);
    assert_eq!(world.images(), [old]);
    let disk = world.larder(&["df", "-o", "json"]).expect(0).json()["store"]["disk"].clone();
    assert_eq!(disk["unpacking"]["inodes"], 1, "{disk}");
}
