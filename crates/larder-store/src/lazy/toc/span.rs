//! Spans: parts of a gzip blob, each with a digest of its compressed bytes and what its inflating begins with.
//!
//! A span is inflated by itself for a read. When the whole blob is unpacked, its spans are verified before they are
//! inflated ([`SpanReader`]), so that what comes of them can be written at once.

use std::io::{self, Read};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sha2::{Digest as _, Sha256};

use super::error::ChunkError;
use crate::unpack::GzipReader;

/// Plain bytes that deflate refers to, at most.
pub(super) const WINDOW: usize = 32 << 10;

/// A part of a gzip blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GzipSpan {
    /// Its compressed bytes. The first belongs to the span before, too, if there are [bits](GzipSpan::bits).
    pub(crate) blob: Range<u64>,
    /// Its plain bytes in the archive.
    pub(super) plain: Range<u64>,
    /// Last bits of the first byte that belong to this span; 0 if it begins with a byte.
    pub(super) bits: u8,
    /// Plain bytes before it as a zstd frame.
    pub(super) window: Vec<u8>,
    /// SHA-256 of the span's compressed bytes.
    pub(super) sha256: [u8; 32],
}

/// Data of a chunk in a span.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SpanChunk {
    pub(crate) span: Arc<GzipSpan>,
    /// Plain bytes before it in the span.
    pub(super) skip: u64,
}

impl SpanChunk {
    /// Digest of the span and the place in it.
    pub(crate) fn mark(&self) -> [u8; 32] {
        Sha256::new().chain_update(self.span.sha256).chain_update(self.skip.to_le_bytes()).finalize().into()
    }
}

impl GzipSpan {
    /// Inflates the span from the bytes of [`GzipSpan::blob`], after these were verified.
    pub(super) fn inflate(&self, bytes: &[u8]) -> Result<Vec<u8>, ChunkError> {
        let (offset, size) = (self.blob.start, self.plain.end - self.plain.start);
        if Sha256::digest(bytes)[..] != self.sha256 {
            return Err(ChunkError::Digest { offset, size: self.blob.end - self.blob.start });
        }
        let inflate = || -> io::Result<Vec<u8>> {
            let window = zstd::bulk::decompress(&self.window, WINDOW)?;
            // The reader takes a byte before the span in any case.
            let before: &[u8] = if self.bits == 0 { &[0] } else { &[] };
            let mut plain = Vec::new();
            let reader = GzipReader::resume(before.chain(bytes), &window, self.bits.into())?;
            reader.take(size).read_to_end(&mut plain)?;
            if plain.len() as u64 == size { Ok(plain) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
        };
        inflate().map_err(|cause| ChunkError::Decompress { offset, size, cause })
    }
}

/// Passes on a blob, and checks each of its spans before.
pub(crate) struct SpanReader<R> {
    blob: R,
    spans: Arc<[Arc<GzipSpan>]>,
    /// Number of the next span; what comes before the first one is the header.
    next: usize,
    is_after_header: bool,
    /// Offset in the blob of what comes next.
    offset: u64,
    bytes: Vec<u8>,
    passed: usize,
    /// False once a span did not have its digest.
    is_right: Arc<AtomicBool>,
}

impl<R: Read> SpanReader<R> {
    /// `is_right` becomes false before bytes are passed on that are not verified. The reader goes on: the digest of the
    /// blob shows whether these bytes are wrong, or the spans.
    pub(crate) fn new(blob: R, spans: Arc<[Arc<GzipSpan>]>, is_right: Arc<AtomicBool>) -> SpanReader<R> {
        SpanReader {
            blob,
            spans,
            next: 0,
            is_after_header: false,
            offset: 0,
            bytes: Vec::new(),
            passed: 0,
            is_right,
        }
    }

    /// Reads up to an offset of the blob. Returns the byte before, too.
    fn read_to(&mut self, end: u64) -> io::Result<Option<u8>> {
        let before = self.bytes.last().copied();
        self.bytes.clear();
        self.passed = 0;
        self.blob.by_ref().take(end.saturating_sub(self.offset)).read_to_end(&mut self.bytes)?;
        self.offset += self.bytes.len() as u64;
        Ok(before)
    }

    /// Reads and checks what comes next.
    fn fill(&mut self) -> io::Result<()> {
        let Some(span) = self.spans.get(self.next).cloned() else { return Ok(()) };
        if !self.is_after_header {
            self.is_after_header = true;
            self.read_to(span.blob.start)?;
            if gzip_header(&self.bytes) != Some(self.bytes.len()) {
                self.is_right.store(false, Ordering::Release);
            }
            return Ok(());
        }
        self.next += 1;
        let start = self.offset;
        let before = self.read_to(span.blob.end)?;
        let mut digest = Sha256::new();
        if let Some(before) = before.filter(|_| span.blob.start < start) {
            digest.update([before]);
        }
        digest.update(&self.bytes);
        if digest.finalize()[..] != span.sha256 {
            self.is_right.store(false, Ordering::Release);
        }
        Ok(())
    }
}

impl<R: Read> Read for SpanReader<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.passed == self.bytes.len() {
            if self.next == self.spans.len() {
                let count = self.blob.read(into)?;
                if count > 0 {
                    // All of the blob should be in spans.
                    self.is_right.store(false, Ordering::Release);
                }
                return Ok(count);
            }
            self.fill()?;
        }
        let count = (&self.bytes[self.passed..]).read(into)?;
        self.passed += count;
        Ok(count)
    }
}

/// Length of the header of a gzip member (RFC 1952) at the beginning of these bytes.
fn gzip_header(bytes: &[u8]) -> Option<usize> {
    let mut reader = GzipReader::new(bytes);
    reader.header().ok()?;
    Some(bytes.len() - reader.get_mut().len())
}
