//! Forms of entries, and how entries of one layer act on each other.

use std::os::unix::fs::MetadataExt as _;

use larder_store::unpack::{DetectedCompression, UnpackError, UnpackOptions, UnpackThreads};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry, edge_case_layers, seal};

use crate::support::{UnpackDir, capability, gzip, is_root};

fn unpacked(entries: impl IntoIterator<Item = TarBuilderEntry>) -> UnpackDir {
    let layer = UnpackDir::new();
    layer.unpack(&TarBuilder::new().extend(entries).finish()).unwrap();
    layer
}

#[test]
fn every_compression_gives_the_same_layer_whatever_it_is_called() {
    let [plain, _] = edge_case_layers();
    let (first, second) = plain.split_at(plain.len() / 3);
    let zstd = |bytes: &[u8]| zstd::encode_all(bytes, 3).unwrap();
    for (compressed, found) in [
        (plain.clone(), DetectedCompression::None),
        (gzip(&plain), DetectedCompression::Gzip),
        ([gzip(first), gzip(second), gzip(b"")].concat(), DetectedCompression::Gzip),
        (zstd(&plain), DetectedCompression::Zstd),
        (
            [zstd(first), b"\x50\x2a\x4d\x18\x03\0\0\0abc".to_vec(), zstd(second)].concat(),
            DetectedCompression::Zstd,
        ),
    ] {
        for threads in [UnpackThreads::One, UnpackThreads::Two] {
            let layer = UnpackDir::new();
            let options = UnpackOptions { threads, ..UnpackOptions::default() };
            let unpacked = layer.unpack_with(&compressed, &plain, &options).unwrap();
            assert_eq!(unpacked.compression, found);
            assert_eq!(unpacked.plain_bytes, plain.len() as u64);
            assert_eq!(unpacked.compressed_bytes, compressed.len() as u64);
            assert_eq!(options.progress.plain_bytes(), plain.len() as u64);
            assert_eq!(options.progress.compressed_bytes(), compressed.len() as u64);
            assert_eq!(options.progress.entries(), unpacked.entries);
        }
    }
}

#[test]
fn bytes_after_the_end_of_the_archive_count_for_the_digest_only() {
    let archive =
        [TarBuilder::new().with(TarBuilderEntry::file("f", "x")).finish(), vec![7; 3_000_000]].concat();
    for threads in [UnpackThreads::One, UnpackThreads::Two] {
        let layer = UnpackDir::new();
        let options = UnpackOptions { threads, ..UnpackOptions::default() };
        let unpacked = layer.unpack_with(&gzip(&archive), &archive, &options).unwrap();
        assert_eq!((unpacked.entries, unpacked.plain_bytes), (1, archive.len() as u64));
    }
}

#[test]
fn an_archive_may_end_without_an_end() {
    for end in [0, 512] {
        let mut archive = TarBuilder::new().with(TarBuilderEntry::file("f", "x")).unfinished();
        archive.resize(archive.len() + end, 0);
        assert_eq!(UnpackDir::new().unpack(&archive).unwrap().entries, 1);
    }
    assert_eq!(UnpackDir::new().unpack(b"").unwrap().entries, 0);
}

