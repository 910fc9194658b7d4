//! Entries that make no sense together, or alone.

use std::os::unix::fs::MetadataExt as _;

use larder_erofs::EntryProblem;
use larder_store::unpack::EntryRefusal;
use larder_testkit::archive::TarBuilderEntry;

use super::ExpectedResult::{Contained, Damaged, Limit, Refused};
use super::{HostileArchive, case, entries};

pub(super) fn nonsense() -> Vec<HostileArchive> {
    let path = |path: &[u8]| entries([TarBuilderEntry::file("short", "").pax("path", path)]);
    vec![
        case(
            "two links in a circle",
            entries([
                TarBuilderEntry::symlink("a", "b"),
                TarBuilderEntry::symlink("b", "a"),
                TarBuilderEntry::file("a/f", ""),
            ]),
            Refused(EntryRefusal::Entry(EntryProblem::TooManyLinks)),
        ),
        case(
            "a link to itself",
            entries([TarBuilderEntry::symlink("a", "a"), TarBuilderEntry::file("a/f", "")]),
            Refused(EntryRefusal::Entry(EntryProblem::TooManyLinks)),
        ),
        case(
            "a link that grows",
            entries([TarBuilderEntry::symlink("a", "a/a"), TarBuilderEntry::file("a/f", "")]),
            Refused(EntryRefusal::Entry(EntryProblem::TooManyLinks)),
        ),
        case(
            "a whiteout of nothing",
            entries([TarBuilderEntry::file("d/.wh.", "")]),
            Refused(EntryRefusal::Entry(EntryProblem::Whiteout)),
        ),
        case(
            "a whiteout of its directory",
            entries([TarBuilderEntry::file("d/.wh..", "")]),
            Refused(EntryRefusal::Entry(EntryProblem::Whiteout)),
        ),
        case(
            "a whiteout of the directory above",
            entries([TarBuilderEntry::file("d/.wh...", "")]),
            Refused(EntryRefusal::Entry(EntryProblem::Whiteout)),
        ),
        case("a zero byte in a path", path(b"a\0b"), Refused(EntryRefusal::Entry(EntryProblem::ZeroByte))),
        case(
            "a zero byte in a link",
            entries([TarBuilderEntry::symlink("a", "b").pax("linkpath", "b\0c")]),
            Refused(EntryRefusal::Entry(EntryProblem::ZeroByte)),
        ),
        case(
            "a link to nothing",
            entries([TarBuilderEntry::symlink("a", "")]),
            Refused(EntryRefusal::EmptyLink),
        ),
        case("a long name", path(&[b'n'; 256]), Refused(EntryRefusal::Entry(EntryProblem::NameTooLong))),
        case(
            "a long name as a parent",
            path(&[&[b'n'; 256][..], b"/f"].concat()),
            Refused(EntryRefusal::Entry(EntryProblem::NameTooLong)),
        ),
        case("a long path", path(&b"d/".repeat(3000)), Limit("bytes in the path of an entry")),
        case(
            "a long path through links",
            entries([
                TarBuilderEntry::dir(format!("{}x", "d/".repeat(1500))),
                TarBuilderEntry::symlink("a", "d/".repeat(1500)),
                TarBuilderEntry::file(format!("a/{}f", "e/".repeat(1500)), ""),
            ]),
            Refused(EntryRefusal::Entry(EntryProblem::PathTooLong)),
        ),
        case(
            "the root as a file",
            entries([TarBuilderEntry::file("./", "")]),
            Refused(EntryRefusal::Entry(EntryProblem::RootNotDirectory)),
        ),
        case(
            "the root as a link",
            entries([TarBuilderEntry::symlink("/", "/etc")]),
            Refused(EntryRefusal::Entry(EntryProblem::RootNotDirectory)),
        ),
        case(
            "a file as a parent",
            entries([TarBuilderEntry::file("f", ""), TarBuilderEntry::file("f/g", "")]),
            Refused(EntryRefusal::Entry(EntryProblem::ParentNotDirectory)),
        ),
        case(
            "a pipe as a parent",
            entries([TarBuilderEntry::fifo("f"), TarBuilderEntry::file("f/g", "")]),
            Refused(EntryRefusal::Entry(EntryProblem::ParentNotDirectory)),
        ),
        case(
            "a hard link to a directory",
            entries([TarBuilderEntry::dir("d"), TarBuilderEntry::hard_link("e", "d")]),
            Refused(EntryRefusal::Entry(EntryProblem::LinkToDirectory)),
        ),
        case(
            "a hard link to the root",
            entries([TarBuilderEntry::hard_link("e", "/")]),
            Refused(EntryRefusal::Entry(EntryProblem::LinkToDirectory)),
        ),
        case(
            "a hard link to itself",
            entries([TarBuilderEntry::file("a", ""), TarBuilderEntry::hard_link("a", "./a")]),
            Refused(EntryRefusal::Entry(EntryProblem::LinkToItself)),
        ),
        case(
            "a hard link that removes its target",
            entries([TarBuilderEntry::file("d/f", ""), TarBuilderEntry::hard_link("d", "d/f")]),
            Refused(EntryRefusal::Entry(EntryProblem::LinkTarget)),
        ),
        case(
            "a long chain of hard links backwards",
            entries(
                (0..60)
                    .map(|at| TarBuilderEntry::hard_link(format!("l{at}"), format!("l{}", at + 1)))
                    .chain([TarBuilderEntry::file("l60", "")]),
            ),
            Refused(EntryRefusal::Entry(EntryProblem::LinkChain)),
        ),
        case(
            "hard links in a circle",
            entries([TarBuilderEntry::hard_link("a", "b"), TarBuilderEntry::hard_link("b", "a")]),
            Refused(EntryRefusal::Entry(EntryProblem::LinkTarget)),
        ),
        case(
            "an unknown type",
            entries([TarBuilderEntry::new(b'Z', "z")]),
            Refused(EntryRefusal::Type(b'Z')),
        ),
        case(
            "an owner over 32 bits",
            entries([TarBuilderEntry::file("f", "").owner(1 << 32, 0)]),
            Refused(EntryRefusal::Entry(EntryProblem::Owner)),
        ),
        case(
            "the owner -1",
            entries([TarBuilderEntry::file("f", "").owner(0, u32::MAX.into())]),
            Refused(EntryRefusal::Entry(EntryProblem::Owner)),
        ),
        case(
            "an owner that is no number",
            entries([TarBuilderEntry::file("f", "").pax("uid", "-1")]),
            Damaged("malformed"),
        ),
        case(
            "attributes that steer the overlay",
            entries([
                TarBuilderEntry::dir("d")
                    .xattr("trusted.overlay.opaque", "y")
                    .xattr("trusted.overlay.redirect", "/etc"),
                TarBuilderEntry::file("f", "")
                    .xattr("trusted.overlay.metacopy", "")
                    .xattr("user.overlay.redirect", "/etc"),
            ]),
            Contained(|layer, _| {
                assert!(!layer.opaque("d"));
                for path in ["d", "f"] {
                    let mut names = [0; 256];
                    let length = rustix::fs::llistxattr(layer.root().join(path), &mut names[..]).unwrap();
                    let names = String::from_utf8_lossy(&names[..length]).into_owned();
                    // In a layer they are escaped: an overlay then shows them, and does not follow them.
                    assert!(!names.replace("trusted.overlay.overlay.", "").contains("overlay"), "{names}");
                }
            }),
        ),
        case(
            "a whiteout as a device",
            entries([TarBuilderEntry::char_device("gone", 0, 0)]),
            Contained(|layer, unpacked| {
                assert!(unpacked.hides_lowers);
                assert!(layer.is_whiteout("gone"));
            }),
        ),
        case(
            "a hard link to a whiteout",
            entries([TarBuilderEntry::file(".wh.a", ""), TarBuilderEntry::hard_link("b", "a")]),
            Refused(EntryRefusal::Entry(EntryProblem::LinkTarget)),
        ),
        case(
            "a file over a pipe",
            entries([TarBuilderEntry::fifo("p"), TarBuilderEntry::file("p", "content")]),
            Contained(|layer, _| {
                assert_eq!(layer.read("p"), "content");
            }),
        ),
        case(
            "what an old union filesystem kept",
            entries([TarBuilderEntry::file(".wh..wh.plnk/1.2", "x")]),
            Contained(|layer, _| {
                assert_eq!(fs_err::read_dir(layer.root()).unwrap().count(), 0);
            }),
        ),
        case(
            "content where the type has none",
            entries([TarBuilderEntry::dir("d").with_false_size(1 << 40), TarBuilderEntry::file("d/f", "x")]),
            Contained(|layer, _| {
                assert_eq!(layer.read("d/f"), "x");
            }),
        ),
        case(
            "a set-id file of another user",
            entries([TarBuilderEntry::file("su", "x").mode(0o6755).owner(0, 5)]),
            Contained(|layer, _| {
                assert_eq!(layer.meta("su").mode() & 0o777, 0o755);
            }),
        ),
    ]
}
