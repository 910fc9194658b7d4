//! Archives that lead out of the layer.

use larder_erofs::EntryProblem;
use larder_store::unpack::EntryRefusal;
use larder_testkit::archive::TarBuilderEntry;

use super::ExpectedResult::{Contained, Refused};
use super::{HostileArchive, case, entries};

/// The paths lead to the guarded directory if they lead anywhere outside: `{outside}` is its absolute path.
pub(super) fn ways_out(outside: &str) -> Vec<HostileArchive> {
    let inside = outside.trim_start_matches('/').to_owned();
    let absolute = format!("{outside}/secret");
    vec![
        case(
            "an absolute path",
            entries([TarBuilderEntry::file(absolute.as_str(), "evil")]),
            Contained(|layer, _| {
                let inside = layer.root().join(layer.outside().strip_prefix("/").unwrap()).join("secret");
                assert_eq!(fs_err::read_to_string(inside).unwrap(), "evil");
            }),
        ),
        case(
            "dots at the start",
            entries([TarBuilderEntry::file("../outside/secret", "evil")]),
            Contained(|layer, _| assert_eq!(layer.read("outside/secret"), "evil")),
        ),
        case(
            "dots in the middle",
            entries([TarBuilderEntry::file("a/b/../../../../outside/secret", "evil")]),
            Contained(|layer, _| assert_eq!(layer.read("outside/secret"), "evil")),
        ),
        case(
            "dots through a link",
            entries([
                TarBuilderEntry::symlink("a", "/"),
                TarBuilderEntry::file("a/../../outside/secret", "evil"),
            ]),
            Contained(|layer, _| assert_eq!(layer.read("outside/secret"), "evil")),
        ),
        case(
            "a file through an absolute link",
            entries([TarBuilderEntry::symlink("out", outside), TarBuilderEntry::file("out/secret", "evil")]),
            Contained(|layer, _| {
                let inside = layer.root().join(layer.outside().strip_prefix("/").unwrap()).join("secret");
                assert_eq!(fs_err::read_to_string(inside).unwrap(), "evil");
            }),
        ),
        case(
            "a file through a relative link",
            entries([
                TarBuilderEntry::symlink("up", "../../outside"),
                TarBuilderEntry::file("up/secret", "evil"),
            ]),
            Contained(|layer, _| assert_eq!(layer.read("outside/secret"), "evil")),
        ),
        case(
            "a file through a chain of links",
            entries([
                TarBuilderEntry::dir("d"),
                TarBuilderEntry::symlink("d/one", ".."),
                TarBuilderEntry::symlink("d/two", "one/.."),
                TarBuilderEntry::symlink("d/three", "two/outside"),
                TarBuilderEntry::file("d/three/secret", "evil"),
            ]),
            Contained(|layer, _| assert_eq!(layer.read("outside/secret"), "evil")),
        ),
        case(
            "a directory that becomes a link while its name is remembered",
            entries([
                TarBuilderEntry::file("d/first", "1"),
                TarBuilderEntry::symlink("d", "../outside"),
                TarBuilderEntry::file("d/secret", "evil"),
            ]),
            Contained(|layer, _| assert_eq!(layer.read("outside/secret"), "evil")),
        ),
        case(
            "a file over a link",
            entries([
                TarBuilderEntry::symlink("link", absolute.as_str()),
                TarBuilderEntry::file("link", "evil"),
            ]),
            Contained(|layer, _| assert!(layer.meta("link").is_file())),
        ),
        case(
            "a directory over a link",
            entries([
                TarBuilderEntry::symlink("link", outside),
                TarBuilderEntry::dir("link").mode(0o777),
                TarBuilderEntry::file("link/secret", "x"),
            ]),
            Contained(|layer, _| assert!(layer.meta("link").is_dir())),
        ),
        case(
            "the mode of a link's target",
            entries([TarBuilderEntry::symlink("link", absolute.as_str()).mode(0o7777).owner(7, 7)]),
            Contained(|layer, _| assert!(layer.meta("link").is_symlink())),
        ),
        case(
            "attributes of a link's target",
            entries([TarBuilderEntry::symlink("link", absolute.as_str()).xattr("trusted.evil", "1")]),
            Contained(|layer, _| assert!(layer.meta("link").is_symlink())),
        ),
        case(
            "a hard link to an absolute path",
            entries([TarBuilderEntry::hard_link("mine", absolute.as_str())]),
            Refused(EntryRefusal::Entry(EntryProblem::LinkTarget)),
        ),
        case(
            "a hard link upwards",
            entries([TarBuilderEntry::hard_link("mine", "../../outside/secret")]),
            Refused(EntryRefusal::Entry(EntryProblem::LinkTarget)),
        ),
        case(
            "a hard link through a link",
            entries([
                TarBuilderEntry::symlink("out", outside),
                TarBuilderEntry::hard_link("mine", "out/secret"),
            ]),
            Refused(EntryRefusal::Entry(EntryProblem::LinkTarget)),
        ),
        case(
            "a hard link to a link, and a file over it",
            entries([
                TarBuilderEntry::symlink("link", absolute.as_str()),
                TarBuilderEntry::hard_link("mine", "link").mode(0o777),
                TarBuilderEntry::file("mine", "evil"),
            ]),
            Contained(|layer, _| assert_eq!(layer.read("mine"), "evil")),
        ),
        case(
            "a whiteout through a link",
            entries([TarBuilderEntry::symlink("out", outside), TarBuilderEntry::file("out/.wh.secret", "")]),
            Contained(|layer, unpacked| {
                assert!(unpacked.hides_lowers);
                assert!(layer.meta("out").is_symlink());
            }),
        ),
        case(
            "an opaque mark through a link",
            entries([
                TarBuilderEntry::symlink("out", outside),
                TarBuilderEntry::file("out/.wh..wh..opq", ""),
            ]),
            Contained(|layer, _| assert!(layer.meta("out").is_symlink())),
        ),
        case(
            "a link into /proc",
            entries([
                TarBuilderEntry::symlink("p", "/proc/self/root"),
                TarBuilderEntry::file(format!("p/{inside}/secret"), "evil"),
            ]),
            Contained(|layer, _| assert!(layer.meta("proc/self/root").is_dir())),
        ),
    ]
}
