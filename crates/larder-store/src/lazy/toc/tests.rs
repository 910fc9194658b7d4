//! Tables of contents of other writers, compared with the archives that they describe.

use std::collections::BTreeMap;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use larder::reference::Digest;
use larder_erofs::ErofsTime;
use larder_registry::manifest::{ArtifactManifest, Descriptor};
use larder_testkit::archive::{TarBuilder, TarBuilderEntry, edge_case_layers};
use larder_testkit::chunked_layer::{ChunkedFormat, ChunkedLayer};
use proptest::prelude::*;

use super::chunk::CompressedChunk;
use super::error::ChunkError;
use super::table::TocEntry;
use super::*;
use crate::unpack::{GzipReader, LayerArchive, LayerEntry, TarStream, UnpackOptions, from_reader};

/// A layer of another writer. `make-layer.py` beside it says how it was made.
struct Fixture {
    blob: Vec<u8>,
    layer: Descriptor,
}

const SOCI: [&str; 2] = ["soci", "soci-members"];

const FIXTURES: [&str; 8] = [
    "skopeo-1.9",
    "podman-5.8",
    "stargz-zstd",
    "estargz",
    "estargz-lossless",
    "estargz-last-file",
    "estargz-small-files",
    "estargz-prioritized",
];

fn fixture(name: &str) -> Fixture {
    let path = |extension: &str| -> PathBuf {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/toc");
        directory.join(format!("{name}.{extension}"))
    };
    let blob = fs_err::read(path("blob")).unwrap();
    let annotations = fs_err::read_to_string(path("annotations")).unwrap();
    let pairs = annotations.lines().map(|line| line.split_once('=').unwrap());
    let annotations = pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    let layer = descriptor(&blob, annotations);
    Fixture { blob, layer }
}

fn descriptor(blob: &[u8], annotations: BTreeMap<String, String>) -> Descriptor {
    Descriptor { annotations, ..Descriptor::new("", Digest::sha256(blob), blob.len() as u64) }
}

/// Reads a table with as many requests as it needs. Returns their ranges, too.
fn read(format: &TocFormat, blob: &[u8]) -> Result<(TableOfContents, Vec<Range<u64>>), TocError> {
    let size = blob.len() as u64;
    let mut ranges = vec![format.first_range(size)?];
    read_from(format, blob, &mut ranges).map(|table| (table, ranges))
}

fn read_from(
    format: &TocFormat,
    blob: &[u8],
    ranges: &mut Vec<Range<u64>>,
) -> Result<TableOfContents, TocError> {
    loop {
        let range = ranges.last().unwrap().clone();
        let bytes = &blob[usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap()];
        match format.read(range, bytes, blob.len() as u64, &UnpackLimits::default())? {
            TocStep::Read(table) => return Ok(table),
            TocStep::Needs(range) => ranges.push(range),
        }
        assert!(ranges.len() < 4, "{ranges:?}");
    }
}

/// Entries as an ordinary unpacking reads them, each with its content.
fn unpack(blob: &[u8]) -> Vec<(LayerEntry, Vec<u8>)> {
    let plain: Box<dyn Read + '_> = if blob.starts_with(b"\x1f\x8b") {
        Box::new(GzipReader::new(blob))
    } else if blob.starts_with(b"\x28\xb5\x2f\xfd") {
        Box::new(zstd::stream::read::Decoder::with_buffer(blob).unwrap())
    } else {
        Box::new(blob)
    };
    let (options, mut entries) = (UnpackOptions::default(), Vec::new());
    let mut plain = from_reader(plain);
    let mut archive = LayerArchive::new(TarStream::new(&mut plain, None, &options), &options);
    while let Some(mut entry) = archive.next().unwrap() {
        let mut content = Vec::new();
        loop {
            let piece = archive.content().unwrap();
            let length = piece.len();
            if length == 0 {
                break;
            }
            content.extend_from_slice(piece);
            archive.consume(length);
        }
        entry.xattrs.sort();
        entries.push((entry, content));
    }
    entries
}

/// Content of an entry by its chunks.
fn content(entry: &TocEntry, blob: &[u8]) -> Vec<u8> {
    let mut reader = ChunkReader::default();
    let pieces = entry.chunks.iter().map(|chunk| match chunk.content.blob() {
        None => vec![0; usize::try_from(chunk.size).unwrap()],
        Some(Range { start, end }) => {
            let bytes = &blob[usize::try_from(*start).unwrap()..usize::try_from(*end).unwrap()];
            reader.read(chunk, bytes).unwrap()
        }
    });
    pieces.collect::<Vec<_>>().concat()
}

/// The time in an eStargz table.
fn whole_seconds(time: ErofsTime) -> ErofsTime {
    ErofsTime { seconds: time.seconds + i64::from(time.nanos >= 500_000_000), nanos: 0 }
}

