//! Contents of a layer for single entries.

use larder_erofs::{EntryProblem, ErofsError, ErofsOptions, ErofsReader, ErofsWriter};

use crate::reader::{ReadNode, read};
use crate::script::{ScriptEntry, ScriptKind, dir, entry, file, hard_link, noise, symlink, write};

fn layer(entries: &[ScriptEntry]) -> Vec<u8> {
    write(entries).unwrap().0
}

#[test]
fn an_empty_layer_has_a_root_and_two_blocks() {
    let (layer, summary) = write(&[]).unwrap();
    let tree = read(&layer);
    assert_eq!(tree.len(), 1);
    assert_eq!((tree[&b""[..]].mode, summary.inodes, summary.size), (0o040_755, 1, 8192));
    assert!(!summary.hides_lowers);
}

#[test]
fn small_files_share_blocks() {
    let size = |at: usize| at * 7919 % 1025;
    let files: Vec<ScriptEntry> =
        (0..1000).map(|at| file(format!("f{at}"), noise(size(at), at as u64))).collect();
    let (layer, _) = write(&files).unwrap();
    let data: usize = (0..1000).map(|at| size(at) + 64).sum();
    let directory = 1000 * 17;
    assert!(layer.len() < (data + directory) * 108 / 100, "{} for {data} bytes", layer.len());
    assert_eq!(read(&layer).len(), 1001);
}

#[test]
fn data_is_appended_as_it_comes_and_starts_at_a_block() {
    let data = noise(3 * 4096, 1);
    let layer = layer(&[file("a", data.clone())]);
    assert_eq!(&layer[4096..4 * 4096], &data[..]);
}

#[test]
fn names_of_255_bytes_and_long_paths_are_kept() {
    let deep = vec![vec![b'n'; 255]; 15].join(&b'/');
    let tree = read(&layer(&[file([&deep[..], b"/", &[b'x'; 255]].concat(), "deep")]));
    assert_eq!(tree[&[&deep[..], b"/", &[b'x'; 255]].concat()].content, b"deep");
}

#[test]
fn large_directories_are_in_order() {
    let files: Vec<ScriptEntry> =
        (0..20_000u32).map(|at| file(format!("d/{:05}", at.wrapping_mul(7919) % 20_000), "")).collect();
    assert_eq!(read(&layer(&files)).len(), 20_002);
    let many: Vec<ScriptEntry> = (0..3000).map(|at| dir(format!("{at}"))).collect();
    assert_eq!(read(&layer(&many))[&b""[..]].links, 3002);
}

#[test]
fn hard_links_share_an_inode_and_count() {
    let (layer, summary) = write(&[
        hard_link("early", "dir/file"),
        file("dir/file", "content").owner(7, 8),
        hard_link("late", "/dir/../dir/file"),
        symlink("link", "nowhere"),
        hard_link("other", "link"),
    ])
    .unwrap();
    let tree = read(&layer);
    assert_eq!((tree[&b"early"[..]].links, tree[&b"late"[..]].uid), (3, 7));
    assert_eq!(tree[&b"early"[..]].number, tree[&b"late"[..]].number);
    assert_eq!(tree[&b"other"[..]].content, b"nowhere");
    assert_eq!((summary.inodes, summary.lower_links), (4, 0));
}

#[test]
fn links_to_files_of_lower_layers_are_reported_and_can_be_completed() {
    let mut writer = ErofsWriter::new(Vec::new(), ErofsOptions::default()).unwrap();
    hard_link("a/link", "/usr/bin/tool").add_to(&mut writer, 1).unwrap();
    hard_link("b", "a/link").add_to(&mut writer, 1).unwrap();
    hard_link("replaced", "gone").add_to(&mut writer, 1).unwrap();
    file("replaced", "by a file").add_to(&mut writer, 100).unwrap();
    writer.resolve_links(&|| false).unwrap();
    let links: Vec<_> = writer.lower_links().collect();
    assert_eq!(links.len(), 2);
    assert_eq!((&links[0].path[..], &links[0].target[..]), (&b"a/link"[..], &b"usr/bin/tool"[..]));
    assert_eq!(writer.implicit_directories().collect::<Vec<_>>(), [&b""[..], b"a"]);
    file("usr/bin/tool", "from below").add_to(&mut writer, 100).unwrap();
    dir("a").mode(0o700).add_to(&mut writer, 1).unwrap();
    let (layer, summary) = writer.finish().unwrap();
    let tree = read(&layer);
    assert_eq!(summary.lower_links, 0);
    assert_eq!((&tree[&b"b"[..]].content[..], tree[&b"b"[..]].links), (&b"from below"[..], 3));
    assert_eq!(tree[&b"a"[..]].mode, 0o040_700);
}