#[test]
fn modes_owners_times_and_attributes_are_those_of_the_archive() {
    if !is_root() {
        return;
    }
    let layer = unpacked([
        TarBuilderEntry::dir("d").mode(0o3750).owner(70_000, 3).mtime(1_000_000_000).xattr("user.d", "1"),
        TarBuilderEntry::file("d/su", "x")
            .mode(0o4711)
            .owner(5, 6)
            .xattr("security.capability", capability()),
        TarBuilderEntry::file("d/none", "x").mode(0),
        TarBuilderEntry::file("d/nanos", "x").pax("mtime", "1234567890.123456789"),
        TarBuilderEntry::file("d/early", "x").pax("mtime", "-1.25"),
        TarBuilderEntry::file("d/late", "x").owner(4_294_967_294, 0),
        TarBuilderEntry::symlink("d/link", "nowhere").owner(8, 9).mtime(5),
        TarBuilderEntry::fifo("d/pipe").mode(0o622).owner(1, 2),
        TarBuilderEntry::char_device("d/null", 1, 3).mode(0o666),
        TarBuilderEntry { device: (8, 1), ..TarBuilderEntry::new(b'4', "d/disk") },
    ]);
    let of = |path: &str| {
        let meta = layer.meta(path);
        (meta.mode() & 0o7777, meta.uid(), meta.gid(), meta.mtime())
    };
    assert_eq!(of("d"), (0o3750, 70_000, 3, 1_000_000_000));
    assert_eq!(of("d/su"), (0o4711, 5, 6, 1_700_000_000));
    assert_eq!(of("d/none").0, 0);
    assert_eq!(layer.meta("d/nanos").mtime_nsec(), 123_456_789);
    assert_eq!((layer.meta("d/early").mtime(), layer.meta("d/early").mtime_nsec()), (-2, 750_000_000));
    assert_eq!(of("d/late").1, 4_294_967_294);
    assert_eq!((of("d/link").1, of("d/link").2, of("d/link").3), (8, 9, 5));
    assert_eq!(of("d/pipe"), (0o622, 1, 2, 1_700_000_000));
    assert_eq!(layer.meta("d/null").rdev(), rustix::fs::makedev(1, 3));
    assert_eq!(layer.meta("d/disk").rdev(), rustix::fs::makedev(8, 1));
    let mut value = [0; 64];
    let length =
        rustix::fs::getxattr(layer.root().join("d/su"), "security.capability", &mut value[..]).unwrap();
    assert_eq!(&value[..length], capability());
}

#[test]
fn long_names_are_read_in_every_format() {
    if !is_root() {
        return;
    }
    let name = |letter: &str| format!("{}/{}", letter.repeat(120), letter.repeat(240));
    let mut prefixed = TarBuilderEntry::file("short", "prefix").header();
    prefixed[345..345 + 6].copy_from_slice(b"prefix");
    seal(&mut prefixed);
    let archive = TarBuilder::new()
        .with(TarBuilderEntry::file(name("p"), "pax"))
        .with(TarBuilderEntry::file(name("g"), "gnu").gnu())
        .with(TarBuilderEntry::symlink("link-p", name("p")))
        .with(TarBuilderEntry::symlink("link-g", name("g")).gnu())
        .raw(&prefixed)
        .raw(&[&b"prefix"[..], &[0; 506]].concat())
        .finish();
    let layer = UnpackDir::new();
    layer.unpack(&archive).unwrap();
    for (path, content) in [
        (name("p").as_str(), "pax"),
        (name("g").as_str(), "gnu"),
        ("link-p", "pax"),
        ("link-g", "gnu"),
        ("prefix/short", "prefix"),
    ] {
        assert_eq!(layer.read(path), content);
    }
}

#[test]
fn directories_of_old_archives_end_in_a_slash() {
    if !is_root() {
        return;
    }
    let mut old = TarBuilderEntry::file("old/", "").header();
    old[156] = 0;
    seal(&mut old);
    let layer = UnpackDir::new();
    layer.unpack(&TarBuilder::new().raw(&old).finish()).unwrap();
    assert!(layer.meta("old").is_dir());
}