/// Compares the table of a blob with the archive. Returns the largest number of chunks that a file has.
fn check_table(name: &str, Fixture { blob, layer }: &Fixture) -> usize {
    let format = TocFormat::of(layer).unwrap();
    let (table, _) = read(&format, blob).unwrap_or_else(|error| panic!("{name}: {error:?}"));
    check_entries(name, &format, &table, blob)
}

fn check_entries(name: &str, format: &TocFormat, table: &TableOfContents, blob: &[u8]) -> usize {
    let expected = unpack(blob);
    for (found, (entry, bytes)) in table.entries.iter().zip(&expected) {
        let path = String::from_utf8_lossy(&entry.path);
        let mtime = match format {
            TocFormat::ZstdChunked(_) | TocFormat::Soci(_) => entry.mtime,
            TocFormat::EStargz(_) => whole_seconds(entry.mtime),
        };
        assert_eq!(found.entry, LayerEntry { mtime, ..entry.clone() }, "{name}, {path}");
        assert_eq!(found.chunks.iter().map(|chunk| chunk.size).sum::<u64>(), bytes.len() as u64);
        assert_eq!(content(found, blob), *bytes, "{name}, {path}");
    }
    assert_eq!(table.entries.len(), expected.len(), "{name}");
    table.entries.iter().map(|entry| entry.chunks.len()).max().unwrap_or(0)
}

#[test]
fn tables_of_other_writers_are_equal_to_their_archives() {
    for name in FIXTURES {
        assert!(check_table(name, &fixture(name)) >= 3, "{name}");
    }
}

/// The layer of an index that has a ztoc for it, and the ztoc.
fn soci(name: &str) -> (TocFormat, Vec<u8>, Vec<u8>) {
    let path =
        |extension: &str| format!("{}/tests/fixtures/toc/{name}.{extension}", env!("CARGO_MANIFEST_DIR"));
    let (blob, ztoc) = (fs_err::read(path("blob")).unwrap(), fs_err::read(path("ztoc")).unwrap());
    let entry = descriptor(
        &ztoc,
        [("com.amazon.soci.image-layer-digest".to_owned(), Digest::sha256(&blob).to_string())].into(),
    );
    let index = ArtifactManifest {
        artifact_type: "application/vnd.amazon.soci.index.v2+json".into(),
        config: Descriptor::new("", Digest::sha256("{}"), 2),
        layers: vec![entry],
        annotations: BTreeMap::new(),
    };
    let of_first = ArtifactManifest {
        artifact_type: "application/vnd.amazon.soci.index.v1+json".into(),
        ..index.clone()
    };
    assert!(SociToc::annotations(&of_first).is_empty(), "nothing binds it to the image");
    let mut layer = descriptor(&blob, BTreeMap::new());
    layer.annotations.extend(SociToc::annotations(&index).remove(&layer.digest));
    (TocFormat::of(&layer).unwrap(), blob, ztoc)
}

#[test]
fn tables_of_soci_are_equal_to_their_archives() {
    for name in SOCI {
        let (format, blob, ztoc) = soci(name);
        assert_eq!(format.blob().unwrap().digest, Digest::sha256(&ztoc));
        let (table, ranges) = read(&format, &ztoc).unwrap_or_else(|error| panic!("{name}: {error:?}"));
        assert_eq!(ranges.len(), 1);
        assert_eq!(ranges[0], 0..ztoc.len() as u64);
        assert!(check_entries(name, &format, &table, &blob) >= 2, "{name}");
        let other = [&ztoc[1..], b"x"].concat();
        assert!(matches!(read(&format, &other), Err(TocError::Digest { .. })), "{name}");
    }
}

#[test]
fn spans_are_verified_before_their_bytes_are_passed_on() {
    for name in SOCI {
        let (format, blob, ztoc) = soci(name);
        let spans = read(&format, &ztoc).unwrap().0.spans;
        let verify = |blob: &[u8]| {
            let is_right = Arc::new(AtomicBool::new(true));
            let (mut reader, mut passed) = (SpanReader::new(blob, spans.clone(), is_right.clone()), 0);
            let mut buffer = [0; 1000];
            loop {
                match reader.read(&mut buffer).unwrap() {
                    0 => return passed,
                    count if is_right.load(Ordering::Acquire) => {
                        assert_eq!(buffer[..count], blob[passed..passed + count]);
                        passed += count;
                    }
                    _ => {}
                }
            }
        };
        assert_eq!(verify(&blob), blob.len(), "{name}");
        let second = usize::try_from(spans[1].blob.start).unwrap();
        for (at, expected) in
            [(3, 0), (second - 1, 20), (second + 1, second + 1), (blob.len() - 1, second + 1)]
        {
            let mut damaged = blob.clone();
            damaged[at] ^= 1 << 4;
            assert!(verify(&damaged) <= expected, "{name}: {at}");
        }
        let longer = [&blob[..], b"more"].concat();
        assert_eq!(verify(&longer), blob.len(), "{name}");
    }
}