#[test]
fn files_of_lower_layers_are_copied() {
    let parts = vec![(1 << 20, noise(70_000, 2)), (8 << 20, noise(3, 3))];
    let below = [
        file("usr/bin/tool", noise(300_000, 1)).mode(0o4711).owner(3, 4).xattr("trusted.overlay.x", "y"),
        entry("sparse", ScriptKind::Sparse(9 << 20, parts)).mtime(5, 6),
        symlink("link", "usr/bin/tool"),
        entry("pipe", ScriptKind::Fifo).mode(0o600),
        entry("null", ScriptKind::CharDevice(1, 3)),
        file("empty", ""),
        dir("dir"),
    ];
    let below = layer(&below);
    let lower = ErofsReader::open(&below[..]).unwrap();
    let names = [&b"usr/bin/tool"[..], b"sparse", b"link", b"pipe", b"null", b"empty"];
    let mut writer = ErofsWriter::new(Vec::new(), ErofsOptions::default()).unwrap();
    for name in names {
        hard_link([&b"links/"[..], name].concat(), name).add_to(&mut writer, 1).unwrap();
    }
    writer.resolve_links(&|| false).unwrap();
    assert_eq!(writer.lower_links().count(), names.len());
    for name in names {
        let found = lower.find(name).unwrap().unwrap();
        writer.copy_file(name, &lower, &found).unwrap();
    }
    let found = lower.find(b"dir").unwrap().unwrap();
    let error = writer.copy_file(b"dir", &lower, &found).unwrap_err();
    assert!(matches!(error, ErofsError::Rejected { problem: EntryProblem::LinkToDirectory, .. }), "{error}");
    let (layer, summary) = writer.finish().unwrap();
    assert_eq!(summary.lower_links, 0);
    let (expected, found) = (read(&below), read(&layer));
    for name in names {
        let (copy, link) = (&found[name], &found[&[&b"links/"[..], name].concat()]);
        assert_eq!((copy, copy.links), (link, 2));
        let copied = ReadNode { number: expected[name].number, links: 1, ..copy.clone() };
        assert!(copied == expected[name], "{}", String::from_utf8_lossy(name));
    }
}

#[test]
fn owners_times_and_set_id_bits_are_kept() {
    let tree = read(&layer(&[
        file("f", "").mode(0o6755).owner(100_000, 4_294_967_294).mtime(-5, 999_999_999),
        dir("d").mode(0o3777).mtime(i64::from(u32::MAX) + 9, 1),
    ]));
    let node = &tree[&b"f"[..]];
    assert_eq!(
        (node.mode, node.uid, node.gid, node.mtime),
        (0o106_755, 100_000, 4_294_967_294, (-5, 999_999_999))
    );
    assert_eq!((tree[&b"d"[..]].mode, tree[&b"d"[..]].mtime), (0o043_777, (4_294_967_304, 1)));
}

#[test]
fn attributes_of_files_are_kept_and_those_of_overlays_escaped() {
    let capability = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let mut acl = 2u32.to_le_bytes().to_vec();
    acl.extend([
        1, 0, 6, 0, 255, 255, 255, 255, 4, 0, 4, 0, 255, 255, 255, 255, 32, 0, 4, 0, 255, 255, 255, 255,
    ]);
    let (layer, summary) = write(&[
        file("f", "x")
            .xattr("security.capability", capability)
            .xattr("user.note", "first")
            .xattr("user.note", "last")
            .xattr("trusted.overlay.redirect", "/etc")
            .xattr("user.overlay.opaque", "y")
            .xattr("system.posix_acl_access", acl.clone())
            .xattr("system.posix_acl_default", acl.clone())
            .xattr("system.nfs4_acl", "x"),
        symlink("l", "f").xattr("user.no", "").xattr("trusted.yes", ""),
        dir("d").xattr("system.posix_acl_default", acl.clone()),
        entry("d/.wh..wh..opq", ScriptKind::File(Vec::new())),
    ])
    .unwrap();
    let tree = read(&layer);
    let xattrs = &tree[&b"f"[..]].xattrs;
    assert_eq!(xattrs.len(), 4);
    assert_eq!(xattrs[&b"security.capability"[..]], capability);
    assert_eq!(xattrs[&b"user.note"[..]], b"last");
    assert_eq!(xattrs[&b"trusted.overlay.overlay.redirect"[..]], b"/etc");
    assert_eq!(xattrs[&b"system.posix_acl_access"[..]], acl);
    assert_eq!(tree[&b"l"[..]].xattrs.keys().collect::<Vec<_>>(), [&b"trusted.yes"[..]]);
    assert_eq!(tree[&b"d"[..]].xattrs[&b"trusted.overlay.opaque"[..]], b"y");
    assert_eq!(tree[&b"d"[..]].xattrs[&b"system.posix_acl_default"[..]], acl);
    assert_eq!((summary.skipped_xattrs, summary.hides_lowers), (4, true));
}

