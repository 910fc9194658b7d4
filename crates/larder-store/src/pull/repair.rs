//! Repairs a damaged layer with the parts of its blob that its damaged pieces need, if its index is here.
//!
//! ```text
//! damaged file, index -> copy of the good pieces, places of the others in the archive
//!                     -> ranges of the blob -> decompressed from their checkpoints -> pieces, each verified -> the copy
//! ```
//!
//! The copy takes the layer's place, as a layer does that was fetched as a whole. The digest of each piece decides:
//! whatever does not lead to it, such as damaged metadata, has the layer fetched as a whole.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use larder_registry::{RepositorySession, fetch_range};
use sha2::{Digest as _, Sha256};

use super::StorePuller;
use super::error::PullError;
use super::fetch_layer::LayerFetch;
use crate::disk::{DiskSpace, SpaceReserve};
use crate::erofs::digest::{FilePiece, pieces_of};
use crate::lazy::group::open_to_check;
use crate::lazy::missing_pieces::MAX_PART;
use crate::store::layer_index::LayerIndex;
use crate::store::{
    BlobSource, ClaimRequest, LAYER_FILE, LayerHandle, LayerKey, LayerMetadata, LayerStaging, Store,
    StoreError,
};
use crate::unpack::{CompressedPart, DataPlace, UnpackLimits, compressed_parts, data_places};

/// Damaged pieces of a layer that are repaired, at most: they are in memory.
const MAX_PIECES: usize = 64;
/// Zeros that take no space in a layer's file.
const HOLE: usize = 128 << 10;

/// A layer that is being repaired.
struct LayerRepair {
    layer: LayerHandle,
    index: LayerIndex,
    staging: LayerStaging,
    /// The copy, without the damaged pieces.
    file: File,
    damaged: Vec<DamagedPiece>,
    places: Vec<DataPlace>,
    parts: Vec<CompressedPart>,
}

/// A piece of the layer's file that does not have its digest.
struct DamagedPiece {
    start: u64,
    sha256: [u8; 32],
    /// As far as they are known.
    bytes: Vec<u8>,
}

impl StorePuller {
    /// Keeps the index of a layer. A layer without one is a layer all the same.
    pub(super) fn keep_index(&self, key: &LayerKey, index: &LayerIndex) {
        if let Err(error) = self.store.put_index(key, index) {
            tracing::warn!(layer = %key, error = larder::error_chain(&error), "cannot keep the index of a layer");
        }
    }
}

impl LayerFetch {
    /// Repairs the layer if it is here and damaged. `None` if it must be fetched as a whole.
    pub(super) async fn repair(&self, session: &RepositorySession) -> Result<Option<LayerHandle>, PullError> {
        if self.into.is_some() {
            return Ok(None);
        }
        let (store, request) = (self.puller.store.clone(), self.origin.request(&self.planned));
        let reserve = self.puller.reserve.clone();
        let begin = move || LayerRepair::begin(&store, &request, &reserve);
        let repair = match self.worker.blocking(begin).await? {
            Ok(Some(repair)) => repair,
            Ok(None) => return Ok(None),
            Err(reason) => return Ok(self.in_full(&reason)),
        };
        match self.repaired(session, repair).await? {
            Ok(layer) => Ok(Some(layer)),
            Err(reason) => Ok(self.in_full(&reason)),
        }
    }

    fn in_full(&self, reason: &str) -> Option<LayerHandle> {
        let digest = &self.planned.descriptor.digest;
        tracing::info!(%digest, reason, "fetching a damaged layer as a whole");
        None
    }

    async fn repaired(
        &self,
        session: &RepositorySession,
        mut repair: LayerRepair,
    ) -> Result<Result<LayerHandle, String>, PullError> {
        let descriptor = &self.planned.descriptor;
        for part in std::mem::take(&mut repair.parts) {
            let bytes = match fetch_range(session, descriptor, part.range.clone()).await {
                Ok(bytes) => bytes,
                Err(error) => return Ok(Err(larder::error_chain(&error))),
            };
            let limits = self.puller.config.limits.clone();
            let fill = move || repair.fill(&part, &bytes, &limits).map(|()| repair);
            repair = match self.worker.blocking(fill).await? {
                Ok(repair) => repair,
                Err(error) => return Ok(Err(error.to_string())),
            };
        }
        let blob = self.origin.blob(&self.planned);
        self.worker.blocking(move || repair.finish(&blob)).await?
    }
}

impl LayerRepair {
    /// Copies the good pieces of a damaged layer, and finds what the others need. `None` if no layer is repaired.
    fn begin(
        store: &Store,
        request: &ClaimRequest,
        reserve: &SpaceReserve,
    ) -> Result<Option<LayerRepair>, String> {
        let Some((layer, index)) = damaged_layer(store, request).map_err(|error| in_words(&error))? else {
            return Ok(None);
        };
        let staging = store.begin_layer().map_err(|error| in_words(&error))?;
        let copied = copy_good_pieces(&layer, &staging, reserve);
        let (file, damaged) = copied.map_err(|error| in_words(&error))?;
        if damaged.len() > MAX_PIECES {
            return Err(format!("{} pieces of it are damaged", damaged.len()));
        }
        let ranges: Vec<Range<u64>> =
            damaged.iter().map(|piece| piece.start..piece.start + piece.bytes.len() as u64).collect();
        let opened = open_to_check(layer.path()).map_err(|error| in_words(&error))?;
        let places = data_places(opened, &ranges).map_err(|error| in_words(&error))?;
        let wanted = places.iter().map(|place| place.archive.clone());
        let parts = compressed_parts(&index.checkpoints, wanted, index.head.size).unwrap_or_default();
        let fetched: u64 = parts.iter().map(|part| part.range.end - part.range.start).sum();
        if parts.iter().any(|part| part.memory() > MAX_PART) {
            return Err("its checkpoints are too far from each other".into());
        }
        if fetched > index.head.size / 2 {
            return Err(format!("its damage needs {fetched} bytes of {}", index.head.size));
        }
        Ok(Some(LayerRepair { layer, index, staging, file, damaged, places, parts }))
    }

