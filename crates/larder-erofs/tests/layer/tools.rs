//! `fsck.erofs` and `dump.erofs` accept every layer.

use std::path::Path;
use std::process::Command;

use larder_testkit_peers::packages::{Package, find_program};
use larder_testkit_peers::require;
use proptest::collection::vec;
use proptest::test_runner::{Config, TestRunner};

use crate::properties::{accepted, script_entry};
use crate::script::{ScriptEntry, ScriptKind, dir, entry, file, hard_link, noise, symlink, write};

/// Something of everything.
pub(crate) fn all_kinds() -> Vec<ScriptEntry> {
    let capability = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let mut acl = 2u32.to_le_bytes().to_vec();
    for (tag, bits, id) in
        [(1u16, 6u16, u32::MAX), (2, 4, 1000), (4, 4, u32::MAX), (16, 4, u32::MAX), (32, 0, u32::MAX)]
    {
        acl.extend(tag.to_le_bytes());
        acl.extend(bits.to_le_bytes());
        acl.extend(id.to_le_bytes());
    }
    let mut entries = vec![
        dir("/").mode(0o751).owner(1, 2).xattr("user.root", "yes"),
        file("empty", "").mtime(0, 0),
        file("bin/ping", noise(5000, 1)).mode(0o4755).xattr("security.capability", capability),
        file("acl", noise(4096, 2)).mode(0o640).xattr("system.posix_acl_access", acl.clone()),
        dir("shared").mode(0o3770).xattr("system.posix_acl_default", acl).owner(70_000, 80_000),
        file("note", "x").xattr("user.note", noise(9000, 3)).xattr("trusted.overlay.metacopy", ""),
        file("before 1970", noise(8191, 4)).mtime(-1_000_000, 7),
        hard_link("bin/ping6", "bin/ping"),
        symlink("short", "bin/ping"),
        symlink("long", [b"./".repeat(1500), b"empty".to_vec()].concat()),
        symlink("longest", [b"./".repeat(2045), b"empty".to_vec()].concat()),
        entry("pipe", ScriptKind::Fifo).mode(0o600),
        entry("dev/null", ScriptKind::CharDevice(1, 3)).mode(0o666),
        entry("dev/disk", ScriptKind::BlockDevice(259, 65_537)),
        entry("hidden/.wh.gone", ScriptKind::Fifo),
        entry("hidden/.wh.too", ScriptKind::Fifo),
        entry("opaque/.wh..wh..opq", ScriptKind::Fifo),
        entry(
            "sparse",
            ScriptKind::Sparse(10 << 20, vec![(5000, noise(100, 5)), (9 << 20, noise(90_000, 6))]),
        ),
        file(vec![vec![b'd'; 255]; 12].join(&b'/'), "deep"),
        file("weird/\u{fc}\n\"\\\x01", "name"),
    ];
    entries.extend((0..600).map(|at| file(format!("many/{at:0>100}"), noise(at * 13 % 5000, at as u64))));
    entries
}

fn check(layer: &[u8]) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("layer");
    // fsck.erofs 1.5 reads the header of attributes behind each inode, also where the inode has none and the file ends.
    let padding = [0; 4096];
    fs_err::write(&path, [layer, &padding[..]].concat()).unwrap();
    run("fsck.erofs", &["--extract"], &path);
    run("dump.erofs", &["-s", "-S"], &path);
}

fn run(program: &str, arguments: &[&str], layer: &Path) {
    let program = find_program(program).unwrap();
    let output = Command::new(&program).args(arguments).arg(layer).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    assert!(output.status.success() && !text.contains("<E>"), "{}: {text}", program.display());
}

#[test]
fn fsck_accepts_a_layer_of_all_kinds() {
    if !require(&[Package::ErofsUtils]).is_available() {
        return;
    }
    check(&write(&all_kinds()).unwrap().0);
    check(&write(&[]).unwrap().0);
}

#[test]
fn fsck_accepts_random_layers() {
    if !require(&[Package::ErofsUtils]).is_available() {
        return;
    }
    let mut runner = TestRunner::new(Config { cases: 25, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&vec(script_entry(), 0..60), |entries| {
        check(&write(&accepted(entries).0).unwrap().0);
        Ok(())
    });
    outcome.unwrap();
}

/// Some versions report damage, but return success.
#[test]
fn fsck_reports_a_damaged_layer() {
    if !require(&[Package::ErofsUtils]).is_available() {
        return;
    }
    let mut layer = write(&all_kinds()).unwrap().0;
    layer[1024 + 36] ^= 1;
    assert!(std::panic::catch_unwind(|| check(&layer)).is_err(), "the checksum is wrong");
}