#[test]
fn attributes_larger_than_a_block_are_kept() {
    let value = noise(60_000, 3);
    let tree = read(&layer(&[
        file("f", noise(5000, 1)).xattr("user.big", value.clone()).xattr("user.bigger", value.clone()),
        dir("d").xattr("user.big", value.clone()),
        symlink("l", vec![b'x'; 3000]).xattr("security.x", noise(2000, 5)),
        file("d/small", "after it"),
    ]));
    assert_eq!(tree[&b"f"[..]].xattrs[&b"user.bigger"[..]], value);
    assert_eq!(tree[&b"f"[..]].content, noise(5000, 1));
    assert_eq!(tree[&b"d"[..]].xattrs[&b"user.big"[..]], value);
    assert_eq!(tree[&b"l"[..]].content.len(), 3000);
}

#[test]
fn the_root_has_room_for_attributes() {
    let value = noise(60_000, 1);
    let tree = read(&layer(&[dir("/").xattr("user.x", value.clone()), file("f", "behind it")]));
    assert_eq!(tree[&b""[..]].xattrs[&b"user.x"[..]], value);
    assert_eq!(tree[&b"f"[..]].content, b"behind it");
}

#[test]
fn metadata_is_one_region_behind_the_data() {
    let entries = [
        file("a", noise(3 * 4096 + 1025, 1)),
        file("b", noise(4096 + 1024, 2)),
        entry("sparse", ScriptKind::Sparse(1 << 20, vec![(5000, noise(100, 5))])),
        file("c", noise(1024, 3)),
    ];
    let layer = layer(&entries);
    let blocks_of_data = 4 + 1 + 1;
    // The superblock names the first block of metadata.
    assert_eq!(layer[1024 + 40..][..4], (1u32 + blocks_of_data).to_le_bytes());
    read(&layer);
}

#[test]
fn holes_stay_holes() {
    let size = 64 << 20;
    let parts = vec![(0, noise(10, 1)), (1 << 20, noise(70_000, 2)), (size - 3, noise(3, 3))];
    let layer = layer(&[entry("sparse", ScriptKind::Sparse(size, parts.clone())), file("after", "it")]);
    assert!(layer.len() < 300_000, "{}", layer.len());
    let tree = read(&layer);
    let node = &tree[&b"sparse"[..]];
    assert_eq!(node.size, size);
    let mut content = vec![0; usize::try_from(size).unwrap()];
    for (offset, data) in parts {
        let offset = usize::try_from(offset).unwrap();
        content[offset..offset + data.len()].copy_from_slice(&data);
    }
    assert!(node.content == content);
    let (chunks, filled) = node.chunks.unwrap();
    assert!(filled * 20 < chunks, "{filled} of {chunks} chunks have data");
    assert_eq!(tree[&b"after"[..]].content, b"it");
}

#[test]
fn a_file_of_one_hole_costs_a_map() {
    let layer = layer(&[entry("hole", ScriptKind::Sparse(1 << 50, Vec::new()))]);
    assert_eq!(read(&layer)[&b"hole"[..]].size, 1 << 50);
    assert!(layer.len() <= 3 * 4096, "{}", layer.len());
}

#[test]
fn the_uuid_is_that_of_the_options() {
    let options = ErofsOptions { uuid: *b"0123456789abcdef", ..ErofsOptions::default() };
    let (layer, _) = ErofsWriter::new(Vec::new(), options).unwrap().finish().unwrap();
    assert_eq!(&layer[1024 + 48..1024 + 64], b"0123456789abcdef");
    read(&layer);
}

#[test]
fn data_that_comes_later_belongs_where_it_would_have_been_written() {
    let sizes = [1, 4096, 5000, 0, 70_000];
    let files: Vec<ScriptEntry> = (1..)
        .zip(sizes)
        .map(|(seed, size)| file(format!("f{seed}"), noise(size, seed)))
        .chain([dir("d"), hard_link("d/link", "f2"), file(".wh.gone", "ignored")])
        .collect();
    let options = || ErofsOptions { max_inline_tail: 0, ..ErofsOptions::default() };
    let mut whole = ErofsWriter::new(Vec::new(), options()).unwrap();
    let mut without = ErofsWriter::new(Vec::new(), options()).unwrap();
    let mut places = Vec::new();
    for entry in &files {
        entry.add_to(&mut whole, 1000).unwrap();
        let data = entry.begin_in(&mut without).unwrap();
        places.push((without.leave_data().unwrap(), data));
    }
    let (whole, mut filled) = (whole.finish().unwrap().0, without.finish().unwrap().0);
    assert_ne!(whole, filled);
    for (place, data) in &places {
        if let Some((start, length)) = place {
            let start = usize::try_from(*start).unwrap();
            assert_eq!(data.len() as u64, *length);
            filled[start..start + data.len()].copy_from_slice(data);
        }
    }
    assert!(whole == filled);
    let places: Vec<bool> = places.iter().map(|(place, _)| place.is_some()).collect();
    assert_eq!(places, [true, true, true, false, true, false, false, false]);
}

#[test]
fn data_of_which_some_is_metadata_cannot_come_later() {
    let mut writer = ErofsWriter::new(Vec::new(), ErofsOptions::default()).unwrap();
    file("tail", noise(5000, 1)).begin_in(&mut writer).unwrap();
    writer.leave_data().expect_err("its tail is in the metadata");
}
