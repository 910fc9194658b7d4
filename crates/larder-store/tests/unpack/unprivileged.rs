//! Unpacking without root. Root runs this as another user; other users run it as is.

use std::os::unix::fs::MetadataExt as _;
use std::process::Command;

use larder_store::unpack::layer_manifest::RecordKind;
use larder_store::unpack::{LowerMergeMode, OverlayForm, OwnerMode, UnpackOptions};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry, edge_case_layers};
use larder_testkit_peers::process::copy_program;

use crate::support::{UnpackDir, capability};

#[test]
fn without_root_all_files_except_devices_are_unpacked() {
    if rustix::process::geteuid().is_root() {
        run_without_root("unprivileged::without_root_all_files_except_devices_are_unpacked");
        return;
    }
    let options = UnpackOptions::default();
    assert_eq!((options.owners, options.overlay), (OwnerMode::Record, OverlayForm::User));
    let layers = [UnpackDir::new(), UnpackDir::new()];
    for (layer, archive) in layers.iter().zip(edge_case_layers()) {
        let unpacked = layer.unpack_with(&archive, &archive, &options).unwrap();
        assert_eq!(unpacked.usage, layer.usage_on_disk());
    }
    let [lower, upper] = &layers;
    lower.settle(&[], LowerMergeMode::Apply).unwrap();
    upper.settle(&[lower], LowerMergeMode::Apply).unwrap();
    for layer in &layers {
        assert_eq!(layer.damage(), []);
        layer.assert_contained();
    }
    let device = lower.record("var/null");
    assert!(matches!(device.kind, RecordKind::Device { skipped: true, numbers: (1, 3), .. }));
    assert!(!lower.root().join("var/null").exists());
    assert_eq!(lower.record("etc/keep/b").uid, 1000);
    assert_eq!(lower.meta("etc/keep/b").uid(), rustix::process::geteuid().as_raw());
    assert_eq!(lower.meta("usr/bin/set").mode() & 0o7777, 0o4755);
    assert!(upper.is_whiteout("etc/keep/a"));
    let mut value = [0; 4];
    let length =
        rustix::fs::getxattr(upper.root().join("etc/opaque"), "user.overlay.opaque", &mut value[..]).unwrap();
    assert_eq!(&value[..length], b"y");
}

#[test]
fn without_root_devices_and_capabilities_are_counted() {
    if rustix::process::geteuid().is_root() {
        run_without_root("unprivileged::without_root_devices_and_capabilities_are_counted");
        return;
    }
    let archive = TarBuilder::new()
        .with(TarBuilderEntry::char_device("null", 1, 3))
        .with(
            TarBuilderEntry::file("ping", "x")
                .xattr("security.capability", capability())
                .xattr("user.kept", "1"),
        )
        .finish();
    let layer = UnpackDir::new();
    let unpacked = layer.unpack(&archive).unwrap();
    assert_eq!((unpacked.skipped_devices, unpacked.skipped_xattrs), (1, 1));
    assert!(layer.record("ping").xattrs.is_some());
    assert_eq!(layer.damage(), []);
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
