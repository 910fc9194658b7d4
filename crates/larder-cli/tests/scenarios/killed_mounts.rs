//! The daemon is killed with a hundred mounts of twenty images: none is lost, and nothing is left of it in the end.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use larder_testkit_peers::process::poll;
use larder_testkit_peers::{ImageBuilder, LayerFiles};
use rustix::process::Signal;
use tempfile::TempDir;

use super::store::may_mount;
use crate::world::{LarderOutput, LarderProcess, larder_in};

const IMAGES: usize = 20;
const MOUNTS: usize = 100;
/// Mounts that are being made when the daemon is killed.
const STARTED: usize = 20;

/// Layers of all images: one that they share, and one for each.
const LAYERS: usize = IMAGES + 1;

struct MountMachine {
    home: TempDir,
}

impl MountMachine {
    fn root(&self) -> PathBuf {
        self.home.path().join("store")
    }

    fn target(&self, number: usize) -> PathBuf {
        self.home.path().join(format!("mnt/{number}"))
    }

    fn start(&self, arguments: &[&str]) -> LarderProcess {
        let mut command = larder_in(self.home.path());
        command.arg("--root").arg(self.root()).args(arguments);
        LarderProcess::start(command)
    }

    fn larder(&self, arguments: &[&str]) -> LarderOutput {
        self.start(arguments).finish()
    }

    fn serve(&self) -> LarderProcess {
        let socket = self.home.path().join("larder.sock").to_string_lossy().into_owned();
        let daemon = self.start(&["serve", "--socket", &socket, "--metrics-address", ""]);
        poll(Duration::from_secs(30), || (self.larder(&["status"]).code == 0).then_some(()))
            .expect("it serves");
        daemon
    }

    fn load_images(&self) {
        let base = LayerFiles::new().file("etc/base", "base");
        for number in 0..IMAGES {
            let own = LayerFiles::new().file("etc/number", number.to_string());
            let layout = self.home.path().join(format!("layout{number}"));
            ImageBuilder::new().layer(base.clone()).layer(own).write(&layout).unwrap();
            let name = format!("registry.example/app{number}");
            self.larder(&["load", &layout.to_string_lossy(), "--name", &name]).expect(0);
        }
    }

    fn mount(&self, number: usize) -> LarderProcess {
        let target = self.target(number);
        fs_err::create_dir_all(&target).unwrap();
        let image = format!("registry.example/app{}:image", number % IMAGES);
        self.start(&["mount", &image, &target.to_string_lossy()])
    }

    /// Returns the directories that `larder mounts` lists as mounted.
    fn listed(&self) -> BTreeSet<PathBuf> {
        let mounts = self.larder(&["mounts", "-o", "json"]).expect(0).json();
        let mounted = mounts.as_array().unwrap().iter().filter(|mount| mount["mounted"] == true);
        mounted.map(|mount| PathBuf::from(mount["target"].as_str().unwrap())).collect()
    }

    /// Mountpoints of this kind below the machine's directory, as the kernel lists them.
    fn mounted(&self, kind: &str) -> Vec<PathBuf> {
        let table = fs_err::read_to_string("/proc/self/mounts").unwrap();
        let mounts = table.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let ours =
            mounts.filter(|mount| mount[2] == kind && Path::new(mount[1]).starts_with(self.home.path()));
        ours.map(|mount| PathBuf::from(mount[1])).collect()
    }

    /// Loop devices whose file is in the store.
    fn loop_devices(&self) -> usize {
        let devices = fs_err::read_dir("/sys/block").unwrap().map(|device| device.unwrap().path());
        let files =
            devices.filter_map(|device| fs_err::read_to_string(device.join("loop/backing_file")).ok());
        files.filter(|file| Path::new(file.trim()).starts_with(self.root())).count()
    }