#[test]
fn sparse_files_keep_their_holes() {
    if !is_root() {
        return;
    }
    let layer = unpacked([
        TarBuilderEntry::file("v01", "abcXYZ")
            .pax("GNU.sparse.map", "0,3,1048576,3,2097152,0")
            .pax("GNU.sparse.size", "2097152")
            .pax("GNU.sparse.name", "sparse/one"),
        TarBuilderEntry::file(
            "v10",
            [format!("2\n0\n3\n1048576\n3\n{}", "\0".repeat(496)).into_bytes(), b"abcXYZ".to_vec()].concat(),
        )
        .pax("GNU.sparse.major", "1")
        .pax("GNU.sparse.minor", "0")
        .pax("GNU.sparse.realsize", "2097152")
        .pax("GNU.sparse.name", "sparse/two"),
        TarBuilderEntry::file("after", "after"),
    ]);
    for path in ["sparse/one", "sparse/two"] {
        let content = fs_err::read(layer.root().join(path)).unwrap();
        assert_eq!(content.len(), 2_097_152, "{path}");
        assert_eq!((&content[..3], &content[1_048_576..1_048_579]), (&b"abc"[..], &b"XYZ"[..]), "{path}");
        assert_eq!(content.iter().filter(|byte| **byte != 0).count(), 6, "{path}");
    }
    // EROFS reports blocks by size: the file of the layer shows that holes take none.
    assert!(fs_err::metadata(layer.layer()).unwrap().len() < 200_000);
    assert_eq!(layer.read("after"), "after");
}

#[test]
fn sparse_files_of_gnu_tar_are_read_in_all_its_formats() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("holes");
    let file = fs_err::File::create(&path).unwrap();
    // More parts than fit into one header.
    for part in 0..40u64 {
        rustix::io::pwrite(&file, format!("part {part}").as_bytes(), part * 100_000).unwrap();
    }
    file.set_len(10_000_000).unwrap();
    let content = fs_err::read(&path).unwrap();
    for format in [
        &["--format=gnu"][..],
        &["--format=pax", "--sparse-version=1.0"],
        &["--format=pax", "--sparse-version=0.1"],
        &["--format=pax", "--sparse-version=0.0"],
    ] {
        let tar = std::process::Command::new("tar")
            .args(["-c", "--sparse"])
            .args(format)
            .arg("-C")
            .arg(dir.path())
            .arg("holes")
            .output()
            .unwrap();
        assert!(tar.status.success(), "{}", String::from_utf8_lossy(&tar.stderr));
        let layer = UnpackDir::new();
        layer.unpack(&tar.stdout).unwrap();
        assert_eq!(fs_err::read(layer.root().join("holes")).unwrap(), content, "{format:?}");
        assert!(fs_err::metadata(layer.layer()).unwrap().len() < 1_000_000, "{format:?}");
    }
}

#[test]
fn the_last_entry_of_a_name_wins() {
    if !is_root() {
        return;
    }
    let layer = unpacked([
        TarBuilderEntry::file("f", "first"),
        TarBuilderEntry::file("./f", "second"),
        TarBuilderEntry::dir("d"),
        TarBuilderEntry::file("d/old", "x"),
        TarBuilderEntry::file("d", "a file now"),
        TarBuilderEntry::file("e", "x"),
        TarBuilderEntry::dir("e"),
        TarBuilderEntry::file("e/in", "a directory now"),
        TarBuilderEntry::symlink("l", "e"),
        TarBuilderEntry::dir("l"),
        TarBuilderEntry::file("l/in", "no link now"),
        TarBuilderEntry::dir("again").mode(0o700),
        TarBuilderEntry::file("again/kept", "x"),
        TarBuilderEntry::dir("again").mode(0o711),
    ]);
    assert_eq!(layer.read("f"), "second");
    assert_eq!(layer.read("d"), "a file now");
    assert_eq!(layer.read("e/in"), "a directory now");
    assert!(!layer.root().join("e/in/../../e/x").exists());
    assert_eq!(layer.read("l/in"), "no link now");
    assert_eq!(layer.meta("again").mode() & 0o777, 0o711);
    assert_eq!(layer.read("again/kept"), "x");
    // What was there before hid the lower layers' directories.
    assert!(layer.opaque("e") && layer.opaque("l") && !layer.opaque("again"));
}

