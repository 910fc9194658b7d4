//! Commands through the daemon and without one: output and exit code are equal.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use larder_testkit_peers::ImageBuilder;
use larder_testkit_peers::process::wait_until;

use super::{MachineWithDaemon, UNPRIVILEGED_USER, give, is_root};
use crate::world::{LarderOutput, LarderProcess, RuntimeFixture, pod};

/// Two stores with one home and one registry, one of them with a daemon; after each command they are in the same state.
struct DaemonComparison {
    with: MachineWithDaemon,
    without: MachineWithDaemon,
}

impl DaemonComparison {
    fn new() -> Option<DaemonComparison> {
        Some(DaemonComparison { with: MachineWithDaemon::serving()?, without: MachineWithDaemon::new()? })
    }

    /// Runs it both ways.
    #[track_caller]
    fn same(&self, arguments: &[&str]) {
        let [asked, own] = [&self.with, &self.without].map(|machine| machine.larder(arguments));
        assert_eq!(asked.code, own.code, "{arguments:?}\n{asked:?}\n{own:?}");
        for (asked, own) in [(&asked.stdout, &own.stdout), (&asked.stderr, &own.stderr)] {
            assert_eq!(
                plain(asked, &self.with.root()),
                plain(own, &self.without.root()),
                "{arguments:?}\n{asked}\n{own}"
            );
        }
    }
}

/// A text without what differs from run to run: numbers, times and sizes, widths of columns, the directory of the
/// store.
///
/// Lines are sorted: of two images that are ensured at once, either may be reported first.
fn plain(text: &str, root: &Path) -> Vec<String> {
    let home = root.parent().unwrap().display().to_string();
    let text = text.replace(&home, "HOME");
    let plain_word = |word: &str| {
        let bare = word.trim_matches(|c: char| !c.is_ascii_alphanumeric());
        if bare.starts_with(|c: char| c.is_ascii_digit()) { "#".to_owned() } else { word.to_owned() }
    };
    let line = |line: &str| line.split_whitespace().map(plain_word).collect::<Vec<_>>().join(" ");
    let mut lines: Vec<String> = text.lines().map(line).collect();
    lines.sort();
    lines
}

#[test]
fn every_command_prints_the_same_with_and_without_a_daemon() {
    let Some(pair) = DaemonComparison::new() else { return };
    // One registry for both: names are the same.
    let web = pair.with.push(1, "shop/web:1");
    let api = pair.with.push(2, "shop/api:1");
    let manifest = pair.with.home.path().join("pod.yaml");
    fs_err::write(&manifest, pod("web", "IfNotPresent", &[&web, &api])).unwrap();
    let manifest = manifest.to_string_lossy().into_owned();
    let absent = pair.with.registry.image("no/such:1");
    let now = ["--minimum-image-ttl-duration", "0"];
    let never = ["--image-gc-high-threshold", "100"];

    for arguments in [
        &["ensure", "-f", &manifest][..],
        &["images"],
        &["ensure", "-f", &manifest],
        &["ensure", "-o", "wide", "-f", &manifest],
        &["ensure", "--policy", "never", &absent],
        &["ensure", &absent],
        &["ensure", &absent],
        &["ensure", "Bad:Name"],
        &["pull", &web],
        &["pull", &absent],
        &["pull", "-o", "json", &absent],
        &["images", "-o", "json"],
        &["images", "-q", "*/web"],
        &["inspect", &web, &absent],
        &["inspect", "Bad"],
        &["runtime"],
        &["runtime", "-o", "yaml"],
        &["df"],
        &["df", "-o", "json"],
        &[&["gc", "--dry-run", "-o", "wide"][..], &never].concat(),
        &[&["gc", "--dry-run", "-o", "json"][..], &never].concat(),
        &["gc", "--dry-run", "--image-gc-high-threshold", "1", "--image-gc-low-threshold", "1"],
        &["gc", "--dry-run", "--free", "10TiB"],
        &["gc", "--dry-run", "--image-gc-high-threshold", "10", "--image-gc-low-threshold", "50"],
        &["gc", "--dry-run", "--kubelet", "--all-unused"],
        &[&["explain", &web][..], &never].concat(),
        &[&["explain", "-o", "json", &web][..], &never].concat(),
        &["explain", "shop/wob:1"],
        &["keep"],
        &["keep", "*/web"],
        &["keep", "nothing/like/it", "--ttl", "1h"],
        &["keep", "--label", "a=b", "--budget", "1GiB"],
        &["keep", "["],
        &["keep", "-o", "json"],
        &["explain", &web],
        &["unkeep", "2"],
        &["unkeep", "--label", "x"],
        &["unkeep", "*/web"],
        &["unkeep", "--all"],
        &["keep"],
        &["lease", &api, "1h"],
        &["lease", &absent, "1h"],
        &[&["gc", "--all-unused", "--force"][..], &now].concat(),
        &[&["gc", "--all-unused", "--force", "-o", "json"][..], &now].concat(),
        &["lease", &api, "0"],
        &["gc", "log"],
        &["mounts"],
        &["umount", "/nowhere"],
        &["rm", &absent],
        &["rm", "--ignore-not-found", &absent],
        &["rm", &web, &web],
        &["rm", "-o", "json", &api],
        &["rm", &api],
        &["images"],
        &["gc", "log", "-o", "json"],
    ] {
        pair.same(arguments);
    }
}

