//! A disk without a free byte or inode: removing images must work, since nothing else makes room, and saving them
//! elsewhere.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::Path;

use larder_testkit_peers::process::wait_until;
use larder_testkit_peers::{ImageBuilder, LayerFiles, LoopDisk, LoopFilesystem};

use crate::world::{LarderOutput, LarderProcess, larder_in};

/// Takes all inodes or all bytes.
fn fill(disk: &Path, inodes: bool) {
    let filler = disk.join("filler");
    fs_err::create_dir(&filler).unwrap();
    let mut file = fs_err::File::create(filler.join("bytes")).unwrap();
    if inodes {
        let mut number = 0;
        while fs_err::write(filler.join(number.to_string()), "").is_ok() {
            number += 1;
        }
    } else {
        for size in [1 << 20, 4096] {
            let block = vec![1; size];
            while file.write_all(&block).and_then(|()| file.sync_data()).is_ok() {}
        }
    }
    let free = rustix::fs::statvfs(disk).unwrap();
    assert_eq!(if inodes { free.f_ffree } else { free.f_bavail }, 0);
}

#[test]
fn images_are_saved_and_removed_on_a_full_disk() {
    if !LoopFilesystem::Ext4.is_available() {
        return;
    }
    for inodes in [false, true] {
        let disk = LoopDisk::new(LoopFilesystem::Ext4, 96, &["-N", "1500"]).unwrap();
        let home = tempfile::tempdir().unwrap();
        let settings = "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\n\
                        pull: {ensuredLease: 0s}\nstore: {reserveBytes: 1MiB, reserveInodes: 10}\n";
        fs_err::write(home.path().join("larder.yaml"), settings).unwrap();
        let larder = |arguments: &[&str]| -> LarderOutput {
            let mut command = larder_in(home.path());
            command.env("LARDER_CONFIG", home.path().join("larder.yaml"));
            command.arg("--root").arg(disk.path().join("store")).args(arguments);
            LarderProcess::start(command).finish()
        };
        for number in 0..3 {
            let layout = home.path().join(format!("layout-{number}"));
            let layers = (0..20).map(|at| LayerFiles::new().file(format!("{number}/{at}"), "x"));
            layers.fold(ImageBuilder::new(), ImageBuilder::layer).write(&layout).unwrap();
            let name = format!("registry.example/app-{number}");
            larder(&["load", &layout.to_string_lossy(), "--name", &name]).expect(0);
        }
        // As after a failed sync, or a rebuild.
        fs_err::write(disk.path().join("store/larder.db-wal"), "").unwrap();
        larder(&["images"]).expect(0);
        larder(&["lease", "registry.example/app-1:image", "1h"]).expect(0);
        fill(&disk.path(), inodes);
        let mut new = larder_in(home.path());
        new.arg("--root")
            .arg(disk.path().join("new"))
            .args(["load", &home.path().join("layout-0").to_string_lossy()]);
        let refused = LarderProcess::start(new).finish().expect(3);
        assert!(refused.stderr.contains("hint: free disk space"), "inodes: {inodes}: {refused:?}");
        for state in [&["keep", "registry.example/*"][..], &["lease", "registry.example/app-0:image", "1h"]] {
            let refused = larder(state).expect(1);
            let names_both = refused.stderr.contains("/store/collect/")
                && refused.stderr.contains("hint: free disk space: larder ");
            assert!(names_both, "inodes: {inodes}: {refused:?}");
        }
        let refused = larder(&["pull", "registry.invalid/app:1"]).expect(1);
        // Kubelet's text has it twice.
        assert_eq!(refused.stderr.matches("ecord image pull intent").count(), 2, "{refused:?}");
        assert!(refused.stderr.contains("hint: free disk space: larder "), "{refused:?}");
        let archive = home.path().join("app-0.tar").to_string_lossy().into_owned();
        larder(&["save", "-o", &archive, "registry.example/app-0:image"]).expect(0);
        let removed = larder(&["rm", "registry.example/app-0:image"]).expect(0);
        assert!(!removed.stderr.contains("error=\""), "no fields of the log: {removed:?}");
        let arguments =
            ["gc", "--all-unused", "--force", "--force-leases", "--minimum-image-ttl-duration", "0"];
        let collected = larder(&arguments).expect(0);
        assert!(collected.stdout.contains("removed 2 images"), "inodes: {inodes}: {collected:?}");
        assert_eq!(larder(&["images", "-q"]).expect(0).stdout, "");
        larder(&["fsck"]).expect(0);
    }
}

/// GC of a daemon must run on a full disk, where the daemon cannot record where it listens.
#[test]
fn a_daemon_that_started_on_a_full_disk_is_found_once_there_is_space() {
    if !LoopFilesystem::Ext4.is_available() {
        return;
    }
    let disk = LoopDisk::new(LoopFilesystem::Ext4, 96, &[]).unwrap();
    let home = tempfile::tempdir().unwrap();
    let socket = home.path().join("s");
    let start = |arguments: &[&str]| {
        let mut command = larder_in(home.path());
        command.arg("--root").arg(disk.path().join("store")).args(arguments);
        LarderProcess::start(command)
    };
    let layout = home.path().join("layout");
    ImageBuilder::small(1, 1000).write(&layout).unwrap();
    start(&["load", &layout.to_string_lossy(), "--name", "registry.example/app"]).finish().expect(0);
    fill(&disk.path(), false);
    let daemon = start(&["serve", "--metrics-address", "", "--socket", &socket.to_string_lossy()]);
    wait_until("the daemon serves", || UnixStream::connect(&socket).is_ok());
    let waited = start(&["--timeout", "1", "status"]).finish().expect(3);
    for part in ["starts or stops", "hint: if it runs, select it with --daemon SOCKET", "hint: waited 1s"] {
        assert!(waited.stderr.contains(part), "{part}: {waited:?}");
    }
    let daemon_flag = ["--daemon", &format!("unix://{}", socket.display())];
    start(&[&daemon_flag[..], &["status"]].concat()).finish().expect(0);
    let mut other = larder_in(home.path());
    other.arg("--root").arg(home.path().join("other")).args(daemon_flag).arg("status");
    let refused = LarderProcess::start(other).finish().expect(2);
    assert!(refused.stderr.contains("serves other images"), "{refused:?}");
    fs_err::remove_dir_all(disk.path().join("filler")).unwrap();
    wait_until("the daemon has recorded its socket", || disk.path().join("store/daemon").exists());
    let status = start(&["-v", "status"]).finish().expect(0);
    assert!(status.stderr.contains("using the daemon at"), "{status:?}");
    daemon.terminate();
    daemon.finish().expect(0);
    assert!(!disk.path().join("store/daemon").exists());
}
