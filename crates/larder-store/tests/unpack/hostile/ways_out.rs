//! Archives that lead out of the layer.

use larder_store::unpack::{Refusal, Settling, UnpackError, Unpacked};
use larder_testkit::archive::Entry;

use super::Outcome::Contained;
use super::{Case, case, entries};
use crate::support::Layer;

/// The paths lead to the guarded folder if they lead anywhere outside: `{outside}` is its absolute path.
pub(super) fn ways_out(outside: &str) -> Vec<Case> {
    let inside = outside.trim_start_matches('/').to_owned();
    let absolute = format!("{outside}/secret");
    vec![
        case(
            "an absolute path",
            entries([Entry::file(absolute.as_str(), "evil")]),
            Contained(|layer, _| {
                let inside = layer.root().join(layer.outside().strip_prefix("/").unwrap()).join("secret");
                assert_eq!(fs_err::read_to_string(inside).unwrap(), "evil");
            }),
        ),
        case(
            "dots at the start",
            entries([Entry::file("../outside/secret", "evil")]),
            Contained(|layer, _| assert_eq!(layer.read("outside/secret"), "evil")),
        ),
        case(
            "dots in the middle",
            entries([Entry::file("a/b/../../../../outside/secret", "evil")]),
            Contained(|layer, _| assert_eq!(layer.read("outside/secret"), "evil")),
        ),
        case(
            "dots through a link",
            entries([Entry::symlink("a", "/"), Entry::file("a/../../outside/secret", "evil")]),
            Contained(|layer, _| assert_eq!(layer.read("outside/secret"), "evil")),
        ),
        case(
            "a file through an absolute link",
            entries([Entry::symlink("out", outside), Entry::file("out/secret", "evil")]),
            Contained(|layer, _| {
                let inside = layer.root().join(layer.outside().strip_prefix("/").unwrap()).join("secret");
                assert_eq!(fs_err::read_to_string(inside).unwrap(), "evil");
            }),
        ),
        case(
            "a file through a relative link",
            entries([Entry::symlink("up", "../../outside"), Entry::file("up/secret", "evil")]),
            Contained(|layer, _| assert_eq!(layer.read("outside/secret"), "evil")),
        ),
        case(
            "a file through a chain of links",
            entries([
                Entry::dir("d"),
                Entry::symlink("d/one", ".."),
                Entry::symlink("d/two", "one/.."),
                Entry::symlink("d/three", "two/outside"),
                Entry::file("d/three/secret", "evil"),
            ]),
            Contained(|layer, _| assert_eq!(layer.read("outside/secret"), "evil")),
        ),
        case(
            "a directory that becomes a link while its name is remembered",
            entries([
                Entry::file("d/first", "1"),
                Entry::symlink("d", "../outside"),
                Entry::file("d/secret", "evil"),
            ]),
            Contained(|layer, _| assert_eq!(layer.read("outside/secret"), "evil")),
        ),
        case(
            "a file over a link",
            entries([Entry::symlink("link", absolute.as_str()), Entry::file("link", "evil")]),
            Contained(|layer, _| assert!(layer.meta("link").is_file())),
        ),
        case(
            "a directory over a link",
            entries([
                Entry::symlink("link", outside),
                Entry::dir("link").mode(0o777),
                Entry::file("link/secret", "x"),
            ]),
            Contained(|layer, _| assert!(layer.meta("link").is_dir())),
        ),
        case(
            "the mode of a link's target",
            entries([Entry::symlink("link", absolute.as_str()).mode(0o7777).owner(7, 7)]),
            Contained(|layer, _| assert!(layer.meta("link").is_symlink())),
        ),
        case(
            "attributes of a link's target",
            entries([Entry::symlink("link", absolute.as_str()).xattr("trusted.evil", "1")]),
            Contained(|layer, _| assert!(layer.meta("link").is_symlink())),
        ),
        case(
            "a hard link to an absolute path",
            entries([Entry::hard_link("mine", absolute.as_str())]),
            Contained(cannot_be_settled),
        ),
        case(
            "a hard link upwards",
            entries([Entry::hard_link("mine", "../../outside/secret")]),
            Contained(cannot_be_settled),
        ),
        case(
            "a hard link through a link",
            entries([Entry::symlink("out", outside), Entry::hard_link("mine", "out/secret")]),
            Contained(cannot_be_settled),
        ),
        case(
            "a hard link to a link, and a file over it",
            entries([
                Entry::symlink("link", absolute.as_str()),
                Entry::hard_link("mine", "link").mode(0o777),
                Entry::file("mine", "evil"),
            ]),
            Contained(|layer, _| assert_eq!(layer.read("mine"), "evil")),
        ),
        case(
            "a whiteout through a link",
            entries([Entry::symlink("out", outside), Entry::file("out/.wh.secret", "")]),
            Contained(|layer, unpacked| {
                assert!(unpacked.hides_lowers);
                assert!(layer.meta("out").is_symlink());
            }),
        ),
        case(
            "an opaque mark through a link",
            entries([Entry::symlink("out", outside), Entry::file("out/.wh..wh..opq", "")]),
            Contained(|layer, _| assert!(layer.meta("out").is_symlink())),
        ),
        case(
            "a link into /proc",
            entries([
                Entry::symlink("p", "/proc/self/root"),
                Entry::file(format!("p/{inside}/secret"), "evil"),
            ]),
            Contained(|layer, _| assert!(layer.meta("proc/self/root").is_dir())),
        ),
    ]
}

fn cannot_be_settled(layer: &Layer, unpacked: &Unpacked) {
    assert_eq!(unpacked.pending.cross_layer_links, 1);
    assert!(!layer.root().join("mine").exists());
    let refused = layer.settle(&[], Settling::Apply).expect_err("there is no such file");
    assert!(matches!(refused, UnpackError::Refused { reason: Refusal::LinkTarget, .. }), "{refused}");
    assert!(!layer.root().join("mine").exists());
}
