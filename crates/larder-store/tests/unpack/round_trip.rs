//! A layer that is accepted is read back as it was written, by larder and by the kernel; one that is not names the
//! entry.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use larder_erofs::ErofsInode;
use larder_store::unpack::{LayerReader, open_layer};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry};
use proptest::prelude::*;
use proptest::sample::select;

use crate::support::{UnpackDir, capability};

const FILE: u8 = b'0';
const SYMLINK: u8 = b'2';
const DIRECTORY: u8 = b'5';

/// An attribute of an archive.
#[derive(Debug, Clone)]
struct XattrCase {
    name: &'static str,
    value: Vec<u8>,
    /// Types of entries that keep it, and the value that they have then.
    kept: &'static [u8],
    stored: Vec<u8>,
}

/// An access control list: tags, permissions and IDs.
fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        value.extend([tag.to_le_bytes(), permissions.to_le_bytes()].concat());
        value.extend(id.to_le_bytes());
    }
    value
}

fn xattr_cases() -> Vec<XattrCase> {
    const ANY: &[u8] = b"0234567";
    const USER: &[u8] = b"05";
    const NONE: u32 = u32::MAX;
    let kept = |name, value: Vec<u8>, kept| XattrCase { name, stored: value.clone(), value, kept };
    let dropped = |name, value: Vec<u8>| kept(name, value, b"");
    let sorted = acl(&[(1, 6, NONE), (2, 7, 5), (4, 4, NONE), (16, 6, NONE), (32, 0, NONE)]);
    let mixed = acl(&[(32, 0, 0), (2, 7, 5), (16, 6, 3), (4, 4, 0), (1, 6, 0)]);
    vec![
        kept("user.text", b"value".to_vec(), USER),
        kept("user.empty", Vec::new(), USER),
        kept("user.bytes", vec![0, 255, b'\n', b'='], USER),
        kept("user.large", vec![7; 65_535], USER),
        kept("trusted.any", b"1".to_vec(), ANY),
        kept("security.selinux", b"u:object_r:system_file:s0\0".to_vec(), ANY),
        kept("security.capability", capability(), ANY),
        XattrCase { stored: sorted.clone(), ..kept("system.posix_acl_access", mixed.clone(), b"034567") },
        XattrCase { stored: sorted, ..kept("system.posix_acl_default", mixed, b"5") },
        dropped("user.", vec![1]),
        dropped("user.too-large", vec![7; 65_536]),
        dropped("user.overlay.opaque", b"y".to_vec()),
        dropped("security.capability", Vec::new()),
        dropped("security.capability", vec![1, 2]),
        dropped("system.posix_acl_access", acl(&[])),
        dropped("system.posix_acl_access", acl(&[(1, 6, NONE), (4, 6, NONE)])),
        dropped("system.nfs4_acl", vec![1]),
    ]
}

/// An entry, and whether it is one that a layer can hold.
fn entry() -> impl Strategy<Value = (TarBuilderEntry, Vec<XattrCase>, bool)> {
    let number = select(vec![0, 1, 255, 256, 4095, 4096, (1 << 20) - 1, 1 << 20, 1 << 21, u32::MAX]);
    let device = prop_oneof![3 => Just((1, 3)), 1 => (number.clone(), number)];
    let kind = prop_oneof![
        4 => Just((FILE, 0, (0, 0))),
        2 => Just((DIRECTORY, 0, (0, 0))),
        2 => select(vec![1usize, 200, 4095]).prop_map(|length| (SYMLINK, length, (0, 0))),
        1 => select(vec![4096, 5000]).prop_map(|length| (SYMLINK, length, (0, 0))),
        2 => (select(vec![b'3', b'4']), device).prop_map(|(kind, device)| (kind, 0, device)),
        1 => Just((b'6', 0, (0, 0))),
    ];
    let name = prop_oneof![8 => Just(10usize), 2 => Just(255), 1 => Just(256)];
    let owner = prop_oneof![6 => Just(0u64), 2 => Just(4_294_967_294), 1 => Just(4_294_967_295)];
    let xattrs = prop::collection::vec(select(xattr_cases()), 0..4);
    (kind, name, owner, 0u32..0o10_000, any::<u32>(), xattrs).prop_map(
        |((kind, link, device), name, uid, mode, mtime, xattrs)| {
            let mut entry = TarBuilderEntry { device, uid, ..TarBuilderEntry::new(kind, vec![b'n'; name]) };
            (entry.link, entry.mode, entry.mtime) = (vec![b'l'; link], mode, mtime.into());
            if kind == FILE {
                entry.data = vec![b'd'; mode as usize];
            }
            for case in &xattrs {
                entry = entry.xattr(case.name, case.value.clone());
            }
            let is_device = matches!(kind, b'3' | b'4');
            let fits = !is_device || (device.0 < 4096 && device.1 < 1 << 20);
            (entry, xattrs, fits && link < 4096 && name < 256 && uid < 4_294_967_295)
        },
    )
}

