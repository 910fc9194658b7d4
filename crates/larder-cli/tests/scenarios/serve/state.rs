//! A place for the state that cannot be used, or not for long, and a socket as the settings want it.

use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::Command;

use larder_testkit_peers::process::wait_until;
use larder_testkit_peers::{ImageBuilder, Package, RegistryOptions, RegistryProcess, require};

use crate::collect::MountedDisk;
use crate::served::CriDaemon;
use crate::world::{LarderOutput, LarderProcess, larder_in};

/// A daemon on a store in this directory that exits with an error.
fn refused(home: &Path, root: &Path) -> LarderOutput {
    start(home, root).finish()
}

fn start(home: &Path, root: &Path) -> LarderProcess {
    let mut command = larder_in(home);
    command.arg("--root").arg(root).arg("serve");
    LarderProcess::start(command)
}

fn serving(home: &Path, root: &Path) -> CriDaemon {
    CriDaemon::at(root.join("larder.sock"), start(home, root))
}

#[track_caller]
fn says(run: &LarderOutput, words: &[&str]) {
    assert!(words.iter().all(|word| run.stderr.contains(word)), "{words:?}: {run:?}");
}

#[test]
fn a_store_of_another_format_is_refused_and_not_changed() {
    let home = tempfile::tempdir().unwrap();
    let root = home.path().join("store");
    serving(home.path(), &root).stop().expect(0);
    fs_err::write(root.join("format"), "larder store 99\n").unwrap();
    let run = refused(home.path(), &root).expect(3);
    says(
        &run,
        &["has unsupported format \"larder store 99\"", "hint: use the version of larder that wrote it"],
    );
    assert_eq!(fs_err::read_to_string(root.join("format")).unwrap(), "larder store 99\n");
}

#[test]
fn a_store_that_cannot_be_written_is_refused_with_what_to_do() {
    let Some(disk) = MountedDisk::new(16) else { return };
    let (home, root) = (disk.home(), disk.path().join("store"));
    serving(home, &root).stop().expect(0);
    let remount = |how: &str| {
        let status = Command::new("mount").args(["-o", how]).arg(disk.path()).status();
        assert!(status.unwrap().success());
    };
    remount("remount,ro");
    for root in [root.clone(), disk.path().join("new")] {
        says(
            &refused(home, &root).expect(3),
            &["Read-only file system", "hint: the filesystem is read-only"],
        );
    }
    let mut images = larder_in(home);
    images.arg("--root").arg(&root).arg("images");
    says(
        &LarderProcess::start(images).finish().expect(3),
        &["Read-only file system", "mount it for writing, or use another directory with --root DIR"],
    );
    remount("remount,rw");
    serving(home, &root).stop().expect(0);
}

#[test]
fn on_a_full_disk_the_daemon_refuses_pulls_until_space_is_free() {
    if !require(&[Package::DockerRegistry, Package::Skopeo]).is_available() {
        return;
    }
    let Some(disk) = MountedDisk::new(160) else { return };
    let (home, root) = (disk.home(), disk.path().join("store"));
    let registry = RegistryProcess::start(RegistryOptions::default()).unwrap();
    ImageBuilder::small(1, 3_000_000).push(&registry, "shop/web:1").unwrap();
    let image = registry.image("shop/web:1");
    serving(home, &root).stop().expect(0);
    disk.fill_to(95);
    let filler = disk.path().join("filler");
    let mut rest = fs_err::OpenOptions::new().append(true).open(&filler).unwrap();
    while rest.write_all(&[0; 4096]).is_ok() {}
    drop(rest);
    says(
        &refused(home, &disk.path().join("new")).expect(3),
        &["No space left on device", "hint: free disk space"],
    );

    let daemon = serving(home, &root);
    let error = daemon.pull(&image).unwrap_err().to_string();
    assert!(error.contains("free"), "{error}");
    assert!(daemon.list().is_empty());
    wait_until("it is ready all the same", || daemon.is_ready());
    daemon.wait_for_log("Insufficient free disk space", 1);
    assert_eq!(daemon.logged("image garbage collection failed"), 0, "the event reports it");
    fs_err::remove_file(filler).unwrap();
    daemon.pull(&image).unwrap();
    daemon.stop().expect(0);
}

#[test]
fn the_socket_has_the_mode_and_group_of_the_settings() {
    let home = tempfile::tempdir().unwrap();
    let root = home.path().join("store");
    let group = if rustix::process::geteuid().is_root() { 1 } else { rustix::process::getegid().as_raw() };
    let config = home.path().join("config.yaml");
    let listen = format!("listen:\n  mode: \"0620\"\n  group: \"{group}\"\n");
    fs_err::write(&config, format!("apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\n{listen}"))
        .unwrap();
    let mut command = larder_in(home.path());
    command.arg("--root").arg(&root).arg("serve").arg("--config").arg(&config);
    let daemon = CriDaemon::at(root.join("larder.sock"), LarderProcess::start(command));
    let found = fs_err::metadata(&daemon.socket).unwrap();
    assert_eq!((found.permissions().mode() & 0o7777, found.gid()), (0o620, group));
    daemon.stop().expect(0);
    assert!(!root.join("larder.sock").exists());
}
