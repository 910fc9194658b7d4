//! Writes layers with a table of contents: zstd:chunked and eStargz.

use std::collections::BTreeMap;
use std::io::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use larder::reference::Digest;
use serde_json::{Map, Value, json};
use tar::EntryType;

use crate::archive::{TarBuilder, TarBuilderEntry};

/// Format of a table of contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkedFormat {
    /// zstd frames, and a document in a skippable one. Chunks of zeros are marked.
    ZstdChunked,
    /// gzip members, and a document that is the last file of the archive. Times are whole seconds.
    EStargz,
}

/// A compressed layer with a table of contents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkedLayer {
    /// The compressed layer.
    pub blob: Vec<u8>,
    /// The archive, which has the diff ID of the layer: the given one, for eStargz with one more file.
    pub archive: Vec<u8>,
    /// Annotations of its descriptor.
    pub annotations: BTreeMap<String, String>,
}

impl ChunkedLayer {
    /// Compresses an archive without sparse files, in chunks of at most this size.
    ///
    /// # Panics
    ///
    /// If the archive is not valid.
    pub fn new(archive: &[u8], format: ChunkedFormat, chunk_size: usize) -> ChunkedLayer {
        ChunkedLayer::with_document(archive, format, chunk_size, |document| document)
    }

    /// Compresses an archive as [`ChunkedLayer::new`] does, and puts another document beside it than the one it needs.
    ///
    /// # Panics
    ///
    /// If the archive is not valid.
    pub fn with_document(
        archive: &[u8],
        format: ChunkedFormat,
        chunk_size: usize,
        change: impl FnOnce(Vec<u8>) -> Vec<u8>,
    ) -> ChunkedLayer {
        let (mut blob, mut records) = (Vec::new(), Vec::new());
        let (mut compressed, mut end) = (0, 0);
        for entry in tar::Archive::new(archive).entries().expect("an archive") {
            let mut entry = entry.expect("an entry");
            let (mut record, size) = record(&mut entry, format);
            let start = usize::try_from(entry.raw_file_position()).expect("in memory");
            end = (start + size).next_multiple_of(512);
            if size == 0 {
                records.push(record);
                continue;
            }
            blob.extend(format.compress(&archive[compressed..start]));
            compressed = start + size;
            let content = &archive[start..compressed];
            record.insert("digest".into(), Digest::sha256(content).to_string().into());
            let name = record["name"].clone();
            for (number, chunk) in content.chunks(chunk_size).enumerate() {
                if number > 0 {
                    records.push(record);
                    record =
                        map(json!({ "type": "chunk", "name": name, "chunkOffset": number * chunk_size }));
                }
                record.insert("offset".into(), blob.len().into());
                record.insert("chunkSize".into(), chunk.len().into());
                record.insert("chunkDigest".into(), Digest::sha256(chunk).to_string().into());
                if format == ChunkedFormat::ZstdChunked && chunk.iter().all(|byte| *byte == 0) {
                    record.insert("chunkType".into(), "zeros".into());
                }
                blob.extend(format.compress(chunk));
            }
            records.push(record);
        }
        let document = change(json!({ "version": 1, "entries": records }).to_string().into());
        match format {
            ChunkedFormat::ZstdChunked => {
                blob.extend(format.compress(&archive[compressed..]));
                zstd_chunked(blob, archive, &document)
            }
            ChunkedFormat::EStargz => {
                if compressed < end {
                    blob.extend(format.compress(&archive[compressed..end]));
                }
                estargz(blob, &archive[..end], &document)
            }
        }
    }
}

impl ChunkedFormat {
    fn compress(self, plain: &[u8]) -> Vec<u8> {
        match self {
            ChunkedFormat::ZstdChunked => zstd::bulk::compress(plain, 3).expect("memory"),
            ChunkedFormat::EStargz => {
                let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
                encoder.write_all(plain).and_then(|()| encoder.finish()).expect("memory")
            }
        }
    }
}

