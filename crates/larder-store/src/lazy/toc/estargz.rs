//! eStargz: the document is the last file of the archive, in gzip members of its own, before a footer.
//!
//! The footer has the offset of those members. Writers that keep an archive as it is put them behind its end, so the
//! file is no entry then: the archive from its last file on shows which it is.

use std::collections::BTreeMap;
use std::ops::Range;

use larder::reference::Digest;
use larder_erofs::ErofsTime;
use sha2::{Digest as _, Sha256};

use super::chunk::{ChunkCompression, ChunkContent, CompressedChunk, TocChunk, skip_bytes};
use super::document::read_document;
use super::error::TocError;
use super::table::{LastData, MAX_CHUNK_BYTES, TableBuilder, TocEntry};
use super::{MAX_DOCUMENT_BYTES, TocStep, check_place};
use crate::unpack::{
    GzipReader, LayerArchive, LayerEntry, LayerEntryKind, TarStream, UnpackError, UnpackLimits,
    UnpackOptions, from_reader, named,
};

const DIGEST_ANNOTATION: &str = "containerd.io/snapshot/stargz/toc.digest";

/// Name of the document in the archive.
const DOCUMENT_NAME: &[u8] = b"stargz.index.json";

/// An empty gzip member with the offset of the document in its extra field.
const FOOTER_BYTES: usize = 51;

/// Bytes of the blob's end that are read first: footer and document of most layers.
const FIRST_BYTES: u64 = 128 << 10;

/// Bytes before the document that are read with it: the last file of most layers.
const LAST_FILE_BYTES: u64 = 16 << 10;

/// Bytes of the blob's end that are read at most: document, and the chunk before it.
const MAX_END_BYTES: u64 = MAX_DOCUMENT_BYTES + MAX_CHUNK_BYTES;

/// Digest of the table of contents of a layer. Its place is in the footer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EStargzToc {
    /// Of the document, which is a file of the layer. A SHA-256.
    digest: Digest,
}

/// Plain bytes of a chunk of the document: a read of it waits for no more.
const DOCUMENT_CHUNK: usize = 4 << 20;

/// The file of the document, and its content.
struct DocumentFile {
    entry: LayerEntry,
    json: Vec<u8>,
    /// Plain bytes before it in its member.
    skip: u64,
}

impl DocumentFile {
    /// The document as a file of the layer, whose members are at `place` in the blob.
    fn entry_at(self, place: &Range<u64>) -> TocEntry {
        let mut skip = self.skip;
        let chunks = self.json.chunks(DOCUMENT_CHUNK).map(|part| {
            let size = part.len() as u64;
            let (compression, blob) = (ChunkCompression::Gzip, place.clone());
            let data = CompressedChunk { compression, blob, skip, sha256: Sha256::digest(part).into() };
            skip += size;
            TocChunk { size, content: ChunkContent::Compressed(data) }
        });
        TocEntry { chunks: chunks.collect(), entry: self.entry }
    }
}

pub(super) fn first_range(blob_size: u64) -> Result<Range<u64>, TocError> {
    if blob_size <= FOOTER_BYTES as u64 {
        return Err(TocError::Footer);
    }
    Ok(blob_size.saturating_sub(FIRST_BYTES)..blob_size)
}

impl EStargzToc {
    pub(super) fn of(annotations: &BTreeMap<String, String>) -> Option<EStargzToc> {
        let digest = Digest::parse(annotations.get(DIGEST_ANNOTATION)?).ok()?;
        (digest.algorithm() == "sha256").then_some(EStargzToc { digest })
    }

    /// `bytes` are those of the blob from `start` to its end.
    pub(super) fn read(
        &self,
        start: u64,
        bytes: &[u8],
        blob_size: u64,
        limits: &UnpackLimits,
    ) -> Result<TocStep, TocError> {
        let Some((_, footer)) = bytes.split_last_chunk::<FOOTER_BYTES>() else {
            return Err(TocError::Footer);
        };
        let offset = document_offset(footer).ok_or(TocError::Footer)?;
        let place = offset..blob_size - FOOTER_BYTES as u64;
        check_place(&place, blob_size)?;
        let from = |offset: u64| {
            let bytes = bytes.get(usize::try_from(offset.checked_sub(start)?).ok()?..)?;
            bytes.get(..bytes.len() - FOOTER_BYTES)
        };
        let Some(member) = from(offset) else {
            return Ok(TocStep::Needs(offset.saturating_sub(LAST_FILE_BYTES)..blob_size));
        };
        let options = UnpackOptions { limits: limits.clone(), ..UnpackOptions::default() };
        let document = read_document_file(member, &options)?;
        self.digest
            .check(&document.json)
            .map_err(|found| TocError::Digest { expected: self.digest.clone(), found })?;
        let mut table = TableBuilder::new(ChunkCompression::Gzip, limits, offset);
        read_document(&document.json, |record| table.add(&record))?;
        let (mut table, last) = table.finish()?;
        if blob_size - last.start > MAX_END_BYTES || last.plain > MAX_CHUNK_BYTES + 512 {
            return Err(TocError::Limit { what: "bytes after the last file", limit: MAX_END_BYTES });
        }
        let Some(end) = from(last.start) else { return Ok(TocStep::Needs(last.start..blob_size)) };
        let expected = &table.entries[table.entries.len() - last.entries_after..];
        if has_document(end, &last, expected, &options)? {
            table.entries.push(document.entry_at(&place));
        }
        Ok(TocStep::Read(table))
    }
}