    /// Whether the kernel mounts images of this filesystem through loop devices.
    fn needs_loop_devices(&self) -> bool {
        let described = self.larder(&["df", "-v"]).expect(0).stdout;
        assert!(described.contains("layers: EROFS, mounted "), "{described}");
        described.contains("through loop devices")
    }

    /// Checks what is mounted. Mounts that the kernel has are listed, and the other way round.
    fn check_mounts(&self, at_least: usize) {
        let listed = self.listed();
        let overlays: BTreeSet<_> = self.mounted("overlay").into_iter().collect();
        assert_eq!(listed, overlays);
        assert!(listed.len() >= at_least, "{} mounts", listed.len());
        for number in 0..at_least {
            let content = fs_err::read_to_string(self.target(number).join("etc/number")).unwrap();
            assert_eq!(content, (number % IMAGES).to_string());
        }
        assert_eq!(self.mounted("erofs").len(), LAYERS, "each layer is mounted once");
        assert_eq!(self.loop_devices(), if self.needs_loop_devices() { LAYERS } else { 0 });
    }

    /// Files of the store's layers that a process has open.
    fn open_layers(&self, daemon: &LarderProcess) -> Vec<PathBuf> {
        let open = fs_err::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap();
        let open = open.filter_map(|entry| fs_err::read_link(entry.unwrap().path()).ok());
        let of_layers = |file: &PathBuf| {
            ["layers", "lowers", "mounts"].iter().any(|dir| file.starts_with(self.root().join(dir)))
        };
        open.filter(of_layers).collect()
    }
}

impl Drop for MountMachine {
    fn drop(&mut self) {
        for kind in ["overlay", "erofs"] {
            for target in self.mounted(kind) {
                let _ = rustix::mount::unmount(&target, rustix::mount::UnmountFlags::DETACH);
            }
        }
    }
}

fn survive_a_kill(machine: &MountMachine) {
    let daemon = machine.serve();
    machine.load_images();
    for number in 0..MOUNTS {
        machine.mount(number).finish().expect(0);
    }
    machine.check_mounts(MOUNTS);
    assert_eq!(machine.open_layers(&daemon), Vec::<PathBuf>::new());

    let started: Vec<_> = (MOUNTS..MOUNTS + STARTED).map(|number| machine.mount(number)).collect();
    daemon.signal(Signal::KILL);
    drop(daemon);
    // Those that found no daemon any more made their mounts themselves.
    for mount in started {
        mount.finish();
    }

    let daemon = machine.serve();
    machine.check_mounts(MOUNTS);
    assert_eq!(machine.open_layers(&daemon), Vec::<PathBuf>::new());
    machine.larder(&["rm", "registry.example/app0:image"]).expect(1);
    for target in machine.listed() {
        machine.larder(&["umount", &target.to_string_lossy()]).expect(0);
    }
    assert_eq!(machine.listed().len(), 0);
    assert_eq!((machine.mounted("overlay").len(), machine.mounted("erofs").len()), (0, 0));
    let gone = || (machine.loop_devices() == 0).then_some(());
    poll(Duration::from_secs(10), gone).expect("no loop device is left");
    assert_eq!(machine.open_layers(&daemon), Vec::<PathBuf>::new());
    for dir in ["lowers", "mounts"] {
        assert_eq!(fs_err::read_dir(machine.root().join(dir)).unwrap().count(), 0, "{dir}");
    }
    machine.larder(&["rm", "registry.example/app0:image"]).expect(0);
}

#[test]
fn a_killed_daemon_loses_no_mount_and_leaks_nothing() {
    if may_mount() {
        survive_a_kill(&MountMachine { home: tempfile::tempdir().unwrap() });
    }
}

/// Linux mounts no image from a file of a tmpfs.
#[test]
fn a_killed_daemon_leaks_no_loop_device() {
    if may_mount() {
        let home = tempfile::tempdir_in("/dev/shm").unwrap();
        let machine = MountMachine { home };
        survive_a_kill(&machine);
        assert!(machine.needs_loop_devices());
    }
}
