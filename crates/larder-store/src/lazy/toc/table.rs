//! Puts the entries of a document together as those of the archive, and checks that their data are where they can be.
//!
//! Data of files lie in the blob in the order of the entries. A chunk begins at an offset; its compressed bytes end
//! where other data begin, at the end that its file has, or at the end of all data.

use std::sync::Arc;

use larder::reference::Digest;
use larder_erofs::ErofsTime;

use super::chunk::{ChunkCompression, ChunkContent, CompressedChunk, TocChunk};
use super::document::TocRecord;
use super::error::{TocEntryProblem, TocError, excerpt};
use super::span::GzipSpan;
use crate::unpack::{LayerEntry, LayerEntryKind, UnpackLimits, named};

/// Bytes that are decompressed for one chunk, at most: it is memory, and a reader waits for it.
pub(super) const MAX_CHUNK_BYTES: u64 = 64 << 20;

/// Memory of a table of contents. Half a million files with one chunk each fit.
pub(super) const MAX_TABLE_BYTES: u64 = 192 << 20;

/// Entries of an archive, each with its data's places in the blob. In the order of the archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TableOfContents {
    pub(crate) entries: Vec<TocEntry>,
    /// Spans of the blob that have the chunks, if no digests of chunks are known: in order, up to its end.
    pub(crate) spans: Arc<[Arc<GzipSpan>]>,
}

/// An entry of an archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TocEntry {
    /// As an ordinary unpacking reads it, but for the order of attributes and what the format cannot say.
    pub(crate) entry: LayerEntry,
    /// They cover the file in order. Empty if the entry has no content.
    pub(crate) chunks: Vec<TocChunk>,
}

/// Collects the entries of one document.
pub(super) struct TableBuilder<'a> {
    compression: ChunkCompression,
    limits: &'a UnpackLimits,
    /// End of all data in the blob.
    data_end: u64,
    entries: Vec<TocEntry>,
    /// Records of the document so far.
    records: u64,
    /// Plain bytes of all files.
    file_bytes: u64,
    /// Memory of the entries.
    memory: u64,
    /// The file that the last entry is, if that is one.
    file: Option<OpenFile>,
    /// The stream that begins where the last data are.
    stream: DataStream,
}

/// A file whose chunks are being read.
struct OpenFile {
    name: Vec<u8>,
    size: u64,
    /// Bytes of the file that have a chunk.
    covered: u64,
    /// End of its compressed data, or 0.
    end_offset: u64,
}

/// Data that are decompressed from one offset on.
#[derive(Default)]
struct DataStream {
    /// Where it begins in the blob; 0 before the first data.
    start: u64,
    /// End of the plain data in it so far.
    plain_end: u64,
    /// Other data cannot begin before this offset.
    floor: u64,
    /// Chunks in it: numbers of entry and chunk.
    chunks: Vec<(usize, usize)>,
}

/// Last data of a table: where the rest of the archive begins.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct LastData {
    /// Offset of the stream in the blob.
    pub(super) start: u64,
    /// Plain bytes from there to the end of the last file's content and its padding.
    pub(super) plain: u64,
    /// Entries after that file.
    pub(super) entries_after: usize,
}

