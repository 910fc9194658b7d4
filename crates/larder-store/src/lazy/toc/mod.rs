//! Tables of contents, which say what is where in a compressed layer: zstd:chunked, eStargz and SOCI.
//!
//! ```text
//! annotations -> TocFormat -> range of the blob -> document -> table -> chunks
//! ```
//!
//! Read [`TocFormat`] first. The annotations have the digest of the table, so it is what the manifest names. Each chunk
//! has a digest in the table, or, with SOCI, the compressed span that it lies in. Nothing else makes it true: whether
//! entries and chunks are those of the archive is known once the whole layer is unpacked. What a table cannot say, or
//! says in an unknown way, is an error, after which the layer is pulled in the ordinary way.
//!
//! A table is not equal to its archive in these points:
//!
//! - attributes may be in another order, which the writer of a layer's file does not keep;
//! - eStargz rounds times to seconds, so that a layer whose archive has fractions differs from its table;
//! - writers for all formats refuse sparse files, or damage the archive.

mod chunk;
mod document;
mod error;
mod estargz;
mod flatbuffer;
mod piece;
mod soci;
mod span;
mod table;
#[cfg(test)]
mod tests;
mod zstd_chunked;

use std::ops::Range;

use larder_registry::manifest::Descriptor;

#[cfg(test)]
pub(crate) use chunk::{ChunkCompression, CompressedChunk};
pub(crate) use chunk::{ChunkContent, ChunkReader, TocChunk};
pub(crate) use error::{ChunkError, TocError};
pub(crate) use piece::{BlobPart, ChunkDigest, MissingPiece, PieceReader};
pub(crate) use soci::SociToc;
pub(crate) use span::{GzipSpan, SpanReader};
pub(crate) use table::TableOfContents;

use crate::unpack::UnpackLimits;
use estargz::EStargzToc;
use zstd_chunked::ZstdChunkedToc;

/// Bytes of a document, compressed or not. containers/storage has a limit of 150 MiB for both.
const MAX_DOCUMENT_BYTES: u64 = 64 << 20;

/// Requests for a table of contents: for its place, for the table, and for what was not in either.
pub(crate) const TABLE_REQUESTS: usize = 3;

/// Format of a layer's table of contents, and where that is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TocFormat {
    ZstdChunked(ZstdChunkedToc),
    EStargz(EStargzToc),
    Soci(SociToc),
}

/// Outcome of reading a table of contents from some bytes.
#[derive(Debug)]
pub(crate) enum TocStep {
    /// These bytes of the blob are needed, all at once. At most 128 MiB.
    Needs(Range<u64>),
    /// The table.
    Read(TableOfContents),
}

impl TocFormat {
    /// The format that the annotations of a layer's descriptor name, with the digest of the table. `None` if they do
    /// not, or not in a known way.
    pub(crate) fn of(layer: &Descriptor) -> Option<TocFormat> {
        let annotations = &layer.annotations;
        // stargz-snapshotter sets the digest of eStargz for zstd:chunked as well.
        ZstdChunkedToc::of(annotations)
            .map(TocFormat::ZstdChunked)
            .or_else(|| EStargzToc::of(annotations).map(TocFormat::EStargz))
            .or_else(|| SociToc::of(layer).map(TocFormat::Soci))
    }

    /// The blob that is the table, if the layer does not have it.
    pub(crate) fn blob(&self) -> Option<&Descriptor> {
        match self {
            TocFormat::Soci(toc) => Some(&toc.ztoc),
            TocFormat::ZstdChunked(_) | TocFormat::EStargz(_) => None,
        }
    }

    /// Bytes to begin with, of the layer's blob or of [the table's](TocFormat::blob), as in all of this.
    pub(crate) fn first_range(&self, blob_size: u64) -> Result<Range<u64>, TocError> {
        match self {
            TocFormat::ZstdChunked(toc) => toc.range(blob_size),
            TocFormat::EStargz(_) => estargz::first_range(blob_size),
            TocFormat::Soci(toc) => toc.range(),
        }
    }

    /// Reads the table from the bytes of a range: that of [`TocFormat::first_range`], or that an earlier call needed.
    pub(crate) fn read(
        &self,
        range: Range<u64>,
        bytes: &[u8],
        blob_size: u64,
        limits: &UnpackLimits,
    ) -> Result<TocStep, TocError> {
        let wrong = TocError::Range { range: range.clone(), bytes: bytes.len(), blob_size };
        if range.end.checked_sub(range.start) != Some(bytes.len() as u64) || range.end > blob_size {
            return Err(wrong);
        }
        match self {
            TocFormat::ZstdChunked(toc) if range == toc.range(blob_size)? => {
                Ok(TocStep::Read(toc.read(bytes, limits)?))
            }
            TocFormat::EStargz(toc) if range.end == blob_size => {
                toc.read(range.start, bytes, blob_size, limits)
            }
            TocFormat::Soci(toc) if range == toc.range()? => Ok(TocStep::Read(toc.read(bytes, limits)?)),
            TocFormat::ZstdChunked(_) | TocFormat::EStargz(_) | TocFormat::Soci(_) => Err(wrong),
        }
    }
}

/// Checks that a compressed document at this place can be read.
fn check_place(place: &Range<u64>, blob_size: u64) -> Result<(), TocError> {
    if place.is_empty() || place.end > blob_size {
        return Err(TocError::Place { place: place.clone(), blob_size });
    }
    if place.end - place.start > MAX_DOCUMENT_BYTES {
        return Err(TocError::Limit { what: "bytes", limit: MAX_DOCUMENT_BYTES });
    }
    Ok(())
}
