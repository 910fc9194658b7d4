//! Layers that only the layers below complete.

use std::os::unix::fs::MetadataExt as _;

use larder_store::unpack::files::RecordKind;
use larder_store::unpack::{Refusal, Settled, Settling, UnpackError};
use larder_testkit::archive::{Archive, Entry};

use crate::support::{Layer, is_root};

/// Layers unpacked, the lowest first, and settled each on those below it.
fn stack<const N: usize>(layers: [Vec<Entry>; N]) -> [Layer; N] {
    let layers = layers.map(|entries| {
        let layer = Layer::new();
        layer.unpack(&Archive::new().extend(entries).finish()).unwrap();
        layer
    });
    for at in 0..N {
        settle(&layers, at, Settling::Apply).unwrap();
    }
    layers
}

fn settle(layers: &[Layer], at: usize, settling: Settling) -> Result<Settled, UnpackError> {
    let lowers: Vec<&Layer> = layers[..at].iter().rev().collect();
    let before = layers[at].usage_on_disk();
    let settled = layers[at].settle(&lowers, settling)?;
    let after = layers[at].usage_on_disk();
    assert_eq!(after.inodes - before.inodes, settled.added.inodes);
    assert_eq!(after.allocated_bytes - before.allocated_bytes, settled.added.allocated_bytes);
    assert_eq!(layers[at].damage(), []);
    Ok(settled)
}

#[test]
fn an_implied_directory_looks_like_the_one_below() {
    if !is_root() {
        return;
    }
    let [_, _, top] = stack([
        vec![
            Entry::dir("."),
            Entry::dir("etc").mode(0o2750).owner(3, 4).mtime(99).xattr("user.a", "1"),
            Entry::dir("etc/sub").mode(0o700),
            Entry::dir("plain"),
        ],
        vec![Entry::file("etc/other", "")],
        vec![Entry::file("etc/sub/f", ""), Entry::file("plain/f", ""), Entry::file("own/f", "")],
    ]);
    let meta = top.meta("etc");
    assert_eq!((meta.mode() & 0o7777, meta.uid(), meta.gid(), meta.mtime()), (0o2750, 3, 4, 99));
    assert_eq!(top.meta("etc/sub").mode() & 0o777, 0o700);
    assert_eq!(top.meta("own").mode() & 0o777, 0o755);
    let record = top.record("etc");
    assert_eq!((record.mode, record.uid, record.gid), (0o2750, 3, 4));
    assert!(record.xattrs.is_some());
    assert!(matches!(record.kind, RecordKind::Directory { implicit: true, .. }));
}

#[test]
fn only_what_is_seen_below_counts() {
    if !is_root() {
        return;
    }
    let [.., top] = stack([
        vec![
            Entry::dir("gone").mode(0o700),
            Entry::dir("o").mode(0o711),
            Entry::dir("o/d").mode(0o700),
            Entry::dir("f").mode(0o700),
        ],
        vec![
            Entry::file(".wh.gone", ""),
            Entry::dir("o").mode(0o712),
            Entry::file("o/.wh..wh..opq", ""),
            Entry::file("f", ""),
        ],
        vec![Entry::file("gone/x", ""), Entry::file("o/d/x", ""), Entry::file("f/x", "")],
    ]);
    for (path, mode) in [("gone", 0o755), ("o", 0o712), ("o/d", 0o755), ("f", 0o755)] {
        assert_eq!(top.meta(path).mode() & 0o777, mode, "{path}");
    }
}

#[test]
fn a_directory_that_replaces_a_link_looks_like_its_target() {
    let [_, top] = stack([
        vec![
            Entry::dir("usr/lib").mode(0o711),
            Entry::symlink("lib", "usr/lib"),
            Entry::symlink("out", "/../../etc"),
        ],
        vec![Entry::file("lib/x", ""), Entry::file("out/x", "")],
    ]);
    assert!(top.meta("lib").is_dir());
    assert_eq!(top.meta("lib").mode() & 0o777, 0o711);
    assert_eq!(top.meta("out").mode() & 0o777, 0o755);
}