#[test]
fn a_file_keeps_its_other_names_when_its_first_is_replaced() {
    if !is_root() {
        return;
    }
    let layer = unpacked([
        TarBuilderEntry::file("a", "old"),
        TarBuilderEntry::hard_link("b", "a"),
        TarBuilderEntry::hard_link("c", "a"),
        TarBuilderEntry::file("d/x", "in a directory"),
        TarBuilderEntry::hard_link("e", "d/x"),
        TarBuilderEntry::file("a", "new"),
        TarBuilderEntry::file("d", "a file now"),
    ]);
    assert_eq!(
        (layer.read("a"), layer.read("b"), layer.read("c")),
        ("new".into(), "old".into(), "old".into())
    );
    assert_eq!(layer.meta("b").ino(), layer.meta("c").ino());
    assert_eq!(layer.read("e"), "in a directory");
}

#[test]
fn entries_may_be_in_any_order() {
    if !is_root() {
        return;
    }
    let layer = unpacked([
        TarBuilderEntry::hard_link("link-to-link", "link"),
        TarBuilderEntry::hard_link("link", "dir/file"),
        TarBuilderEntry::hard_link("replaced", "dir/file"),
        TarBuilderEntry::file("replaced", "a file"),
        TarBuilderEntry::hard_link("dir/gone", "dir/file"),
        TarBuilderEntry::file("dir/.wh.gone", ""),
        TarBuilderEntry::file("dir/file", "content"),
        TarBuilderEntry::dir("dir").mode(0o750),
    ]);
    assert_eq!(layer.meta("link-to-link").ino(), layer.meta("dir/file").ino());
    assert_eq!(layer.meta("link").nlink(), 4);
    assert_eq!(layer.read("replaced"), "a file");
    assert_eq!(layer.meta("dir").mode() & 0o777, 0o750);
}

#[test]
fn a_parent_that_is_a_link_of_the_layer_is_followed_inside() {
    if !is_root() {
        return;
    }
    let layer = unpacked([
        TarBuilderEntry::symlink("lib", "usr/lib"),
        TarBuilderEntry::file("lib/a", "1"),
        TarBuilderEntry::symlink("abs", "/usr/share"),
        TarBuilderEntry::file("abs/b", "2"),
        TarBuilderEntry::symlink("usr/up", "../../../usr/up2"),
        TarBuilderEntry::file("usr/up/c", "3"),
        TarBuilderEntry::hard_link("again", "lib/a"),
    ]);
    assert!(layer.meta("lib").is_symlink());
    assert_eq!(layer.read("usr/lib/a"), "1");
    assert_eq!(layer.read("usr/share/b"), "2");
    assert_eq!(layer.read("usr/up2/c"), "3");
    assert_eq!(layer.meta("again").ino(), layer.meta("usr/lib/a").ino());
}

#[test]
fn whiteouts_and_opaque_directories_are_those_of_the_overlay() {
    if !is_root() {
        return;
    }
    let layer = unpacked([
        TarBuilderEntry::file("d/.wh.gone", ""),
        TarBuilderEntry::file("d/.wh.kept", ""),
        TarBuilderEntry::file("d/kept", "in this layer"),
        TarBuilderEntry::dir("d/dir"),
        TarBuilderEntry::file("d/dir/in", "x"),
        TarBuilderEntry::file("d/.wh.dir", ""),
        TarBuilderEntry::file("o/.wh..wh..opq", ""),
        TarBuilderEntry::file("o/new", "x"),
        TarBuilderEntry::file(".wh.back", ""),
        TarBuilderEntry::dir("back"),
        TarBuilderEntry::file(".wh.implied", ""),
        TarBuilderEntry::file("implied/x", ""),
    ]);
    assert!(layer.is_whiteout("d/gone"));
    assert_eq!(layer.read("d/kept"), "in this layer");
    assert_eq!(layer.read("d/dir/in"), "x");
    for (path, opaque) in [("d", false), ("d/dir", true), ("o", true), ("back", true), ("implied", true)] {
        assert_eq!(layer.opaque(path), opaque, "{path}");
    }
}

