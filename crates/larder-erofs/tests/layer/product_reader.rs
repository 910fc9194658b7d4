//! The reader of this crate, compared with the independent one of these tests; and damaged layers.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::Read as _;

use larder_erofs::{ErofsInode, ErofsReadError, ErofsReader, InodeKind, LayerDamage};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::reader::{ReadTree, read};
use crate::script::{ScriptEntry, ScriptKind, dir, entry, file, noise, symlink, write};
use crate::tools::all_kinds;

fn mode_of(inode: &ErofsInode) -> u32 {
    let kind = match inode.kind {
        InodeKind::Fifo => 0o010_000,
        InodeKind::CharDevice => 0o020_000,
        InodeKind::Directory => 0o040_000,
        InodeKind::BlockDevice => 0o060_000,
        InodeKind::File => 0o100_000,
        InodeKind::Symlink => 0o120_000,
    };
    inode.mode | kind
}

fn content_of(layer: &ErofsReader<&[u8]>, bytes: &[u8], inode: &ErofsInode) -> Vec<u8> {
    let mut content = Vec::new();
    layer.reader(inode).read_to_end(&mut content).unwrap();
    let mut by_extents = Vec::new();
    for extent in layer.extents(inode) {
        let extent = extent.unwrap();
        assert_eq!(extent.offset, by_extents.len() as u64);
        let length = usize::try_from(extent.length).unwrap();
        match extent.layer_offset.map(|at| usize::try_from(at).unwrap()) {
            Some(at) => by_extents.extend_from_slice(&bytes[at..at + length]),
            None => by_extents.resize(by_extents.len() + length, 0),
        }
    }
    assert!(by_extents == content);
    let mut part = vec![1; content.len() / 2 + 5];
    let start = content.len() / 3;
    let length = layer.read_at(inode, &mut part, start as u64).unwrap();
    assert!(part[..length] == content[start..start + length]);
    assert_eq!(length, part.len().min(content.len() - start));
    content
}

/// Reads a layer with both readers, and compares them.
pub(crate) fn compare_readers(bytes: &[u8]) {
    let expected: ReadTree = read(bytes);
    let layer = ErofsReader::open(bytes).unwrap();
    assert_eq!(layer.filesystem_end(), bytes.len() as u64);
    let mut paths = Vec::new();
    for found in layer.walk().unwrap() {
        let found = found.unwrap();
        let (node, inode) = (&expected[&found.path], &found.inode);
        assert_eq!(mode_of(inode), u32::from(node.mode));
        assert_eq!(
            (inode.uid, inode.gid, inode.nlink, inode.nid),
            (node.uid, node.gid, node.links, node.number)
        );
        assert_eq!(
            (inode.mtime.seconds, inode.mtime.nanos, inode.size),
            (node.mtime.0, node.mtime.1, node.size)
        );
        let (major, minor) = inode.rdev;
        assert_eq!(minor & 0xff | major << 8 | (minor >> 8) << 20, node.device);
        let xattrs: BTreeMap<_, _> = layer.stored_xattrs(inode).unwrap().into_iter().collect();
        assert_eq!(xattrs, node.xattrs);
        match inode.kind {
            InodeKind::File if inode.size <= 1 << 24 => {
                assert!(content_of(&layer, bytes, inode) == node.content);
            }
            InodeKind::Symlink => assert_eq!(layer.symlink_target(inode).unwrap(), node.content),
            _ => {}
        }
        assert_eq!(layer.find(&found.path).unwrap().as_ref(), Some(inode));
        paths.push(found.path);
    }
    let mut sorted: Vec<_> = expected.into_keys().collect();
    sorted.sort_by(|one, other| one.split(|byte| *byte == b'/').cmp(other.split(|byte| *byte == b'/')));
    assert_eq!(paths, sorted);
}

#[test]
fn both_readers_agree_on_all_kinds() {
    compare_readers(&write(&all_kinds()).unwrap().0);
    compare_readers(&write(&[]).unwrap().0);
}

