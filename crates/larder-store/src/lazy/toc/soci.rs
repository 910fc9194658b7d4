//! SOCI: the table is a blob of its own (a ztoc, in the format `FlatBuffers`), beside an ordinary gzip layer.
//!
//! It has the entries of the archive with their places in it, and checkpoints: places in the blob where it can be
//! inflated from, with the 32 KiB before each. The compressed bytes between two checkpoints, a span, have a digest;
//! files have none.
//!
//! The manifest of an image names the digest of its SOCI index, which names those of the ztocs (version 2 of the
//! index). An index that only refers to an image (version 1) is not used: whoever can push it could change what a
//! digest of an image stands for.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use larder::reference::Digest;
use larder_registry::manifest::{ArtifactManifest, Descriptor, ImageManifest};

use super::MAX_DOCUMENT_BYTES;
use super::chunk::{ChunkContent, TocChunk};
use super::error::{TocEntryProblem, TocError, excerpt};
use super::flatbuffer::FlatTable;
use super::span::{GzipSpan, SpanChunk, WINDOW};
use super::table::{
    MAX_TABLE_BYTES, TableOfContents, TocEntry, check_names, device, entry_bytes, kind_of, owner, sha256_of,
    time_of,
};
use crate::unpack::{LayerEntry, LayerEntryKind, UnpackLimits, named};

/// Digest of the SOCI index, in the manifest of the image.
const INDEX: &str = "com.amazon.soci.index-digest";
/// Type of the index that this names.
const INDEX_TYPE: &str = "application/vnd.amazon.soci.index.v2+json";
/// Digest of the layer, at each ztoc in the index.
const LAYER: &str = "com.amazon.soci.image-layer-digest";
/// Digest and size of the ztoc, at the layer: larder's own, once the index was read.
const ZTOC: &str = "larder.soci.ztoc";

/// The only version there is.
const VERSION: &[u8] = b"0.9";
/// The compression that is known.
const GZIP: u8 = 1;
/// Bytes of the checkpoints before the first one: their number and the size of spans.
const CHECKPOINTS_HEADER: usize = 12;
/// Bytes of a checkpoint: offsets in the blob and in the archive, bits, window.
const CHECKPOINT: usize = 8 + 8 + 1 + WINDOW;
/// Bytes of the header of a blob, at most: it is in memory while it is read.
const MAX_HEADER: u64 = 4 << 10;
/// Plain bytes of a span, at most, and half as many as it has compressed: a read waits for it, and it is in memory.
const MAX_SPAN: u64 = 16 << 20;
/// Extended attributes: names and values.
type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

/// Attributes of archives that are those of files.
const XATTR: &[u8] = b"SCHILY.xattr.";
/// Attributes of archives that say where the data of sparse files belong.
const SPARSE: &[u8] = b"GNU.sparse.";

/// The ztoc of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SociToc {
    pub(super) ztoc: Descriptor,
    /// Compressed bytes of the layer's blob.
    blob_size: u64,
}

impl SociToc {
    pub(super) fn of(layer: &Descriptor) -> Option<SociToc> {
        let (digest, size) = layer.annotations.get(ZTOC)?.split_once(' ')?;
        let ztoc = Descriptor::new("", Digest::parse(digest).ok()?, size.parse().ok()?);
        Some(SociToc { ztoc, blob_size: layer.size })
    }

    /// The digest of an image's SOCI index, which its manifest names.
    pub(crate) fn index_of(image: &ImageManifest) -> Option<Digest> {
        Digest::parse(image.annotations.get(INDEX)?).ok()
    }

    /// Annotations that a SOCI index adds to layers, by their digests: with them, [`TocFormat::of`] finds the ztocs.
    ///
    /// [`TocFormat::of`]: super::TocFormat::of
    pub(crate) fn annotations(index: &ArtifactManifest) -> HashMap<Digest, (String, String)> {
        let ztocs = index.layers.iter().filter(|_| index.artifact_type == INDEX_TYPE);
        let named = ztocs.filter_map(|ztoc| {
            let layer = Digest::parse(ztoc.annotations.get(LAYER)?).ok()?;
            Some((layer, (ZTOC.to_owned(), format!("{} {}", ztoc.digest, ztoc.size))))
        });
        named.collect()
    }

    pub(super) fn range(&self) -> Result<Range<u64>, TocError> {
        if self.ztoc.size > MAX_DOCUMENT_BYTES {
            return Err(TocError::Limit { what: "bytes", limit: MAX_DOCUMENT_BYTES });
        }
        Ok(0..self.ztoc.size)
    }

