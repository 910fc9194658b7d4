//! Archives that mean harm. Each is refused or contained, says so in its own way, and touches nothing outside.

use std::os::unix::fs::MetadataExt as _;

use larder_store::unpack::{Limits, Options, Refusal, Settling, Stage, Threads, UnpackError, Unpacked};
use larder_testkit::archive::{Archive, Entry, pax_record, seal};
use proptest::prelude::*;

use crate::support::{Layer, digest, gzip};

type Check = fn(&Layer, &Unpacked);

enum Outcome {
    Refused(Refusal),
    Limit(&'static str),
    /// The text says this about the archive.
    Damaged(&'static str),
    Decompress,
    Foreign,
    /// Unpacked, inside; and this holds.
    Contained(Check),
}

use Outcome::{Contained, Damaged, Decompress, Foreign, Limit, Refused};

struct Case {
    name: &'static str,
    compressed: Vec<u8>,
    plain: Vec<u8>,
    options: Options,
    outcome: Outcome,
}

fn case(name: &'static str, archive: Vec<u8>, outcome: Outcome) -> Case {
    Case { name, compressed: archive.clone(), plain: archive, options: Options::default(), outcome }
}

fn entries(entries: impl IntoIterator<Item = Entry>) -> Vec<u8> {
    Archive::new().extend(entries).finish()
}

fn limited(name: &'static str, archive: Vec<u8>, limits: Limits, outcome: Outcome) -> Case {
    Case { options: Options { limits, ..Options::default() }, ..case(name, archive, outcome) }
}

/// The paths lead to the guarded folder if they lead anywhere outside: `{outside}` is its absolute path.
fn ways_out(outside: &str) -> Vec<Case> {
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

fn nonsense() -> Vec<Case> {
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

fn bombs() -> Vec<Case> {
    let limits = |change: fn(&mut Limits)| {
        let mut limits = Limits::default();
        change(&mut limits);
        limits
    };
    let sparse = |map: &str, real: &str, data: usize| {
        Entry::file("sparse", vec![b'x'; data])
            .pax("GNU.sparse.map", map)
            .pax("GNU.sparse.size", real)
            .pax("GNU.sparse.name", "sparse")
    };
    let zeros = entries([Entry::file("zeros", vec![0; 3 << 20])]);
    let tail = [entries([]), vec![0; 3 << 20]].concat();
    let plain_limit = limits(|limits| limits.max_plain_bytes = 1 << 20);
    let mut wide_window = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
    wide_window.window_log(24).unwrap();
    wide_window.long_distance_matching(true).unwrap();
    std::io::Write::write_all(&mut wide_window, &zeros).unwrap();
    vec![
        limited("too many bytes in a file", zeros.clone(), plain_limit.clone(), Limit("bytes in its files")),
        limited("too many bytes after the end", tail.clone(), plain_limit.clone(), Limit("plain bytes")),
        Case {
            compressed: gzip(&tail),
            ..limited("too many bytes, packed small", tail, plain_limit, Limit("plain bytes"))
        },
        Case {
            compressed: wide_window.finish().unwrap(),
            ..limited(
                "a wide zstd window",
                zeros,
                limits(|limits| limits.max_zstd_window_log = 20),
                Decompress,
            )
        },
        limited(
            "too many entries",
            entries((0..101).map(|at| Entry::file(format!("f{at}"), ""))),
            limits(|limits| limits.max_entries = 100),
            Limit("entries"),
        ),
        limited(
            "too many global headers",
            Archive::new().extend((0..101).map(|_| Entry::new(b'g', "g"))).finish(),
            limits(|limits| limits.max_entries = 100),
            Limit("entries"),
        ),
        limited(
            "too many directories",
            entries((0..101).map(|at| Entry::dir(format!("d{at}")))),
            limits(|limits| limits.max_directories = 100),
            Limit("directories"),
        ),
        limited(
            "too many implied directories",
            entries([Entry::file("d/".repeat(101) + "f", "")]),
            limits(|limits| limits.max_directories = 100),
            Limit("directories"),
        ),
        limited(
            "too many links to what may come",
            entries((0..100).map(|at| Entry::hard_link(format!("l{at}"), "later"))),
            limits(|limits| limits.max_bookkeeping = 1000),
            Limit("bytes of paths that replace or precede others"),
        ),
        limited(
            "too many replacements",
            entries((0..100).map(|at| Entry::file(format!("f{}", at % 50), ""))),
            limits(|limits| limits.max_bookkeeping = 1000),
            Limit("bytes of paths that replace or precede others"),
        ),
        case(
            "a huge extended header",
            entries([Entry::file("f", "").pax("comment", vec![b'c'; 2 << 20])]),
            Limit("bytes of extended headers in one entry"),
        ),
        case(
            "an extended header of more than there is",
            Archive::new().raw(&Entry::new(b'x', "x").claiming(1 << 19).header()).finish(),
            Damaged("middle of a header"),
        ),
        case(
            "many long names for one entry",
            Archive::new()
                .raw(&Entry { data: b"a\0".to_vec(), ..Entry::new(b'L', "l").gnu() }.into_bytes().repeat(2))
                .with(Entry::file("f", ""))
                .finish(),
            Damaged("duplicate"),
        ),
        case(
            "a hole of an exabyte",
            entries([sparse("0,1", "1152921504606846976", 1)]),
            Limit("bytes in its files"),
        ),
        case("a sparse map that overlaps", entries([sparse("0,2,1,1", "9", 3)]), Refused(Refusal::SparseMap)),
        case("a sparse map beyond the end", entries([sparse("8,2", "9", 2)]), Refused(Refusal::SparseMap)),
        case(
            "a sparse map that overflows",
            entries([sparse("18446744073709551615,1", "9", 1)]),
            Refused(Refusal::SparseMap),
        ),
        case(
            "a sparse map without an end",
            entries([Entry::file("f", vec![b'9'; 4096])
                .pax("GNU.sparse.major", "1")
                .pax("GNU.sparse.minor", "0")
                .pax("GNU.sparse.realsize", "9")]),
            Damaged("sparse map"),
        ),
        case(
            "an old sparse map without an end",
            endless_sparse_map(),
            Limit("bytes of extended headers in one entry"),
        ),
    ]
}

/// A sparse header that is followed by empty blocks that all say that another one follows.
fn endless_sparse_map() -> Vec<u8> {
    let mut header = Entry::new(b'S', "sparse").gnu().header();
    header[482] = 1;
    seal(&mut header);
    let mut block = [0; 512];
    block[504] = 1;
    Archive::new().raw(&header).raw(&block.repeat(8000)).finish()
}

fn damaged() -> Vec<Case> {
    let good = || Archive::new().with(Entry::file("f", vec![b'x'; 5000]));
    let mut negative = Entry::file("f", "").header();
    negative[124..136].fill(0xff);
    seal(&mut negative);
    let mut wrong_sum = Entry::file("f", "").header();
    wrong_sum[0] = b'g';
    let pax = |records: &[u8]| {
        Archive::new()
            .with(Entry { data: records.to_vec(), ..Entry::new(b'x', "x") })
            .with(Entry::file("f", ""))
            .finish()
    };
    let packed =
        |name, plain: Vec<u8>, compressed, outcome| Case { compressed, ..case(name, plain, outcome) };
    let plain = good().finish();
    vec![
        case("cut in a file", good().unfinished()[..2000].to_vec(), Damaged("middle of a file")),
        case("cut in a header", good().unfinished()[..300].to_vec(), Damaged("middle of a header")),
        case("a wrong checksum", Archive::new().raw(&wrong_sum).finish(), Damaged("checksum")),
        case("a negative size", Archive::new().raw(&negative).finish(), Damaged("invalid entry size")),
        case(
            "a size over 63 bits",
            Archive::new().raw(&Entry::file("f", "").claiming(1 << 63).header()).finish(),
            Refused(Refusal::Size),
        ),
        case("a size that is no number", pax(&pax_record(b"size", b"1e3")), Damaged("malformed")),
        case("a record longer than its header", pax(b"99 path=x\n"), Damaged("")),
        case("a record without a length", pax(b"path=x\n"), Damaged("malformed")),
        case(
            "an attribute name that is no text",
            pax(&pax_record(b"SCHILY.xattr.user.\xff", b"1")),
            Damaged("UTF-8"),
        ),
        case("no archive at all", b"hello, I am no archive".repeat(100), Damaged("")),
        packed(
            "bytes after the last gzip member",
            plain.clone(),
            [gzip(&plain), b"junk".to_vec()].concat(),
            Decompress,
        ),
        packed(
            "zeros after the last gzip member",
            plain.clone(),
            [gzip(&plain), vec![0; 512]].concat(),
            Decompress,
        ),
        packed("a gzip stream that ends early", plain.clone(), gzip(&plain)[..60].to_vec(), Decompress),
        packed(
            "a zstd stream that ends early",
            plain.clone(),
            zstd::encode_all(&plain[..], 1).unwrap()[..40].to_vec(),
            Decompress,
        ),
        packed(
            "bytes after the last zstd frame",
            plain.clone(),
            [zstd::encode_all(&plain[..], 1).unwrap(), b"junk!".to_vec()].concat(),
            Decompress,
        ),
        packed("another compression", plain, b"\xfd7zXZ\0and so on".to_vec(), Foreign),
    ]
}

fn run(case: &Case, layer: &Layer, threads: Threads) {
    let options = Options { threads, ..case.options.clone() };
    let result = layer.unpack_with(&case.compressed, &case.plain, &options);
    let name = case.name;
    match (&case.outcome, &result) {
        (Refused(expected), Err(UnpackError::Refused { reason, .. })) if reason == expected => {}
        (Limit(expected), Err(UnpackError::Limit { what, .. })) if what == expected => {}
        (Damaged(expected), Err(UnpackError::Archive { problem, .. })) if problem.contains(expected) => {}
        (Decompress, Err(UnpackError::Decompress { .. }))
        | (Foreign, Err(UnpackError::ForeignCompression(_))) => {}
        (Contained(check), Ok(unpacked)) => {
            assert_eq!(layer.damage(), [], "{name}");
            assert_eq!(unpacked.usage, layer.usage_on_disk(), "{name}");
            check(layer, unpacked);
        }
        _ => panic!("{name}: {result:?}"),
    }
    layer.assert_contained();
}

fn run_all(cases: impl Fn(&Layer) -> Vec<Case>) {
    let count = cases(&Layer::new()).len();
    for at in 0..count {
        for threads in [Threads::One, Threads::Two, Threads::Many] {
            let layer = Layer::new();
            run(&cases(&layer)[at], &layer, threads);
        }
    }
}

#[test]
fn nothing_gets_out_of_the_layer() {
    run_all(|layer| ways_out(layer.outside().to_str().unwrap()));
}

#[test]
fn nonsense_is_refused_or_contained() {
    run_all(|_| nonsense());
}

#[test]
fn bombs_are_bounded() {
    run_all(|_| bombs());
}

#[test]
fn damaged_archives_are_named_as_such() {
    run_all(|_| damaged());
}

#[test]
fn wrong_bytes_are_reported_before_what_they_look_like() {
    let plain = entries([Entry::file("f", vec![b'x'; 100_000])]);
    let sound = gzip(&plain);
    let mut changed = sound.clone();
    let middle = changed.len() / 2;
    changed[middle] ^= 0xff;
    for threads in [Threads::One, Threads::Two, Threads::Many] {
        let options = Options { threads, ..Options::default() };
        let (digest, diff_id) = (digest(&sound), digest(&plain));
        let expected = |size| larder_store::unpack::Expected {
            digest: Some(&digest),
            size: Some(size),
            diff_id: &diff_id,
        };
        let unpack =
            |bytes: &[u8], size| Layer::new().unpack_expecting(bytes, &expected(size), &options).unwrap_err();
        let size = sound.len() as u64;
        let error = unpack(&changed, size);
        assert!(matches!(error, UnpackError::Digest { stage: Stage::Compressed, .. }), "{error:?}");
        assert!(error.is_wrong_bytes());
        let error = unpack(&sound[..middle], size);
        assert!(matches!(error, UnpackError::Size { more: false, .. }), "{error:?}");
        let error = unpack(&[&sound[..], b"more"].concat(), size);
        assert!(matches!(error, UnpackError::Size { more: true, .. }), "{error:?}");
        // A sound archive, but another one than the config names.
        let other = larder_store::unpack::Expected { digest: None, size: None, diff_id: &digest };
        let error = Layer::new().unpack_expecting(&sound, &other, &options).unwrap_err();
        assert!(matches!(error, UnpackError::Digest { stage: Stage::Plain, .. }), "{error:?}");
        assert!(!error.is_wrong_bytes());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn changed_archives_never_panic_or_get_out(
        upper: bool,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), any::<bool>()), 1..8),
        cut in any::<prop::sample::Index>(),
        is_cut: bool,
    ) {
        // Without the large file, so that changes hit headers.
        let mut archive = larder_testkit::archive::tricky()[usize::from(upper)].clone();
        archive.truncate(60 << 10);
        for (at, byte, header) in &changes {
            let at = at.index(archive.len());
            archive[at] = *byte;
            if *header {
                let start = at / 512 * 512;
                if let Some(block) = archive.get_mut(start..start + 512) {
                    let mut sealed: [u8; 512] = block.try_into().unwrap();
                    seal(&mut sealed);
                    block.copy_from_slice(&sealed);
                }
            }
        }
        if is_cut {
            archive.truncate(cut.index(archive.len()));
        }
        let layer = Layer::new();
        if let Ok(unpacked) = layer.unpack(&archive) {
            prop_assert_eq!(layer.damage(), []);
            prop_assert_eq!(unpacked.usage, layer.usage_on_disk());
        }
        layer.assert_contained();
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..3000), start in 0..4usize) {
        let start: &[u8] = [&b""[..], &[0x1f, 0x8b, 8], &[0x28, 0xb5, 0x2f, 0xfd], &[0x50, 0x2a, 0x4d, 0x18]][start];
        let layer = Layer::new();
        let _ = layer.unpack(&[start, &bytes].concat());
        layer.assert_contained();
    }
}
