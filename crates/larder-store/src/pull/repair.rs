//! Repairs a damaged layer with [its damaged pieces](crate::lazy::missing_pieces), if its index is here: they are
//! fetched and written into a copy of the good ones, which takes the layer's place, as a layer does that was fetched as
//! a whole.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use larder::reference::Digest;
use larder_registry::manifest::Descriptor;
use larder_registry::{RepositorySession, fetch_range};

use super::StorePuller;
use super::error::PullError;
use super::fetch_layer::LayerFetch;
use super::pull_workers::PullWorker;
use crate::disk::{DiskSpace, SpaceReserve};
use crate::erofs::ErofsFile;
use crate::erofs::digest::{DamagedPiece, pieces_of};
use crate::lazy::missing_pieces::{MAX_DAMAGED, MissingPiecesError, PieceBatch};
use crate::store::layer_index::LayerIndex;
use crate::store::{
    ClaimRequest, LAYER_FILE, LayerHandle, LayerKey, LayerRecord, LayerStaging, Store, StoreError,
};

/// Zeros that take no space in a layer's file.
const HOLE: usize = 128 << 10;

/// A layer that is being repaired.
struct LayerRepair {
    layer: LayerHandle,
    staging: LayerStaging,
    /// The copy, without the damaged pieces.
    file: File,
    pieces: Vec<PieceBatch>,
}

/// Why a layer must be fetched as a whole.
#[derive(Debug, thiserror::Error)]
pub(super) enum RepairError {
    #[error(transparent)]
    Pieces(#[from] MissingPiecesError),
    #[error("cannot write pieces of the layer")]
    Copy(#[from] io::Error),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Fetches damaged pieces, each verified, or says why the layer must be fetched as a whole.
pub(super) async fn fetch_pieces(
    session: &RepositorySession,
    blob: &Descriptor,
    batches: Vec<PieceBatch>,
    worker: &PullWorker,
) -> Result<Result<Vec<DamagedPiece>, MissingPiecesError>, PullError> {
    let mut repaired = Vec::new();
    for batch in batches {
        let bytes = match fetch_range(session, blob, batch.blob.clone()).await {
            Ok(bytes) => bytes,
            Err(error) => return Ok(Err(error.into())),
        };
        match worker.blocking(move || batch.read(&bytes)).await? {
            Ok(pieces) => repaired.extend(pieces),
            Err(error) => return Ok(Err(error.into())),
        }
    }
    Ok(Ok(repaired))
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
        let (blob, reserve) = (self.planned.descriptor.digest.clone(), self.puller.reserve.clone());
        let begin = move || LayerRepair::begin(&store, &request, &blob, &reserve);
        let repair = match self.worker.blocking(begin).await? {
            Ok(Some(repair)) => repair,
            Ok(None) => return Ok(None),
            Err(error) => return Ok(self.in_full(&error)),
        };
        match self.repaired(session, repair).await? {
            Ok(layer) => Ok(Some(layer)),
            Err(error) => Ok(self.in_full(&error)),
        }
    }

    fn in_full(&self, error: &RepairError) -> Option<LayerHandle> {
        let (digest, reason) = (&self.planned.descriptor.digest, larder::error_chain(error));
        tracing::info!(%digest, reason, "fetching a damaged layer as a whole");
        None
    }

    async fn repaired(
        &self,
        session: &RepositorySession,
        repair: LayerRepair,
    ) -> Result<Result<LayerHandle, RepairError>, PullError> {
        let LayerRepair { layer, staging, file, pieces } = repair;
        let pieces = match fetch_pieces(session, &self.planned.descriptor, pieces, &self.worker).await? {
            Ok(pieces) => pieces,
            Err(error) => return Ok(Err(error.into())),
        };
        let blob = self.origin.blob(&self.planned);
        let finish = move || -> Result<_, PullError> {
            for DamagedPiece { piece, bytes } in &pieces {
                if let Err(error) = file.write_all_at(bytes, piece.range.start) {
                    return Ok(Err(error.into()));
                }
            }
            let LayerRecord { key, facts, erofs, .. } = layer.record();
            let repaired = staging.finish(key, facts.clone(), erofs.clone(), &blob)?;
            tracing::info!(layer = %repaired.key(), pieces = pieces.len(), "repaired a layer");
            Ok(Ok(repaired))
        };
        self.worker.blocking(finish).await?
    }
}

impl LayerRepair {
    /// Copies the good pieces of a damaged layer, and finds what the others need. `None` if no layer is repaired.
    fn begin(
        store: &Store,
        request: &ClaimRequest,
        blob: &Digest,
        reserve: &SpaceReserve,
    ) -> Result<Option<LayerRepair>, RepairError> {
        let Some((layer, index)) = damaged_layer(store, request)? else { return Ok(None) };
        let staging = store.begin_layer()?;
        let from = fs_err::File::open(layer.path())?.into_parts().0;
        let (file, damaged) = copy_good_pieces(&from, &layer.record().erofs, &staging, reserve)?;
        let pieces = index.damaged_pieces(&from, layer.record(), damaged, blob)?;
        Ok(Some(LayerRepair { layer, staging, file, pieces }))
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
    from: &File,
    erofs: &ErofsFile,
    staging: &LayerStaging,
    reserve: &SpaceReserve,
) -> Result<(File, Vec<DamagedPiece>), RepairError> {
    let pieces = pieces_of(from, erofs)?.ok_or(MissingPiecesError::Digests)?;
    let mut options = fs_err::OpenOptions::new();
    let to = options.read(true).write(true).create_new(true).open(staging.dir().join(LAYER_FILE))?;
    let (to, mut damaged) = (to.into_parts().0, Vec::new());
    let digests: Vec<u8> = pieces.iter().flat_map(|piece| piece.sha256).collect();
    to.write_all_at(&digests, erofs.bytes)?;
    let mut bytes = Vec::new();
    for piece in pieces {
        // What cannot be read is damaged.
        let is_read = piece.read_from(from, &mut bytes).is_ok();
        if is_read && piece.has_digest_of(&bytes) {
            reserve.admit(DiskSpace { bytes: bytes.len() as u64, inodes: 0 })?;
            let mut at = piece.range.start;
            for part in bytes.chunks(HOLE) {
                if part.iter().any(|byte| *byte != 0) {
                    to.write_all_at(part, at)?;
                }
                at += part.len() as u64;
            }
        } else if damaged.len() <= MAX_DAMAGED {
            damaged.push(DamagedPiece { piece, bytes: bytes.clone() });
        }
    }
    Ok((to, damaged))
}