#[test]
fn mounts_are_made_by_the_daemon_as_without_one() {
    if !is_root() {
        return;
    }
    let Some(pair) = DaemonComparison::new() else { return };
    let web = pair.with.push(1, "shop/web:1");
    for machine in [&pair.with, &pair.without] {
        fs_err::create_dir(machine.home.path().join("mnt")).unwrap();
    }
    pair.same(&["pull", &web]);
    pair.same(&["mount", &web, "nowhere"]);
    let mounted = |machine: &MachineWithDaemon| machine.home.path().join("mnt/srv/data").exists();
    // Each has a directory of its own of that name.
    for machine in [&pair.with, &pair.without] {
        machine.larder(&["mount", &web, "mnt"]).expect(0);
        assert!(mounted(machine));
        assert_eq!(machine.larder(&["mounts"]).expect(0).lines_with(&["mnt", "mounted"]), 1);
        let refused = machine.larder(&["rm", &web]).expect(1);
        assert!(refused.stderr.contains("mounted at"), "{refused:?}");
        machine.larder(&["umount", "mnt"]).expect(0);
        assert!(!mounted(machine));
    }
}

#[test]
fn archives_are_loaded_by_the_daemon_as_without_one() {
    let Some(mut pair) = DaemonComparison::new() else { return };
    let from = format!("docker://{}", pair.with.push(1, "shop/web:1"));
    let home = tempfile::tempdir().unwrap();
    let at = |name: &str| home.path().join(name).to_string_lossy().into_owned();
    for to in [
        format!("docker-archive:{}:registry.example/shop/web:docker", at("docker.tar")),
        format!("oci:{}:latest", at("layout")),
    ] {
        let skopeo = Command::new("skopeo")
            .args(["--insecure-policy", "copy", "--quiet", "--src-tls-verify=false", &from, &to])
            .status();
        assert!(skopeo.unwrap().success(), "{to}");
    }
    fs_err::create_dir(at("unpacked")).unwrap();
    let tar = Command::new("tar").args(["-xf", &at("docker.tar"), "-C", &at("unpacked")]).status();
    assert!(tar.unwrap().success());
    let whole = fs_err::read(at("docker.tar")).unwrap();
    fs_err::write(at("half.tar"), &whole[..whole.len() / 2]).unwrap();
    fs_err::write(at("bad.tar"), "not an archive").unwrap();
    fs_err::create_dir(at("empty")).unwrap();

    for arguments in [
        &["load", &at("half.tar"), &at("bad.tar")][..],
        &["images"],
        &["load", &at("bad.tar"), &at("docker.tar")],
        &["load", "-o", "json", &at("docker.tar")],
        &["load", &at("unpacked")],
        &["load", &at("layout")],
        &["load", &at("layout"), "--name", "registry.example/shop/layout"],
        &["load", &at("docker.tar"), "--name", "registry.example/shop/other:1"],
        &["load", &at("docker.tar"), "--name", "Bad:Name"],
        &["images", "-o", "json"],
    ] {
        pair.same(arguments);
    }
    assert_eq!(pair.with.larder(&["images", "-q"]).expect(0).stdout.lines().count(), 1);
    for unreadable in [at("missing.tar"), at("empty")] {
        let runs =
            [&pair.with, &pair.without].map(|machine| machine.larder(&["load", &unreadable]).expect(2));
        assert!(runs.iter().all(|run| run.stderr.contains(&unreadable)), "{runs:?}");
    }
    let loads = pair.with.larder(&["events"]).expect(0);
    let said = "Loaded image registry.example/shop/web:docker";
    assert!(loads.lines_with(&["Normal", "Loaded", said]) > 0, "{loads:?}");
    let socket = pair.with.socket().display().to_string();
    for arguments in [&["fsck"][..], &["fsck", "--daemon", &socket]] {
        let refused = pair.with.larder(arguments).expect(3);
        assert!(refused.stderr.contains("hint: stop the daemon ("), "{arguments:?}: {refused:?}");
    }
    let waiting = pair.with.start(&["fsck", "--wait"]);
    wait_until("it says for what it waits", || waiting.stderr().contains("in use by the daemon at "));
    pair.with.stop().expect(0);
    waiting.finish().expect(0);
    pair.with.larder(&["fsck"]).expect(0);
}

