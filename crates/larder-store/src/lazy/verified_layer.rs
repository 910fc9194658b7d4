//! A complete layer whose pieces are verified when they are first read.
//!
//! The kernel asks for reads of data only. So the metadata is verified before the layer is mounted, as if it were read.
//! A damaged piece is written again in its place: with the parts of the blob that it needs, or from the whole archive,
//! whose bytes the deterministic writer gives again. The digest of the piece says whether they are those.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use larder_erofs::ErofsReader;
use parking_lot::Mutex;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::mpsc::unbounded_channel;
use tokio::time::Instant;

use super::partial_layer::{PartialLayer, WaitingReader};
use super::skeleton::PlacedChunk;
use super::toc::{ChunkContent, TocChunk};
use super::verified_layers::VerificationCounts;
use crate::erofs::digest::{DamagedPiece, FilePiece, pieces_of};
use crate::store::LayerRecord;
use crate::unpack::{ContentDiffers, UnfilledLayer};

/// Numbers of pieces that reads wait for.
pub(crate) type PieceDemand = UnboundedReceiver<usize>;

/// A complete layer, some of whose pieces are not verified yet.
#[derive(Debug)]
pub(crate) struct VerifiedLayer {
    /// As it was when its reads began to be guarded.
    pub(crate) record: LayerRecord,
    /// Its pieces are the chunks: filled is verified.
    pub(crate) reads: Arc<PartialLayer>,
    /// Opened before reads of the file were guarded.
    file: File,
    pieces: Vec<FilePiece>,
    repair: Mutex<Repair>,
    counts: Arc<VerificationCounts>,
}

/// Pieces that are written again.
#[derive(Debug, Default)]
struct Repair {
    damaged: BTreeSet<usize>,
    /// Pieces that were damaged when the unpacking began.
    wanted: BTreeSet<usize>,
    /// Bytes of the damaged piece that the unpacking is at.
    current: Vec<u8>,
    /// The first piece, which is complete when the first block has come.
    first: Vec<u8>,
    has_first_block: bool,
}

/// No piece is damaged any more.
#[derive(Debug, thiserror::Error)]
#[error("no more of the layer is needed")]
struct Repaired;

impl VerifiedLayer {
    /// Opens a layer, of which nothing is verified. `file` was opened without a guard. `None` if it is unknown which
    /// part of the layer is damaged.
    pub(crate) fn open(
        file: File,
        record: LayerRecord,
        counts: Arc<VerificationCounts>,
    ) -> io::Result<Option<(VerifiedLayer, PieceDemand)>> {
        let Some(pieces) = pieces_of(&file, &record.erofs)? else { return Ok(None) };
        let placed = pieces.iter().map(|FilePiece { range, .. }| PlacedChunk {
            begins_file: false,
            is_before_landmark: false,
            offset: range.start,
            chunk: TocChunk { size: range.end - range.start, content: ChunkContent::InPlace },
        });
        let (demand, demanded) = unbounded_channel();
        // Nothing gives way to reads that are verified on this machine.
        let gives_way = Arc::default();
        let reads =
            PartialLayer::new(file.try_clone()?, record.erofs.bytes, placed.collect(), demand, gives_way);
        let layer =
            VerifiedLayer { record, reads: Arc::new(reads), file, pieces, repair: Mutex::default(), counts };
        Ok(Some((layer, demanded)))
    }

    /// Reads the metadata as a container would. Fails if it is damaged and was not repaired in time.
    pub(crate) fn read_metadata(&self) -> io::Result<()> {
        let failed =
            |_| io::Error::new(io::ErrorKind::InvalidData, "it is damaged, and cannot be repaired now");
        self.begin_read(0..1).recv().map_err(failed)?;
        self.begin_read(self.metadata()?).recv().map_err(failed)
    }

    /// Has the metadata verified, which mounts have read.
    pub(crate) fn request_metadata(&self) {
        drop(self.begin_read(0..1));
        drop(self.metadata().map(|metadata| self.begin_read(metadata)));
    }

    /// All from the first block of metadata on: what follows the filesystem is no data, either.
    fn metadata(&self) -> io::Result<Range<u64>> {
        let start = ErofsReader::open(&self.file).map_err(io::Error::other)?.metadata_start();
        Ok(start..self.record.erofs.bytes.max(start + 1))
    }

    fn begin_read(&self, range: Range<u64>) -> Receiver<()> {
        let (allowed, answer) = sync_channel(1);
        self.reads.read(Box::new(OwnRead(allowed)), &range, Instant::now());
        answer
    }

    /// Verifies a piece; false if it is damaged.
    pub(crate) fn verify(&self, number: usize) -> bool {
        // What the disk cannot read is damaged, too.
        let is_right = self.pieces[number].is_in(&self.file).unwrap_or(false);
        if is_right {
            self.counts.verified_bytes.fetch_add(self.piece_bytes(number), Ordering::Relaxed);
            self.reads.set_filled(number);
        } else if self.repair.lock().damaged.insert(number) {
            tracing::error!(layer = %self.record.key, piece = number, "a layer is damaged on the disk");
            self.counts.damaged.fetch_add(1, Ordering::Relaxed);
        }
        is_right
    }

    /// Whether the piece before this one was read.
    pub(crate) fn is_read_in_order(&self, number: usize) -> bool {
        number.checked_sub(1).is_some_and(|before| self.reads.is_filled(before))
    }

    /// Bytes of a piece.
    fn piece_bytes(&self, number: usize) -> u64 {
        let range = &self.pieces[number].range;
        range.end - range.start
    }

