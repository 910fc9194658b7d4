//! Unpacking without root. Root runs this as another user; other users run it as is.

use std::process::Command;

use larder_erofs::InodeKind;
use larder_store::unpack::open_layer;
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use larder_testkit_peers::process::copy_program;

use crate::support::{UnpackDir, capability};

#[test]
fn without_root_a_layer_has_devices_owners_and_capabilities() {
    if rustix::process::geteuid().is_root() {
        run_without_root("unprivileged::without_root_a_layer_has_devices_owners_and_capabilities");
        return;
    }
    let archive = TarBuilder::new()
        .with(TarBuilderEntry::char_device("null", 1, 3))
        .with(
            TarBuilderEntry::file("ping", "x")
                .mode(0o4750)
                .owner(1000, 70_000)
                .xattr("security.capability", capability()),
        )
        .finish();
    let layer = UnpackDir::new();
    let unpacked = layer.unpack(&archive).unwrap();
    assert_eq!(unpacked.skipped_xattrs, 0);
    let files = open_layer(&layer.layer()).unwrap();
    let [null, ping] = ["null", "ping"].map(|path| files.find(path.as_bytes()).unwrap().unwrap());
    assert_eq!((null.kind, null.rdev), (InodeKind::CharDevice, (1, 3)));
    assert_eq!((ping.mode, ping.uid, ping.gid), (0o4750, 1000, 70_000));
    assert_eq!(files.xattrs(&ping).unwrap(), [(b"security.capability".to_vec(), capability())]);
}

/// Runs one test of this program again, as a user without privileges.
fn run_without_root(test: &str) {
    let dir = tempfile::tempdir().unwrap();
    // The build directory may be closed to others.
    let program = dir.path().join("tests");
    copy_program(&std::env::current_exe().unwrap(), &program);
    std::os::unix::fs::chown(dir.path(), Some(65_534), Some(65_534)).unwrap();
    let run = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"])
        .arg(&program)
        .args(["--exact", test, "--nocapture"])
        .env("TMPDIR", dir.path())
        .current_dir(dir.path())
        .output()
        .unwrap();
    let said = [run.stdout, run.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(run.status.success() && said.contains("1 passed"), "{said}");
}
