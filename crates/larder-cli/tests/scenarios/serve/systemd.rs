//! The units, and the notifications between the daemon and systemd.

use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use larder::backend::{Backend as _, ImageSpec, ProgressReporter};
use larder_cri::{CriBackend, CriConfig, Endpoint};
use larder_testkit::archive::{self, TarBuilder, TarBuilderEntry};
use larder_testkit_peers::packages::find_program;
use larder_testkit_peers::process::{WAIT_LIMIT, pause, wait_until};
use larder_testkit_peers::{ImageBuilder, LayerFiles, Package, RegistryOptions, require};
use rustix::process::Signal;
use tempfile::TempDir;
use tokio::time::Instant;

use crate::served::{CriDaemon, client_of};
use crate::world::{LarderProcess, RuntimeFixture, larder_in};

const INSTALLED: &str = "/usr/local/bin/larder";

fn units() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd")
}

fn unit(name: &str) -> String {
    fs_err::read_to_string(units().join(name)).unwrap()
}

#[test]
fn systemd_finds_nothing_wrong_with_the_units() {
    if !require(&[Package::Systemd]).is_available() {
        return;
    }
    let service = unit("larder.service");
    assert!(service.contains(INSTALLED));
    // It looks for the program, too.
    let service = service.replace(INSTALLED, env!("CARGO_BIN_EXE_larder"));
    // Since systemd 254; earlier ones ignore it, and say so.
    let preserve = "FileDescriptorStorePreserve=yes\n";
    assert!(service.contains(preserve));
    let said = match verify_units(&service) {
        Err(said) if said.contains("Unknown key 'FileDescriptorStorePreserve'") => {
            verify_units(&service.replace(preserve, ""))
        }
        said => said,
    };
    assert_eq!(said, Ok(()));
}

/// Has systemd verify this service, and the socket. Fails with what it says.
fn verify_units(service: &str) -> Result<(), String> {
    let dir = tempfile::tempdir().unwrap();
    fs_err::write(dir.path().join("larder.service"), service).unwrap();
    fs_err::write(dir.path().join("larder.socket"), unit("larder.socket")).unwrap();
    let analyze = Package::Systemd.program().unwrap();
    let mut verify = Command::new(analyze);
    verify.args(["verify", "--man=no", "--recursive-errors=no"]);
    verify.args(["larder.service", "larder.socket"].map(|name| dir.path().join(name)));
    let output = verify.output().unwrap();
    let said =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    // Keys that it does not know are no failure to it; units of others that it reads as well are none to us.
    let is_ours = said.lines().any(|line| line.contains("larder"));
    if output.status.success() && !is_ours { Ok(()) } else { Err(said) }
}

/// A daemon on larder's own store, started with these variables.
struct NotifyDaemon {
    running: LarderProcess,
    socket: PathBuf,
    messages: UnixDatagram,
    _home: TempDir,
}

impl NotifyDaemon {
    fn start(variables: &[(&str, &str)]) -> NotifyDaemon {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("notify");
        let messages = UnixDatagram::bind(&path).unwrap();
        messages.set_read_timeout(Some(WAIT_LIMIT)).unwrap();
        let mut command = larder_in(home.path());
        command.arg("--root").arg(home.path().join("store")).arg("serve");
        command.env("NOTIFY_SOCKET", &path).envs(variables.iter().copied());
        let socket = home.path().join("store/larder.sock");
        NotifyDaemon { running: LarderProcess::start(command), socket, messages, _home: home }
    }

    /// The next message, as one that is no sign of life.
    fn next(&self) -> String {
        loop {
            let message = self.any();
            if message != "WATCHDOG=1" {
                return message;
            }
        }
    }

    fn any(&self) -> String {
        let mut buffer = [0; 512];
        let length = self.messages.recv(&mut buffer).unwrap_or_else(|error| {
            panic!("no message: {error}\n{}", self.running.stderr());
        });
        String::from_utf8_lossy(&buffer[..length]).trim_end().to_owned()
    }
}

