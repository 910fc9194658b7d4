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

/// Places of the data of a piece, at most: a file begins with a block.
const MAX_PLACES: usize = 1024;

/// Why data of a layer cannot be fetched piece by piece.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MissingPiecesError {
    #[error("its index is missing or damaged")]
    NoIndex,
    #[error("cannot read what is kept of the layer")]
    Read(#[from] io::Error),
    #[error("its metadata is damaged")]
    Metadata(#[from] ErofsReadError),
    #[error("the digests of its pieces are damaged")]
    Digests,
    #[error("cannot read the record of its archive")]
    Record(#[from] RebuildError),
    #[error("most of its data cannot be fetched in parts")]
    FewParts,
}

/// The pieces of a layer that has all but its data, in the order of their offsets; `parts` are those of its blob, in
/// its order. Zeros need nothing. Data that no part has, or without parts all of it, comes with the whole blob.
pub(crate) fn missing_pieces(
    file: &File,
    erofs: &ErofsFile,
    parts: &[Arc<BlobPart>],
) -> Result<Vec<PlacedChunk>, MissingPiecesError> {
    let pieces = pieces_of(file, erofs)?.ok_or(MissingPiecesError::Digests)?;
    let data = FIRST_BLOCK..erofs.metadata_start;
    let of_data = |piece: &Range<u64>| piece.start.max(data.start)..piece.end.min(data.end);
    let ranges: Vec<Range<u64>> =
        pieces.iter().map(|piece| of_data(&piece.range)).filter(|range| !range.is_empty()).collect();
    let mut places: Vec<Vec<DataPlace>> = vec![Vec::new(); ranges.len()];
    let found = match parts {
        [] => Vec::new(),
        _ => data_places(ErofsReader::open(file.try_clone()?)?, &ranges)?,
    };
    for place in found {
        let number = ranges.partition_point(|range| range.end <= place.offset);
        let place = DataPlace { offset: place.offset - ranges[number].start, ..place };
        let places = &mut places[number];
        match places.iter().position(|earlier| earlier.offset == place.offset) {
            Some(earlier) => places[earlier] = place,
            // Without this one, its digest shows that it must come in another way.
            None if places.len() == MAX_PLACES => {}
            None => places.push(place),
        }
    }
    let mut chunks: Vec<PlacedChunk> = Vec::new();
    let (mut last_end, mut with_blob) = (None, 0);
    for ((range, mut places), FilePiece { range: whole, sha256 }) in
        ranges.into_iter().zip(places).zip(pieces)
    {
        let around = (read(file, whole.start..range.start)?, read(file, range.end..whole.end)?);
        let (offset, size) = (range.start, range.end - range.start);
        places.sort_unstable_by_key(|place| place.archive.start);
        if places.is_empty() {
            let zeros = vec![0; usize::try_from(size).unwrap_or(usize::MAX)];
            let piece = [&around.0[..], &zeros, &around.1].concat();
            if Sha256::digest(piece)[..] == sha256 {
                continue;
            }
        }
        // A file that goes on has one place, where the last one ended.
        let goes_on = places.len() == 1 && last_end == places.first().map(|place| place.archive.start);
        last_end = places.last().map(|place| place.archive.end);
        let piece = MissingPiece::new(sha256, around.clone(), places, parts).unwrap_or_else(|| {
            with_blob += 1;
            MissingPiece::of_whole_blob(sha256, around)
        });
        let content = ChunkContent::Piece(Arc::new(piece));
        let (chunk, begins_file) = (TocChunk { size, content }, !goes_on);
        chunks.push(PlacedChunk { offset, chunk, begins_file, is_before_landmark: false });
    }
    let is_useful = parts.is_empty() || with_blob <= chunks.len() / 2;
    is_useful.then_some(chunks).ok_or(MissingPiecesError::FewParts)
}

fn read(file: &File, range: Range<u64>) -> io::Result<Box<[u8]>> {
    let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap_or(usize::MAX)];
    file.read_exact_at(&mut bytes, range.start)?;
    Ok(bytes.into())
}
