//! Tables of contents of other writers, compared with the archives that they describe.

use std::collections::BTreeMap;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

use larder::reference::Digest;
use larder_registry::manifest::Descriptor;

use super::*;
use crate::unpack::{
    GzipReader, LayerArchive, LayerEntry, LayerEntryKind, TarStream, UnpackOptions, from_reader,
};

/// A layer of another writer, made from the archive of `make-layer.py` beside it.
struct Fixture {
    blob: Vec<u8>,
    layer: Descriptor,
}

/// With skopeo 1.9 in a time zone of its own, the compressor of containers/storage (August 2025), and estargz (August
/// 2026) with chunks of 60,000 bytes: with zstdchunked, by `Build`, by `AppendTarLossLess`, with a minimal chunk size,
/// and with prioritized files. The archives for estargz have whole seconds.
const FIXTURES: [&str; 8] = [
    "skopeo-1.9",
    "containers-storage",
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
    } else {
        Box::new(zstd::stream::read::Decoder::with_buffer(blob).unwrap())
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
fn content(format: &TocFormat, entry: &TocEntry, blob: &[u8]) -> Vec<u8> {
    let pieces = entry.chunks.iter().map(|chunk| match &chunk.content {
        ChunkContent::Zeros => vec![0; usize::try_from(chunk.size).unwrap()],
        ChunkContent::Compressed(data) => {
            let bytes =
                &blob[usize::try_from(data.blob.start).unwrap()..usize::try_from(data.blob.end).unwrap()];
            data.decompress(format.compression(), chunk.size, bytes).unwrap()
        }
    });
    pieces.collect::<Vec<_>>().concat()
}

#[test]
fn tables_of_other_writers_are_equal_to_their_archives() {
    for name in FIXTURES {
        let Fixture { blob, layer } = fixture(name);
        let format = TocFormat::of(&layer).unwrap();
        let (table, _) = read(&format, &blob).unwrap_or_else(|error| panic!("{name}: {error:?}"));
        let expected = unpack(&blob);
        assert!(expected.len() >= 19, "{name}");
        for (found, (entry, bytes)) in table.entries.iter().zip(&expected) {
            let path = String::from_utf8_lossy(&entry.path);
            assert_eq!(found.entry, *entry, "{name}, {path}");
            assert_eq!(found.chunks.iter().map(|chunk| chunk.size).sum::<u64>(), bytes.len() as u64);
            assert_eq!(content(&format, found, &blob), *bytes, "{name}, {path}");
        }
        assert_eq!(table.entries.len(), expected.len(), "{name}");
        let chunks = table.entries.iter().map(|entry| entry.chunks.len()).max().unwrap();
        assert!(chunks >= 3, "{name}: {chunks}");
    }
}
