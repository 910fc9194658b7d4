//! Entries that make no sense together, or alone.

use std::os::unix::fs::MetadataExt as _;

use larder_store::unpack::{Refusal, Settling};
use larder_testkit::archive::Entry;

use super::Outcome::{Contained, Damaged, Limit, Refused};
use super::{Case, case, entries};

pub(super) fn nonsense() -> Vec<Case> {
    let path = |path: &[u8]| entries([Entry::file("short", "").pax("path", path)]);
    vec![
        case(
            "two links in a circle",
            entries([Entry::symlink("a", "b"), Entry::symlink("b", "a"), Entry::file("a/f", "")]),
            Refused(Refusal::TooManyLinks),
        ),
        case(
            "a link to itself",
            entries([Entry::symlink("a", "a"), Entry::file("a/f", "")]),
            Refused(Refusal::TooManyLinks),
        ),
        case(
            "a link that grows",
            entries([Entry::symlink("a", "a/a"), Entry::file("a/f", "")]),
            Refused(Refusal::TooManyLinks),
        ),
        case("a whiteout of nothing", entries([Entry::file("d/.wh.", "")]), Refused(Refusal::Whiteout)),
        case(
            "a whiteout of its directory",
            entries([Entry::file("d/.wh..", "")]),
            Refused(Refusal::Whiteout),
        ),
        case(
            "a whiteout of the directory above",
            entries([Entry::file("d/.wh...", "")]),
            Refused(Refusal::Whiteout),
        ),
        case("a zero byte in a path", path(b"a\0b"), Refused(Refusal::ZeroByte)),
        case(
            "a zero byte in a link",
            entries([Entry::symlink("a", "b").pax("linkpath", "b\0c")]),
            Refused(Refusal::ZeroByte),
        ),
        case("a link to nothing", entries([Entry::symlink("a", "")]), Refused(Refusal::EmptyLink)),
        case("a long name", path(&[b'n'; 256]), Refused(Refusal::NameTooLong)),
        case(
            "a long name as a parent",
            path(&[&[b'n'; 256][..], b"/f"].concat()),
            Refused(Refusal::NameTooLong),
        ),
        case("a long path", path(&b"d/".repeat(3000)), Limit("bytes in the path of an entry")),
        case(
            "a long path through links",
            entries([
                Entry::dir(format!("{}x", "d/".repeat(1500))),
                Entry::symlink("a", "d/".repeat(1500)),
                Entry::file(format!("a/{}f", "e/".repeat(1500)), ""),
            ]),
            Refused(Refusal::PathTooLong),
        ),
        case("the root as a file", entries([Entry::file("./", "")]), Refused(Refusal::Root)),
        case("the root as a link", entries([Entry::symlink("/", "/etc")]), Refused(Refusal::Root)),
        case(
            "a file as a parent",
            entries([Entry::file("f", ""), Entry::file("f/g", "")]),
            Refused(Refusal::ParentNotDirectory),
        ),
        case(
            "a pipe as a parent",
            entries([Entry::fifo("f"), Entry::file("f/g", "")]),
            Refused(Refusal::ParentNotDirectory),
        ),
        case(
            "a hard link to a directory",
            entries([Entry::dir("d"), Entry::hard_link("e", "d")]),
            Refused(Refusal::LinkToDirectory),
        ),
        case(
            "a hard link to the root",
            entries([Entry::hard_link("e", "/")]),
            Refused(Refusal::LinkToDirectory),
        ),
        case(
            "a hard link to itself",
            entries([Entry::file("a", ""), Entry::hard_link("a", "./a")]),
            Refused(Refusal::LinkToItself),
        ),
        case(
            "a hard link that removes its target",
            entries([Entry::file("d/f", ""), Entry::hard_link("d", "d/f")]),
            Refused(Refusal::LinkTarget),
        ),
        case(
            "a long chain of hard links backwards",
            entries(
                (0..60)
                    .map(|at| Entry::hard_link(format!("l{at}"), format!("l{}", at + 1)))
                    .chain([Entry::file("l60", "")]),
            ),
            Refused(Refusal::LinkChain),
        ),
        case(
            "hard links in a circle",
            entries([Entry::hard_link("a", "b"), Entry::hard_link("b", "a")]),
            Contained(|layer, unpacked| {
                assert_eq!(unpacked.pending.cross_layer_links, 2);
                assert!(layer.settle(&[], Settling::Apply).is_err());
            }),
        ),
        case("an unknown type", entries([Entry::new(b'Z', "z")]), Refused(Refusal::Type(b'Z'))),
        case(
            "an owner over 32 bits",
            entries([Entry::file("f", "").owner(1 << 32, 0)]),
            Refused(Refusal::Owner),
        ),
        case(
            "the owner -1",
            entries([Entry::file("f", "").owner(0, u32::MAX.into())]),
            Refused(Refusal::Owner),
        ),
        case(
            "an owner that is no number",
            entries([Entry::file("f", "").pax("uid", "-1")]),
            Damaged("malformed"),
        ),
        case(
            "attributes that steer the overlay",
            entries([
                Entry::dir("d")
                    .xattr("trusted.overlay.opaque", "y")
                    .xattr("trusted.overlay.redirect", "/etc"),
                Entry::file("f", "")
                    .xattr("trusted.overlay.metacopy", "")
                    .xattr("user.overlay.redirect", "/etc"),
            ]),
            Contained(|layer, _| {
                assert!(!layer.opaque("d"));
                for path in ["d", "f"] {
                    let mut names = [0; 256];
                    let length = rustix::fs::llistxattr(layer.root().join(path), &mut names[..]).unwrap();
                    let names = String::from_utf8_lossy(&names[..length]).into_owned();
                    assert!(!names.contains("overlay"), "{names}");
                }
            }),
        ),
        case(
            "a whiteout as a device",
            entries([Entry::char_device("gone", 0, 0)]),
            Contained(|layer, unpacked| {
                assert!(unpacked.hides_lowers);
                assert!(layer.is_whiteout("gone"));
            }),
        ),
        case(
            "a hard link to a whiteout",
            entries([Entry::file(".wh.a", ""), Entry::hard_link("b", "a")]),
            Contained(|_, unpacked| {
                assert_eq!(unpacked.pending.cross_layer_links, 1);
            }),
        ),
        case(
            "a file over a pipe",
            entries([Entry::fifo("p"), Entry::file("p", "content")]),
            Contained(|layer, _| {
                assert_eq!(layer.read("p"), "content");
            }),
        ),
        case(
            "what an old union file system kept",
            entries([Entry::file(".wh..wh.plnk/1.2", "x")]),
            Contained(|layer, _| {
                assert_eq!(fs_err::read_dir(layer.root()).unwrap().count(), 0);
            }),
        ),
        case(
            "content where the type has none",
            entries([Entry::dir("d").claiming(1 << 40), Entry::file("d/f", "x")]),
            Contained(|layer, _| {
                assert_eq!(layer.read("d/f"), "x");
            }),
        ),
        case(
            "a set-id file of somebody else",
            entries([Entry::file("su", "x").mode(0o6755).owner(0, 5)]),
            Contained(|layer, _| {
                assert_eq!(layer.meta("su").mode() & 0o777, 0o755);
            }),
        ),
    ]
}