/// The offset in a footer.
fn document_offset(footer: &[u8; FOOTER_BYTES]) -> Option<u64> {
    let fields = footer.strip_prefix(b"\x1f\x8b\x08\x04")?;
    // Time, flags and system do not matter.
    let fields = fields[6..].strip_prefix(b"\x1a\0SG\x16\0")?;
    let (digits, rest) = fields.split_first_chunk::<16>()?;
    let is_footer =
        rest == b"STARGZ\x01\0\0\xff\xff\0\0\0\0\0\0\0\0" && digits.iter().all(u8::is_ascii_hexdigit);
    is_footer.then(|| u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok())?
}

/// Reads the file of the document from its members.
fn read_document_file(members: &[u8], options: &UnpackOptions) -> Result<DocumentFile, TocError> {
    let mut plain = from_reader(GzipReader::new(members));
    let mut archive = LayerArchive::new(TarStream::new(&mut plain, None, options), options);
    let entry = archive.next().map_err(archive_error)?;
    let entry = entry.ok_or_else(|| mismatch(DOCUMENT_NAME, None))?;
    if entry != document_entry(entry.size) {
        return Err(mismatch(DOCUMENT_NAME, Some(&entry)));
    }
    if entry.size > MAX_DOCUMENT_BYTES {
        return Err(TocError::Limit { what: "bytes", limit: MAX_DOCUMENT_BYTES });
    }
    let skip = archive.position();
    let mut json = Vec::with_capacity(usize::try_from(entry.size).unwrap_or(0));
    loop {
        let piece = archive.content().map_err(archive_error)?;
        let length = piece.len();
        if length == 0 {
            return Ok(DocumentFile { entry, json, skip });
        }
        json.extend_from_slice(piece);
        archive.consume(length);
    }
}

/// Reads the archive after its last file with content. Its entries must be those of the table. Returns whether the
/// document is an entry, too.
fn has_document(
    members: &[u8],
    last: &LastData,
    expected: &[TocEntry],
    options: &UnpackOptions,
) -> Result<bool, TocError> {
    let mut plain = GzipReader::new(members);
    skip_bytes(&mut plain, last.plain).map_err(TocError::Decompress)?;
    let mut plain = from_reader(plain);
    let mut archive = LayerArchive::new(TarStream::new(&mut plain, None, options), options);
    for TocEntry { entry, .. } in expected {
        let found = archive.next().map_err(archive_error)?;
        if found.as_ref().map(|found| (&found.path, &found.kind)) != Some((&entry.path, &entry.kind)) {
            return Err(mismatch(&entry.path, found.as_ref()));
        }
    }
    match archive.next().map_err(archive_error)? {
        None => Ok(false),
        Some(entry) if entry == document_entry(entry.size) => Ok(true),
        Some(entry) => Err(mismatch(DOCUMENT_NAME, Some(&entry))),
    }
}

/// The document as all writers enter it: nothing but its content has a digest in the manifest.
fn document_entry(size: u64) -> LayerEntry {
    LayerEntry {
        path: DOCUMENT_NAME.to_vec(),
        kind: LayerEntryKind::File,
        link: Vec::new(),
        size,
        mode: 0,
        uid: 0,
        gid: 0,
        mtime: ErofsTime { seconds: 0, nanos: 0 },
        device: (0, 0),
        xattrs: Vec::new(),
    }
}

fn archive_error(error: UnpackError) -> TocError {
    match error {
        UnpackError::Read(cause) => TocError::Decompress(cause),
        other => TocError::Archive(other),
    }
}

fn mismatch(expected: &[u8], found: Option<&LayerEntry>) -> TocError {
    let quoted = |path: &[u8]| format!("{:?}", named(path).to_string_lossy());
    let found = match found {
        None => "no such entry".to_owned(),
        Some(entry) if entry.path == expected => format!("another {}", quoted(&entry.path)),
        Some(entry) => quoted(&entry.path),
    };
    TocError::Mismatch { expected: quoted(expected), found }
}
