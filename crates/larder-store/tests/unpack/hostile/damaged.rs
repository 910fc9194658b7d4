//! Archives that are cut, changed or packed in an unknown way.

use larder_store::unpack::EntryRefusal;
use larder_testkit::archive::{TarBuilder, TarBuilderEntry, pax_record, seal};

use super::ExpectedResult::{Damaged, Decompress, Foreign, Refused};
use super::{HostileArchive, case};
use crate::support::gzip;

pub(super) fn damaged() -> Vec<HostileArchive> {
    let good = || TarBuilder::new().with(TarBuilderEntry::file("f", vec![b'x'; 5000]));
    let mut negative = TarBuilderEntry::file("f", "").header();
    negative[124..136].fill(0xff);
    seal(&mut negative);
    let mut wrong_sum = TarBuilderEntry::file("f", "").header();
    wrong_sum[0] = b'g';
    let pax = |records: &[u8]| {
        TarBuilder::new()
            .with(TarBuilderEntry { data: records.to_vec(), ..TarBuilderEntry::new(b'x', "x") })
            .with(TarBuilderEntry::file("f", ""))
            .finish()
    };
    let packed = |name, plain: Vec<u8>, compressed, outcome| HostileArchive {
        compressed,
        ..case(name, plain, outcome)
    };
    let plain = good().finish();
    vec![
        case("cut in a file", good().unfinished()[..2000].to_vec(), Damaged("end of archive in a file")),
        case("cut in a header", good().unfinished()[..300].to_vec(), Damaged("end of archive in a header")),
        case("a wrong checksum", TarBuilder::new().raw(&wrong_sum).finish(), Damaged("checksum")),
        case("a negative size", TarBuilder::new().raw(&negative).finish(), Damaged("invalid entry size")),
        case(
            "a size over 63 bits",
            TarBuilder::new().raw(&TarBuilderEntry::file("f", "").with_false_size(1 << 63).header()).finish(),
            Refused(EntryRefusal::Size),
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