impl<'a> TableBuilder<'a> {
    /// `data_end` is where data in the blob end.
    pub(super) fn new(
        compression: ChunkCompression,
        limits: &'a UnpackLimits,
        data_end: u64,
    ) -> TableBuilder<'a> {
        TableBuilder {
            compression,
            limits,
            data_end,
            entries: Vec::new(),
            records: 0,
            file_bytes: 0,
            memory: 0,
            file: None,
            stream: DataStream::default(),
        }
    }

    /// Adds the next record of the document.
    pub(super) fn add(&mut self, record: &TocRecord<'_>) -> Result<(), TocError> {
        let number = self.records;
        self.records += 1;
        if record.kind != "chunk" {
            self.close_file()?;
        }
        let added = if record.kind == "chunk" { self.add_chunk(record) } else { self.add_entry(record) };
        added.map_err(|problem| TocError::Entry { number, path: named(record.name.as_bytes()), problem })?;
        self.check_limits()
    }

    fn check_limits(&self) -> Result<(), TocError> {
        for (value, limit, what) in [
            (self.records, self.limits.max_entries, "entries"),
            (self.file_bytes, self.limits.max_plain_bytes, "bytes of file content"),
            (self.memory, MAX_TABLE_BYTES, "bytes of memory"),
        ] {
            if value > limit {
                return Err(TocError::Limit { what, limit });
            }
        }
        Ok(())
    }

    fn add_entry(&mut self, record: &TocRecord<'_>) -> Result<(), TocEntryProblem> {
        let kind = kind_of(&record.kind)?;
        check_record(record, self.limits)?;
        let size = if kind == LayerEntryKind::File { record.size } else { 0 };
        let entry = layer_entry(record, kind, size)?;
        self.file_bytes = self.file_bytes.saturating_add(size);
        self.memory = self.memory.saturating_add(entry_bytes(&entry));
        self.entries.push(TocEntry { entry, chunks: Vec::new() });
        if size == 0 {
            return Ok(());
        }
        self.file = Some(OpenFile {
            name: record.name.as_bytes().to_vec(),
            size,
            covered: 0,
            end_offset: record.end_offset,
        });
        let chunk = if record.chunk_size == 0 { size } else { record.chunk_size };
        // The digest of a file is that of its only chunk.
        let is_only = record.chunk_digest.is_empty() && chunk == size;
        self.push_chunk(record, chunk, if is_only { &record.digest } else { &record.chunk_digest })
    }

    fn add_chunk(&mut self, record: &TocRecord<'_>) -> Result<(), TocEntryProblem> {
        let Some(file) = &self.file else { return Err(TocEntryProblem::StrayChunk) };
        if !record.name.is_empty() && record.name.as_bytes() != file.name {
            return Err(TocEntryProblem::ForeignChunk(named(&file.name)));
        }
        let size = if record.chunk_size == 0 { file.size - file.covered } else { record.chunk_size };
        self.push_chunk(record, size, &record.chunk_digest)
    }

    /// Adds a chunk to the file that the last entry is.
    fn push_chunk(&mut self, record: &TocRecord<'_>, size: u64, digest: &str) -> Result<(), TocEntryProblem> {
        let (Some(file), Some(number)) = (&mut self.file, self.entries.len().checked_sub(1)) else {
            return Err(TocEntryProblem::StrayChunk);
        };
        let left = file.size - file.covered;
        if record.chunk_offset != file.covered {
            return Err(TocEntryProblem::ChunkOffset { expected: file.covered, found: record.chunk_offset });
        }
        if size == 0 || size > left {
            return Err(TocEntryProblem::ChunkSize { chunk: size, left });
        }
        file.covered += size;
        let content = match &*record.chunk_type {
            "" => {
                let plain = record.inner_offset.saturating_add(size);
                if plain > MAX_CHUNK_BYTES {
                    return Err(TocEntryProblem::LargeChunk { limit: MAX_CHUNK_BYTES });
                }
                if digest.is_empty() {
                    return Err(TocEntryProblem::NoDigest(size));
                }
                let sha256 = sha256_of(digest).ok_or_else(|| TocEntryProblem::Digest(excerpt(digest)))?;
                // The end follows.
                let blob = record.offset..record.offset;
                let (compression, skip) = (self.compression, record.inner_offset);
                ChunkContent::Compressed(CompressedChunk { compression, blob, skip, sha256 })
            }
            "zeros" => ChunkContent::Zeros,
            other => return Err(TocEntryProblem::ChunkType(excerpt(other))),
        };
        self.place(record.offset, record.inner_offset, size)?;
        let chunks = &mut self.entries[number].chunks;
        self.stream.chunks.push((number, chunks.len()));
        chunks.push(TocChunk { size, content });
        self.memory = self.memory.saturating_add(2 * size_of::<TocChunk>() as u64);
        Ok(())
    }

    /// Goes on with data at an offset of the blob, `inner` plain bytes after it.
    fn place(&mut self, offset: u64, inner: u64, size: u64) -> Result<(), TocEntryProblem> {
        let plain_end = inner.saturating_add(size);
        if plain_end > i64::MAX as u64 {
            return Err(TocEntryProblem::LargeChunk { limit: i64::MAX as u64 });
        }
        let continues = offset == self.stream.start && offset > 0;
        if continues && self.stream.floor > offset {
            return Err(TocEntryProblem::Offset { offset, allowed: self.stream.floor..self.data_end });
        }
        if continues {
            if inner < self.stream.plain_end {
                return Err(TocEntryProblem::InnerOffset { expected: self.stream.plain_end, found: inner });
            }
            self.stream.plain_end = plain_end;
            return Ok(());
        }
        let first = self.stream.floor.max(self.stream.start + 1);
        if !(first..self.data_end).contains(&offset) {
            return Err(TocEntryProblem::Offset { offset, allowed: first..self.data_end });
        }
        self.end_stream(offset);
        self.stream = DataStream { start: offset, plain_end, floor: 0, chunks: Vec::new() };
        Ok(())
    }

    /// Says where the compressed data end that begin at the last offset.
    fn end_stream(&mut self, end: u64) {
        for (entry, chunk) in std::mem::take(&mut self.stream.chunks) {
            let chunk = &mut self.entries[entry].chunks[chunk];
            if let ChunkContent::Compressed(data) = &mut chunk.content {
                data.blob.end =
                    end.min(data.blob.start.saturating_add(compressed_bound(data.skip + chunk.size)));
            }
        }
    }

    /// Ends the file that the last entry is.
    fn close_file(&mut self) -> Result<(), TocError> {
        let Some(file) = self.file.take() else { return Ok(()) };
        let refuse = |problem| TocError::Entry {
            number: self.records.saturating_sub(2),
            path: named(&file.name),
            problem,
        };
        if file.covered != file.size {
            return Err(refuse(TocEntryProblem::Uncovered { size: file.size, found: file.covered }));
        }
        if file.end_offset > 0 {
            let allowed = self.stream.start + 1..self.data_end;
            if !(allowed.contains(&file.end_offset) || file.end_offset == allowed.end) {
                return Err(refuse(TocEntryProblem::Offset { offset: file.end_offset, allowed }));
            }
            self.end_stream(file.end_offset);
            self.stream.floor = file.end_offset;
        }
        Ok(())
    }

    /// Ends the table.
    pub(super) fn finish(mut self) -> Result<(TableOfContents, LastData), TocError> {
        self.records += 1;
        self.close_file()?;
        self.end_stream(self.data_end);
        let last_file = self.entries.iter().rposition(|entry| !entry.chunks.is_empty());
        let last =
            last_file.map_or(LastData { entries_after: self.entries.len(), ..LastData::default() }, |at| {
                let padding = self.entries[at].entry.size.wrapping_neg() % 512;
                LastData {
                    start: self.stream.start,
                    plain: self.stream.plain_end + padding,
                    entries_after: self.entries.len() - at - 1,
                }
            });
        Ok((TableOfContents { entries: self.entries, spans: Arc::default() }, last))
    }
}