#[test]
fn most_layers_can_be_shared_by_all_images() {
    let archive = |entries: Vec<Entry>| Archive::new().extend(entries).finish();
    let unpack = |bytes: Vec<u8>| {
        let layer = Layer::new();
        layer.unpack(&bytes).unwrap();
        layer
    };
    let usual = unpack(archive(vec![Entry::dir("."), Entry::dir("usr").mtime(1)]));
    let other = unpack(archive(vec![Entry::dir("."), Entry::dir("usr").mtime(2)]));
    let strict = unpack(archive(vec![Entry::dir("."), Entry::dir("usr").mode(0o700)]));
    let shared = unpack(archive(vec![Entry::file("usr/f", "")]));
    assert!(!shared.settle(&[&usual], Settling::Apply).unwrap().changed);
    assert!(!shared.settle(&[&other], Settling::Check).unwrap().changed);
    assert!(shared.settle(&[&strict], Settling::Check).unwrap().changed);
    assert_eq!(shared.meta("usr").mode() & 0o777, 0o755, "checking changes nothing");
    assert!(shared.settle(&[&strict], Settling::Apply).unwrap().changed);
    assert!(!shared.settle(&[&strict], Settling::Apply).unwrap().changed, "once is enough");
}

#[test]
fn a_hard_link_to_a_lower_file_becomes_a_copy_with_both_names() {
    if !is_root() {
        return;
    }
    let [_, top] = stack([
        vec![
            Entry::dir("bin").mode(0o711).mtime(50),
            Entry::file("bin/tool", "program").mode(0o4755).owner(1, 2).mtime(77).xattr("user.x", "1"),
            Entry::symlink("sbin", "bin"),
            Entry::symlink("bin/link", "tool"),
        ],
        vec![
            Entry::dir("usr").mtime(60),
            Entry::hard_link("usr/tool", "sbin/tool"),
            Entry::hard_link("usr/again", "bin/tool"),
            Entry::hard_link("usr/link", "bin/link"),
        ],
    ]);
    assert_eq!(top.read("usr/tool"), "program");
    let (first, second) = (top.meta("usr/tool"), top.meta("bin/tool"));
    assert_eq!((first.ino(), first.nlink()), (second.ino(), 3));
    assert_eq!((first.mode() & 0o7777, first.uid(), first.gid(), first.mtime()), (0o4755, 1, 2, 77));
    assert_eq!((top.meta("bin").mode() & 0o777, top.meta("bin").mtime()), (0o711, 50));
    assert_eq!(top.meta("usr").mtime(), 60);
    assert!(top.meta("usr/link").is_symlink());
    assert_eq!(top.record("usr/tool").kind, RecordKind::HardLink { target: b"bin/tool".to_vec() });
}

#[test]
fn a_link_to_what_the_layer_then_removes_keeps_the_content() {
    let [_, top] = stack([
        vec![Entry::file("old", "moved")],
        vec![Entry::hard_link("new", "old"), Entry::file(".wh.old", "")],
    ]);
    assert_eq!(top.read("new"), "moved");
    assert!(top.is_whiteout("old"));
}

#[test]
fn a_hard_link_to_nothing_or_to_a_directory_is_refused() {
    for (lower, reason) in [
        (vec![Entry::dir("d")], Refusal::LinkTarget),
        (vec![Entry::dir("x")], Refusal::LinkToDirectory),
        (vec![Entry::symlink("x", "x2"), Entry::symlink("x2", "x")], Refusal::LinkTarget),
    ] {
        let archive = |entries: Vec<Entry>| Archive::new().extend(entries).finish();
        let (below, top) = (Layer::new(), Layer::new());
        below.unpack(&archive(lower)).unwrap();
        let target = if reason == Refusal::LinkTarget { "x/none" } else { "x" };
        top.unpack(&archive(vec![Entry::hard_link("l", target)])).unwrap();
        match top.settle(&[&below], Settling::Apply).unwrap_err() {
            UnpackError::Refused { reason: found, .. } => assert_eq!(found, reason),
            // Links in a circle.
            UnpackError::File { cause, .. } => assert_eq!(cause.raw_os_error(), Some(40)),
            other => panic!("{other:?}"),
        }
        top.assert_contained();
    }
}