    /// Fills in what a part of the blob has.
    fn fill(&mut self, part: &CompressedPart, bytes: &[u8], limits: &UnpackLimits) -> io::Result<()> {
        let plain = part.decompress(self.index.head.compression, bytes, limits.max_zstd_window_log)?;
        for place in &self.places {
            let DataPlace { offset, archive } = place;
            if archive.start < part.plain.start || archive.end > part.plain.end {
                continue;
            }
            let at = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX);
            let data = &plain[at(archive.start - part.plain.start)..at(archive.end - part.plain.start)];
            let inside = |piece: &&mut DamagedPiece| {
                piece.start <= *offset && offset + data.len() as u64 <= piece.start + piece.bytes.len() as u64
            };
            if let Some(piece) = self.damaged.iter_mut().find(inside) {
                let start = at(offset - piece.start);
                piece.bytes[start..start + data.len()].copy_from_slice(data);
            }
        }
        Ok(())
    }

    /// Puts the copy in the layer's place, if each piece has its digest.
    fn finish(self, blob: &BlobSource) -> Result<Result<LayerHandle, String>, PullError> {
        let LayerRepair { layer, staging, file, damaged, .. } = self;
        for piece in &damaged {
            if Sha256::digest(&piece.bytes)[..] != piece.sha256 {
                return Ok(Err(format!("more than data of files is damaged at byte {} of it", piece.start)));
            }
            if let Err(error) = file.write_all_at(&piece.bytes, piece.start) {
                return Ok(Err(error.to_string()));
            }
        }
        let (record, pieces) = (layer.record(), damaged.len());
        let facts: LayerMetadata = record.facts.clone();
        let repaired = staging.finish(&record.key, facts, record.erofs.clone(), blob)?;
        tracing::info!(layer = %repaired.key(), pieces, "repaired a layer");
        Ok(Ok(repaired))
    }
}

/// The damaged layer that answers a request, and its index.
fn damaged_layer(
    store: &Store,
    request: &ClaimRequest,
) -> Result<Option<(LayerHandle, LayerIndex)>, StoreError> {
    for key in request.keys() {
        let Some(layer) = store.layer(key)? else { continue };
        let is_damaged = layer.record().damaged && layer.record().partial.is_none();
        // Another source has to send all of it.
        if is_damaged && layer.is_proved_for(request.source()) {
            return Ok(store.index_of(layer.record())?.map(|index| (layer, index)));
        }
    }
    Ok(None)
}

/// Copies the pieces that have their digests to a new file. Returns the others with what is left of them.
fn copy_good_pieces(
    layer: &LayerHandle,
    staging: &LayerStaging,
    reserve: &SpaceReserve,
) -> io::Result<(File, Vec<DamagedPiece>)> {
    let (from, erofs) = (fs_err::File::open(layer.path())?.into_parts().0, &layer.record().erofs);
    let unknown = || io::Error::new(io::ErrorKind::InvalidData, "the digests of its pieces are damaged");
    let pieces = pieces_of(&from, erofs)?.ok_or_else(unknown)?;
    let mut options = fs_err::OpenOptions::new();
    let to = options.read(true).write(true).create_new(true).open(staging.dir().join(LAYER_FILE))?;
    let (to, mut damaged) = (to.into_parts().0, Vec::new());
    let digests: Vec<u8> = pieces.iter().flat_map(|piece| piece.sha256).collect();
    to.write_all_at(&digests, erofs.bytes)?;
    let mut bytes = Vec::new();
    for FilePiece { range, sha256 } in pieces {
        bytes.clear();
        bytes.resize(usize::try_from(range.end - range.start).unwrap_or(usize::MAX), 0);
        // What cannot be read is damaged.
        let is_read = from.read_exact_at(&mut bytes, range.start).is_ok();
        if is_read && Sha256::digest(&bytes)[..] == sha256 {
            reserve.admit(DiskSpace { bytes: bytes.len() as u64, inodes: 0 })?;
            let mut at = range.start;
            for part in bytes.chunks(HOLE) {
                if part.iter().any(|byte| *byte != 0) {
                    to.write_all_at(part, at)?;
                }
                at += part.len() as u64;
            }
        } else if damaged.len() <= MAX_PIECES {
            damaged.push(DamagedPiece { start: range.start, sha256, bytes: bytes.clone() });
        }
    }
    Ok((to, damaged))
}

fn in_words(error: &(dyn std::error::Error + 'static)) -> String {
    larder::error_chain(error)
}