#[test]
fn a_span_with_other_bytes_is_refused() {
    let (format, blob, ztoc) = soci("soci");
    let (table, _) = read(&format, &ztoc).unwrap();
    let chunk = table.entries.iter().flat_map(|entry| &entry.chunks).next().unwrap();
    let range = chunk.content.blob().unwrap();
    let mut bytes = blob[usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap()].to_vec();
    bytes[700] ^= 1;
    let refused = ChunkReader::default().read(chunk, &bytes);
    assert!(matches!(refused, Err(ChunkError::Digest { .. })), "{refused:?}");
}

#[test]
fn tables_of_the_testkit_are_equal_to_their_archives() {
    for format in [ChunkedFormat::ZstdChunked, ChunkedFormat::EStargz] {
        for (archive, chunks) in edge_case_layers().iter().zip([3, 1]) {
            let ChunkedLayer { blob, archive, annotations } = ChunkedLayer::new(archive, format, 1_000_000);
            assert_eq!(unpack(&archive), unpack(&blob));
            let layer = descriptor(&blob, annotations);
            assert_eq!(check_table(&format!("{format:?}"), &Fixture { blob, layer }), chunks);
        }
    }
}

/// A zstd:chunked blob of 1,000 bytes before the frame of this document.
fn zstd_chunked(json: &str) -> (Vec<u8>, TocFormat) {
    let document = zstd::bulk::compress(json.as_bytes(), 3).unwrap();
    let size = u32::try_from(document.len()).unwrap();
    let blob = [&[7; 1000][..], b"\x50\x2a\x4d\x18", &size.to_le_bytes(), &document].concat();
    let position = format!("1008:{size}:{}:1", json.len());
    let format = zstd_format(&position, &Digest::sha256(&document), &blob).unwrap();
    (blob, format)
}

fn zstd_format(position: &str, digest: &Digest, blob: &[u8]) -> Option<TocFormat> {
    let key = |name| format!("io.github.containers.zstd-chunked.{name}");
    let position = (key("manifest-position"), position.to_owned());
    TocFormat::of(&descriptor(blob, [position, (key("manifest-checksum"), digest.to_string())].into()))
}