    /// `bytes` are those of the ztoc.
    pub(super) fn read(&self, bytes: &[u8], limits: &UnpackLimits) -> Result<TableOfContents, TocError> {
        self.ztoc
            .digest
            .check(bytes)
            .map_err(|found| TocError::Digest { expected: self.ztoc.digest.clone(), found })?;
        read_ztoc(bytes, self.blob_size, limits)
    }
}

fn some<T>(value: Option<T>, name: &'static str) -> Result<T, TocError> {
    value.ok_or(TocError::Flat(name))
}

/// Reads the ztoc of a blob of this size.
pub(super) fn read_ztoc(
    bytes: &[u8],
    blob_size: u64,
    limits: &UnpackLimits,
) -> Result<TableOfContents, TocError> {
    let ztoc = some(FlatTable::root(bytes), "root")?;
    let version = some(ztoc.octets(0), "version")?;
    if version != VERSION {
        return Err(TocError::Version(excerpt(&String::from_utf8_lossy(version))));
    }
    let found = some(ztoc.u63(2), "size of the blob")?;
    if found != blob_size {
        return Err(TocError::OtherBlob { expected: blob_size, found });
    }
    let archive_size = some(ztoc.u63(3), "size of the archive")?;
    let spans = read_spans(some(ztoc.table(5), "compression")?, blob_size, archive_size)?;
    let entries = some(some(ztoc.table(4), "entries")?.vector(0), "entries")?;
    let mut table = SociTable {
        limits,
        spans,
        entries: Vec::new(),
        file_bytes: 0,
        memory: 0,
        attributes: 0,
        // Each takes an offset of its own.
        max_attributes: bytes.len() / 4,
        end: 0,
    };
    for entry in entries.tables() {
        table.add(some(entry, "entry")?)?;
    }
    Ok(TableOfContents { entries: table.entries, spans: table.spans })
}

/// Reads the spans of a blob, which cover it from the first one on.
fn read_spans(
    info: FlatTable<'_>,
    blob_size: u64,
    archive_size: u64,
) -> Result<Arc<[Arc<GzipSpan>]>, TocError> {
    if some(info.u8(0, GZIP), "compression")? != GZIP {
        return Err(TocError::Flat("gzip compression"));
    }
    let digests = some(info.vector(2), "digests of spans")?;
    let bytes = some(info.octets(3), "checkpoints")?;
    let count = some(bytes.first_chunk().copied().map(u32::from_le_bytes), "checkpoints")?;
    let checkpoints = some(bytes.get(CHECKPOINTS_HEADER..), "checkpoints")?;
    // Without a remainder, and as many as there are digests.
    let is_whole = checkpoints.len() % CHECKPOINT == 0 && !checkpoints.is_empty();
    if !is_whole
        || checkpoints.len() / CHECKPOINT != digests.len()
        || digests.len() as u64 != u64::from(count)
    {
        return Err(TocError::Flat("checkpoint for each digest of a span"));
    }
    let at = |number: usize| {
        let bytes = checkpoints.get(number * CHECKPOINT..)?;
        let (blob, rest) = bytes.split_first_chunk()?;
        let (plain, rest) = rest.split_first_chunk()?;
        let (bits, window) = rest.split_first()?;
        Some((u64::from_le_bytes(*blob), u64::from_le_bytes(*plain), *bits, window.get(..WINDOW)?))
    };
    let mut spans = Vec::with_capacity(digests.len());
    for (number, digest) in digests.strings().enumerate() {
        let refuse = |problem| TocError::Span { number, problem };
        let digest = some(digest, "digest of a span")?;
        let sha256 = std::str::from_utf8(digest).ok().and_then(sha256_of);
        let sha256 = sha256.ok_or_else(|| refuse("its digest is no SHA-256"))?;
        let (blob, plain, bits, window) = some(at(number), "checkpoint")?;
        let (blob_end, plain_end) =
            at(number + 1).map_or((blob_size, archive_size), |(blob, plain, ..)| (blob, plain));
        let has_place = blob < blob_end && blob_end <= blob_size && plain <= plain_end && blob > 0;
        if !has_place || bits > 7 || (number == 0 && (plain > 0 || bits > 0 || blob > MAX_HEADER)) {
            return Err(refuse("it is not between the others"));
        }
        let blob = blob - u64::from(bits > 0)..blob_end;
        if plain_end - plain > MAX_SPAN || blob.end - blob.start > 2 * MAX_SPAN {
            return Err(refuse("it is too large"));
        }
        let window = zstd::bulk::compress(window, 1).map_err(TocError::Decompress)?;
        spans.push(Arc::new(GzipSpan { blob, plain: plain..plain_end, bits, window, sha256 }));
    }
    Ok(spans.into())
}