/// The record of an entry without the places of its data, and the size of its content.
fn record(entry: &mut tar::Entry<'_, &[u8]>, format: ChunkedFormat) -> (Map<String, Value>, usize) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("UTF-8");
    let (mut time, mut xattrs) = (None, BTreeMap::new());
    for extension in entry.pax_extensions().expect("an extended header").into_iter().flatten() {
        let extension = extension.expect("a record");
        let key = extension.key().expect("UTF-8");
        if let Some(name) = key.strip_prefix("SCHILY.xattr.") {
            xattrs.insert(name.to_owned(), STANDARD.encode(extension.value_bytes()));
        } else if key == "mtime" {
            time = Some(text(extension.value_bytes()));
        }
    }
    let header = entry.header();
    let (kind, size) = match header.entry_type() {
        EntryType::Regular => ("reg", entry.size()),
        EntryType::Directory => ("dir", 0),
        EntryType::Symlink => ("symlink", 0),
        EntryType::Link => ("hardlink", 0),
        EntryType::Fifo => ("fifo", 0),
        EntryType::Char => ("char", 0),
        EntryType::Block => ("block", 0),
        other => panic!("a table of contents cannot have entries of the type {other:?}"),
    };
    let time = time.unwrap_or_else(|| header.mtime().expect("a time").to_string());
    let time = format!("{time}s").parse::<jiff::SignedDuration>().expect("a time");
    let time = jiff::Timestamp::from_duration(time).expect("a time");
    let time = match format {
        ChunkedFormat::ZstdChunked => time,
        ChunkedFormat::EStargz => time.round(jiff::Unit::Second).expect("a time"),
    };
    let record = map(json!({
        "type": kind,
        "name": text(&entry.path_bytes()),
        "linkName": text(&entry.link_name_bytes().unwrap_or_default()),
        "size": size,
        "mode": header.mode().expect("a mode"),
        "uid": header.uid().expect("an owner"),
        "gid": header.gid().expect("a group"),
        "modtime": time.to_string(),
        "devMajor": header.device_major().expect("a device").unwrap_or(0),
        "devMinor": header.device_minor().expect("a device").unwrap_or(0),
        "xattrs": xattrs,
    }));
    (record, usize::try_from(size).expect("in memory"))
}

fn map(value: Value) -> Map<String, Value> {
    let Value::Object(map) = value else { panic!("no map: {value}") };
    map
}

fn zstd_chunked(mut blob: Vec<u8>, archive: &[u8], document: &[u8]) -> ChunkedLayer {
    let frame = ChunkedFormat::ZstdChunked.compress(document);
    let size = u32::try_from(frame.len()).expect("a small document");
    blob.extend(b"\x50\x2a\x4d\x18".iter().chain(&size.to_le_bytes()));
    let position = format!("{}:{size}:{}:1", blob.len(), document.len());
    blob.extend(&frame);
    let annotation = |name, value| (format!("io.github.containers.zstd-chunked.{name}"), value);
    let annotations = [
        annotation("manifest-position", position),
        annotation("manifest-checksum", Digest::sha256(&frame).to_string()),
    ];
    ChunkedLayer { blob, archive: archive.to_vec(), annotations: annotations.into() }
}

fn estargz(mut blob: Vec<u8>, entries: &[u8], document: &[u8]) -> ChunkedLayer {
    let file = TarBuilder::new().with(TarBuilderEntry::file("stargz.index.json", document).mode(0).mtime(0));
    let file = file.finish();
    let offset = format!("{:016x}STARGZ", blob.len());
    blob.extend(ChunkedFormat::EStargz.compress(&file));
    // An empty gzip member with an extra field.
    blob.extend(b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x1a\0SG\x16\0".iter().chain(offset.as_bytes()));
    blob.extend(b"\x01\0\0\xff\xff\0\0\0\0\0\0\0\0");
    let digest =
        ("containerd.io/snapshot/stargz/toc.digest".to_owned(), Digest::sha256(document).to_string());
    ChunkedLayer { blob, archive: [entries, &file].concat(), annotations: [digest].into() }
}
