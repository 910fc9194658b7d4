//! Verifies complete layers when they are read, and writes damaged pieces of them again.
//!
//! ```text
//! read -> piece -> its SHA-256 -> right: the read goes on
//!                              -> damaged: parts of the blob of the registry -> the piece, written again
//!                                          the whole blob, unpacked, where those do not lead to it
//! ```

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::stream::{self, FuturesUnordered};
use futures_util::{FutureExt as _, StreamExt as _};
use larder::credentials::Credential;
use larder::reference::Reference;
use larder_registry::manifest::Descriptor;
use larder_registry::{RegistryClient, RepositorySession};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::{self, Instant};

use super::error::PullError;
use super::fill::LayerBlob;
use super::fill_sessions::NodeCredentials;
use super::plan::{PlannedLayer, chain_id};
use super::pull_workers::{PullWorkers, blocking};
use super::repair::{RepairError, fetch_pieces};
use super::{StorePullConfig, StorePuller};
use crate::lazy::BegunLayer;
use crate::lazy::missing_pieces::{MAX_DAMAGED, MissingPiecesError};
use crate::lazy::verified_layer::{PieceDemand, VerifiedLayer};
use crate::store::{
    BlobSource, ImageLayer, LayerKey, LayerRecord, OpenStore, Store, StoreError, TransferLogin,
};
use crate::unpack::{UnfilledLayer, UnpackError};

/// Pieces of one layer that are verified at once.
const AT_ONCE: usize = 4;
/// Layers that are mounted again at once when the daemon starts; each may wait for its repair.
const REMOUNTS_AT_ONCE: usize = 16;
/// Pieces that are verified ahead of reads in order.
const AHEAD: usize = 8;
/// Times between two attempts to repair a layer: the first, and the longest.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// Verifies the layers of a store for as long as that is open.
struct Verifier {
    store: Weak<OpenStore>,
    client: RegistryClient,
    config: StorePullConfig,
    credentials: NodeCredentials,
    /// How long a read waits for a repair.
    longest_wait: Duration,
}

/// A registry that has a layer.
struct RepairSource {
    name: Reference,
    planned: PlannedLayer,
    /// Layers below it, lowest first.
    lowers: Vec<LayerKey>,
}

impl StorePuller {
    /// Verifies the reads of complete layers from now on, which must be guarded.
    pub(super) async fn verify_reads(&self, longest_wait: Duration) -> Result<(), PullError> {
        let (guarded, layers) = unbounded_channel();
        self.store.0.verified.enable(guarded);
        let verifier = Verifier {
            store: Arc::downgrade(&self.store.0),
            client: self.client.clone(),
            config: (*self.config).clone(),
            credentials: self.credentials.clone(),
            longest_wait,
        };
        tokio::spawn(verify_layers(Arc::new(verifier), layers));
        let store = self.store.clone();
        let unguarded = blocking(move || store.resume_verification()).await??;
        let store = self.store.clone();
        // A repair may take long: neither the start nor other layers wait for it.
        let remount = move |layer: Arc<VerifiedLayer>| {
            let store = store.clone();
            blocking(move || store.remount_verified(&layer)).map(drop)
        };
        tokio::spawn(stream::iter(unguarded).for_each_concurrent(REMOUNTS_AT_ONCE, remount));
        Ok(())
    }
}

/// Ends with the store.
async fn verify_layers(verifier: Arc<Verifier>, mut layers: UnboundedReceiver<BegunLayer>) {
    while let Some((layer, demand)) = layers.recv().await {
        tokio::spawn(verify_layer(Arc::clone(&verifier), layer, demand));
    }
}

/// Verifies the pieces that reads wait for, until all are verified or the layer is removed.
async fn verify_layer(verifier: Arc<Verifier>, layer: Arc<VerifiedLayer>, mut demand: PieceDemand) {
    let mut pieces = FuturesUnordered::new();
    let mut repair = None;
    loop {
        tokio::select! {
            is_right = pieces.next(), if !pieces.is_empty() => {
                match is_right {
                    Some(Some(true)) if layer.is_verified() => return,
                    Some(Some(false)) if repair.is_none() => {
                        repair = Some(Box::pin(verifier.repair(&layer)));
                    }
                    Some(None) => return, // the store is closed
                    _ => {}
                }
            }
            () = async { if let Some(repair) = &mut repair { repair.await } }, if repair.is_some() => {
                repair = None;
                if layer.is_verified() {
                    return;
                }
            }
            Some(number) = demand.recv(), if pieces.len() < AT_ONCE => {
                pieces.push(verifier.verify(&layer, number));
            }
            _ = layer.reads.ended() => return,
        }
    }
}

