//! Settings that change while the daemon runs, and files that cannot be used.

use larder_testkit_peers::process::wait_until;
use larder_testkit_peers::{ImageBuilder, RegistryOptions};
use rustix::process::Signal;

use crate::served::CriDaemon;
use crate::world::{LarderProcess, RuntimeFixture, larder_in, pod};

const HEAD: &str = "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\n";

fn world() -> Option<RuntimeFixture> {
    RuntimeFixture::with_store(RegistryOptions::default())
}

fn status(world: &RuntimeFixture, daemon: &CriDaemon) -> serde_json::Value {
    world.larder(&["--daemon", &daemon.socket.to_string_lossy(), "status", "-o", "json"]).expect(0).json()
}

#[test]
fn invalid_settings_change_nothing_and_are_reported_until_they_are_fixed() {
    let Some(world) = world() else { return };
    let good = format!("{HEAD}imageGCHighThresholdPercent: 90\nimageGCLowThresholdPercent: 80\n");
    let config = world.file("config.yaml", &good);
    let daemon = CriDaemon::with(&world, &["--config", &config]);
    let pods = world.path("pods");
    fs_err::create_dir(&pods).unwrap();

    let bad = format!("{HEAD}imageGCHighThresholdPercent: 40\nstaticPodPth: {pods}\n");
    world.file("config.yaml", &bad);
    daemon.running.signal(Signal::HUP);
    daemon.wait_for_log("reason=ReloadFailed", 1);
    let printed = daemon.running.stderr();
    assert!(printed.contains("The settings are unchanged") && printed.contains("staticPodPath"), "{printed}");
    let reported = status(&world, &daemon).to_string();
    assert!(reported.contains("staticPodPth"), "the status says so: {reported}");
    let events = world.larder(&["--daemon", &daemon.socket.to_string_lossy(), "events"]).expect(0);
    assert_eq!(events.lines_with(&["ReloadFailed"]), 1, "{events:?}");

    let refused = world.larder(&["--daemon", &daemon.socket.to_string_lossy(), "reload"]).expect(2);
    let checked = world.larder(&["config", "--check", &config]).expect(2);
    assert_eq!(refused.stderr, checked.stderr, "each error is printed as one");
    assert_eq!(refused.stderr.matches("error: ").count(), 2, "{refused:?}");

    // No reload request: the changed file is enough.
    world.file("config.yaml", &format!("{good}log: {{level: debug}}\nstaticPodPath: {pods}\n"));
    daemon.wait_for_log("reason=Reloaded", 1);
    daemon.wait_for_log("Changed: ", 1);
    assert!(!status(&world, &daemon).to_string().contains("staticPodPth"), "the error is gone");
    daemon.stop().expect(0);
}

#[test]
fn a_daemon_is_found_after_its_root_was_changed_in_the_file() {
    let home = tempfile::tempdir().unwrap();
    let path = |name: &str| home.path().join(name).display().to_string();
    let config = path("config.yaml");
    let write = |root: &str, threshold: u32| {
        let (root, socket) = (path(root), path("larder.sock"));
        let text = format!(
            "{HEAD}root: {root}\nlisten: {{socket: {socket}}}\nmetrics: {{address: ''}}\n\
             imageGCHighThresholdPercent: {threshold}\n"
        );
        fs_err::write(&config, text).unwrap();
    };
    let larder = |arguments: &[&str]| {
        let mut command = larder_in(home.path());
        command.env("LARDER_CONFIG", &config).args(arguments);
        LarderProcess::start(command)
    };
    write("one", 90);
    let daemon = larder(&["serve"]);
    wait_until("it serves", || std::os::unix::net::UnixStream::connect(path("larder.sock")).is_ok());
    write("two", 85);
    let reloaded = larder(&["reload"]).finish().expect(1);
    assert!(reloaded.stdout.contains("root: requires a restart"), "{reloaded:?}");
    assert!(reloaded.stdout.contains("imageGCHighThresholdPercent: waits for that restart"), "{reloaded:?}");
    let status = larder(&["status"]).finish().expect(0);
    assert!(status.stdout.contains(&path("one")), "it serves the old store: {status:?}");
    assert_eq!(status.lines_with(&["Needs restart", "root"]), 1, "and the settings name another: {status:?}");
    daemon.interrupt();
    daemon.finish();
}

#[test]
fn a_start_with_invalid_settings_uses_the_last_good_ones_and_collects_nothing() {
    let Some(world) = world() else { return };
    ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
    let image = world.registry.image("shop/web:1");
    let good = format!("{HEAD}imageGCHighThresholdPercent: 90\npull: {{ensuredLease: 0s}}\n");
    let config = world.file("config.yaml", &good);
    let daemon = CriDaemon::with(&world, &["--config", &config]);
    daemon.pull(&image).unwrap();
    daemon.stop().expect(0);

    world.file("config.yaml", &format!("{good}staticPodPth: /pods\n"));
    let daemon = CriDaemon::with(&world, &["--config", &config]);
    daemon.wait_for_log("reason=ReloadFailed", 1);
    let log = daemon.running.stderr();
    assert!(log.contains("the last good ones are in force") && log.contains("staticPodPth"), "{log}");
    assert_eq!(daemon.list().len(), 1, "kubelet is served");
    wait_until("a rollout stops here", || {
        daemon.get("/readyz").contains("degraded: The settings are invalid")
    });
    assert!(!daemon.is_ready());
    assert!(daemon.metrics().contains("larder_settings_valid 0"));
    let reported = status(&world, &daemon);
    assert!(reported["warnings"][0].as_str().is_some_and(|text| text.contains("GC is off")), "{reported}");
    let socket = daemon.socket.to_string_lossy().into_owned();
    let gc = ["--daemon", &socket, "gc", "--all-unused", "--force", "--minimum-image-ttl-duration", "0"];
    let refused = world.larder(&gc).expect(1);
    assert!(refused.stderr.contains("GC is off"), "{refused:?}");

    world.file("config.yaml", &good);
    daemon.wait_for_log("reason=Reloaded", 1);
    assert!(daemon.is_ready());
    assert!(daemon.metrics().contains("larder_settings_valid 1"));
    world.larder(&gc).expect(0);
    assert_eq!(daemon.list().len(), 0);
    daemon.stop().expect(0);
}