#[test]
fn a_service_manager_is_notified_of_readiness_reloads_and_stop() {
    let daemon = NotifyDaemon::start(&[]);
    assert_eq!(daemon.next(), "READY=1");
    assert!(UnixStream::connect(&daemon.socket).is_ok(), "ready is who can be asked");
    daemon.running.signal(Signal::HUP);
    let reloading = daemon.next();
    let since = reloading.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").expect(&reloading);
    assert!(since.parse::<u64>().is_ok_and(|since| since > 0), "{reloading}");
    assert_eq!(daemon.next(), "READY=1");
    daemon.running.signal(Signal::TERM);
    assert_eq!(daemon.next(), "STOPPING=1\nEXTEND_TIMEOUT_USEC=35000000", "30 s of grace, and a little");
    daemon.running.finish().expect(0);
}

#[test]
fn a_watchdog_hears_from_the_daemon_more_often_than_it_wants() {
    let period = Duration::from_millis(200);
    let daemon = NotifyDaemon::start(&[("WATCHDOG_USEC", &period.as_micros().to_string())]);
    assert_eq!(daemon.next(), "READY=1");
    let mut gaps = [(); 11].map(|()| {
        let start = Instant::now();
        assert_eq!(daemon.any(), "WATCHDOG=1");
        start.elapsed()
    });
    gaps.sort();
    // A machine that stands still delays some of them.
    assert!(gaps[5] < period.mul_f64(0.9), "{gaps:?}");
}

#[test]
fn a_signal_right_after_readiness_is_heard() {
    for signal in [Signal::TERM, Signal::INT] {
        let daemon = NotifyDaemon::start(&[]);
        assert_eq!(daemon.next(), "READY=1");
        daemon.running.signal(signal);
        daemon.running.finish().expect(0);
    }
}

#[test]
fn systemd_passes_its_socket_at_the_first_connection() {
    if !require(&[Package::Systemd]).is_available() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let socket = home.path().join("activated.sock");
    let larder = larder_in(home.path()).get_program().to_owned();
    let activate = find_program("systemd-socket-activate").expect("part of the package systemd");
    let mut command = Command::new(activate);
    command.current_dir(home.path()).env_clear().env("HOME", home.path());
    command.arg("-l").arg(&socket).arg(larder).arg("--root").arg(home.path().join("store")).arg("serve");
    let running = LarderProcess::start(command);
    wait_until("systemd listens", || UnixStream::connect(&socket).is_ok());
    let daemon = CriDaemon::at(socket.clone(), running);
    assert!(daemon.list().is_empty());
    daemon.wait_for_log(&format!("larder's own API: {}", socket.display()), 1);
    assert!(!home.path().join("store/larder.sock").exists(), "it makes none of its own");
    daemon.stop().expect(0);
    assert!(socket.exists(), "the socket is systemd's");
}

/// A daemon that gets this listener as systemd passes it.
pub(super) fn on_passed(
    listener: &UnixListener,
    world: &RuntimeFixture,
    arguments: &[&str],
) -> LarderProcess {
    rustix::io::fcntl_setfd(listener, rustix::io::FdFlags::empty()).unwrap();
    let plain = world.command(&[&["serve"], arguments].concat());
    let mut command = Command::new(find_program("bash").expect("an essential package"));
    let pass = format!("exec 3<&{}; LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" \"$@\"", listener.as_raw_fd());
    command.args(["-c", &pass]).arg(plain.get_program()).args(plain.get_args());
    let variables = plain.get_envs().filter_map(|(key, value)| Some((key, value?)));
    command.env_clear().envs(variables).current_dir(plain.get_current_dir().unwrap());
    LarderProcess::start(command)
}