/// Collects the entries of one ztoc.
struct SociTable<'a> {
    limits: &'a UnpackLimits,
    spans: Arc<[Arc<GzipSpan>]>,
    entries: Vec<TocEntry>,
    /// Plain bytes of all files.
    file_bytes: u64,
    /// Memory of the entries.
    memory: u64,
    /// Attributes of all entries.
    attributes: usize,
    max_attributes: usize,
    /// End of the last entry in the archive.
    end: u64,
}

impl SociTable<'_> {
    fn add(&mut self, entry: FlatTable<'_>) -> Result<(), TocError> {
        let name = some(entry.octets(0), "name")?;
        let (number, path) = (self.entries.len() as u64, named(name));
        let xattrs = self.xattrs(entry)?;
        let refuse = |problem| TocError::Entry { number, path: path.clone(), problem };
        let Some(xattrs) = xattrs else { return Err(refuse(TocEntryProblem::Type("sparse".into()))) };
        let kind = String::from_utf8_lossy(some(entry.octets(1), "type")?);
        let kind = kind_of(&kind).map_err(refuse)?;
        let (offset, size) = (some(entry.u63(2), "offset")?, some(entry.u63(3), "size")?);
        let size = if kind == LayerEntryKind::File { size } else { 0 };
        let link = some(entry.octets(4), "link")?;
        check_names([name, link], &xattrs, self.limits).map_err(refuse)?;
        let mtime = String::from_utf8_lossy(some(entry.octets(10), "time")?);
        let layer_entry = LayerEntry {
            path: name.to_vec(),
            kind,
            link: link.to_vec(),
            size,
            mode: u32::try_from(some(entry.u63(5), "mode")? & 0o7777).unwrap_or_default(),
            uid: owner(some(entry.u32(6), "owner")?.into()).map_err(refuse)?,
            gid: owner(some(entry.u32(7), "owner")?.into()).map_err(refuse)?,
            mtime: time_of(&mtime).ok_or_else(|| refuse(TocEntryProblem::Time(excerpt(&mtime))))?,
            device: (
                device(some(entry.u63(11), "device")?).map_err(refuse)?,
                device(some(entry.u63(12), "device")?).map_err(refuse)?,
            ),
            xattrs,
        };
        let allowed = self.end..self.spans.last().map_or(0, |last| last.plain.end);
        let end = offset.saturating_add(size);
        if offset < allowed.start || end > allowed.end {
            return Err(refuse(TocEntryProblem::Offset { offset, allowed }));
        }
        self.end = end;
        let chunks = self.chunks(offset..end);
        self.file_bytes = self.file_bytes.saturating_add(size);
        let of_chunks = 2 * chunks.len() * size_of::<TocChunk>();
        self.memory = self.memory.saturating_add(entry_bytes(&layer_entry) + of_chunks as u64);
        self.entries.push(TocEntry { entry: layer_entry, chunks });
        for (value, limit, what) in [
            (self.entries.len() as u64, self.limits.max_entries, "entries"),
            (self.file_bytes, self.limits.max_plain_bytes, "bytes of file content"),
            (self.memory, MAX_TABLE_BYTES, "bytes of memory"),
        ] {
            if value > limit {
                return Err(TocError::Limit { what, limit });
            }
        }
        Ok(())
    }

    /// Extended attributes, without others that an archive has; `None` for a sparse file.
    fn xattrs(&mut self, entry: FlatTable<'_>) -> Result<Option<Xattrs>, TocError> {
        let records = some(entry.vector(13), "attributes")?;
        self.attributes = self.attributes.saturating_add(records.len());
        if self.attributes > self.max_attributes {
            return Err(TocError::Limit { what: "attributes", limit: self.max_attributes as u64 });
        }
        let (mut xattrs, mut bytes) = (BTreeMap::new(), 0_usize);
        for record in records.tables() {
            let record = some(record, "attribute")?;
            let (key, value) = (some(record.octets(0), "attribute")?, some(record.octets(1), "attribute")?);
            if key.starts_with(SPARSE) {
                return Ok(None);
            }
            let Some(name) = key.strip_prefix(XATTR) else { continue };
            bytes = bytes.saturating_add(name.len() + value.len());
            if bytes > self.limits.max_metadata as usize {
                let limit = self.limits.max_metadata.into();
                return Err(TocError::Limit { what: "bytes of attributes of an entry", limit });
            }
            xattrs.insert(name.to_vec(), value.to_vec());
        }
        Ok(Some(xattrs.into_iter().collect()))
    }

    /// The chunks of a file: one in each span that it lies in.
    fn chunks(&self, file: Range<u64>) -> Vec<TocChunk> {
        let first = self.spans.partition_point(|span| span.plain.end <= file.start);
        let spans = self.spans[first..].iter().take_while(|span| span.plain.start < file.end);
        let chunks = spans.map(|span| {
            let start = file.start.max(span.plain.start);
            let size = file.end.min(span.plain.end).saturating_sub(start);
            let data = SpanChunk { span: Arc::clone(span), skip: start - span.plain.start };
            TocChunk { size, content: ChunkContent::Span(data) }
        });
        chunks.filter(|chunk| chunk.size > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ztoc() -> (Vec<u8>, u64) {
        let read = |name: &str| {
            fs_err::read(format!("{}/tests/fixtures/toc/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
        };
        (read("soci.ztoc"), read("soci.blob").len() as u64)
    }

    #[test]
    fn a_ztoc_of_another_blob_is_refused() {
        let (ztoc, size) = ztoc();
        let refused = read_ztoc(&ztoc, size + 1, &UnpackLimits::default());
        assert!(matches!(refused, Err(TocError::OtherBlob { .. })), "{refused:?}");
    }

    #[test]
    fn limits_hold_for_ztocs() {
        let (ztoc, size) = ztoc();
        let limits = UnpackLimits { max_entries: 3, ..UnpackLimits::default() };
        let refused = read_ztoc(&ztoc, size, &limits);
        assert!(matches!(refused, Err(TocError::Limit { what: "entries", limit: 3 })), "{refused:?}");
        let limits = UnpackLimits { max_plain_bytes: 100_000, ..UnpackLimits::default() };
        let refused = read_ztoc(&ztoc, size, &limits);
        assert!(matches!(refused, Err(TocError::Limit { what: "bytes of file content", .. })), "{refused:?}");
    }

    /// Reads a ztoc with other bytes in a checkpoint.
    fn with_checkpoint(number: usize, at: usize, bytes: &[u8]) -> Result<TableOfContents, TocError> {
        let (mut ztoc, size) = ztoc();
        let header = [2_u32.to_le_bytes().as_slice(), &250_000_u64.to_le_bytes()].concat();
        let start = ztoc.windows(header.len()).position(|part| part == header).unwrap();
        let place = start + CHECKPOINTS_HEADER + number * CHECKPOINT + at;
        ztoc[place..place + bytes.len()].copy_from_slice(bytes);
        read_ztoc(&ztoc, size, &UnpackLimits::default())
    }

    #[test]
    fn spans_that_cannot_be_are_refused() {
        assert!(with_checkpoint(1, 0, &[]).is_ok());
        for (at, bytes) in [
            (0, u64::MAX.to_le_bytes().as_slice()),
            (0, &0_u64.to_le_bytes()),
            (0, &(1_u64 << 63).to_le_bytes()),
            (8, &u64::MAX.to_le_bytes()),
            (8, &(1_u64 << 40).to_le_bytes()),
            (16, &[8]),
        ] {
            let refused = with_checkpoint(1, at, bytes);
            assert!(matches!(refused, Err(TocError::Span { .. })), "{at}, {bytes:?}: {refused:?}");
        }
        let long_header = with_checkpoint(0, 0, &(MAX_HEADER + 1).to_le_bytes());
        assert!(matches!(long_header, Err(TocError::Span { number: 0, .. })), "{long_header:?}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_ztoc_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = read_ztoc(&bytes, 1000, &UnpackLimits::default());
        }

        #[test]
        fn a_damaged_ztoc_is_read_or_refused(
            changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
            cut in any::<prop::sample::Index>(),
            is_cut in any::<bool>(),
        ) {
            let (mut ztoc, size) = ztoc();
            let end = ztoc.len();
            for (at, byte) in changes {
                ztoc[at.index(end)] = byte;
            }
            if is_cut {
                ztoc.truncate(cut.index(end));
            }
            let _ = read_ztoc(&ztoc, size, &UnpackLimits::default());
        }
    }
}