#[test]
fn a_default_acl_does_not_reach_the_files_of_the_archive() {
    if !is_root() {
        return;
    }
    // user::rwx, user:7:rwx, group::r-x, mask::rwx, other::---
    let acl: Vec<u8> = [
        (0x01u16, 7u16, u32::MAX),
        (0x02, 7, 7),
        (0x04, 5, u32::MAX),
        (0x10, 7, u32::MAX),
        (0x20, 0, u32::MAX),
    ]
    .iter()
    .flat_map(|(tag, perm, id)| [&tag.to_le_bytes()[..], &perm.to_le_bytes(), &id.to_le_bytes()].concat())
    .collect();
    let acl = [&2u32.to_le_bytes()[..], &acl].concat();
    let layer = unpacked([
        TarBuilderEntry::dir("d").xattr("system.posix_acl_default", acl),
        TarBuilderEntry::file("d/f", "x"),
    ]);
    let mut buffer = [0; 128];
    let length =
        |path: &str, name, buffer: &mut [u8]| rustix::fs::getxattr(layer.root().join(path), name, buffer);
    assert!(length("d", "system.posix_acl_default", &mut buffer).is_ok());
    assert!(length("d/f", "system.posix_acl_access", &mut buffer).is_err());
}

#[test]
fn canceling_ends_it() {
    let [archive, _] = edge_case_layers();
    for threads in [UnpackThreads::One, UnpackThreads::Two] {
        let options = UnpackOptions { threads, ..UnpackOptions::default() };
        options.progress.cancel();
        let error = UnpackDir::new().unpack_with(&gzip(&archive), &archive, &options).unwrap_err();
        assert!(matches!(error, UnpackError::Canceled), "{error:?}");
    }
}

/// Cancels while it is read, and counts what is read afterwards.
struct CancelingReader<'a> {
    bytes: &'a [u8],
    options: &'a UnpackOptions,
    reads: &'a mut u32,
}

impl std::io::Read for CancelingReader<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        *self.reads += 1;
        if *self.reads == 3 {
            self.options.progress.cancel();
        }
        let length = into.len().min(1000);
        std::io::Read::read(&mut self.bytes, &mut into[..length])
    }
}

#[test]
fn canceling_in_the_middle_reads_no_further() {
    let [archive, _] = edge_case_layers();
    let digest = crate::support::digest(&archive);
    for threads in [UnpackThreads::One, UnpackThreads::Two] {
        let options = UnpackOptions { threads, ..UnpackOptions::default() };
        let (layer, mut reads) = (UnpackDir::new(), 0);
        let error = larder_store::unpack::unpack_layer(
            CancelingReader { bytes: &archive, options: &options, reads: &mut reads },
            &larder_store::unpack::ExpectedLayer { digest: None, size: None, diff_id: &digest },
            &layer.layer(),
            &options,
        )
        .unwrap_err();
        assert!(matches!(error, UnpackError::Canceled), "{error:?}");
        assert_eq!(reads, 3);
    }
}

#[test]
fn deep_trees_are_made_and_replaced() {
    if !is_root() {
        return;
    }
    let deep = "d/".repeat(1000);
    let layer = unpacked([
        TarBuilderEntry::file(format!("{deep}f"), "deep"),
        TarBuilderEntry::file("other", ""),
        TarBuilderEntry::file(format!("{deep}g"), "deep"),
        TarBuilderEntry::file("d", "shallow"),
    ]);
    assert_eq!(layer.read("d"), "shallow");
    let layer = unpacked([TarBuilderEntry::file(format!("{deep}f"), "deep")]);
    assert_eq!(layer.read(&format!("{deep}f")), "deep");
}
