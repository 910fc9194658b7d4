//! Layers that only the layers below complete.

use std::os::unix::fs::MetadataExt as _;

use larder_store::unpack::layer_manifest::RecordKind;
use larder_store::unpack::{EntryRefusal, LowerMergeMode, LowerMergeReport, UnpackError};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};

use crate::support::{UnpackDir, is_root};

/// Layers unpacked, the lowest first, and settled each on those below it.
fn stack<const N: usize>(layers: [Vec<TarBuilderEntry>; N]) -> [UnpackDir; N] {
    let layers = layers.map(|entries| {
        let layer = UnpackDir::new();
        layer.unpack(&TarBuilder::new().extend(entries).finish()).unwrap();
        layer
    });
    for at in 0..N {
        settle(&layers, at, LowerMergeMode::Apply).unwrap();
    }
    layers
}

fn settle(
    layers: &[UnpackDir],
    at: usize,
    settling: LowerMergeMode,
) -> Result<LowerMergeReport, UnpackError> {
    let lowers: Vec<&UnpackDir> = layers[..at].iter().rev().collect();
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
            TarBuilderEntry::dir("."),
            TarBuilderEntry::dir("etc").mode(0o2750).owner(3, 4).mtime(99).xattr("user.a", "1"),
            TarBuilderEntry::dir("etc/sub").mode(0o700),
            TarBuilderEntry::dir("plain"),
        ],
        vec![TarBuilderEntry::file("etc/other", "")],
        vec![
            TarBuilderEntry::file("etc/sub/f", ""),
            TarBuilderEntry::file("plain/f", ""),
            TarBuilderEntry::file("own/f", ""),
        ],
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
            TarBuilderEntry::dir("gone").mode(0o700),
            TarBuilderEntry::dir("o").mode(0o711),
            TarBuilderEntry::dir("o/d").mode(0o700),
            TarBuilderEntry::dir("f").mode(0o700),
        ],
        vec![
            TarBuilderEntry::file(".wh.gone", ""),
            TarBuilderEntry::dir("o").mode(0o712),
            TarBuilderEntry::file("o/.wh..wh..opq", ""),
            TarBuilderEntry::file("f", ""),
        ],
        vec![
            TarBuilderEntry::file("gone/x", ""),
            TarBuilderEntry::file("o/d/x", ""),
            TarBuilderEntry::file("f/x", ""),
        ],
    ]);
    for (path, mode) in [("gone", 0o755), ("o", 0o712), ("o/d", 0o755), ("f", 0o755)] {
        assert_eq!(top.meta(path).mode() & 0o777, mode, "{path}");
    }
}

#[test]
fn a_directory_that_replaces_a_link_looks_like_its_target() {
    let [_, top] = stack([
        vec![
            TarBuilderEntry::dir("usr/lib").mode(0o711),
            TarBuilderEntry::symlink("lib", "usr/lib"),
            TarBuilderEntry::symlink("out", "/../../etc"),
        ],
        vec![TarBuilderEntry::file("lib/x", ""), TarBuilderEntry::file("out/x", "")],
    ]);
    assert!(top.meta("lib").is_dir());
    assert_eq!(top.meta("lib").mode() & 0o777, 0o711);
    assert_eq!(top.meta("out").mode() & 0o777, 0o755);
}

#[test]
fn most_layers_can_be_shared_by_all_images() {
    let archive = |entries: Vec<TarBuilderEntry>| TarBuilder::new().extend(entries).finish();
    let unpack = |bytes: Vec<u8>| {
        let layer = UnpackDir::new();
        layer.unpack(&bytes).unwrap();
        layer
    };
    let usual = unpack(archive(vec![TarBuilderEntry::dir("."), TarBuilderEntry::dir("usr").mtime(1)]));
    let other = unpack(archive(vec![TarBuilderEntry::dir("."), TarBuilderEntry::dir("usr").mtime(2)]));
    let strict = unpack(archive(vec![TarBuilderEntry::dir("."), TarBuilderEntry::dir("usr").mode(0o700)]));
    let shared = unpack(archive(vec![TarBuilderEntry::file("usr/f", "")]));
    assert!(!shared.settle(&[&usual], LowerMergeMode::Apply).unwrap().changed);
    assert!(!shared.settle(&[&other], LowerMergeMode::Check).unwrap().changed);
    assert!(shared.settle(&[&strict], LowerMergeMode::Check).unwrap().changed);
    assert_eq!(shared.meta("usr").mode() & 0o777, 0o755, "checking changes nothing");
    assert!(shared.settle(&[&strict], LowerMergeMode::Apply).unwrap().changed);
    assert!(!shared.settle(&[&strict], LowerMergeMode::Apply).unwrap().changed, "once is enough");
}

