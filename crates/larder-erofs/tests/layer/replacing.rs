//! Later entries, whiteouts, and parents that come late or never.

use larder_erofs::OverlayView;

use crate::reader::{ReadTree, read};
use crate::script::{ScriptEntry, ScriptKind, dir, entry, file, hard_link, symlink, write, writer};

fn tree(entries: &[ScriptEntry]) -> ReadTree {
    read(&write(entries).unwrap().0)
}

fn paths(tree: &ReadTree) -> Vec<String> {
    tree.keys().map(|path| String::from_utf8(path.clone()).unwrap()).collect()
}

fn is_opaque(tree: &ReadTree, path: &str) -> bool {
    tree[path.as_bytes()].xattrs.contains_key(&b"trusted.overlay.opaque"[..])
}

#[test]
fn parents_that_never_come_are_directories_of_root() {
    let tree = tree(&[file("a/b/c", "x")]);
    assert_eq!(paths(&tree), ["", "a", "a/b", "a/b/c"]);
    let made = &tree[&b"a/b"[..]];
    assert_eq!((made.mode, made.uid, made.mtime), (0o040_755, 0, (1_700_000_000, 123_456_789)));
}

#[test]
fn parents_that_come_later_keep_what_is_in_them() {
    let tree = tree(&[file("a/b", "x"), dir("a").mode(0o700).owner(5, 6), dir("/").mode(0o711)]);
    assert_eq!((tree[&b"a"[..]].mode, tree[&b"a"[..]].uid, tree[&b""[..]].mode), (0o040_700, 5, 0o040_711));
    assert_eq!(tree[&b"a/b"[..]].content, b"x");
    assert!(!is_opaque(&tree, "a"));
}

#[test]
fn the_last_entry_of_a_path_counts() {
    let tree = tree(&[
        file("f", "old"),
        hard_link("kept", "f"),
        file("f", "new"),
        dir("d"),
        file("d/x", "gone"),
        file("d", "now a file"),
        symlink("s", "f"),
        dir("s"),
        file("s/y", ""),
    ]);
    assert_eq!(paths(&tree), ["", "d", "f", "kept", "s", "s/y"]);
    assert_eq!(tree[&b"f"[..]].content, b"new");
    assert_eq!((&tree[&b"kept"[..]].content[..], tree[&b"kept"[..]].links), (&b"old"[..], 1));
    assert!(is_opaque(&tree, "s"), "it hides what the link hid");
}

#[test]
fn a_directory_does_not_return_with_its_name() {
    let tree = tree(&[file("d/x", ""), file("d", ""), file("e/x", ""), dir("d"), file("d/y", "")]);
    assert_eq!(paths(&tree), ["", "d", "d/y", "e", "e/x"]);
    assert!(is_opaque(&tree, "d"));
}

#[test]
fn whiteouts_are_devices_that_share_an_inode() {
    let tree = tree(&[
        entry("a/.wh.x", ScriptKind::File(Vec::new())),
        entry("a/.wh.y", ScriptKind::File(Vec::new())),
        entry("z", ScriptKind::CharDevice(0, 0)),
    ]);
    assert_eq!(paths(&tree), ["", "a", "a/x", "a/y", "z"]);
    for path in ["a/x", "a/y", "z"] {
        let node = &tree[path.as_bytes()];
        assert_eq!((node.mode, node.device, node.links), (0o020_000, 0, 3), "{path}");
    }
}

#[test]
fn a_whiteout_spares_what_the_same_layer_has() {
    let whiteout = |path: &str| entry(path, ScriptKind::File(Vec::new()));
    let tree = tree(&[
        file("f", "stays"),
        whiteout(".wh.f"),
        file("d/x", "stays"),
        whiteout(".wh.d"),
        whiteout(".wh.g"),
        file("g", "replaces it"),
        whiteout(".wh.h"),
        file("h/y", "makes a directory of it"),
    ]);
    assert_eq!(paths(&tree), ["", "d", "d/x", "f", "g", "h", "h/y"]);
    assert!(is_opaque(&tree, "d") && is_opaque(&tree, "h"));
}

#[test]
fn a_layer_hides_files_of_lower_layers() {
    let entries = [
        file("own", ""),
        hard_link("link", "below"),
        entry(".wh.gone", ScriptKind::Fifo),
        entry("opaque/.wh..wh..opq", ScriptKind::Fifo),
        file("opaque/dir/own", ""),
        file("dir/x", ""),
        symlink("alias", "dir"),
    ];
    let mut writer = writer();
    for entry in &entries {
        entry.add_to(&mut writer, 1).unwrap();
    }
    for path in ["own", "link", "dir/x", "opaque/dir/own", "alias"] {
        assert_eq!(writer.view(path.as_bytes()), OverlayView::Own, "{path}");
    }
    for (path, resolved) in [("alias/a/b", "dir/a/b"), ("dir/alias", "dir/alias"), ("x/../y", "x/../y")] {
        assert_eq!(writer.resolve_path(path.as_bytes()).unwrap(), resolved.as_bytes(), "{path}");
    }
    for path in ["other", "dir/y", "dir/a/b"] {
        assert_eq!(writer.view(path.as_bytes()), OverlayView::Lower, "{path}");
    }
    for path in ["gone", "gone/x", "opaque/x", "opaque/dir/x", "alias/x", "own/x"] {
        assert_eq!(writer.view(path.as_bytes()), OverlayView::Hidden, "{path}");
    }
}

#[test]
fn paths_lead_through_links_of_the_layer() {
    let tree = tree(&[
        symlink("lib", "usr/lib"),
        file("lib/x", "1"),
        symlink("usr/abs", "/etc/../etc"),
        file("usr/abs/y", "2"),
        symlink("up", "../../.."),
        file("up/z", "3"),
    ]);
    assert_eq!(
        paths(&tree),
        ["", "etc", "etc/y", "lib", "up", "usr", "usr/abs", "usr/lib", "usr/lib/x", "z"]
    );
}

#[test]
fn names_of_old_union_filesystems_are_left_out_and_data_of_whiteouts_is_ignored() {
    let tree = tree(&[
        file(".wh..wh.aufs", "data"),
        file(".wh..wh.plnk/x", ""),
        file(".wh.b", "data"),
        file("a", ""),
    ]);
    assert_eq!(paths(&tree), ["", "a", "b"]);
}
