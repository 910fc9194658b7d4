//! Random sequences of entries become what the model says, whatever their order.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use larder_erofs::{ErofsError, ErofsOptions, ErofsTime, ErofsWriter};

use crate::model::{Model, view_of_layer};
use crate::product_reader::compare_readers;
use crate::reader::read;
use crate::script::{ScriptEntry, ScriptKind, file, hard_link, noise, symlink, write, writer};

/// Few names, so that entries meet.
fn name() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        8 => prop::sample::select(vec!["a", "b", "c", "d"]).prop_map(|name| name.as_bytes().to_vec()),
        1 => (1usize..=255, any::<u8>()).prop_map(|(length, byte)| vec![byte.max(b'0'); length]),
        1 => prop::sample::select(vec!["-", "..x", "\u{e9}", "!"]).prop_map(|name| name.as_bytes().to_vec()),
    ]
}

fn path() -> impl Strategy<Value = Vec<u8>> {
    vec(name(), 1..5).prop_map(|parts| parts.join(&b'/'))
}

fn entry_path() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        20 => path(),
        2 => path().prop_map(|path| [b"/./", &path[..], b"/"].concat()),
        2 => (path(), name()).prop_map(|(path, name)| [&path[..], b"/.wh.", &name].concat()),
        1 => path().prop_map(|path| [&path[..], b"/.wh..wh..opq"].concat()),
        1 => Just(b"./".to_vec()),
    ]
}

fn size() -> impl Strategy<Value = usize> {
    prop_oneof![
        4 => 0usize..200,
        4 => 0usize..9000,
        2 => prop::sample::select(vec![0, 1, 4031, 4032, 4033, 4095, 4096, 4097, 8192, 8192 + 4032]),
        1 => 20_000usize..200_000,
    ]
}

fn sparse() -> impl Strategy<Value = ScriptKind> {
    (vec((0u64..30_000, 1usize..9000), 0..5), 0u64..50_000).prop_map(|(parts, hole)| {
        let mut end = 0;
        let mut extents = Vec::new();
        for (gap, length) in parts {
            extents.push((end + gap, noise(length, gap)));
            end += gap + length as u64;
        }
        ScriptKind::Sparse(end + hole, extents)
    })
}

fn kind() -> impl Strategy<Value = ScriptKind> {
    let target = prop_oneof![4 => path(), 1 => path().prop_map(|path| [b"../", &path[..]].concat())];
    prop_oneof![
        6 => (size(), any::<u64>()).prop_map(|(size, seed)| ScriptKind::File(noise(size, seed))),
        1 => sparse(),
        5 => Just(ScriptKind::Directory),
        2 => target.prop_map(ScriptKind::Symlink),
        1 => (0usize..2048).prop_map(|length| ScriptKind::Symlink([&b"./".repeat(length)[..], b"e"].concat())),
        3 => path().prop_map(ScriptKind::HardLink),
        1 => Just(ScriptKind::Fifo),
        1 => (0u32..4096, 0u32..1 << 20).prop_map(|(major, minor)| ScriptKind::CharDevice(major, minor)),
        1 => Just(ScriptKind::CharDevice(0, 0)),
        1 => (0u32..4096, 0u32..1 << 20).prop_map(|(major, minor)| ScriptKind::BlockDevice(major, minor)),
    ]
}

/// Attributes that a kernel would refuse, which a layer does not have.
fn invalid_xattr() -> impl Strategy<Value = (Vec<u8>, Vec<u8>)> {
    let acl = |tags: &[u8]| {
        let entries = tags.iter().flat_map(|tag| [*tag, 0, 6, 0, 255, 255, 255, 255]);
        2u32.to_le_bytes().into_iter().chain(entries).collect()
    };
    let invalid = vec![
        ("security.capability", Vec::new()),
        ("security.capability", vec![1, 0, 0, 2, 0, 0, 0, 0]),
        ("system.posix_acl_access", acl(&[])),
        ("system.posix_acl_access", acl(&[1, 4, 4, 32])),
        ("user.", vec![1]),
        ("user.overlay.opaque", b"y".to_vec()),
        ("user.large", noise(65_536, 1)),
        ("unknown.name", Vec::new()),
    ];
    prop::sample::select(invalid).prop_map(|(name, value)| (name.as_bytes().to_vec(), value))
}

fn xattrs() -> impl Strategy<Value = Vec<(Vec<u8>, Vec<u8>)>> {
    let names = vec!["security.y", "security.x", "trusted.long.name.of.an.attribute"];
    let value = prop_oneof![8 => 0usize..40, 1 => 0usize..5000].prop_map(|length| noise(length, 7));
    let one =
        (prop::sample::select(names), value).prop_map(|(name, value)| (name.as_bytes().to_vec(), value));
    let invalid = vec(invalid_xattr(), 1..3);
    prop_oneof![5 => Just(Vec::new()), 1 => vec(one, 1..4), 1 => invalid]
}

pub(crate) fn script_entry() -> impl Strategy<Value = ScriptEntry> {
    let time = (any::<i32>(), 0u32..1_000_000_000);
    let mode = prop_oneof![3 => Just(0o644u32), 1 => 0u32..0o10_000];
    let owner = prop_oneof![3 => Just(0u32), 1 => 0u32..u32::MAX];
    (entry_path(), kind(), mode, owner.clone(), owner, time, xattrs()).prop_map(
        |(path, kind, mode, uid, gid, (seconds, nanos), xattrs)| ScriptEntry {
            path,
            kind,
            mode,
            uid,
            gid,
            mtime: ErofsTime { seconds: seconds.into(), nanos },
            xattrs,
        },
    )
}

