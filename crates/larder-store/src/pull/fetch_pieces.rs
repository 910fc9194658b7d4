//! Fetches damaged pieces of a layer: the parts of its blob that they need, by the layer's index.
//!
//! ```text
//! damaged pieces, index -> places of their data in the archive -> ranges of the blob
//!                       -> decompressed from their checkpoints -> pieces, each verified
//! ```
//!
//! The digest of each piece decides: whatever does not lead to it, such as damaged metadata, has the layer fetched as
//! a whole.

use std::io;
use std::ops::Range;

use larder_registry::manifest::Descriptor;
use larder_registry::{RepositorySession, fetch_range};

use super::error::PullError;
use super::pull_workers::PullWorker;
use crate::erofs::digest::DamagedPiece;
use crate::store::layer_index::LayerIndex;
use crate::unpack::{CompressedPart, DataPlace, LayerReader, UnpackLimits, compressed_parts, data_places};

/// Damaged pieces of a layer that are fetched, at most: they are in memory.
pub(super) const MAX_PIECES: usize = 64;
/// Bytes of memory for a part of the blob and what it becomes.
const MAX_PART: u64 = 96 << 20;

/// Damaged pieces of a layer, and what they need of its blob.
pub(super) struct PieceFetch {
    index: LayerIndex,
    damaged: Vec<DamagedPiece>,
    places: Vec<DataPlace>,
    parts: Vec<CompressedPart>,
}

impl PieceFetch {
    /// Finds what the damaged pieces of a layer need, or says why the layer must be fetched as a whole.
    pub(super) fn plan(
        layer: LayerReader,
        index: LayerIndex,
        damaged: Vec<DamagedPiece>,
    ) -> Result<PieceFetch, String> {
        if damaged.len() > MAX_PIECES {
            return Err(format!("more than {MAX_PIECES} pieces of it are damaged"));
        }
        let ranges: Vec<Range<u64>> = damaged.iter().map(|damaged| damaged.piece.range.clone()).collect();
        let places = data_places(layer, &ranges).map_err(|error| larder::error_chain(&error))?;
        let wanted = places.iter().map(|place| place.archive.clone());
        let parts = compressed_parts(&index.checkpoints, wanted, index.head.size).unwrap_or_default();
        let fetched: u64 = parts.iter().map(|part| part.range.end - part.range.start).sum();
        if parts.iter().any(|part| part.memory() > MAX_PART) {
            return Err("its checkpoints are too far from each other".into());
        }
        if fetched > index.head.size / 2 {
            return Err(format!("its damage needs {fetched} bytes of {}", index.head.size));
        }
        Ok(PieceFetch { index, damaged, places, parts })
    }

    /// Fetches the pieces, or says why the layer must be fetched as a whole.
    pub(super) async fn run(
        mut self,
        session: &RepositorySession,
        blob: &Descriptor,
        limits: &UnpackLimits,
        worker: &PullWorker,
    ) -> Result<Result<Vec<DamagedPiece>, String>, PullError> {
        if self.index.head.digest != blob.digest {
            return Ok(Err("its index is that of another blob".into()));
        }
        for part in std::mem::take(&mut self.parts) {
            let bytes = match fetch_range(session, blob, part.range.clone()).await {
                Ok(bytes) => bytes,
                Err(error) => return Ok(Err(larder::error_chain(&error))),
            };
            let window_log = limits.max_zstd_window_log;
            let fill = move || self.fill(&part, &bytes, window_log).map(|()| self);
            self = match worker.blocking(fill).await? {
                Ok(fetch) => fetch,
                Err(error) => return Ok(Err(error.to_string())),
            };
        }
        worker.blocking(move || self.verified()).await
    }

    /// Fills in what a part of the blob has.
    fn fill(&mut self, part: &CompressedPart, bytes: &[u8], max_zstd_window_log: u32) -> io::Result<()> {
        let plain = part.decompress(self.index.head.compression, bytes, max_zstd_window_log)?;
        for DataPlace { offset, archive } in &self.places {
            if archive.start < part.plain.start || archive.end > part.plain.end {
                continue;
            }
            let at = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX);
            let data = &plain[at(archive.start - part.plain.start)..at(archive.end - part.plain.start)];
            let place = *offset..offset + data.len() as u64;
            let inside = |damaged: &&mut DamagedPiece| {
                damaged.piece.range.start <= place.start && place.end <= damaged.piece.range.end
            };
            if let Some(DamagedPiece { piece, bytes }) = self.damaged.iter_mut().find(inside) {
                let start = at(offset - piece.range.start);
                bytes[start..start + data.len()].copy_from_slice(data);
            }
        }
        Ok(())
    }

    /// The pieces, if each has its digest.
    fn verified(self) -> Result<Vec<DamagedPiece>, String> {
        match self.damaged.iter().find(|damaged| !damaged.piece.has_digest_of(&damaged.bytes)) {
            None => Ok(self.damaged),
            Some(DamagedPiece { piece, .. }) => {
                Err(format!("more than data of files is damaged at byte {} of it", piece.range.start))
            }
        }
    }
}