/// Compressed bytes that this many plain ones need, at most: stored blocks, with headers and flushes between them.
pub(super) fn compressed_bound(plain: u64) -> u64 {
    plain + plain / 16 + (128 << 10)
}

/// Memory of an entry and what it allocates.
pub(super) fn entry_bytes(entry: &LayerEntry) -> u64 {
    let xattrs = entry.xattrs.iter().map(|(name, value)| name.len() + value.len() + 80);
    (2 * size_of::<TocEntry>() + entry.path.len() + entry.link.len() + xattrs.sum::<usize>() + 32) as u64
}

pub(super) fn kind_of(kind: &str) -> Result<LayerEntryKind, TocEntryProblem> {
    Ok(match kind {
        "reg" => LayerEntryKind::File,
        "dir" => LayerEntryKind::Directory,
        "symlink" => LayerEntryKind::Symlink,
        "hardlink" => LayerEntryKind::HardLink,
        "fifo" => LayerEntryKind::Fifo,
        "char" => LayerEntryKind::CharDevice,
        "block" => LayerEntryKind::BlockDevice,
        other => return Err(TocEntryProblem::Type(excerpt(other))),
    })
}

/// Checks what an ordinary unpacking would refuse, or could read differently.
fn check_record(record: &TocRecord<'_>, limits: &UnpackLimits) -> Result<(), TocEntryProblem> {
    let names = [record.name.as_bytes(), record.link_name.as_bytes()];
    check_names(names, &record.xattrs.0, limits)?;
    let lossy = |name: &[u8]| name.windows(3).any(|bytes| bytes == "\u{fffd}".as_bytes());
    if names.iter().any(|name| lossy(name)) || record.xattrs.0.iter().any(|(name, _)| lossy(name)) {
        return Err(TocEntryProblem::LostBytes);
    }
    Ok(())
}

