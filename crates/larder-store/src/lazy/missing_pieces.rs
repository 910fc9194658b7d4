//! Finds the data of pieces of a layer in its blob, by the layer's index: of all pieces, where only metadata and
//! digests are here (a remnant), or of damaged ones.
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
use larder_registry::BlobError;
use sha2::{Digest as _, Sha256};

use super::skeleton::PlacedChunk;
use super::toc::{BlobPart, ChunkContent, ChunkError, MissingPiece, PieceReader, TocChunk};
use crate::erofs::ErofsFile;
use crate::erofs::digest::{DamagedPiece, FIRST_BLOCK, FilePiece, pieces_of};
use crate::unpack::{DataPlace, RebuildError, data_places};

/// Places of the data of a piece, at most: a file begins with a block.
const MAX_PLACES: usize = 1024;
/// Damaged pieces of a layer that are repaired one by one, at most: they are in memory.
pub(crate) const MAX_DAMAGED: usize = 64;
/// Bytes of the blob that are fetched for several damaged pieces at once, at most: they are in memory.
const MAX_BATCH: u64 = 32 << 20;

/// Why data of a layer cannot be fetched piece by piece.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MissingPiecesError {
    #[error("its index is missing or damaged")]
    NoIndex,
    #[error("its index is that of another blob")]
    OtherBlob,
    #[error("cannot read the layer's file")]
    Read(#[from] io::Error),
    #[error("its metadata is damaged")]
    Metadata(#[from] ErofsReadError),
    #[error("the digests of its pieces are damaged")]
    Digests,
    #[error("cannot read the record of its archive")]
    Record(#[from] RebuildError),
    #[error("most of its data cannot be fetched in parts")]
    FewParts,
    #[error("more than {MAX_DAMAGED} pieces of it are damaged")]
    TooMany,
    #[error("no part of the blob has the data of the piece at byte {0}")]
    NoData(u64),
    #[error("its damage needs {bytes} bytes of {size}")]
    MostOfBlob { bytes: u64, size: u64 },
    #[error("cannot fetch a part of its blob")]
    Fetch(#[from] BlobError),
    #[error("a part of its blob does not lead to the digest of a piece")]
    Piece(#[from] ChunkError),
}

/// Data of a piece.
struct PieceData {
    piece: FilePiece,
    /// Range of the layer's file, not empty.
    range: Range<u64>,
    /// Places of it in the archive, in the order of that. Offsets are those in the data.
    places: Vec<DataPlace>,
}

/// The data of these pieces, which are in order; without parts of the blob, places are not found.
fn data_of(
    file: &File,
    erofs: &ErofsFile,
    mut pieces: Vec<FilePiece>,
    parts: &[Arc<BlobPart>],
) -> Result<Vec<PieceData>, MissingPiecesError> {
    let data = FIRST_BLOCK..erofs.metadata_start;
    let of_data = |piece: &FilePiece| piece.range.start.max(data.start)..piece.range.end.min(data.end);
    pieces.retain(|piece| !of_data(piece).is_empty());
    let ranges: Vec<Range<u64>> = pieces.iter().map(of_data).collect();
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
    for places in &mut places {
        places.sort_unstable_by_key(|place| place.archive.start);
    }
    let found = pieces.into_iter().zip(ranges).zip(places);
    Ok(found.map(|((piece, range), places)| PieceData { piece, range, places }).collect())
}

/// The pieces of a layer that has all but its data, in the order of their offsets; `parts` are those of its blob, in
/// its order. Zeros need nothing. Data that no part has, or without parts all of it, comes with the whole blob.
pub(crate) fn missing_pieces(
    file: &File,
    erofs: &ErofsFile,
    parts: &[Arc<BlobPart>],
) -> Result<Vec<PlacedChunk>, MissingPiecesError> {
    let pieces = pieces_of(file, erofs)?.ok_or(MissingPiecesError::Digests)?;
    let mut chunks: Vec<PlacedChunk> = Vec::new();
    let (mut last_end, mut with_blob) = (None, 0);
    for PieceData { piece: FilePiece { range: whole, sha256 }, range, places } in
        data_of(file, erofs, pieces, parts)?
    {
        let around = (read(file, whole.start..range.start)?, read(file, range.end..whole.end)?);
        let (offset, size) = (range.start, range.end - range.start);
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

/// A damaged piece, and where its data is.
struct RepairablePiece {
    damaged: DamagedPiece,
    /// Its data, of its bytes.
    data: Range<usize>,
    missing: MissingPiece,
}

/// Damaged pieces that are read from one range of the blob.
pub(crate) struct PieceBatch {
    pub(crate) blob: Range<u64>,
    pieces: Vec<RepairablePiece>,
}

/// Damaged pieces of a layer, which are in order, by the parts of its blob that have their data; or why the blob is
/// needed as a whole. `size` is that of the blob.
pub(crate) fn damaged_pieces(
    file: &File,
    erofs: &ErofsFile,
    damaged: Vec<DamagedPiece>,
    parts: &[Arc<BlobPart>],
    size: u64,
) -> Result<Vec<PieceBatch>, MissingPiecesError> {
    if damaged.len() > MAX_DAMAGED {
        return Err(MissingPiecesError::TooMany);
    }
    let pieces = damaged.iter().map(|damaged| damaged.piece.clone()).collect();
    let mut found = data_of(file, erofs, pieces, parts)?.into_iter();
    let mut repairable = Vec::new();
    for damaged in damaged {
        let start = damaged.piece.range.start;
        let PieceData { piece, range, places } =
            found.find(|data| data.piece == damaged.piece).ok_or(MissingPiecesError::NoData(start))?;
        let at = |offset: u64| usize::try_from(offset - start).unwrap_or(usize::MAX);
        let data = at(range.start)..at(range.end);
        let around = (damaged.bytes[..data.start].into(), damaged.bytes[data.end..].into());
        let missing = MissingPiece::new(piece.sha256, around, places, parts);
        let missing = missing.ok_or(MissingPiecesError::NoData(start))?;
        repairable.push(RepairablePiece { damaged, data, missing });
    }
    let batches = batches(repairable);
    let bytes = batches.iter().map(|batch| batch.blob.end - batch.blob.start).sum();
    if bytes > size / 2 { Err(MissingPiecesError::MostOfBlob { bytes, size }) } else { Ok(batches) }
}

/// Pieces whose parts of the blob overlap, or meet, are read from one range.
fn batches(mut pieces: Vec<RepairablePiece>) -> Vec<PieceBatch> {
    let blob = |piece: &RepairablePiece| piece.missing.blob().cloned().unwrap_or_default();
    pieces.sort_by_key(|piece| blob(piece).start);
    let mut batches: Vec<PieceBatch> = Vec::new();
    for piece in pieces {
        let blob = blob(&piece);
        match batches.last_mut() {
            Some(PieceBatch { blob: last, pieces })
                if blob.start <= last.end && blob.end.saturating_sub(last.start) <= MAX_BATCH =>
            {
                last.end = last.end.max(blob.end);
                pieces.push(piece);
            }
            _ => batches.push(PieceBatch { blob, pieces: vec![piece] }),
        }
    }
    batches
}

impl PieceBatch {
    /// Reads the pieces from the bytes of the range, and verifies each.
    pub(crate) fn read(self, bytes: &[u8]) -> Result<Vec<DamagedPiece>, ChunkError> {
        let mut reader = PieceReader::default();
        let read = |RepairablePiece { mut damaged, data, missing }| {
            let of_piece = missing.blob().cloned().unwrap_or_default();
            let at = |offset: u64| usize::try_from(offset - self.blob.start).unwrap_or(usize::MAX);
            let bytes = &bytes[at(of_piece.start)..at(of_piece.end)];
            reader.read(&missing, &mut damaged.bytes[data], bytes).map(|()| damaged)
        };
        self.pieces.into_iter().map(read).collect()
    }
}

fn read(file: &File, range: Range<u64>) -> io::Result<Box<[u8]>> {
    let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap_or(usize::MAX)];
    file.read_exact_at(&mut bytes, range.start)?;
    Ok(bytes.into())
}