/// Why a layer could not be repaired.
struct RepairFailure {
    reason: String,
    /// Another attempt ends in the same way, unless images change.
    is_lasting: bool,
}

impl Verifier {
    fn store(&self) -> Option<Store> {
        self.store.upgrade().map(Store)
    }

    /// Verifies a piece; `None` once the store is closed.
    async fn verify(&self, layer: &Arc<VerifiedLayer>, number: usize) -> Option<bool> {
        let (store, reads, layer) = (self.store()?, Arc::clone(&layer.reads), Arc::clone(layer));
        let verify = move || {
            let is_in_order = layer.is_read_in_order(number);
            let mut is_right = layer.verify(number);
            // The reads of this piece go on while the next ones are verified.
            for next in number + 1..=number + if is_in_order { AHEAD } else { 0 } {
                if layer.reads.claim_next(next) {
                    is_right &= layer.verify(next);
                }
            }
            store.end_if_verified(&layer);
            is_right
        };
        Some(blocking(verify).await.unwrap_or_else(|error| {
            tracing::error!(%error, "cannot verify what a container reads");
            reads.fail(number);
            true
        }))
    }

    /// Writes the damaged pieces of a layer again, as soon as a registry sends it. The layer is recorded as damaged
    /// meanwhile if reads have failed.
    async fn repair(&self, layer: &Arc<VerifiedLayer>) {
        let (mut wait, began, mut is_recorded) = (RETRY.0, Instant::now(), false);
        while let Some(store) = self.store().filter(|_| layer.is_damaged()) {
            let failure = self.try_repair(&store, layer).await.err();
            store.end_if_verified(layer);
            let is_late = began.elapsed() >= self.longest_wait;
            let was_recorded = is_recorded;
            is_recorded = failure.as_ref().is_some_and(|failure| failure.is_lasting || is_late);
            let reason = failure.as_ref().map(|failure| failure.reason.clone());
            let noted = Arc::clone(layer);
            let note = move || {
                if (is_recorded && !was_recorded) || reason.is_none() {
                    store.report_damage(&noted.record.key, reason);
                }
                if is_recorded == was_recorded { Ok(()) } else { store.note_damage(&noted, is_recorded) }
            };
            if let Ok(Err(error)) = blocking(note).await {
                tracing::error!(layer = %layer.record.key, %error, "cannot record the damage of a layer");
            }
            let Some(RepairFailure { reason, is_lasting }) = failure else { continue };
            tracing::debug!(layer = %layer.record.key, reason, "cannot repair a damaged layer yet");
            if is_lasting {
                layer.damaged().into_iter().for_each(|number| layer.reads.fail(number));
            }
            time::sleep(wait).await;
            wait = RETRY.1.min(wait * 2);
        }
    }

    async fn try_repair(&self, store: &Store, layer: &Arc<VerifiedLayer>) -> Result<(), RepairFailure> {
        let passing = |reason: String| RepairFailure { reason, is_lasting: false };
        let (asked, record) = (store.clone(), layer.record.clone());
        let sources = blocking(move || asked.sources_of(&record)).await;
        let sources = sources.map_err(|error| passing(larder::error_chain(&error)))?;
        let sources = sources.map_err(|error| passing(larder::error_chain(&error)))?;
        let puller = StorePuller::new(store.clone(), self.client.clone(), self.config.clone());
        let mut failure = RepairFailure { reason: "it came from no registry".into(), is_lasting: true };
        for source in sources {
            for credential in self.credentials.lookup(&source.name).await {
                match puller.repair_from(&source, credential.as_ref(), layer).await {
                    Ok(true) => return Ok(()),
                    Ok(false) => failure.reason = format!("{} has other bytes now", source.name.name()),
                    Err(error) => failure = passing(larder::error_chain(&error)),
                }
            }
        }
        Err(failure)
    }
}