#[test]
fn clients_of_systemds_socket_wait_through_a_restart() {
    let Some(world) = RuntimeFixture::with_store(RegistryOptions::default()) else { return };
    ImageBuilder::small(1, 500_000).push(&world.registry, "shop/web:1").unwrap();
    let gate = world.gate();
    let image = gate.image("shop/web:1");
    let socket = PathBuf::from(world.path("passed.sock"));
    let listener = UnixListener::bind(&socket).unwrap();
    let first = CriDaemon::at(socket.clone(), on_passed(&listener, &world, &[]));
    gate.hold_blobs_after(1000);
    let (client, name) = (client_of(socket.clone()), image.clone());
    let pull = first.runtime.spawn(async move {
        client.pull(&ImageSpec::named(name), None, None, &ProgressReporter::unwatched()).await
    });
    gate.wait_until_held(1);
    first.running.terminate();
    // gRPC's clients for Go send it again, to the next process.
    let ended = first.runtime.block_on(pull).unwrap().unwrap_err();
    assert!(ended.to_string().contains("refused stream"), "{ended}");
    let CriDaemon { running, runtime, .. } = first;
    running.finish().expect(0);
    let config = CriConfig { connect_timeout: WAIT_LIMIT, ..CriConfig::default() };
    let after = CriBackend::new(Endpoint::at(socket.clone()), config);
    let listed = runtime.spawn(async move { after.list().await });
    pause(Duration::from_millis(300));
    assert!(!listed.is_finished(), "it waits and is not refused");
    gate.open();
    let second = CriDaemon::at(socket, on_passed(&listener, &world, &[]));
    assert_eq!(runtime.block_on(listed).unwrap().map(|images| images.len()), Ok(0));
    second.stop().expect(0);
}

#[test]
fn a_daemon_that_systemd_does_not_restart_leaves_the_socket_to_the_next_one() {
    let service = unit("larder.service");
    assert!(service.lines().any(|line| line == "RestartPreventExitStatus=2"));
    let Some(world) = RuntimeFixture::with_store(RegistryOptions::default()) else { return };
    let socket = PathBuf::from(world.path("passed.sock"));
    let listener = UnixListener::bind(&socket).unwrap();
    // Settings that were never valid.
    let config =
        world.file("config.yaml", "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\nlogg: {}\n");
    let run = on_passed(&listener, &world, &["--config", &config]).finish().expect(2);
    assert!(run.stderr.contains("logg"), "{run:?}");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let client = client_of(socket.clone());
    let listed = runtime.spawn(async move { client.list().await });
    pause(Duration::from_millis(300));
    assert!(!listed.is_finished(), "it waits and is not refused");
    world.file("config.yaml", "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\n");
    let fixed = CriDaemon::at(socket, on_passed(&listener, &world, &["--config", &config]));
    assert_eq!(runtime.block_on(listed).unwrap().map(|images| images.len()), Ok(0));
    fixed.stop().expect(0);
}

#[test]
fn the_units_check_settings_before_a_reload_and_keep_the_socket() {
    let service = unit("larder.service");
    let lines: Vec<&str> = service.lines().collect();
    let at =
        |line: &str| lines.iter().position(|known| *known == line).unwrap_or_else(|| panic!("no {line}"));
    assert!(at("ExecReload=/usr/local/bin/larder config --check") < at("ExecReload=/bin/kill -HUP $MAINPID"));
    assert!(lines.contains(&"Requires=larder.socket") && lines.contains(&"Also=larder.socket"));
    // A larder that was killed is back within the second that a client of a present image may wait.
    assert!(lines.contains(&"RestartSec=250ms") && lines.contains(&"StartLimitIntervalSec=0"));
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("config.yaml");
    for (settings, code) in [("log: {level: debug}", 0), ("log: {level: loud}", 2)] {
        fs_err::write(
            &file,
            format!("apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\n{settings}\n"),
        )
        .unwrap();
        let mut command = larder_in(home.path());
        command.args(["config", "--check"]).env("LARDER_CONFIG", &file);
        LarderProcess::start(command).finish().expect(code);
    }
}