fn check_metadata(layer: &LayerReader, inode: &ErofsInode, entry: &TarBuilderEntry, xattrs: &[XattrCase]) {
    let is_link = entry.kind == SYMLINK;
    assert_eq!(inode.mode, if is_link { 0o777 } else { entry.mode });
    assert_eq!((u64::from(inode.uid), inode.mtime.seconds), (entry.uid, i64::try_from(entry.mtime).unwrap()));
    if matches!(entry.kind, b'3' | b'4') {
        assert_eq!(inode.rdev, entry.device);
    }
    if is_link {
        assert_eq!(layer.symlink_target(inode).unwrap(), entry.link);
    }
    let mut content = vec![0; entry.data.len() + 1];
    if entry.kind == FILE {
        let length = layer.read_at(inode, &mut content, 0).unwrap();
        assert_eq!(&content[..length], &entry.data);
    }
    let mut expected: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
    for case in xattrs.iter().filter(|case| case.kept.contains(&entry.kind)) {
        expected.retain(|(name, _)| name != case.name.as_bytes());
        expected.push((case.name.into(), case.stored.clone()));
    }
    let mut found = layer.xattrs(inode).unwrap();
    expected.sort();
    found.sort();
    assert_eq!(found, expected);
}

/// The kernel shows what the layer has.
fn check_mounted(path: &Path, layer: &LayerReader, inode: &ErofsInode, kind: u8) {
    let meta = fs_err::symlink_metadata(path).unwrap();
    assert_eq!((meta.mode() & 0o7777, meta.uid(), meta.size()), (inode.mode, inode.uid, inode.size));
    if matches!(kind, b'3' | b'4') {
        assert_eq!((rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev())), inode.rdev);
    }
    let mut expected = layer.stored_xattrs(inode).unwrap();
    let mut names = vec![0; 65_536];
    let length = rustix::fs::llistxattr(path, &mut names[..]).unwrap();
    let names = names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let mut found: Vec<_> = names
        .map(|name| {
            let mut value = vec![0; 65_536];
            let text = std::str::from_utf8(name).unwrap();
            let length = rustix::fs::lgetxattr(path, text, &mut value[..]).unwrap();
            value.truncate(length);
            (name.to_vec(), value)
        })
        .collect();
    expected.sort();
    found.sort();
    assert_eq!(found, expected);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn an_accepted_layer_is_read_back_and_a_rejected_entry_is_named(
        entries in prop::collection::vec(entry(), 1..12)
    ) {
        let mut archive = TarBuilder::new();
        let mut named = Vec::new();
        for (number, (mut entry, xattrs, fits)) in entries.into_iter().enumerate() {
            let digits = format!("{number:02}");
            entry.path[..2].copy_from_slice(digits.as_bytes());
            archive = archive.with(entry.clone());
            named.push((entry, xattrs, fits));
        }
        let layer = UnpackDir::new();
        let outcome = layer.unpack(&archive.finish());
        if let Some((rejected, ..)) = named.iter().find(|(.., fits)| !fits) {
            let error = outcome.unwrap_err().to_string();
            prop_assert!(error.contains(&*String::from_utf8_lossy(&rejected.path)), "{}", error);
            return Ok(());
        }
        let unpacked = outcome.unwrap();
        let dropped = named.iter().flat_map(|(entry, xattrs, _)| {
            let is_whiteout = entry.kind == b'3' && entry.device == (0, 0);
            let kind = entry.kind;
            xattrs.iter().filter(move |case| !is_whiteout && !case.kept.contains(&kind))
        });
        prop_assert_eq!(unpacked.skipped_xattrs, dropped.count() as u64);
        let reader = open_layer(&layer.layer()).unwrap();
        for (entry, xattrs, _) in &named {
            let inode = reader.find(&entry.path).unwrap().unwrap();
            if inode.is_whiteout() {
                continue;
            }
            check_metadata(&reader, &inode, entry, xattrs);
            if layer.is_mounted() {
                let path = layer.root().join(std::str::from_utf8(&entry.path).unwrap());
                check_mounted(&path, &reader, &inode, entry.kind);
            }
        }
    }
}