#[test]
fn names_are_found_in_large_directories() {
    let files: Vec<ScriptEntry> = (0..3000).map(|at| file(format!("d/{at:0>40}"), "")).collect();
    let bytes = write(&files).unwrap().0;
    let layer = ErofsReader::open(&bytes[..]).unwrap();
    let dir = layer.find(b"d").unwrap().unwrap();
    for at in 0..3000 {
        assert!(layer.lookup(&dir, format!("{at:0>40}").as_bytes()).unwrap().is_some(), "{at}");
    }
    for absent in [&b""[..], b".", b"..", b"0", b"zzz", &[b'0'; 41], &[0xff; 300]] {
        assert_eq!(layer.lookup(&dir, absent).unwrap(), None, "{absent:?}");
    }
    assert_eq!(layer.entries(&dir).unwrap().count(), 3000);
    let error = layer.lookup(&layer.find(&[&b"d/"[..], &[b'0'; 40]].concat()).unwrap().unwrap(), b"x");
    assert!(matches!(error, Err(ErofsReadError::Damaged { damage: LayerDamage::Kind, .. })));
}

#[test]
fn attributes_have_the_names_of_the_archive_again() {
    let bytes = write(&[
        file("f", "x").xattr("trusted.overlay.redirect", "/etc").xattr("user.note", "n"),
        entry("d/.wh..wh..opq", ScriptKind::Fifo),
        entry("d/.wh.gone", ScriptKind::Fifo),
        dir("e").xattr("trusted.overlay.opaque", "y"),
    ]);
    let bytes = bytes.unwrap().0;
    let layer = ErofsReader::open(&bytes[..]).unwrap();
    let inode = |path: &[u8]| layer.find(path).unwrap().unwrap();
    let xattrs = |path: &[u8]| -> Vec<(String, String)> {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        layer
            .xattrs(&inode(path))
            .unwrap()
            .into_iter()
            .map(|(name, value)| (text(name), text(value)))
            .collect()
    };
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    assert_eq!(xattrs(b"f"), [pair("user.note", "n"), pair("trusted.overlay.redirect", "/etc")]);
    assert_eq!(xattrs(b"d"), []);
    assert_eq!(xattrs(b"e"), [pair("trusted.overlay.opaque", "y")]);
    assert!(layer.is_opaque(&inode(b"d")).unwrap() && !layer.is_opaque(&inode(b"e")).unwrap());
    assert!(inode(b"d/gone").is_whiteout() && !inode(b"f").is_whiteout());
}

#[test]
fn holes_are_extents_without_a_place() {
    let parts = vec![(1 << 20, noise(70_000, 2)), (8 << 20, noise(3, 3))];
    let bytes = write(&[entry("sparse", ScriptKind::Sparse(9 << 20, parts)), file("full", noise(9000, 4))]);
    let bytes = bytes.unwrap().0;
    let layer = ErofsReader::open(&bytes[..]).unwrap();
    let extents: Vec<_> =
        layer.extents(&layer.find(b"sparse").unwrap().unwrap()).map(Result::unwrap).collect();
    let is_hole: Vec<_> = extents.iter().map(|extent| extent.layer_offset.is_none()).collect();
    assert_eq!(is_hole, [true, false, true, false, true]);
    assert_eq!(extents[1].offset, 1 << 20);
    let full: Vec<_> = layer.extents(&layer.find(b"full").unwrap().unwrap()).map(Result::unwrap).collect();
    assert_eq!(full.iter().map(|extent| extent.length).sum::<u64>(), 9000);
    compare_readers(&bytes);
}

#[test]
fn a_file_that_is_no_layer_is_refused() {
    let open = |bytes: &[u8]| match ErofsReader::open(bytes) {
        Err(ErofsReadError::Superblock(damage)) => damage,
        other => panic!("{other:?}"),
    };
    let layer = write(&[file("f", noise(5000, 1))]).unwrap().0;
    assert_eq!(open(b""), LayerDamage::TooShort);
    assert_eq!(open(&[0; 8192]), LayerDamage::Magic);
    assert_eq!(open(&layer[..layer.len() - 1]), LayerDamage::TooShort);
    let mut damaged = layer.clone();
    damaged[1024 + 36] ^= 1;
    assert_eq!(open(&damaged), LayerDamage::Checksum);
    let longer = [&layer[..], b"what the store has behind it"].concat();
    assert_eq!(ErofsReader::open(&longer[..]).unwrap().filesystem_end(), layer.len() as u64);
}