#[test]
fn a_client_in_another_mount_namespace_gets_an_error() {
    if !is_root() {
        return;
    }
    let Some(machine) = MachineWithDaemon::serving() else { return };
    let web = machine.push(1, "shop/web:1");
    machine.larder(&["pull", &web]).expect(0);
    let target = machine.home.path().join("mnt");
    fs_err::create_dir(&target).unwrap();
    let target = target.to_string_lossy().into_owned();
    let mut elsewhere = Command::new("unshare");
    elsewhere.args(["--mount", "--propagation", "private", env!("CARGO_BIN_EXE_larder")]);
    elsewhere.arg("--root").arg(machine.root()).args(["mount", &web, &target]);
    let run = LarderProcess::start(elsewhere).finish().expect(1);
    assert_eq!(run.stdout, "");
    assert!(run.stderr.contains("different mount namespaces"), "{run:?}");
    let process = machine.status()["pid"].to_string();
    assert!(run.stderr.contains(&format!("nsenter --mount --target {process} ")), "{run:?}");
    machine.larder(&["umount", &target]).expect(0);
}

#[test]
fn rules_of_the_settings_are_dropped_where_they_are_written() {
    let Some(mut machine) = MachineWithDaemon::new() else { return };
    let config = machine.home.path().join("config.yaml");
    let settings = "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\ngc:\n  keep:\n    - name: base/*\n    - name: tools/*\n";
    fs_err::write(&config, settings).unwrap();
    let config = config.to_string_lossy().into_owned();
    machine.serve_with(&["--config", &config]);
    let place = format!("{config}:5");
    machine.larder(&["keep", "base/*", "--ttl", "1h"]).expect(0);
    let listed = machine.larder(&["keep"]).expect(0);
    assert_eq!(listed.lines_with(&["1", "name base/*", &place]), 1, "{listed:?}");
    assert_eq!(
        listed.lines_with(&["2", "name tools/*", &format!("{config}:6")]),
        1,
        "each its own line: {listed:?}"
    );
    assert_eq!(listed.lines_with(&["3", "name base/*, for 1h0m0s", "larder keep"]), 1, "{listed:?}");
    let data = machine.larder(&["keep", "-o", "json"]).expect(0).json();
    assert_eq!((&data[0]["from"], &data[2]["from"]), (&place.as_str().into(), &serde_json::Value::Null));
    let refused = machine.larder(&["unkeep", "1"]).expect(1);
    assert!(refused.stderr.contains(&place) && refused.stderr.contains("gc.keep"), "{refused:?}");
    // Of two with one name, it is the other that is meant.
    machine.larder(&["unkeep", "base/*"]).expect(0);
    machine.larder(&["unkeep", "base/*"]).expect(1);
    let all = machine.larder(&["unkeep", "--all"]).expect(0);
    assert!(all.stdout.contains(&place), "{all:?}");
}

#[test]
fn verbose_names_the_choice_of_daemon_or_direct_access() {
    let Some(mut machine) = MachineWithDaemon::serving() else { return };
    let said = |run: &LarderOutput, text: &str| assert!(run.stderr.contains(text), "{text}: {run:?}");
    let asked = machine.larder(&["-v", "images"]).expect(0);
    said(&asked, &format!("info: using the daemon at {}", machine.socket().display()));
    said(&machine.larder(&["--daemon", "none", "images"]).expect(3), "in use by");
    let refused = machine.larder(&["fsck"]).expect(3);
    said(&refused, "the daemon at");
    said(&refused, "hint: stop the daemon (");
    let other = machine.home.path().display().to_string();
    let web = machine.push(1, "shop/web:1");
    for (flag, key, command) in
        [("--state", "state", &["gc", "--dry-run"][..]), ("--certs-d", "registry.certsDirs", &["pull", &web])]
    {
        let warned = machine.larder(&[&[flag, &other], command].concat()).expect(0);
        said(&warned, &format!("warning: the daemon's settings apply, not those of this command: {key} is "));
        said(&warned, &format!("({flag})"));
    }
    machine.stop().expect(0);
    assert!(!machine.root().join("daemon").exists(), "the note goes with the daemon");
    said(&machine.larder(&["-v", "images"]).expect(0), "info: no daemon");
    said(&machine.larder(&["status"]).expect(3), "no daemon is running");
    let socket = machine.socket().display().to_string();
    said(&machine.larder(&["--daemon", &socket, "images"]).expect(3), "no daemon at");
}