impl StorePuller {
    /// Repairs a layer until it has no known damage: with the parts of its blob that its damaged pieces need, or by
    /// unpacking the blob into it. False if the blob has other bytes. A whole blob is kept for damage that is found
    /// later, until space is reclaimed.
    async fn repair_from(
        &self,
        source: &RepairSource,
        credential: Option<&Credential>,
        layer: &Arc<VerifiedLayer>,
    ) -> Result<bool, PullError> {
        let session = self.client.session(&source.name, credential)?;
        match self.repair_pieces(&session, &source.planned.descriptor, layer).await? {
            Ok(()) => return Ok(true),
            Err(error) => {
                let reason = larder::error_chain(&error);
                tracing::info!(layer = %layer.record.key, reason, "fetching a damaged layer as a whole");
            }
        }
        let Descriptor { digest, size, .. } = &source.planned.descriptor;
        let login = TransferLogin::from(credential);
        let blob = BlobSource::registry(&source.name, login, digest.clone(), *size);
        let store = self.store.clone();
        let ingest = blocking(move || store.ingest(&blob)).await??;
        layer.begin_repair();
        let unpacked = LayerBlob {
            session: &session,
            planned: &source.planned,
            ingest: &ingest,
            lowers: &source.lowers,
            // Nothing is promised to a repair.
            reserve: &self.reserve,
            observer: Arc::new(|_| ()),
        };
        let workers = PullWorkers::new(self.syncer.begin(), &self.fills);
        let done = self.unpack_into(unpacked, Arc::clone(layer) as Arc<dyn UnfilledLayer>, &workers).await;
        workers.end().await;
        match done {
            // Its end is an error, too.
            _ if layer.is_repaired() => Ok(true),
            Err(PullError::Unpack { cause: UnpackError::Differs { .. }, .. }) | Ok(_) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl StorePuller {
    /// Writes the damaged pieces of a layer again by its index, or says why the whole blob is needed.
    async fn repair_pieces(
        &self,
        session: &RepositorySession,
        blob: &Descriptor,
        layer: &Arc<VerifiedLayer>,
    ) -> Result<Result<(), RepairError>, PullError> {
        let workers = PullWorkers::new(self.syncer.begin(), &self.fills);
        let worker = workers.worker();
        let (store, damaged, digest) = (self.store.clone(), Arc::clone(layer), blob.digest.clone());
        let plan = move || -> Result<_, StoreError> {
            let index = store.index_of(&damaged.record)?.ok_or(MissingPiecesError::NoIndex);
            let pieces = damaged.damaged_pieces(MAX_DAMAGED + 1);
            Ok(index.and_then(|index| index.damaged_pieces(damaged.file(), &damaged.record, pieces, &digest)))
        };
        let repaired = match worker.blocking(plan).await?? {
            Ok(batches) => fetch_pieces(session, blob, batches, &worker).await?,
            Err(reason) => Err(reason),
        };
        let layer = Arc::clone(layer);
        let write = move || layer.write_pieces(&repaired?).map_err(RepairError::Copy);
        let written = worker.blocking(write).await;
        drop(worker);
        workers.end().await;
        written
    }
}

impl Store {
    /// Registries that may have a layer.
    fn sources_of(&self, record: &LayerRecord) -> Result<Vec<RepairSource>, StoreError> {
        let mut sources = Vec::new();
        for image in self.images()? {
            let Some(at) = image.layers.iter().position(|layer| layer.key == record.key) else { continue };
            let ImageLayer { diff_id, digest, size, media_type, .. } = &image.layers[at];
            let is_artifact = !image.artifact_type.is_empty();
            let files = if is_artifact { self.blob_files_of(&record.key)? } else { Vec::new() };
            let lowers: Vec<LayerKey> = image.layers[..at].iter().map(|layer| layer.key.clone()).collect();
            let mut chain = None;
            for layer in &image.layers[..=at] {
                chain = Some(chain_id(chain.as_ref(), &layer.diff_id));
            }
            for name in &image.digests {
                let (Ok(name), Some(chain_id)) = (Reference::parse(name), chain.clone()) else { continue };
                let descriptor = Descriptor::new(media_type.clone(), digest.clone(), *size);
                let planned =
                    PlannedLayer { descriptor, diff_id: diff_id.clone(), chain_id, files: files.clone() };
                sources.push(RepairSource { name, planned, lowers: lowers.clone() });
            }
        }
        Ok(sources)
    }
}