/// The entries that the model accepts, up to the first 60; and the first one that it does not.
pub(crate) fn accepted(entries: Vec<ScriptEntry>) -> (Vec<ScriptEntry>, Model, Option<(usize, ScriptEntry)>) {
    let (mut model, mut accepted, mut rejected) = (Model::new(), Vec::new(), None);
    for entry in entries {
        let mut next = model.clone();
        // A link that can never be made is only found at the end.
        if next.apply(&entry).is_some() && next.clone().finish().is_some() {
            model = next;
            accepted.push(entry);
        } else if next.clone().apply(&entry).is_none() && rejected.is_none() {
            rejected = Some((accepted.len(), entry));
        }
    }
    (accepted, model, rejected)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_layer_is_what_its_entries_say(entries in vec(script_entry(), 0..50)) {
        let (entries, mut model, _) = accepted(entries);
        let mut writer = writer();
        for (at, entry) in entries.iter().enumerate() {
            entry.add_to(&mut writer, [usize::MAX, 1000, 4096][at % 3]).unwrap();
        }
        writer.resolve_links(&|| false).unwrap();
        let links: Vec<_> = writer.lower_links().map(|link| (link.path, link.target)).collect();
        let mut implicit: Vec<_> = writer.implicit_directories().collect();
        implicit.sort();
        let (layer, summary) = writer.finish().unwrap();
        prop_assert_eq!(summary.size, layer.len() as u64);
        compare_readers(&layer);
        prop_assert_eq!(summary.lower_links, links.len() as u64);
        let mut expected_links = model.finish().unwrap();
        expected_links.sort();
        let mut links = links;
        links.sort();
        prop_assert_eq!(links, expected_links);
        let mut expected_implicit = model.implicit_directories();
        expected_implicit.sort();
        prop_assert_eq!(implicit, expected_implicit);
        let (expected, found) = (model.view(), view_of_layer(&read(&layer)));
        prop_assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
        for (path, node) in &expected {
            prop_assert_eq!(node, &found[path], "{}", String::from_utf8_lossy(path));
        }
    }

    #[test]
    fn the_writer_rejects_what_the_model_rejects(entries in vec(script_entry(), 0..30)) {
        let (entries, _, rejected) = accepted(entries);
        if let Some((at, rejected)) = rejected {
            let mut writer = writer();
            for entry in &entries[..at] {
                entry.add_to(&mut writer, usize::MAX).unwrap();
            }
            prop_assert!(rejected.add_to(&mut writer, usize::MAX).is_err(), "{:?}", rejected);
        }
    }

    #[test]
    fn equal_input_makes_equal_layers(entries in vec(script_entry(), 0..30)) {
        let (entries, ..) = accepted(entries);
        prop_assert_eq!(write(&entries).unwrap().0, write(&entries).unwrap().0);
    }
}

#[test]
fn names_in_a_file_make_an_equal_layer() {
    let mut runner = TestRunner::new(Config { cases: 15, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&(vec(script_entry(), 0..60), 1u32..2000), |(entries, dirs)| {
        let (entries, ..) = accepted(entries);
        let many =
            (0..5000).map(|at| hard_link(format!("many/{}/{at:0>60}", at % dirs), format!("x{at:0>60}")));
        let write = |max_name_bytes| {
            let options = ErofsOptions { max_name_bytes, ..ErofsOptions::default() };
            let mut writer = ErofsWriter::new(Vec::new(), options).unwrap();
            for entry in many.clone().chain(entries.iter().cloned()) {
                entry.add_to(&mut writer, usize::MAX).unwrap();
            }
            let links: Vec<_> = writer.lower_links().collect();
            (writer.finish().unwrap().0, links)
        };
        prop_assert!(write(0) == write(usize::MAX));
        Ok(())
    });
    outcome.unwrap();
}

#[test]
fn a_layer_that_waits_in_files_becomes_an_equal_layer() {
    let mut runner = TestRunner::new(Config { cases: 8, failure_persistence: None, ..Config::default() });
    let outcome = runner.run(&(vec(script_entry(), 0..60), 0usize..9_000), |(entries, names)| {
        let (entries, ..) = accepted(entries);
        let many = (0..names).map(|at| hard_link(format!("many/{}/{at}", at % 100), format!("x{at}")));
        let write = |is_parked| {
            let mut writer = writer();
            for entry in many.clone().chain(entries.iter().cloned()) {
                entry.add_to(&mut writer, usize::MAX).unwrap();
            }
            writer.resolve_links(&|| false).unwrap();
            if is_parked {
                writer.park().unwrap();
                assert!(writer.memory() < 1000, "{} bytes while it waits", writer.memory());
                writer.unpark().unwrap();
            }
            // Names are found and new ones added, as for files of lower layers.
            file("many/1/1", "content").add_to(&mut writer, usize::MAX).unwrap();
            hard_link("linked", "many/1/1").add_to(&mut writer, usize::MAX).unwrap();
            symlink("new", "many/1").add_to(&mut writer, usize::MAX).unwrap();
            let links: Vec<_> = writer.lower_links().collect();
            (writer.finish().unwrap().0, links)
        };
        prop_assert!(write(true) == write(false));
        Ok(())
    });
    outcome.unwrap();
}

#[test]
fn links_are_resolved_until_the_layer_is_canceled() {
    let mut writer = writer();
    hard_link("link", "later").add_to(&mut writer, 1).unwrap();
    file("later", "").add_to(&mut writer, 1).unwrap();
    assert!(matches!(writer.resolve_links(&|| true), Err(ErofsError::Canceled)));
    assert_eq!(writer.lower_links().count(), 1);
}