/// Errors of the parser, of the limits and of the rules alike.
#[test]
fn errors_name_the_entry() {
    let long = "n/".repeat(3000);
    let file = |name: &str| TarBuilderEntry::file(name, "");
    let mut damaged = file("a/damaged").header();
    damaged[108] = b'z';
    larder_testkit::archive::seal(&mut damaged);
    let damaged = TarBuilder::new().raw(&damaged).finish();
    let entries = |entry: TarBuilderEntry| TarBuilder::new().with(entry).finish();
    for (archive, texts) in [
        (damaged, ["a/damaged", "damaged at byte 0"]),
        (entries(TarBuilderEntry::char_device("a/device", 1 << 21, 0)), ["a/device", "damaged at byte 0"]),
        (entries(TarBuilderEntry::char_device("a/device", 4096, 0)), ["a/device", "out of range"]),
        (entries(file("a/pax").pax("mtime", "yesterday")), ["a/pax", "malformed extended header"]),
        (
            entries(file("a/huge").pax("comment", vec![b'c'; 2 << 20])),
            ["bytes of extended headers", "1048576"],
        ),
        (entries(TarBuilderEntry::symlink("a/link", long.as_str())), ["a/link", "longer than 4096 bytes"]),
        (entries(TarBuilderEntry::symlink("a/link", "l".repeat(4096))), ["a/link", "longer than 4095 bytes"]),
        (entries(TarBuilderEntry::hard_link("a/hard", long.as_str())), ["a/hard", "longer than 4096 bytes"]),
        (entries(file(&long)), ["n/n/n/", "more than 4096 bytes in the path"]),
        (
            entries(TarBuilderEntry::char_device("d/".repeat(60) + "device", 1 << 21, 0)),
            ["d/d/d/d/d/device\"", "damaged at byte"],
        ),
    ] {
        let error = UnpackDir::new().unpack(&archive).unwrap_err().to_string();
        assert!(texts.iter().all(|text| error.contains(text)) && error.len() < 1000, "{texts:?}: {error}");
    }
}

#[test]
fn an_extended_header_without_a_value_leaves_that_of_the_header() {
    let layer = UnpackDir::new();
    let file = TarBuilderEntry::file("dir/file", "x").pax("path", "").pax("mtime", "").pax("uid", "");
    let link = TarBuilderEntry::symlink("link", "dir/file").pax("linkpath", "");
    layer.unpack(&TarBuilder::new().with(file).with(link).finish()).unwrap();
    let reader = open_layer(&layer.layer()).unwrap();
    assert_eq!(reader.find(b"dir/file").unwrap().unwrap().mtime.seconds, 1_700_000_000);
    let link = reader.find(b"link").unwrap().unwrap();
    assert_eq!(reader.symlink_target(&link).unwrap(), b"dir/file");
}