/// Reads all that a layer says, whatever it is. Returns the number of calls.
fn read_all(layer: &ErofsReader<&[u8]>) -> Result<u64, ErofsReadError> {
    let mut calls = 0;
    for found in layer.walk()? {
        let inode = found?.inode;
        calls += 1;
        let _ = (layer.stored_xattrs(&inode), layer.xattrs(&inode), layer.is_opaque(&inode));
        let _ = (layer.symlink_target(&inode), layer.lookup(&inode, b"many"));
        let mut buffer = [0; 5000];
        for offset in [0, 1, 4095, inode.size / 2, inode.size.saturating_sub(1), u64::MAX] {
            let _ = layer.read_at(&inode, &mut buffer, offset);
        }
        // Chunks of one file may have the same blocks, so that it has more bytes than the layer.
        for extent in layer.extents(&inode) {
            let Ok(extent) = extent else { break };
            let end = extent.layer_offset.map_or(0, |begin| begin + extent.length);
            assert!(end <= layer.filesystem_end(), "{extent:?} leads out of the layer");
            calls += 1;
        }
    }
    Ok(calls)
}

/// Gives a changed superblock its checksum.
fn seal(bytes: &mut [u8]) {
    bytes[1028..1032].fill(0);
    let crc = bytes[1024..4096].iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0x82F6_3B78 * (crc & 1)))
    });
    bytes[1028..1032].copy_from_slice(&crc.to_le_bytes());
}

#[test]
fn damaged_layers_are_errors_and_every_walk_ends() {
    let entries = [
        dir("/").xattr("user.root", "yes"),
        file("bin/ping", noise(5000, 1)).xattr("security.x", noise(30, 1)),
        dir("a/b/c/d"),
        symlink("link", "bin/ping"),
        symlink("long", vec![b'x'; 4095]),
        entry("sparse", ScriptKind::Sparse(1 << 20, vec![(5000, noise(100, 5)), (900_000, noise(9000, 6))])),
        entry("null", ScriptKind::CharDevice(1, 3)),
    ];
    let many = (0..60).map(|at| file(format!("many/{at:0>90}"), ""));
    let entries: Vec<ScriptEntry> = entries.into_iter().chain(many).collect();
    let layer = write(&entries).unwrap().0;
    let length = layer.len();
    // Inodes and directories matter more than data; values that are wrong by little, or are used as addresses.
    let values = prop_oneof![any::<u8>(), Just(0), Just(0xff), Just(1), Just(36), Just(0x80)];
    let changes = vec((0..length, values), 1..12);
    let mut runner = TestRunner::new(Config { cases: 3000, failure_persistence: None, ..Config::default() });
    let (opened, failed) = (Cell::new(0), Cell::new(0));
    let outcome =
        runner.run(&(changes, prop_oneof![8 => Just(length), 1 => 0..length]), |(changes, length)| {
            let mut damaged = layer.clone();
            for (at, value) in changes {
                damaged[at] = value;
            }
            damaged.truncate(length);
            if damaged.len() >= 4096 {
                seal(&mut damaged);
            }
            if let Ok(layer) = ErofsReader::open(&damaged[..]) {
                opened.set(opened.get() + 1);
                match read_all(&layer) {
                    Ok(calls) => prop_assert!(calls < 100_000, "{} calls", calls),
                    Err(_) => failed.set(failed.get() + 1),
                }
            }
            Ok(())
        });
    outcome.unwrap();
    let (opened, failed) = (opened.get(), failed.get());
    assert!(opened > 500 && failed > 100, "{opened} of them open, {failed} are damaged");
}

#[test]
fn a_directory_inside_itself_is_an_error() {
    let mut bytes = write(&[dir("a/b/c")]).unwrap().0;
    let nid = |bytes: &[u8], path: &[u8]| ErofsReader::open(bytes).unwrap().find(path).unwrap().unwrap().nid;
    let (outer, inner) = (nid(&bytes, b"a"), nid(&bytes, b"a/b/c"));
    // The entry of `c` in `b`, and the directory's own entry `.`.
    for at in 0..bytes.len() - 8 {
        if bytes[at..at + 8] == inner.to_le_bytes() {
            bytes[at..at + 8].copy_from_slice(&outer.to_le_bytes());
        }
    }
    seal(&mut bytes);
    let layer = ErofsReader::open(&bytes[..]).unwrap();
    let error = layer.walk().unwrap().find_map(Result::err).unwrap();
    assert!(matches!(error, ErofsReadError::Damaged { damage: LayerDamage::DirectoryLoop, .. }), "{error}");
}
