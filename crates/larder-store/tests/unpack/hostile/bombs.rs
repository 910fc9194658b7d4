//! Archives that become far more than they look.

use larder_store::unpack::{Limits, Refusal};
use larder_testkit::archive::{Archive, Entry, seal};

use super::Outcome::{Damaged, Decompress, Limit, Refused};
use super::{Case, case, entries, limited};
use crate::support::gzip;

pub(super) fn bombs() -> Vec<Case> {
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