/// Checks the name of an entry, its link, and its attributes.
pub(super) fn check_names(
    names: [&[u8]; 2],
    xattrs: &[(Vec<u8>, Vec<u8>)],
    limits: &UnpackLimits,
) -> Result<(), TocEntryProblem> {
    if names[0].is_empty() {
        return Err(TocEntryProblem::NoName);
    }
    if names.iter().any(|name| name.len() > limits.max_path as usize) {
        return Err(TocEntryProblem::TooLong(limits.max_path));
    }
    if names.iter().any(|name| name.contains(&0)) {
        return Err(TocEntryProblem::ZeroByte);
    }
    let xattrs = xattrs.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>();
    if xattrs > limits.max_metadata as usize {
        return Err(TocEntryProblem::Attributes(limits.max_metadata));
    }
    Ok(())
}

fn layer_entry(
    record: &TocRecord<'_>,
    kind: LayerEntryKind,
    size: u64,
) -> Result<LayerEntry, TocEntryProblem> {
    Ok(LayerEntry {
        path: record.name.as_bytes().to_vec(),
        kind,
        link: record.link_name.as_bytes().to_vec(),
        size,
        mode: record.mode & 0o7777,
        uid: owner(record.uid)?,
        gid: owner(record.gid)?,
        mtime: time_of(&record.modtime).ok_or_else(|| TocEntryProblem::Time(excerpt(&record.modtime)))?,
        device: (device(record.dev_major)?, device(record.dev_minor)?),
        xattrs: record.xattrs.0.clone(),
    })
}

/// Number of a user or group.
pub(super) fn owner(id: u64) -> Result<u32, TocEntryProblem> {
    u32::try_from(id).ok().filter(|id| *id != u32::MAX).ok_or(TocEntryProblem::Owner)
}

/// Number of a device.
pub(super) fn device(number: u64) -> Result<u32, TocEntryProblem> {
    u32::try_from(number).map_err(|_| TocEntryProblem::Device)
}

/// Reads a time as Go writes it. A missing one is that of a header without a time.
pub(super) fn time_of(text: &str) -> Option<ErofsTime> {
    if text.is_empty() {
        return Some(ErofsTime { seconds: 0, nanos: 0 });
    }
    let nanos = text.parse::<jiff::Timestamp>().ok()?.as_nanosecond();
    Some(ErofsTime {
        seconds: i64::try_from(nanos.div_euclid(1_000_000_000)).ok()?,
        nanos: u32::try_from(nanos.rem_euclid(1_000_000_000)).ok()?,
    })
}

/// Bytes of a digest; `None` if it is no SHA-256.
pub(super) fn sha256_of(text: &str) -> Option<[u8; 32]> {
    let digest = Digest::parse(text).ok().filter(|digest| digest.algorithm() == "sha256")?;
    let mut bytes = [0; 32];
    for (byte, digits) in bytes.iter_mut().zip(digest.hex().as_bytes().chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(bytes)
}
