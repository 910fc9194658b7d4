//! `larder containerd configure`: Debian's containerd is set up, checked, used and set back.

use std::path::PathBuf;

use larder_testkit_peers::containerd::pods::pause_image;
use larder_testkit_peers::process::wait_until;
use larder_testkit_peers::{Containerd, Package, RegistryOptions, require};

use crate::served::CriDaemon;
use crate::world::{LarderOutput, LarderProcess, RuntimeFixture};

/// A containerd with its own snapshotter, and a daemon with a store.
struct SetupFixture {
    containerd: Containerd,
    daemon: CriDaemon,
    world: RuntimeFixture,
    settings: String,
    /// containerd's configuration.
    config: PathBuf,
}

impl SetupFixture {
    /// `None`, after a loud message, where real servers are not installed and this is not CI.
    fn new() -> Option<SetupFixture> {
        if !require(&Package::ALL).is_available() {
            return None;
        }
        let world = RuntimeFixture::with_store(RegistryOptions::default())?;
        let containerd = Containerd::start().unwrap();
        containerd.add_registry(&world.registry).unwrap();
        let socket = world.path("larder.sock");
        let settings = format!(
            "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\nbackend: store\nlisten:\n  socket: {socket}\n\
             containerd:\n  snapshotter: true\n  socket: {}\n",
            containerd.endpoint()
        );
        let settings = world.file("config.yaml", &settings);
        let mut command = world.command(&["serve"]);
        command.env("LARDER_CONFIG", &settings);
        let daemon = CriDaemon::at(socket.into(), LarderProcess::start(command));
        let config = containerd.socket().with_file_name("config.toml");
        Some(SetupFixture { containerd, daemon, world, settings, config })
    }

    fn configure(&self, flags: &[&str]) -> LarderOutput {
        let (config, kubelet) = (self.config.to_string_lossy(), self.world.path("kubelet.yaml"));
        let fixed = ["containerd", "configure", "--config", &config, "--kubelet-config", &kubelet];
        self.world.larder_with(&self.settings, &[&fixed, flags].concat())
    }

    fn text(&self) -> String {
        fs_err::read_to_string(&self.config).unwrap()
    }

    fn restart_containerd(&mut self) {
        self.containerd.stop();
        self.containerd.start_again().unwrap();
    }
}

/// The parts of a check that are as given.
fn parts<'a>(checked: &'a LarderOutput, state: &'a str) -> Vec<&'a str> {
    let lines = checked.stdout.lines().filter_map(|line| line.strip_prefix(state));
    lines.map(|rest| rest.trim_start().split("   ").next().unwrap_or_default()).collect()
}

#[test]
fn containerd_is_set_up_checked_and_set_back() {
    let Some(mut fixture) = SetupFixture::new() else { return };
    let original = fixture.text();
    let kubelet = format!("imageServiceEndpoint: unix://{}\n", fixture.world.path("larder.sock"));
    fixture.world.file("kubelet.yaml", &kubelet);

    let planned = fixture.configure(&[]);
    assert_eq!(planned.code, 0, "{}", planned.stderr);
    for line in ["+[proxy_plugins.larder] # added by larder", "+  type = \"snapshot\""] {
        assert!(planned.stdout.lines().any(|printed| printed == line), "{}", planned.stdout);
    }
    assert_eq!(fixture.text(), original, "nothing is written");
    let checked = fixture.configure(&["--check"]);
    assert_eq!(checked.code, 1, "{}", checked.stderr);
    assert_eq!(
        parts(&checked, "ok"),
        ["larder's settings", "larder's socket", "kubelet"],
        "{}",
        checked.stdout
    );
    let not = ["configuration", "proxy plugin", "snapshots", "CRI"];
    assert_eq!(parts(&checked, "failed"), not, "{}", checked.stdout);
    let next = format!("containerd configure --apply --config {}", fixture.config.display());
    assert!(checked.stderr.contains(&next), "{}", checked.stderr);

    let applied = fixture.configure(&["--apply"]);
    assert_eq!(applied.code, 0, "{}", applied.stderr);
    assert!(applied.stderr.contains("systemctl restart containerd"), "{}", applied.stderr);
    let backup = fixture.config.with_file_name("config.toml.before-larder");
    assert_eq!(fs_err::read_to_string(backup).unwrap(), original);
    let again = fixture.configure(&["--apply"]);
    assert!(again.code == 0 && again.stderr.contains("no change is needed"), "{}", again.stderr);
    let checked = fixture.configure(&["--check"]);
    assert_eq!(
        parts(&checked, "failed"),
        ["proxy plugin", "snapshots", "CRI"],
        "not restarted: {}",
        checked.stdout
    );
    fixture.restart_containerd();
    let checked = fixture.configure(&["--check"]);
    assert_eq!(checked.code, 0, "{} {}", checked.stdout, checked.stderr);

    // An image that only the store has keeps the change from being taken back.
    let image = fixture.world.registry.image("shop/web:1");
    pause_image().push(&fixture.world.registry, "shop/web:1").unwrap();
    fixture.daemon.pull(&image).unwrap();
    let socket = fixture.world.path("larder.sock");
    let status = || {
        let status = fixture.world.larder(&["--daemon", &socket, "status", "-o", "json"]);
        serde_json::from_str::<serde_json::Value>(&status.stdout).unwrap()
    };
    assert_eq!(status()["mode"], "snapshotter");
    wait_until("the images are compared", || status()["containerd"]["compared"].is_string());
    assert_eq!(status()["containerd"]["pending"], 0, "{}", status());
    let printed = fixture.world.larder(&["--daemon", &socket, "status"]).stdout;
    assert!(printed.contains("runs containers from the store; "), "{printed}");
    let refused = fixture.configure(&["--undo"]);
    assert!(refused.code == 1 && refused.stderr.contains(&image), "{}", refused.stderr);
    assert_ne!(fixture.text(), original);
    fixture.daemon.remove(&image);
    fs_err::write(&fixture.config, format!("# mine\n{}", fixture.text())).unwrap();
    wait_until("containerd needs no layer of the store", || fixture.configure(&["--undo"]).code == 0);
    assert_eq!(fixture.text(), format!("# mine\n{original}"), "only larder's lines are taken back");
    fixture.restart_containerd();
    assert_eq!(fixture.configure(&["--check"]).code, 1);
}

#[test]
fn a_configuration_that_containerd_does_not_take_or_another_program_makes_is_not_changed() {
    let Some(fixture) = SetupFixture::new() else { return };
    let generated = "# File generated by k3s. DO NOT EDIT. Use config.toml.tmpl instead.\nversion = 2\n";
    for (text, code, problem) in [
        ("version = \n", 2, "not TOML"),
        ("{{ template \"base\" . }}\n", 2, "a template"),
        ("version = 3\n", 1, "does not read version 3"),
        (generated, 1, "config.toml.tmpl"),
        ("version = 2\nroot = 5\n", 1, "all files have their old text"),
    ] {
        fs_err::write(&fixture.config, text).unwrap();
        let refused = fixture.configure(&["--apply"]);
        assert!(
            refused.code == code && refused.stderr.contains(problem),
            "{} {}",
            refused.code,
            refused.stderr
        );
        assert_eq!(fixture.text(), text);
    }
    let nowhere = fixture.configure(&["--containerd", "unix:///nonexistent/containerd.sock"]);
    assert_eq!(nowhere.code, 3, "{}", nowhere.stderr);
}
