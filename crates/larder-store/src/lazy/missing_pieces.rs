//! Finds pieces of a layer whose data is missing, although their digests and all metadata are here: what is kept of a
//! removed layer.
//!
//! ```text
//! piece -> places of its data in the archive -> parts of the blob, each from a checkpoint -> the piece, verified
//! ```

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use larder_erofs::{ErofsReadError, ErofsReader};
use sha2::{Digest as _, Sha256};

use super::skeleton::PlacedChunk;
use super::toc::{BlobPart, ChunkContent, MissingPiece, TocChunk};
use crate::erofs::ErofsFile;
use crate::erofs::digest::{FIRST_BLOCK, FilePiece, pieces_of};
use crate::unpack::{DataPlace, RebuildError, data_places};

/// Bytes of memory for a part of the blob and what it becomes.
pub(crate) const MAX_PART: u64 = 96 << 20;
/// Places of the data of a piece, at most: a file begins with a block.
const MAX_PLACES: usize = 1024;

/// Why data of a layer cannot be fetched piece by piece.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MissingPiecesError {
    #[error("its index is not here")]
    NoIndex,
    #[error("cannot read what is kept of the layer")]
    Read(#[from] io::Error),
    #[error("its metadata is damaged")]
    Metadata(#[from] ErofsReadError),
    #[error("the digests of its pieces are damaged")]
    Digests,
    #[error("cannot read the record of its archive")]
    Record(#[from] RebuildError),
    #[error("it has data that its archive does not have")]
    OtherData,
    #[error("its checkpoints are too far from each other")]
    FarCheckpoints,
}

/// The pieces of a layer that has all but its data, in the order of their offsets; `parts` are those of its blob, in
/// its order. Zeros need nothing.
pub(crate) fn missing_pieces(
    file: &File,
    erofs: &ErofsFile,
    parts: &[Arc<BlobPart>],
) -> Result<Vec<PlacedChunk>, MissingPiecesError> {
    if parts.iter().any(|part| part.part.memory() > MAX_PART) {
        return Err(MissingPiecesError::FarCheckpoints);
    }
    let pieces = pieces_of(file, erofs)?.ok_or(MissingPiecesError::Digests)?;
    let data = FIRST_BLOCK..erofs.metadata_start;
    let of_data = |piece: &Range<u64>| piece.start.max(data.start)..piece.end.min(data.end);
    let ranges: Vec<Range<u64>> =
        pieces.iter().map(|piece| of_data(&piece.range)).filter(|range| !range.is_empty()).collect();
    let mut places: Vec<Vec<DataPlace>> = vec![Vec::new(); ranges.len()];
    for place in data_places(ErofsReader::open(file.try_clone()?)?, &ranges)? {
        let number = ranges.partition_point(|range| range.end <= place.offset);
        let place = DataPlace { offset: place.offset - ranges[number].start, ..place };
        let places = &mut places[number];
        match places.iter().position(|earlier| earlier.offset == place.offset) {
            Some(earlier) => places[earlier] = place,
            None if places.len() == MAX_PLACES => return Err(MissingPiecesError::OtherData),
            None => places.push(place),
        }
    }
    let mut chunks: Vec<PlacedChunk> = Vec::new();
    let mut last_end = None;
    for ((range, mut places), FilePiece { range: whole, sha256 }) in
        ranges.into_iter().zip(places).zip(pieces)
    {
        let around = (read(file, whole.start..range.start)?, read(file, range.end..whole.end)?);
        let (offset, size) = (range.start, range.end - range.start);
        places.sort_unstable_by_key(|place| place.archive.start);
        if places.is_empty() {
            let zeros = vec![0; usize::try_from(size).unwrap_or(usize::MAX)];
            let piece = [&around.0[..], &zeros, &around.1].concat();
            if Sha256::digest(piece)[..] != sha256 {
                return Err(MissingPiecesError::OtherData);
            }
            continue;
        }
        // A file that goes on has one place, where the last one ended.
        let goes_on = places.len() == 1 && last_end == places.first().map(|place| place.archive.start);
        last_end = places.last().map(|place| place.archive.end);
        let piece = MissingPiece::new(sha256, around, places, parts).ok_or(MissingPiecesError::OtherData)?;
        if piece.memory() > MAX_PART {
            return Err(MissingPiecesError::FarCheckpoints);
        }
        let content = ChunkContent::Piece(Arc::new(piece));
        let (chunk, begins_file) = (TocChunk { size, content }, !goes_on);
        chunks.push(PlacedChunk { offset, chunk, begins_file, is_before_landmark: false });
    }
    Ok(chunks)
}

fn read(file: &File, range: Range<u64>) -> io::Result<Box<[u8]>> {
    let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap_or(usize::MAX)];
    file.read_exact_at(&mut bytes, range.start)?;
    Ok(bytes.into())
}