    /// Numbers of the pieces that are damaged.
    pub(crate) fn damaged(&self) -> Vec<usize> {
        self.repair.lock().damaged.iter().copied().collect()
    }

    /// The pieces that are damaged, at most so many, with what the file has of them.
    pub(crate) fn damaged_pieces(&self, most: usize) -> Vec<DamagedPiece> {
        let with_bytes = |number: usize| {
            let (piece, mut bytes) = (self.pieces[number].clone(), Vec::new());
            // What the disk cannot read may be data, which is fetched.
            let _ = piece.read_from(&self.file, &mut bytes);
            DamagedPiece { piece, bytes }
        };
        self.damaged().into_iter().take(most).map(with_bytes).collect()
    }

    /// Writes damaged pieces again.
    pub(crate) fn write_pieces(&self, pieces: &[DamagedPiece]) -> io::Result<()> {
        let mut repair = self.repair.lock();
        for DamagedPiece { piece, bytes } in pieces {
            self.write(&mut repair, self.piece_at(piece.range.start), bytes)?;
        }
        Ok(())
    }

    /// Number of the piece that has this byte, or has its place.
    fn piece_at(&self, offset: u64) -> usize {
        self.pieces.partition_point(|piece| piece.range.end <= offset)
    }

    /// Writes a damaged piece again if these are its bytes.
    fn write(&self, repair: &mut Repair, number: usize, bytes: &[u8]) -> io::Result<()> {
        if repair.damaged.contains(&number) && self.pieces[number].has_digest_of(bytes) {
            self.reads.write_chunk(number, bytes)?;
            self.counts.repaired.fetch_add(1, Ordering::Relaxed);
            repair.damaged.remove(&number);
        }
        Ok(())
    }

    /// Whether a piece is damaged.
    pub(crate) fn is_damaged(&self) -> bool {
        !self.repair.lock().damaged.is_empty()
    }

    /// Whether all pieces are verified.
    pub(crate) fn is_verified(&self) -> bool {
        self.reads.is_filled_up()
    }

    /// Begins another unpacking into the layer.
    pub(crate) fn begin_repair(&self) {
        let mut repair = self.repair.lock();
        let damaged = std::mem::take(&mut repair.damaged);
        *repair = Repair { wanted: damaged.clone(), damaged, ..Repair::default() };
    }

    /// Whether the last unpacking has brought all pieces that were damaged when it began.
    pub(crate) fn is_repaired(&self) -> bool {
        let repair = self.repair.lock();
        repair.wanted.is_disjoint(&repair.damaged)
    }

    /// Takes the bytes of a damaged piece from the unpacking, which ends when no piece is damaged any more.
    fn repair(&self, repair: &mut Repair, number: usize, bytes: &[u8]) -> io::Result<()> {
        self.write(repair, number, bytes)?;
        if repair.damaged.is_empty() { Err(io::Error::other(Repaired)) } else { Ok(()) }
    }

    fn repair_first(&self, repair: &mut Repair) -> io::Result<()> {
        if !repair.has_first_block
            || repair.first.len() as u64 != self.piece_bytes(0)
            || !repair.damaged.contains(&0)
        {
            return Ok(());
        }
        let first = std::mem::take(&mut repair.first);
        self.repair(repair, 0, &first)
    }
}

impl UnfilledLayer for VerifiedLayer {
    fn fill(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut repair = self.repair.lock();
        if repair.damaged.is_empty() {
            return Err(io::Error::other(Repaired));
        }
        let (mut at, mut rest) = (offset, bytes);
        while !rest.is_empty() {
            let number = self.piece_at(at);
            let Some(FilePiece { range, .. }) = self.pieces.get(number) else { return Ok(()) };
            let length = usize::try_from(range.end - at).unwrap_or(usize::MAX).min(rest.len());
            let (piece, others) = rest.split_at(length);
            if !repair.damaged.contains(&number) {
                // It is what it should be, or was not read.
            } else if number == 0 {
                repair.first.extend_from_slice(piece);
                self.repair_first(&mut repair)?;
            } else {
                if at == range.start {
                    repair.current.clear();
                }
                repair.current.extend_from_slice(piece);
                if at + length as u64 == range.end {
                    let whole = std::mem::take(&mut repair.current);
                    self.repair(&mut repair, number, &whole)?;
                }
            }
            at += length as u64;
            rest = others;
        }
        Ok(())
    }

    fn compare(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut repair = self.repair.lock();
        let at = usize::try_from(offset).unwrap_or(usize::MAX);
        if let Some(block) = at.checked_add(bytes.len()).and_then(|end| repair.first.get_mut(at..end)) {
            block.copy_from_slice(bytes);
            repair.has_first_block = true;
        }
        self.repair_first(&mut repair)
    }

    fn end(&self, length: u64) -> io::Result<()> {
        if self.is_repaired() {
            return Err(io::Error::other(Repaired));
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, ContentDiffers { offset: length }))
    }

    fn file(&self) -> &File {
        &self.file
    }

    fn has_inline_tails(&self) -> bool {
        self.record.erofs.has_inline_tails
    }
}

/// A read of larder's own, which fails when it is dropped.
#[derive(Debug)]
struct OwnRead(SyncSender<()>);

impl WaitingReader for OwnRead {
    fn allow(self: Box<Self>) {
        let _ = self.0.send(());
    }

    fn process(&self) -> i32 {
        i32::try_from(std::process::id()).unwrap_or_default()
    }
}