#[test]
fn a_hard_link_to_a_lower_file_becomes_a_copy_with_both_names() {
    if !is_root() {
        return;
    }
    let [_, top] = stack([
        vec![
            TarBuilderEntry::dir("bin").mode(0o711).mtime(50),
            TarBuilderEntry::file("bin/tool", "program")
                .mode(0o4755)
                .owner(1, 2)
                .mtime(77)
                .xattr("user.x", "1"),
            TarBuilderEntry::symlink("sbin", "bin"),
            TarBuilderEntry::symlink("bin/link", "tool"),
        ],
        vec![
            TarBuilderEntry::dir("usr").mtime(60),
            TarBuilderEntry::hard_link("usr/tool", "sbin/tool"),
            TarBuilderEntry::hard_link("usr/again", "bin/tool"),
            TarBuilderEntry::hard_link("usr/link", "bin/link"),
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
        vec![TarBuilderEntry::file("old", "moved")],
        vec![TarBuilderEntry::hard_link("new", "old"), TarBuilderEntry::file(".wh.old", "")],
    ]);
    assert_eq!(top.read("new"), "moved");
    assert!(top.is_whiteout("old"));
}

#[test]
fn a_hard_link_to_nothing_or_to_a_directory_is_refused() {
    for (lower, reason) in [
        (vec![TarBuilderEntry::dir("d")], EntryRefusal::LinkTarget),
        (vec![TarBuilderEntry::dir("x")], EntryRefusal::LinkToDirectory),
        (
            vec![TarBuilderEntry::symlink("x", "x2"), TarBuilderEntry::symlink("x2", "x")],
            EntryRefusal::LinkTarget,
        ),
    ] {
        let archive = |entries: Vec<TarBuilderEntry>| TarBuilder::new().extend(entries).finish();
        let (below, top) = (UnpackDir::new(), UnpackDir::new());
        below.unpack(&archive(lower)).unwrap();
        let target = if reason == EntryRefusal::LinkTarget { "x/none" } else { "x" };
        top.unpack(&archive(vec![TarBuilderEntry::hard_link("l", target)])).unwrap();
        match top.settle(&[&below], LowerMergeMode::Apply).unwrap_err() {
            UnpackError::Refused { reason: found, .. } => assert_eq!(found, reason),
            // Links in a circle.
            UnpackError::File { cause, .. } => assert_eq!(cause.raw_os_error(), Some(40)),
            other => panic!("{other:?}"),
        }
        top.assert_contained();
    }
}

#[test]
fn what_an_opaque_root_hides_is_not_linked_to() {
    let layers = [
        vec![TarBuilderEntry::file("hidden", "1")],
        vec![TarBuilderEntry::file(".wh..wh..opq", ""), TarBuilderEntry::file("seen", "2")],
        vec![TarBuilderEntry::hard_link("copy", "seen")],
        vec![TarBuilderEntry::hard_link("copy", "hidden")],
    ]
    .map(|entries| {
        let layer = UnpackDir::new();
        layer.unpack(&TarBuilder::new().extend(entries).finish()).unwrap();
        layer
    });
    for at in 0..3 {
        settle(&layers, at, LowerMergeMode::Apply).unwrap();
    }
    let error = layers[3].settle(&[&layers[2], &layers[1], &layers[0]], LowerMergeMode::Apply).unwrap_err();
    assert!(matches!(error, UnpackError::Refused { reason: EntryRefusal::LinkTarget, .. }), "{error:?}");
}