/// The table of a document with these entries, separated by commas.
fn table_of(entries: &str) -> Result<TableOfContents, TocError> {
    let (blob, format) = zstd_chunked(&format!(r#"{{"version":1,"entries":[{entries}]}}"#));
    read(&format, &blob).map(|(table, _)| table)
}

/// A file `a` with these fields in addition to a digest of some content.
fn file(fields: &str) -> String {
    let digest = Digest::sha256("some content");
    format!(r#"{{"type":"reg","name":"a","digest":"{digest}","chunkDigest":"{digest}",{fields}}}"#)
}

fn chunk(fields: &str) -> String {
    let digest = Digest::sha256("some content");
    format!(r#"{{"type":"chunk","name":"a","chunkDigest":"{digest}",{fields}}}"#)
}

#[test]
fn chunks_lie_between_the_data_around_them() {
    let two = file(r#""size":300,"chunkSize":100,"offset":10,"endOffset":400"#)
        + ","
        + &chunk(r#""chunkOffset":100,"chunkSize":150,"offset":50,"chunkType":"zeros""#)
        + ","
        + &chunk(r#""chunkOffset":250,"offset":60"#);
    let shared = file(r#""size":20,"offset":500,"innerOffset":7"#);
    let last = file(r#""size":30,"offset":500,"innerOffset":512"#);
    let table = table_of(&[two, shared, last].join(",")).unwrap();
    let places = table.entries.iter().flat_map(|entry| &entry.chunks).map(|chunk| match &chunk.content {
        ChunkContent::InPlace | ChunkContent::Span(_) | ChunkContent::Piece(_) => {
            panic!("no document has this")
        }
        ChunkContent::Zeros => (chunk.size, 0..0, 0),
        ChunkContent::Compressed(data) => (chunk.size, data.blob.clone(), data.skip),
    });
    let expected =
        [(100, 10..50, 0), (150, 0..0, 0), (50, 60..400, 0), (20, 500..1000, 7), (30, 500..1000, 512)];
    assert_eq!(places.collect::<Vec<_>>(), expected);
}

#[test]
fn few_bytes_are_read_for_a_small_chunk() {
    let blob = vec![0; 1 << 30];
    let limits = UnpackLimits::default();
    let mut table = table::TableBuilder::new(ChunkCompression::Zstd, &limits, blob.len() as u64);
    let json = format!(r#"{{"version":1,"entries":[{}]}}"#, file(r#""size":1000,"offset":1"#));
    document::read_document(json.as_bytes(), |record| table.add(&record)).unwrap();
    let ChunkContent::Compressed(data) = &table.finish().unwrap().0.entries[0].chunks[0].content else {
        panic!("no data");
    };
    assert!(data.blob.end < 150_000, "{:?}", data.blob);
}

#[test]
fn entries_that_cannot_be_used_are_named() {
    let half = file(r#""size":200,"chunkSize":100,"offset":10"#);
    let refused = [
        (
            r#"{"type":"sparse","name":"a"}"#.into(),
            r#"entry 0 of the table of contents, "a": unknown type "sparse""#,
        ),
        (r#"{"type":"dir"}"#.into(), r#"entry 0 of the table of contents, "": no name"#),
        (r#"{"type":"dir","name":"a\u0000b"}"#.into(), "its name or link contains a zero byte"),
        (r#"{"type":"dir","name":"a\ufffd"}"#.into(), "may have lost bytes that are not UTF-8"),
        (r#"{"type":"dir","name":"a","uid":4294967295}"#.into(), "its owner is not a 32-bit number"),
        (
            r#"{"type":"char","name":"a","devMajor":4294967296}"#.into(),
            "its device number is not a 32-bit number",
        ),
        (r#"{"type":"dir","name":"a","modtime":"yesterday"}"#.into(), r#"invalid time "yesterday""#),
        (
            format!(r#"{{"type":"dir","name":"{}"}}"#, "a/".repeat(3000)),
            "its name or link is longer than 4096 bytes",
        ),
        (
            format!(r#"{{"type":"dir","name":"a","xattrs":{{"user.a":"{}"}}}}"#, "AAAA".repeat(350_000)),
            "its attributes have more than 1048576 bytes",
        ),
        (r#"{"type":"reg","name":"a","size":5,"offset":10}"#.into(), "no digest of 5 bytes"),
        (
            r#"{"type":"reg","name":"a","size":5,"offset":10,"digest":"md5:0"}"#.into(),
            r#"invalid digest "md5:0""#,
        ),
        (file(r#""size":200,"offset":0"#), "its data begin at byte 0 of the blob, allowed are 1..1000"),
        (file(r#""size":200,"offset":1000"#), "its data begin at byte 1000 of the blob, allowed are 1..1000"),
        (
            file(r#""size":200,"offset":10,"endOffset":10"#),
            "begin at byte 10 of the blob, allowed are 11..1000",
        ),
        (
            file(r#""size":200,"offset":10,"endOffset":1001"#),
            "begin at byte 1001 of the blob, allowed are 11..1000",
        ),
        (
            file(r#""size":200,"offset":10,"chunkSize":9223372036854775808"#),
            "a chunk of 9223372036854775808 bytes",
        ),
        (file(r#""size":200,"offset":10,"chunkOffset":1"#), "a chunk at byte 1 of the file, expected at 0"),
        (file(r#""size":200,"offset":10,"chunkType":"copy""#), r#"unknown chunk type "copy""#),
        (
            file(r#""size":100000000,"offset":10"#),
            "more than 67108864 bytes must be decompressed for one chunk",
        ),
        (
            file(r#""size":1,"offset":10,"innerOffset":18446744073709551615"#),
            "more than 67108864 bytes must be decompressed for one chunk",
        ),
        (
            file(r#""size":9,"offset":10,"chunkType":"zeros","innerOffset":18446744073709551615"#),
            "more than 9223372036854775807 bytes must be decompressed for one chunk",
        ),
        (chunk(r#""chunkOffset":0,"chunkSize":1,"offset":10"#), "a chunk without a file before it"),
        (half.clone(), r#"entry 0 of the table of contents, "a": its chunks have 100 bytes of 200"#),
        (
            format!(r#"{half},{{"type":"dir","name":"b"}}"#),
            r#"entry 0 of the table of contents, "a": its chunks have 100 bytes of 200"#,
        ),
        (
            half.clone() + "," + &chunk(r#""chunkOffset":100,"chunkSize":101,"offset":20"#),
            r#"entry 1 of the table of contents, "a": a chunk of 101 bytes, 100 are left of the file"#,
        ),
        (
            half.clone() + "," + &chunk(r#""chunkOffset":99,"chunkSize":100,"offset":20"#),
            "a chunk at byte 99 of the file, expected at 100",
        ),
        (
            half.clone() + "," + &chunk(r#""chunkOffset":100,"offset":9"#),
            "its data begin at byte 9 of the blob, allowed are 11..1000",
        ),
        (
            half.clone() + "," + &chunk(r#""chunkOffset":100,"offset":10,"innerOffset":99"#),
            "its data begin 99 bytes after others in the same stream that end at 100",
        ),
        (
            half.clone() + r#",{"type":"chunk","name":"b","chunkOffset":100,"offset":20}"#,
            r#"a chunk of another file: "a""#,
        ),
        (
            file(r#""size":9,"offset":10,"endOffset":30"#) + "," + &file(r#""size":9,"offset":29"#),
            "its data begin at byte 29 of the blob, allowed are 30..1000",
        ),
        (
            file(r#""size":9,"offset":10,"endOffset":30"#)
                + ","
                + &file(r#""size":9,"offset":10,"innerOffset":9"#),
            "its data begin at byte 10 of the blob, allowed are 30..1000",
        ),
    ];
    for (entries, expected) in refused {
        let error = table_of(&entries).unwrap_err();
        assert!(matches!(error, TocError::Entry { .. }), "{error:?}");
        assert!(error.to_string().contains(expected), "{expected:?}: {error}");
    }
}

#[test]
fn documents_of_another_form_are_refused() {
    let deep = format!(r#"{{"version":1,"entries":[{{"type":{}"#, "[".repeat(100_000));
    let long = format!(r#"{{"version":1,"{}":1}}"#, "x".repeat(100_000));
    for (json, expected) in [
        ("", "malformed: EOF while parsing"),
        ("[]", "malformed: invalid type"),
        (r#"{"entries":[]}"#, r#"has no "version""#),
        (r#"{"version":1}"#, r#"has no "entries""#),
        (r#"{"version":2,"entries":[]}"#, "unknown version 2"),
        (r#"{"version":1,"entries":[]}{}"#, "malformed: trailing characters"),
        (r#"{"version":1,"entries":[],"version":1}"#, "unknown or repeated field"),
        (r#"{"version":1,"entries":[],"entries":[]}"#, "unknown or repeated field"),
        (r#"{"version":1,"Entries":[]}"#, "unknown or repeated field"),
        (r#"{"version":1,"entries":[{"type":"dir","name":"a","name":"b"}]}"#, "duplicate field `name`"),
        (r#"{"version":1,"entries":[{"type":"dir","name":"a","Name":"b"}]}"#, "unknown field `Name`"),
        (r#"{"version":1,"entries":[{"type":"dir","name":"a","size":-1}]}"#, "invalid value: integer `-1`"),
        (r#"{"version":1,"entries":[{"type":"dir","name":"a","size":1e3}]}"#, "invalid type: floating point"),
        (r#"{"version":1,"entries":[{"type":"dir","xattrs":{"user.a":"?"}}]}"#, "is not base64"),
        (r#"{"version":1,"entries":[{"type":"dir","xattrs":{"a":"","b":"","a":""}}]}"#, "occurs twice"),
        (&deep, "malformed: invalid type"),
        (&long, "unknown or repeated field"),
    ] {
        let (blob, format) = zstd_chunked(json);
        let error = read(&format, &blob).unwrap_err().to_string();
        assert!(error.contains(expected) && error.len() < 600, "{expected}: {error}");
    }
}

#[test]
fn limits_bound_a_table() {
    let (blob, format) = zstd_chunked(&format!(
        r#"{{"version":1,"entries":[{},{{"type":"dir","name":"b"}}]}}"#,
        file(r#""size":1099511627776,"offset":10,"chunkType":"zeros""#)
    ));
    let read_with = |limits: &UnpackLimits| {
        let range = format.first_range(blob.len() as u64).unwrap();
        let bytes = &blob[usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap()];
        format.read(range, bytes, blob.len() as u64, limits).map(|_| ()).map_err(|error| error.to_string())
    };
    let large = UnpackLimits { max_plain_bytes: 1 << 40, ..UnpackLimits::default() };
    assert_eq!(read_with(&large), Ok(()));
    let error = |what: &str| Err(format!("the table of contents has more than {what}"));
    assert_eq!(read_with(&UnpackLimits::default()), error("274877906944 bytes of file content"));
    assert_eq!(read_with(&UnpackLimits { max_entries: 1, ..large }), error("1 entries"));
    let many = vec![r#"{"type":"dir","name":"a"}"#; 1_000_000].join(",");
    assert_eq!(table_of(&many).map(|_| ()).map_err(|e| e.to_string()), error("201326592 bytes of memory"));
}

#[test]
fn a_document_is_read_only_where_and_as_the_annotations_say() {
    let (blob, format) = zstd_chunked(r#"{"version":1,"entries":[]}"#);
    assert!(read(&format, &blob).unwrap().0.entries.is_empty());
    let document = blob[1008..].to_vec();
    let (digest, size) = (Digest::sha256(&document), document.len());
    for unknown in
        ["", "1008:40:26", "1008:40:26:2", "1008:40:26:1:0", "-1:40:26:1", "18446744073709551615:1:1:1"]
    {
        assert_eq!(zstd_format(unknown, &digest, &blob), None, "{unknown}");
    }
    assert_eq!(TocFormat::of(&descriptor(&blob, BTreeMap::new())), None);
    for (position, digest, expected) in [
        (format!("1008:{size}:26:1"), Digest::sha256(""), "has the digest sha256:"),
        (format!("1008:{size}:25:1"), digest.clone(), "cannot decompress the table of contents"),
        (format!("1009:{size}:26:1"), digest.clone(), "is not in the blob"),
        ("1008:0:26:1".into(), digest.clone(), "is not in the blob"),
        (format!("7:{size}:26:1"), digest.clone(), "is not in the blob"),
        (format!("1008:{size}:67108865:1"), digest.clone(), "more than 67108864 bytes"),
    ] {
        let error = read(&zstd_format(&position, &digest, &blob).unwrap(), &blob).unwrap_err().to_string();
        assert!(error.contains(expected), "{position}: {error}");
    }
    let large = zstd_format("8:67108865:26:1", &digest, &blob).unwrap();
    let error = large.first_range(1 << 40).unwrap_err().to_string();
    assert_eq!(error, "the table of contents has more than 67108864 bytes");
    let range = format.first_range(blob.len() as u64).unwrap();
    let limits = UnpackLimits::default();
    let error = format.read(range, &document[1..], blob.len() as u64, &limits).unwrap_err();
    assert!(matches!(error, TocError::Range { .. }), "{error:?}");
}

#[test]
fn estargz_is_read_in_as_many_steps_as_it_needs() {
    for name in FIXTURES.iter().filter(|name| name.starts_with("estargz")) {
        let Fixture { blob, layer } = fixture(name);
        let format = TocFormat::of(&layer).unwrap();
        let (whole, ranges) = read(&format, &blob).unwrap();
        let size = blob.len() as u64;
        assert_eq!((ranges.len(), &ranges[0]), (1, &(0..size)), "{name}");
        let footer = size - 51..size;
        let mut ranges = vec![footer];
        assert_eq!(read_from(&format, &blob, &mut ranges).unwrap(), whole, "{name}");
        // Small files share a stream, which begins before what is read with the document.
        let expected = if *name == "estargz-small-files" { 3 } else { 2 };
        assert_eq!(ranges.len(), expected, "{name}: {ranges:?}");
        assert!(ranges.iter().all(|range| range.start > 0), "{name}: {ranges:?}");
    }
}

#[test]
fn an_estargz_blob_with_another_end_is_refused() {
    let Fixture { blob, layer } = fixture("estargz");
    let format = TocFormat::of(&layer).unwrap();
    let end = blob.len() - 51;
    let offset = |offset: &str| [&blob[..end + 16], offset.as_bytes(), &blob[end + 32..]].concat();
    let document =
        usize::from_str_radix(std::str::from_utf8(&blob[end + 16..end + 32]).unwrap(), 16).unwrap();
    let mut lied = layer.clone();
    lied.annotations.values_mut().for_each(|digest| *digest = Digest::sha256("").to_string());
    let refused = [
        (&layer, blob[..end].to_vec(), "the blob has no eStargz footer"),
        (&layer, blob[end + 1..].to_vec(), "the blob has no eStargz footer"),
        (&layer, offset("00000000000000-1"), "the blob has no eStargz footer"),
        (&layer, offset("ffffffffffffffff"), "the table of contents is not in the blob"),
        (&layer, offset(&format!("{end:016x}")), "the table of contents is not in the blob"),
        (&layer, offset(&format!("{:016x}", document + 1)), "cannot decompress the table of contents"),
        // Another member of the blob.
        (&layer, offset("0000000000000000"), r#"has ".no.prefetch.landmark", not "stargz.index.json""#),
        (&lied, blob.clone(), "the table of contents has the digest sha256:"),
    ];
    for (layer, blob, expected) in refused {
        let format = TocFormat::of(layer).unwrap();
        let error = read(&format, &blob).unwrap_err().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
    }
    assert!(read(&format, &blob).is_ok());
}

#[test]
fn chunks_are_compared_with_their_digests() {
    for compression in [ChunkCompression::Gzip, ChunkCompression::Zstd] {
        let plain = b"before the chunk, the chunk, and after it";
        let bytes = match compression {
            ChunkCompression::Gzip => {
                let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
                std::io::Write::write_all(&mut encoder, plain).unwrap();
                encoder.finish().unwrap()
            }
            ChunkCompression::Zstd => zstd::bulk::compress(plain, 3).unwrap(),
        };
        let sha256 = table::sha256_of(Digest::sha256("the chunk").as_str()).unwrap();
        let data = CompressedChunk { compression, blob: 100..100 + bytes.len() as u64, skip: 18, sha256 };
        assert_eq!(data.decompress(9, &bytes).unwrap(), b"the chunk");
        let fails = |data: &CompressedChunk, size, bytes: &[u8]| {
            data.decompress(size, bytes).unwrap_err().to_string()
        };
        assert_eq!(fails(&data, 8, &bytes), "wrong digest of a chunk of 8 bytes at byte 100 of the blob");
        let damaged = "cannot decompress a chunk of 9 bytes at byte 100 of the blob";
        assert_eq!(fails(&data, 9, &bytes[..20]), damaged);
        assert_eq!(fails(&data, 9, &bytes[1..]), damaged);
        assert_eq!(fails(&data, 9, b""), damaged);
        assert_eq!(fails(&CompressedChunk { skip: 40, ..data }, 9, &bytes), damaged);
    }
}

/// An eStargz blob of these members and this document, which a file of the archive has.
fn estargz(members: &[u8], document: TarBuilderEntry, json: &str) -> (Vec<u8>, TocFormat) {
    let mut encoder = flate2::write::GzEncoder::new(members.to_vec(), flate2::Compression::default());
    std::io::Write::write_all(&mut encoder, &TarBuilder::new().with(document).finish()).unwrap();
    let mut blob = encoder.finish().unwrap();
    let offset = format!("{:016x}STARGZ", members.len());
    blob.extend(b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x1a\0SG\x16\0".iter().chain(offset.as_bytes()));
    blob.extend(b"\x01\0\0\xff\xff\0\0\0\0\0\0\0\0");
    let annotation = ("containerd.io/snapshot/stargz/toc.digest".into(), Digest::sha256(json).to_string());
    let format = TocFormat::of(&descriptor(&blob, [annotation].into())).unwrap();
    (blob, format)
}

fn document_file(json: &str) -> TarBuilderEntry {
    TarBuilderEntry::file("stargz.index.json", json).mode(0).mtime(0)
}

/// The members of an eStargz blob before its document, and the document.
fn split_estargz(blob: &[u8]) -> (&[u8], String) {
    let end = blob.len() - 51;
    let offset = usize::from_str_radix(std::str::from_utf8(&blob[end + 16..end + 32]).unwrap(), 16).unwrap();
    let mut json = String::new();
    let mut plain = GzipReader::new(&blob[offset..end]);
    chunk::skip_bytes(&mut plain, 512).unwrap();
    plain.read_to_string(&mut json).unwrap();
    (&blob[..offset], json.trim_end_matches('\0').to_owned())
}

#[test]
fn a_long_document_of_estargz_has_chunks_like_other_files() {
    let Fixture { blob, .. } = fixture("estargz");
    let (members, json) = split_estargz(&blob);
    // As long as that of a layer with many files: no chunk of a layer may have as much.
    let json = format!("{json}{}", " ".repeat(20 << 20));
    let (blob, format) = estargz(members, document_file(&json), &json);
    let table = read(&format, &blob).unwrap().0;
    let document = table.entries.last().unwrap();
    assert!(document.chunks.iter().all(|chunk| chunk.size <= 4 << 20), "{:?}", document.chunks);
    assert!(content(document, &blob) == json.as_bytes());
}

#[test]
fn an_estargz_table_is_compared_with_the_end_of_the_archive() {
    let Fixture { blob, .. } = fixture("estargz");
    let (members, json) = split_estargz(&blob);
    let json = json.as_str();
    let (same, format) = estargz(members, document_file(json), json);
    assert_eq!(read(&format, &same).unwrap().0.entries.len(), 23);
    for (from, to, expected) in [
        ("\"name\": \"var/link\"", "\"name\": \"var/lint\"", r#"has "var/link", not "var/lint""#),
        (
            "\"type\": \"symlink\",\n\t\t\t\"modtime\": \"2023-11-14T22:13:20Z\",\n\t\t\t\"linkName\": \"/run\"",
            "\"type\": \"fifo\"",
            r#"has another "var/link", not "var/link""#,
        ),
    ] {
        assert!(json.contains(from), "{json}");
        let json = json.replace(from, to);
        let (blob, format) = estargz(members, document_file(&json), &json);
        let error = read(&format, &blob).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    for changed in [
        document_file(json).mode(0o4755),
        document_file(json).owner(1, 0),
        document_file(json).mtime(1),
        document_file(json).xattr("user.a", "b"),
    ] {
        let (blob, format) = estargz(members, changed, json);
        let error = read(&format, &blob).unwrap_err().to_string();
        assert!(error.ends_with(r#"has another "stargz.index.json", not "stargz.index.json""#), "{error}");
    }
    let last = json.rfind(",\n\t\t{").unwrap();
    let short = format!("{}]}}", &json[..last]);
    let (blob, format) = estargz(members, document_file(&short), &short);
    let error = read(&format, &blob).unwrap_err().to_string();
    assert!(error.contains(r#"has "var/link", not "stargz.index.json""#), "{error}");
}

#[test]
fn a_document_and_a_window_that_need_much_memory_are_refused() {
    let large = document_file("{}").with_false_size((64 << 20) + 1);
    let (blob, format) = estargz(&[7; 10], large, "{}");
    let error = read(&format, &blob).unwrap_err().to_string();
    assert_eq!(error, "the table of contents has more than 67108864 bytes");
    let mut encoder = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
    encoder.window_log(28).unwrap();
    encoder.include_contentsize(false).unwrap();
    std::io::Write::write_all(&mut encoder, &[0; 2000]).unwrap();
    let frame = encoder.finish().unwrap();
    let sha256 = table::sha256_of(Digest::sha256([0; 2000]).as_str()).unwrap();
    let compression = ChunkCompression::Zstd;
    let data = CompressedChunk { compression, blob: 0..frame.len() as u64, skip: 0, sha256 };
    let error = data.decompress(2000, &frame).unwrap_err();
    assert!(
        matches!(&error, ChunkError::Decompress { cause, .. } if cause.to_string().contains("memory")),
        "{error:?}"
    );
}

/// Numbers where something begins or ends, and any others.
fn numbers() -> impl Strategy<Value = u64> {
    prop_oneof![0..40u64, 990..1010u64, Just(1 << 26), Just(1 << 63), Just(u64::MAX), any::<u64>()]
}

fn records() -> impl Strategy<Value = String> {
    let kinds = ["reg", "reg", "chunk", "chunk", "dir", "hardlink", "link"];
    let fields =
        ["size", "offset", "endOffset", "innerOffset", "chunkSize", "chunkOffset", "uid", "devMajor"];
    let numbers = proptest::collection::btree_map(proptest::sample::select(fields.to_vec()), numbers(), 0..5);
    (proptest::sample::select(kinds.to_vec()), numbers, "(zeros)?").prop_map(|(kind, numbers, chunk_type)| {
        let numbers = numbers.iter().map(|(field, number)| format!(r#""{field}":{number},"#));
        let digest = Digest::sha256("");
        format!(
            r#"{{{}"type":"{kind}","name":"a","digest":"{digest}","chunkDigest":"{digest}","chunkType":"{chunk_type}"}}"#,
            numbers.collect::<String>()
        )
    })
}

proptest! {
    #[test]
    fn any_records_are_refused_or_make_a_sound_table(records in proptest::collection::vec(records(), 0..6)) {
        let json = format!(r#"{{"version":1,"entries":[{}]}}"#, records.join(","));
        let (blob, format) = estargz(&[7; 1000], document_file(&json), &json);
        let _ = read(&format, &blob);
        let (blob, format) = zstd_chunked(&json);
        let Ok((table, _)) = read(&format, &blob) else { return Ok(()) };
        let mut end = 0;
        for entry in &table.entries {
            let size = entry.chunks.iter().map(|chunk| u128::from(chunk.size)).sum::<u128>();
            prop_assert_eq!(size, u128::from(entry.entry.size));
            for chunk in &entry.chunks {
                prop_assert!(chunk.size > 0);
                let ChunkContent::Compressed(data) = &chunk.content else { continue };
                prop_assert!(data.blob.start >= end && data.blob.start < data.blob.end && data.blob.end <= 1000);
                prop_assert!(chunk.size + data.skip <= 64 << 20);
                end = data.blob.start;
            }
        }
    }

    #[test]
    fn any_bytes_are_refused_without_a_panic(
        bytes in proptest::collection::vec(any::<u8>(), 0..600),
        name in proptest::sample::select(&FIXTURES[..]),
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let Fixture { mut blob, layer } = fixture(name);
        let format = TocFormat::of(&layer).unwrap();
        let _ = read(&format, &bytes);
        let (other, format_of_bytes) = zstd_chunked(&String::from_utf8_lossy(&bytes));
        let _ = read(&format_of_bytes, &other);
        for compression in [ChunkCompression::Gzip, ChunkCompression::Zstd] {
            let blob = 0..bytes.len() as u64;
            let data = CompressedChunk { compression, blob, skip: 1, sha256: [0; 32] };
            prop_assert!(data.decompress(100, &bytes).is_err());
        }
        let (table, _) = read(&format, &blob).unwrap();
        // Near the end, where the table is.
        let end = blob.len() - 3000;
        for (at, byte) in &changes {
            blob[end + at.index(3000)] = *byte;
        }
        if let Ok((changed, _)) = read(&format, &blob) {
            // Only the archive says whether the document is an entry.
            prop_assert!(changed.entries.iter().zip(&table.entries).all(|(changed, entry)| changed == entry));
        }
    }
}
