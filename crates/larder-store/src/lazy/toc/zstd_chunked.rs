//! zstd:chunked: the document is in a skippable frame behind the archive, compressed.

use std::collections::BTreeMap;
use std::ops::Range;

use larder::reference::Digest;

use super::chunk::ChunkCompression;
use super::document::read_document;
use super::error::TocError;
use super::table::{TableBuilder, TableOfContents};
use super::{MAX_DOCUMENT_BYTES, check_place};
use crate::unpack::UnpackLimits;

/// Prefixes of the annotations: of podman, buildah and skopeo, and of stargz-snapshotter.
const PREFIXES: [&str; 2] = ["io.github.containers.zstd-chunked.", "io.containers.zstd-chunked."];

/// The only type of table there is.
const TABLE_TYPE: u64 = 1;

/// Header of a skippable frame.
const FRAME_HEADER: u64 = 8;

/// Where the table of contents of a layer is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ZstdChunkedToc {
    /// The compressed document.
    document: Range<u64>,
    plain_bytes: u64,
    /// Of the compressed document.
    digest: Digest,
}

impl ZstdChunkedToc {
    pub(super) fn of(annotations: &BTreeMap<String, String>) -> Option<ZstdChunkedToc> {
        PREFIXES.iter().find_map(|prefix| {
            let value = |name| annotations.get(&format!("{prefix}{name}"));
            let digest = Digest::parse(value("manifest-checksum")?).ok()?;
            let mut numbers = value("manifest-position")?.split(':').map(|number| number.parse::<u64>().ok());
            let mut number = || numbers.next().flatten();
            let (offset, size, plain_bytes) = (number()?, number()?, number()?);
            let is_known = number()? == TABLE_TYPE && numbers.next().is_none();
            let document = offset..offset.checked_add(size)?;
            is_known.then_some(ZstdChunkedToc { document, plain_bytes, digest })
        })
    }

    pub(super) fn range(&self, blob_size: u64) -> Result<Range<u64>, TocError> {
        let place = self.document.clone();
        if place.start < FRAME_HEADER {
            return Err(TocError::Place { place, blob_size });
        }
        check_place(&place, blob_size)?;
        if self.plain_bytes > MAX_DOCUMENT_BYTES {
            return Err(TocError::Limit { what: "bytes", limit: MAX_DOCUMENT_BYTES });
        }
        Ok(place)
    }

    /// `bytes` are those of [`ZstdChunkedToc::range`].
    pub(super) fn read(&self, bytes: &[u8], limits: &UnpackLimits) -> Result<TableOfContents, TocError> {
        self.digest
            .check(bytes)
            .map_err(|found| TocError::Digest { expected: self.digest.clone(), found })?;
        let size = usize::try_from(self.plain_bytes).unwrap_or(usize::MAX);
        // Into a buffer of the whole size: no window is allocated, whatever the frame says.
        let json = zstd::bulk::decompress(bytes, size).map_err(TocError::Decompress)?;
        let mut table = TableBuilder::new(ChunkCompression::Zstd, limits, self.document.start - FRAME_HEADER);
        read_document(&json, |record| table.add(&record))?;
        Ok(table.finish()?.0)
    }
}
