//! Archives that become far more than they look.

use larder_erofs::EntryProblem;
use larder_store::unpack::{EntryRefusal, UnpackLimits};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry, seal};

use super::ExpectedResult::{Damaged, Decompress, Limit, Refused};
use super::{HostileArchive, case, entries, limited};
use crate::support::gzip;

pub(super) fn bombs() -> Vec<HostileArchive> {
    let limits = |change: fn(&mut UnpackLimits)| {
        let mut limits = UnpackLimits::default();
        change(&mut limits);
        limits
    };
    let sparse = |map: &str, real: &str, data: usize| {
        TarBuilderEntry::file("sparse", vec![b'x'; data])
            .pax("GNU.sparse.map", map)
            .pax("GNU.sparse.size", real)
            .pax("GNU.sparse.name", "sparse")
    };
    let zeros = entries([TarBuilderEntry::file("zeros", vec![0; 3 << 20])]);
    let same = entries([TarBuilderEntry::file("same", vec![b'x'; 8 << 20])]);
    let tail = [entries([]), vec![0; 3 << 20]].concat();
    let plain_limit = limits(|limits| limits.max_plain_bytes = 1 << 20);
    let mut wide_window = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
    wide_window.window_log(24).unwrap();
    wide_window.long_distance_matching(true).unwrap();
    std::io::Write::write_all(&mut wide_window, &zeros).unwrap();
    vec![
        limited(
            "too many bytes in a file",
            zeros.clone(),
            plain_limit.clone(),
            Limit("bytes of file content"),
        ),
        limited("too many bytes after the end", tail.clone(), plain_limit.clone(), Limit("plain bytes")),
        HostileArchive {
            compressed: gzip(&tail),
            ..limited("too many bytes, packed small", tail, plain_limit, Limit("plain bytes"))
        },
        HostileArchive {
            compressed: gzip(&same),
            ..limited(
                "the same byte for ever",
                same,
                limits(|limits| (limits.expansion_free_bytes, limits.max_expansion) = (1 << 20, 10)),
                Limit("plain bytes for each compressed byte of the image"),
            )
        },
        HostileArchive {
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
            entries((0..101).map(|at| TarBuilderEntry::file(format!("f{at}"), ""))),
            limits(|limits| limits.max_entries = 100),
            Limit("entries"),
        ),
        limited(
            "too many global headers",
            TarBuilder::new().extend((0..101).map(|_| TarBuilderEntry::new(b'g', "g"))).finish(),
            limits(|limits| limits.max_entries = 100),
            Limit("entries"),
        ),
        limited(
            "too many directories",
            entries((0..101).map(|at| TarBuilderEntry::dir(format!("d{at}")))),
            limits(|limits| limits.max_directories = 100),
            Limit("directories"),
        ),
        limited(
            "too many implied directories",
            entries([TarBuilderEntry::file("d/".repeat(101) + "f", "")]),
            limits(|limits| limits.max_directories = 100),
            Limit("directories"),
        ),
        case(
            "a huge extended header",
            entries([TarBuilderEntry::file("f", "").pax("comment", vec![b'c'; 2 << 20])]),
            Limit("bytes of extended headers in one entry"),
        ),
        case(
            "an extended header of more than there is",
            TarBuilder::new()
                .raw(&TarBuilderEntry::new(b'x', "x").with_false_size(1 << 19).header())
                .finish(),
            Damaged("end of archive in a header"),
        ),
        case(
            "many long names for one entry",
            TarBuilder::new()
                .raw(
                    &TarBuilderEntry { data: b"a\0".to_vec(), ..TarBuilderEntry::new(b'L', "l").gnu() }
                        .into_bytes()
                        .repeat(2),
                )
                .with(TarBuilderEntry::file("f", ""))
                .finish(),
            Damaged("duplicate"),
        ),
        case(
            "a hole of an exabyte",
            entries([sparse("0,1", "1152921504606846976", 1)]),
            Limit("bytes of file content"),
        ),
        case(
            "a sparse map that overlaps",
            entries([sparse("0,2,1,1", "9", 3)]),
            Refused(EntryRefusal::Entry(EntryProblem::SparseMap)),
        ),
        case(
            "a sparse map beyond the end",
            entries([sparse("8,2", "9", 2)]),
            Refused(EntryRefusal::Entry(EntryProblem::SparseMap)),
        ),
        case(
            "a sparse map that overflows",
            entries([sparse("18446744073709551615,1", "9", 1)]),
            Refused(EntryRefusal::Entry(EntryProblem::SparseMap)),
        ),
        case(
            "unterminated sparse map",
            entries([TarBuilderEntry::file("f", vec![b'9'; 4096])
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
    let mut header = TarBuilderEntry::new(b'S', "sparse").gnu().header();
    header[482] = 1;
    seal(&mut header);
    let mut block = [0; 512];
    block[504] = 1;
    TarBuilder::new().raw(&header).raw(&block.repeat(8000)).finish()
}