#[test]
fn the_units_start_before_containerd_and_kubelet_and_share_the_mounts_of_the_machine() {
    let words = |text: &str, key: &str| -> Vec<String> {
        let values = text.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        values.flat_map(str::split_whitespace).map(str::to_owned).collect()
    };
    let service = unit("larder.service");
    for text in [&service, &unit("larder.socket")] {
        assert_eq!(words(text, "Before"), ["containerd.service", "kubelet.service"]);
    }
    assert!(!words(&service, "After").contains(&"containerd.service".to_owned()), "no cycle");
    assert_eq!(words(&service, "Type"), ["notify"], "containerd starts once larder serves");
    for key in [
        "PrivateMounts",
        "PrivateTmp",
        "PrivateDevices",
        "ProtectSystem",
        "ProtectHome",
        "MountFlags",
        "ProtectProc",
    ] {
        assert_eq!(
            words(&service, key),
            [""; 0],
            "{key} makes a mount namespace: containerd would not see layers"
        );
    }
}

/// Returns root's capabilities in the unit, in the form of `setpriv`.
fn bounding_set() -> String {
    let unit = unit("larder.service");
    let line =
        unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet=")).expect("such a line");
    let kept = line.split(' ').map(|capability| capability.strip_prefix("CAP_").unwrap().to_lowercase());
    kept.fold("-all".to_owned(), |set, capability| set + ",+" + &capability)
}

#[test]
fn the_privileges_of_the_unit_suffice_for_any_image_and_for_mounts() {
    if !rustix::process::geteuid().is_root() {
        assert!(std::env::var_os("CI").is_none(), "CI must not skip this: run the tests as root");
        eprintln!("==== SKIPPED, NOT TESTED: what a service may do needs root ====");
        return;
    }
    let home = tempfile::tempdir().unwrap();
    // A program with capabilities of its own, in the form that the kernel keeps.
    let capable = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let rare = TarBuilder::new()
        .with(TarBuilderEntry::char_device("dev/zero", 1, 5))
        .with(TarBuilderEntry::file("bin/su", "x").mode(0o4755).owner(1000, 1000))
        .with(TarBuilderEntry::file("bin/ping", "x").xattr("security.capability", capable));
    let layers = [rare.finish()].into_iter().chain(archive::edge_case_layers());
    let image = layers.fold(ImageBuilder::new(), |image, layer| image.layer(LayerFiles::archive(layer)));
    image.write(&home.path().join("layout")).unwrap();
    fs_err::create_dir(home.path().join("mnt")).unwrap();
    let larder = |arguments: &[&str]| {
        let plain = larder_in(home.path());
        let mut command = Command::new(find_program("setpriv").expect("part of util-linux"));
        command.args([
            "--no-new-privs",
            "--inh-caps=-all",
            &format!("--bounding-set={}", bounding_set()),
            "--",
        ]);
        command.arg(plain.get_program()).current_dir(home.path()).env_clear().env("HOME", home.path());
        command.arg("--root").arg(home.path().join("store")).args(arguments);
        LarderProcess::start(command).finish()
    };
    larder(&["load", "layout", "--name", "registry.example/tricky"]).expect(0);
    larder(&["fsck"]).expect(0);
    larder(&["mount", "registry.example/tricky:image", "mnt"]).expect(0);
    let file = |name: &str| home.path().join("mnt").join(name);
    let (device, program) = (fs_err::metadata(file("dev/zero")), fs_err::metadata(file("bin/su")).unwrap());
    let mut kept = [0; 20];
    let capabilities = rustix::fs::getxattr(file("bin/ping"), "security.capability", &mut kept);
    larder(&["umount", "mnt"]).expect(0);
    assert!(device.is_ok_and(|device| device.file_type().is_char_device()));
    assert_eq!((program.mode() & 0o7777, program.uid()), (0o4755, 1000));
    assert_eq!((capabilities, kept), (Ok(20), capable));
}