#[test]
fn settings_that_were_never_valid_end_the_start() {
    let Some(world) = world() else { return };
    let config = world.file("config.yaml", &format!("{HEAD}staticPodPth: /pods\n"));
    world.larder(&["serve", "--config", &config]).expect(2);
}

#[test]
fn a_log_for_programs_is_one_from_its_first_line() {
    let Some(world) = world() else { return };
    let config = world.file("config.yaml", &format!("{HEAD}log: {{format: json}}\n"));
    let daemon = CriDaemon::with(&world, &["--config", &config, "--metrics-address", ""]);
    daemon.wait_for_log("larder serves", 1);
    let log = daemon.stop().expect(0).stderr;
    let lines: Vec<serde_json::Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("no JSON: {line}")))
        .collect();
    assert!(lines[0]["message"].as_str().is_some_and(|text| text.starts_with("larder serves")), "{log}");
    assert!(lines[0]["socket"].as_str().is_some_and(|path| path.ends_with("larder.sock")), "{log}");
}

#[cfg(feature = "dashboard")]
#[test]
fn the_url_of_the_dashboard_is_printed_where_it_is_served() {
    let Some(world) = world() else { return };
    for (address, is_served) in [("127.0.0.1:0", true), ("", false)] {
        let daemon = CriDaemon::with(&world, &["--metrics-address", address]);
        let reported = status(&world, &daemon);
        let log = daemon.stop().expect(0).stderr;
        let url = reported["dashboard"].as_str().unwrap_or("none");
        assert_eq!(url.starts_with("http://127.0.0.1:") && url.ends_with("/dashboard/"), is_served, "{url}");
        assert_eq!(log.contains(&format!("  dashboard: {url}\n")), is_served, "{log}");
    }
}

#[test]
fn a_log_line_names_its_pull_layer_and_round() {
    let Some(world) = world() else { return };
    ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
    let image = world.registry.image("shop/web:1");
    let config = format!("{HEAD}log: {{level: debug, format: json}}\npull: {{ensuredLease: 0s}}\n");
    let config = world.file("config.yaml", &config);
    let daemon = CriDaemon::with(&world, &["--config", &config]);
    daemon.pull(&image).unwrap();
    let all = ["gc", "--all-unused", "--force", "--minimum-image-ttl-duration", "0"];
    world.larder(&[&["--daemon", &daemon.socket.to_string_lossy()], &all[..]].concat()).expect(0);
    let log = daemon.stop().expect(0).stderr;
    let line = |message: &str| -> serde_json::Value {
        let found = log.lines().find(|line| line.contains(message));
        serde_json::from_str(found.unwrap_or_else(|| panic!("no {message:?} in:\n{log}"))).unwrap()
    };
    let layer = line("unpacked a layer");
    assert_eq!(layer["span"]["pull"]["image"], image, "{layer}");
    assert_eq!(layer["span"]["layer"]["digest"], layer["digest"], "{layer}");
    assert_eq!(line("removed image")["span"]["gc_round"]["goal"], "allUnused", "{log}");
}

#[test]
fn unusable_manifests_in_a_directory_are_reported_and_valid_ones_count() {
    let Some(world) = world() else { return };
    ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
    let image = world.registry.image("shop/web:1");
    let pods = world.path("pods");
    fs_err::create_dir_all(format!("{pods}/subdirectory")).unwrap();
    let write = |name: &str, content: &[u8]| fs_err::write(format!("{pods}/{name}"), content).unwrap();
    write("binary", &[0, 255, 7, 0, 128]);
    write("broken.yaml", b"a: [");
    write("bomb.yaml", b"a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n");
    write("nothing.yaml", b"");
    write("big.yaml", &vec![b'x'; 3 << 20]);
    write("name.yaml", pod("bad", "Always", &["Bad:Name:"]).as_bytes());
    write(".hidden.yaml", b"a: [");
    std::os::unix::fs::symlink("/nowhere", format!("{pods}/dangling.yaml")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        format!("{pods}/pipe.yaml"),
        rustix::fs::FileType::Fifo,
        0o600.into(),
        0,
    )
    .unwrap();
    write("good.yaml", pod("web", "IfNotPresent", &[&image]).as_bytes());
    let config = world.file("config.yaml", &format!("{HEAD}staticPodPath: {pods}\n"));
    let daemon = CriDaemon::with(&world, &["--config", &config]);
    wait_until("the good one is here", || daemon.status(&image).is_some());
    for name in ["binary", "broken.yaml"] {
        daemon.wait_for_log(&format!("static pods: {pods}/{name}"), 1);
    }
    assert_eq!(daemon.logged(".hidden"), 0);
    // Another one is noticed without a reload request; earlier problems are not printed again.
    ImageBuilder::small(2, 50_000).push(&world.registry, "shop/api:1").unwrap();
    let api = world.registry.image("shop/api:1");
    write("api.yaml", pod("api", "IfNotPresent", &[&api]).as_bytes());
    wait_until("the new one is here", || daemon.status(&api).is_some());
    assert_eq!(daemon.logged(&format!("static pods: {pods}/broken.yaml")), 1);
    daemon.stop().expect(0);
}
