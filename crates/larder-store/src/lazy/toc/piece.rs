//! Pieces of a layer, each with a digest, whose data is decompressed from parts of the layer's blob.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use super::error::ChunkError;
use crate::unpack::{CompressedPart, DataPlace, DetectedCompression};

/// Base-2 logarithm of the largest window, as for whole layers. Of a window, only as much is touched as comes out.
pub(super) const MAX_WINDOW_LOG: u32 = 27;
/// Bytes of memory for the bytes of the blob that a piece needs, and for one part of them and what it becomes.
const MAX_MEMORY: u64 = 96 << 20;
/// Parts whose plain bytes are cached for the next piece.
const CACHED_PARTS: usize = 2;

/// Digest of a chunk, or of more than that.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChunkDigest<'a> {
    /// Bytes that it has before the chunk, and behind it.
    pub(crate) before: &'a [u8],
    pub(crate) behind: &'a [u8],
    pub(crate) sha256: &'a [u8; 32],
}

impl ChunkDigest<'_> {
    /// Whether these bytes of a chunk have the digest.
    pub(crate) fn is_of(&self, bytes: &[u8]) -> bool {
        let ChunkDigest { before, behind, sha256 } = self;
        let digest = Sha256::new().chain_update(before).chain_update(bytes).chain_update(behind);
        digest.finalize()[..] == **sha256
    }
}

/// Data of a piece that is missing: all of the piece but metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MissingPiece {
    /// Of the whole piece.
    sha256: [u8; 32],
    /// Metadata of the piece before its data, and behind it.
    around: (Box<[u8]>, Box<[u8]>),
    /// Its data in the archive; a later place counts. Offsets are those in the data.
    places: Vec<DataPlace>,
    /// Parts that are decompressed for it, in the order of the blob.
    parts: Vec<Arc<BlobPart>>,
    /// Bytes of the blob that have all parts; `None` if it comes with the whole blob only.
    blob: Option<Range<u64>>,
}

/// A part of a blob, from one checkpoint to another.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BlobPart {
    pub(crate) compression: DetectedCompression,
    pub(crate) part: CompressedPart,
}

impl MissingPiece {
    /// A piece with this digest, whose data lies between these bytes of metadata. `None` if the parts, in the order of
    /// the blob, do not have all places, or that needs too much memory.
    pub(crate) fn new(
        sha256: [u8; 32],
        around: (Box<[u8]>, Box<[u8]>),
        places: Vec<DataPlace>,
        parts: &[Arc<BlobPart>],
    ) -> Option<MissingPiece> {
        let start = places.iter().map(|place| place.archive.start).min()?;
        let end = places.iter().map(|place| place.archive.end).max()?;
        let first = parts.partition_point(|part| part.part.plain.end <= start);
        let has_place = |part: &&Arc<BlobPart>| {
            let plain = &part.part.plain;
            places.iter().any(|place| place.archive.start < plain.end && plain.start < place.archive.end)
        };
        let parts = parts[first..].iter().take_while(|part| part.part.plain.start < end);
        let parts: Vec<Arc<BlobPart>> = parts.filter(has_place).cloned().collect();
        let (first, last) = (&parts.first()?.part, &parts.last()?.part);
        let has_all = first.plain.start <= start && end <= last.plain.end;
        let blob = first.range.start..last.range.end;
        let largest = parts.iter().map(|part| part.part.memory()).max().unwrap_or_default();
        let is_small = (blob.end - blob.start).saturating_add(largest) <= MAX_MEMORY;
        let blob = Some(blob);
        (has_all && is_small).then_some(MissingPiece { sha256, around, places, parts, blob })
    }

    /// A piece that comes with the whole blob only.
    pub(crate) fn of_whole_blob(sha256: [u8; 32], around: (Box<[u8]>, Box<[u8]>)) -> MissingPiece {
        MissingPiece { sha256, around, places: Vec::new(), parts: Vec::new(), blob: None }
    }

    /// Digest of the piece.
    pub(super) fn digest(&self) -> ChunkDigest<'_> {
        let (before, behind) = &self.around;
        ChunkDigest { before, behind, sha256: &self.sha256 }
    }

    /// Bytes of the blob that are enough for it.
    pub(crate) fn blob(&self) -> Option<&Range<u64>> {
        self.blob.as_ref()
    }
}

/// Decompresses pieces, one after the other.
#[derive(Default)]
pub(crate) struct PieceReader {
    /// Parts that were decompressed last.
    parts: VecDeque<(Arc<BlobPart>, Vec<u8>)>,
}

impl PieceReader {
    /// Reads the data of a piece from the bytes of [`MissingPiece::blob`], and verifies it. Data that has no place in
    /// the archive stays as it is.
    pub(crate) fn read(
        &mut self,
        piece: &MissingPiece,
        data: &mut [u8],
        bytes: &[u8],
    ) -> Result<(), ChunkError> {
        let (start, size) = (piece.blob.as_ref().map_or(0, |blob| blob.start), data.len() as u64);
        let failed = |cause| ChunkError::Decompress { offset: start, size, cause };
        for part in &piece.parts {
            let plain = self.part(part, start, bytes).map_err(failed)?;
            let of_part = &part.part.plain;
            for place in &piece.places {
                let archive = place.archive.start.max(of_part.start)..place.archive.end.min(of_part.end);
                if archive.is_empty() {
                    continue;
                }
                let to = at(place.offset + (archive.start - place.archive.start));
                let from = at(archive.start - of_part.start);
                let length = at(archive.end - archive.start);
                data[to..to + length].copy_from_slice(&plain[from..from + length]);
            }
        }
        if piece.digest().is_of(data) { Ok(()) } else { Err(ChunkError::Digest { offset: start, size }) }
    }

    /// Plain bytes of a part; `bytes` begin at `start` of the blob.
    fn part(&mut self, part: &Arc<BlobPart>, start: u64, bytes: &[u8]) -> io::Result<&[u8]> {
        let known = self.parts.iter().position(|(known, _)| Arc::ptr_eq(known, part));
        let known = if let Some(known) = known {
            known
        } else {
            let range = &part.part.range;
            let bytes = &bytes[at(range.start - start)..at(range.end - start)];
            let plain = part.part.decompress(part.compression, bytes, MAX_WINDOW_LOG)?;
            if self.parts.len() == CACHED_PARTS {
                self.parts.pop_front();
            }
            self.parts.push_back((Arc::clone(part), plain));
            self.parts.len() - 1
        };
        Ok(&self.parts[known].1)
    }
}

fn at(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unpack::{Checkpoint, parts_between};

    #[test]
    fn a_piece_has_parts_only_if_they_have_all_of_its_data() {
        let at = |compressed, plain| Checkpoint { compressed, plain, crc: 0, window: Vec::new() };
        let parts = parts_between(&[at(100, 1000), at(300, 4000)], 900, 9000).into_iter();
        let compression = DetectedCompression::None;
        let parts: Vec<_> = parts.map(|part| Arc::new(BlobPart { compression, part })).collect();
        let blob = |archive| {
            let places = vec![DataPlace { offset: 0, archive }];
            MissingPiece::new([0; 32], Default::default(), places, &parts)?.blob().cloned()
        };
        assert_eq!(blob(2000..3000), Some(100..300));
        assert_eq!(blob(2000..5000), Some(100..900));
        assert_eq!(blob(500..3000), None, "the first part begins too late");
        assert_eq!(blob(8000..9500), None, "the last part ends too early");
    }
}