#[test]
fn a_user_without_access_to_the_daemon_gets_a_hint() {
    if !is_root() {
        return;
    }
    let Some(mut machine) = MachineWithDaemon::serving() else { return };
    for dir in [machine.home.path(), &machine.root()] {
        fs_err::set_permissions(dir, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    machine.user = Some(UNPRIVILEGED_USER);
    let run = machine.larder(&["images"]).expect(3);
    assert!(run.stderr.contains("permission denied") && run.stderr.contains("hint: "), "{run:?}");
    std::os::unix::fs::chown(machine.socket(), None, Some(1)).unwrap();
    let run = machine.larder(&["images"]).expect(3);
    assert!(run.stderr.contains("hint: join the group daemon, or run as root"), "{run:?}");
    fs_err::set_permissions(machine.root(), std::fs::Permissions::from_mode(0o700)).unwrap();
    for command in ["status", "events"] {
        let run = machine.larder(&[command]).expect(3);
        assert!(run.stderr.contains("cannot determine whether a daemon is running"), "{run:?}");
        assert!(run.stderr.contains("hint: run as the user who owns the store"), "{run:?}");
    }
    machine.user = None;
}

#[test]
fn a_user_without_root_has_a_daemon_of_their_own() {
    if !is_root() {
        return;
    }
    let Some(mut machine) = MachineWithDaemon::new() else { return };
    let web = machine.push(1, "shop/web:1");
    give(machine.home.path(), UNPRIVILEGED_USER);
    machine.user = Some(UNPRIVILEGED_USER);
    machine.serve();
    machine.larder(&["ensure", &web]).expect(0);
    assert_eq!(machine.larder(&["images"]).expect(0).lines_with(&["shop/web"]), 1);
    assert_eq!(machine.larder(&["events"]).expect(0).lines_with(&["Pulled", "Successfully"]), 1);
    machine.larder(&["gc", "--dry-run"]).expect(0);
    machine.larder(&["rm", &web]).expect(0);
    machine.stop().expect(0);
}

#[test]
fn a_daemon_in_front_of_a_runtime_is_asked_about_its_images_and_not_about_the_store() {
    let Some(world) = RuntimeFixture::plain() else { return };
    ImageBuilder::small(1, 10_000).push(&world.registry, "shop/web:1").unwrap();
    let image = world.registry.image("shop/web:1");
    let dir = PathBuf::from(world.file("marker", ""));
    let [state, socket] = ["state", "s.sock"].map(|name| dir.with_file_name(name));
    let (state_of, socket_of) = (state.display().to_string(), socket.display().to_string());
    let larder = |arguments: &[&str]| world.larder(&[&["-v", "--state", &state_of][..], arguments].concat());
    let serve = ["--state", &state_of, "serve", "--socket", &socket_of, "--metrics-address", ""];
    let daemon = world.start_larder(&[&serve[..], &["--image-gc-high-threshold", "100"]].concat());
    wait_until("the daemon listens, and says where", || {
        state.join("daemon").exists() && UnixStream::connect(&socket).is_ok()
    });
    for arguments in [
        &["ensure", &image][..],
        &["images"],
        &["inspect", &image],
        &["df"],
        &["runtime"],
        &["explain", &image],
        &["gc", "--dry-run", "--image-gc-high-threshold", "100"],
        &["lease", &image, "1h"],
        &["status"],
        &["rm", &image],
    ] {
        let run = larder(arguments).expect(0);
        assert!(run.stderr.contains("using the daemon at"), "{arguments:?} {run:?}");
    }
    assert_eq!(world.images(), [""; 0]);
    daemon.terminate();
    daemon.finish().expect(0);
}

#[test]
fn an_image_that_gets_a_name_is_not_removed_by_gc_and_a_removed_name_is_an_event() {
    let Some(machine) = MachineWithDaemon::serving() else { return };
    let web = machine.push(1, "shop/web:1");
    machine.larder(&["pull", &web]).expect(0);
    machine.larder(&["lease", "rm", &web]).expect(0);
    machine.larder(&["tag", &web, "again:1"]).expect(0);
    machine.larder(&["gc", "--all-unused", "--force", "--minimum-image-ttl-duration", "0"]).expect(0);
    assert_eq!(machine.larder(&["images"]).expect(0).lines_with(&["again"]), 1);
    machine.larder(&["rm", "again:1"]).expect(0);
    let events = machine.larder(&["events"]).expect(0);
    assert_eq!(events.lines_with(&["Normal", "Untagged", "docker.io/library/again:1"]), 1, "{events:?}");
}
