//! Repairs a damaged layer with [its damaged pieces](super::fetch_pieces), if its index is here: they are written into
//! a copy of the good ones, which takes the layer's place, as a layer does that was fetched as a whole.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use larder_registry::RepositorySession;

use super::StorePuller;
use super::error::PullError;
use super::fetch_layer::LayerFetch;
use super::fetch_pieces::{MAX_PIECES, PieceFetch};
use crate::disk::{DiskSpace, SpaceReserve};
use crate::erofs::digest::{DamagedPiece, pieces_of};
use crate::store::layer_index::LayerIndex;
use crate::store::{
    ClaimRequest, LAYER_FILE, LayerHandle, LayerKey, LayerRecord, LayerStaging, Store, StoreError,
};
use crate::unpack::open_layer;

/// Zeros that take no space in a layer's file.
const HOLE: usize = 128 << 10;

/// A layer that is being repaired.
struct LayerRepair {
    layer: LayerHandle,
    staging: LayerStaging,
    /// The copy, without the damaged pieces.
    file: File,
    pieces: PieceFetch,
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
        repair: LayerRepair,
    ) -> Result<Result<LayerHandle, String>, PullError> {
        let LayerRepair { layer, staging, file, pieces } = repair;
        let limits = &self.puller.config.limits;
        let pieces = match pieces.run(session, &self.planned.descriptor, limits, &self.worker).await? {
            Ok(pieces) => pieces,
            Err(reason) => return Ok(Err(reason)),
        };
        let blob = self.origin.blob(&self.planned);
        let finish = move || -> Result<_, PullError> {
            for DamagedPiece { piece, bytes } in &pieces {
                if let Err(error) = file.write_all_at(bytes, piece.range.start) {
                    return Ok(Err(error.to_string()));
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
        reserve: &SpaceReserve,
    ) -> Result<Option<LayerRepair>, String> {
        let Some((layer, index)) = damaged_layer(store, request).map_err(|error| in_words(&error))? else {
            return Ok(None);
        };
        let staging = store.begin_layer().map_err(|error| in_words(&error))?;
        let copied = copy_good_pieces(&layer, &staging, reserve);
        let (file, damaged) = copied.map_err(|error| in_words(&error))?;
        let reader = open_layer(layer.path()).map_err(|error| in_words(&error))?;
        let pieces = PieceFetch::plan(reader, index, damaged)?;
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
    for piece in pieces {
        // What cannot be read is damaged.
        let is_read = piece.read_from(&from, &mut bytes).is_ok();
        if is_read && piece.has_digest_of(&bytes) {
            reserve.admit(DiskSpace { bytes: bytes.len() as u64, inodes: 0 })?;
            let mut at = piece.range.start;
            for part in bytes.chunks(HOLE) {
                if part.iter().any(|byte| *byte != 0) {
                    to.write_all_at(part, at)?;
                }
                at += part.len() as u64;
            }
        } else if damaged.len() <= MAX_PIECES {
            damaged.push(DamagedPiece { piece, bytes: bytes.clone() });
        }
    }
    Ok((to, damaged))
}

fn in_words(error: &(dyn std::error::Error + 'static)) -> String {
    larder::error_chain(error)
}
