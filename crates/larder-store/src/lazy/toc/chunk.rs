//! Decompresses chunks of files, one at a time.

use std::io::{self, Read};
use std::ops::Range;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::error::ChunkError;
use super::piece::{ChunkDigest, MAX_WINDOW_LOG, MissingPiece, PieceReader};
use super::span::{GzipSpan, SpanChunk};
use crate::unpack::GzipReader;

/// How a chunk is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChunkCompression {
    /// It begins a gzip member, or lies in one.
    Gzip,
    /// It begins a zstd frame, or lies in one.
    Zstd,
}

/// A chunk of a file. Chunks of one file cover it in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TocChunk {
    /// Bytes of the file, never 0.
    pub(crate) size: u64,
    pub(crate) content: ChunkContent,
}

/// Content of a chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ChunkContent {
    /// Only zeros. The blob is not needed for them, and there may be any number of them.
    Zeros,
    Compressed(CompressedChunk),
    /// In a span of a gzip blob.
    Span(SpanChunk),
    /// A piece of the layer: its index says where the data is in the blob.
    Piece(Arc<MissingPiece>),
    /// In the layer already, unless it is damaged; not of a table of contents.
    InPlace,
}

impl ChunkContent {
    /// Digest of its plain bytes, if it has one.
    pub(crate) fn digest(&self) -> Option<ChunkDigest<'_>> {
        match self {
            ChunkContent::Compressed(data) => {
                Some(ChunkDigest { before: &[], behind: &[], sha256: &data.sha256 })
            }
            ChunkContent::Piece(piece) => Some(piece.digest()),
            ChunkContent::Zeros | ChunkContent::Span(_) | ChunkContent::InPlace => None,
        }
    }

    /// Bytes of the blob that are enough to decompress and verify it.
    pub(crate) fn blob(&self) -> Option<&Range<u64>> {
        match self {
            ChunkContent::Compressed(data) => Some(&data.blob),
            ChunkContent::Span(data) => Some(&data.span.blob),
            ChunkContent::Piece(piece) => piece.blob(),
            ChunkContent::Zeros | ChunkContent::InPlace => None,
        }
    }
}

/// Data of a chunk in the blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CompressedChunk {
    pub(crate) compression: ChunkCompression,
    /// Bytes of the blob that are enough to decompress it. Several chunks may lie in one range.
    pub(crate) blob: Range<u64>,
    /// Plain bytes before it in the stream that begins there.
    pub(crate) skip: u64,
    /// Of its plain bytes.
    pub(crate) sha256: [u8; 32],
}

/// Decompresses chunks, one after the other.
#[derive(Default)]
pub(crate) struct ChunkReader {
    /// The last span, and its plain bytes: it may have many chunks.
    span: Option<(Arc<GzipSpan>, Vec<u8>)>,
    pieces: PieceReader,
}

impl ChunkReader {
    /// Decompresses a chunk of the blob from the bytes of [`ChunkContent::blob`], and verifies it.
    pub(crate) fn read(&mut self, chunk: &TocChunk, bytes: &[u8]) -> Result<Vec<u8>, ChunkError> {
        match &chunk.content {
            ChunkContent::Compressed(data) => data.decompress(chunk.size, bytes),
            ChunkContent::Span(SpanChunk { span, skip }) => {
                let plain = match &mut self.span {
                    Some((last, plain)) if Arc::ptr_eq(last, span) => plain,
                    last => &mut last.insert((Arc::clone(span), span.inflate(bytes)?)).1,
                };
                let at = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX);
                let content = plain.get(at(*skip)..at(skip.saturating_add(chunk.size)));
                content.map(<[u8]>::to_vec).ok_or_else(|| ChunkError::Decompress {
                    offset: span.blob.start,
                    size: chunk.size,
                    cause: io::ErrorKind::UnexpectedEof.into(),
                })
            }
            ChunkContent::Piece(piece) => {
                let mut data = vec![0; usize::try_from(chunk.size).unwrap_or(usize::MAX)];
                self.pieces.read(piece, &mut data, bytes)?;
                Ok(data)
            }
            ChunkContent::Zeros | ChunkContent::InPlace => Ok(Vec::new()),
        }
    }
}

impl CompressedChunk {
    /// Decompresses the chunk of this plain size from the bytes of [`CompressedChunk::blob`], and verifies it.
    ///
    /// Memory: the result, and of a zstd window at most as much as was decompressed.
    pub(super) fn decompress(&self, size: u64, bytes: &[u8]) -> Result<Vec<u8>, ChunkError> {
        let offset = self.blob.start;
        let content =
            self.read(size, bytes).map_err(|cause| ChunkError::Decompress { offset, size, cause })?;
        if Sha256::digest(&content)[..] != self.sha256 {
            return Err(ChunkError::Digest { offset, size });
        }
        Ok(content)
    }

    fn read(&self, size: u64, bytes: &[u8]) -> io::Result<Vec<u8>> {
        match self.compression {
            ChunkCompression::Gzip => read_part(GzipReader::new(bytes), self.skip, size),
            ChunkCompression::Zstd => {
                let mut decoder = zstd::stream::read::Decoder::with_buffer(bytes)?;
                decoder.window_log_max(MAX_WINDOW_LOG)?;
                read_part(decoder, self.skip, size)
            }
        }
    }
}

/// Reads `size` bytes after the first `skip`.
fn read_part(mut plain: impl Read, skip: u64, size: u64) -> io::Result<Vec<u8>> {
    skip_bytes(&mut plain, skip)?;
    let mut content = Vec::with_capacity(usize::try_from(size).map_err(io::Error::other)?);
    if plain.take(size).read_to_end(&mut content)? as u64 != size {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(content)
}

/// Reads over `count` bytes.
pub(super) fn skip_bytes(plain: &mut impl Read, count: u64) -> io::Result<()> {
    if io::copy(&mut plain.take(count), &mut io::sink())? != count {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(())
}
