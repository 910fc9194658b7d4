//! Fetches or unpacks the layers of an image, and finishes them from the bottom up.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use larder::backend::LayerPhase;
use larder::reference::Digest;
use tokio::sync::SemaphorePermit;
use tracing::Instrument as _;

use super::StorePuller;
use super::error::PullError;
use super::fetch_layer::{FILES, FetchObserver, StagedLayer, fetch_layer, take};
use super::layer_origin::LayerOrigin;
use super::plan::{PlannedLayer, PullPlan};
use super::pull_tasks::{PullTaskHandle, blocking};
use crate::disk::DiskSpace;
use crate::store::error::StoreErrorContext as _;
use crate::store::{
    ClaimOutcome, FS, LayerClaim, LayerHandle, LayerKey, LayerMetadata, LayerWait, Store, StoreError,
};
use crate::unpack::{
    LowerMergeMode, LowerMergeReport, UnpackError, UnpackTarget, UnpackedLayer, merge_lowers,
};

/// Retry interval for a blob that another pull of this process is fetching.
const BUSY_RETRY: Duration = Duration::from_millis(100);

/// The source of a layer of the plan.
enum LayerAcquisition {
    Present(LayerHandle),
    Waiting(LayerWait),
    /// This pull fetches it.
    Own,
}

/// The layers that this pull fetches, by their index in the plan, until they are finished.
struct LayerFetches {
    worker: PullTaskHandle,
    claims: HashMap<usize, LayerClaim>,
    under_way: FuturesUnordered<BoxFuture<'static, (usize, Result<StagedLayer, PullError>)>>,
    staged: HashMap<usize, StagedLayer>,
    /// Finished layers whose whole blob was served to this pull.
    fetched: HashSet<LayerKey>,
}

impl LayerFetches {
    fn new(worker: PullTaskHandle) -> LayerFetches {
        let (claims, under_way, staged, fetched) = Default::default();
        LayerFetches { worker, claims, under_way, staged, fetched }
    }

    /// Waits for the next fetched layer. `None` if no fetch is running.
    async fn next(&mut self) -> Option<Result<(), PullError>> {
        let (at, brought) = self.under_way.next().await?;
        Some(brought.map(|staged| drop(self.staged.insert(at, staged))))
    }

    /// Waits until the layer at this index of the plan is fetched.
    async fn staged(&mut self, at: usize) -> Result<StagedLayer, PullError> {
        while !self.staged.contains_key(&at)
            && let Some(brought) = self.next().await
        {
            brought?;
        }
        self.staged.remove(&at).ok_or(PullError::Abandoned)
    }

    /// Releases all claims: a pull that waits out of claim order must not hold claims that others wait for. Fetched bytes
    /// remain in the ingest files.
    fn release_claims(&mut self) {
        let fetched = std::mem::take(&mut self.fetched);
        *self = LayerFetches { fetched, ..LayerFetches::new(self.worker.clone()) };
    }
}

impl StorePuller {
    /// Claims each layer, from the bottom up. In that order, or two pulls could wait for each other.
    pub(super) async fn claim(&self, plan: &PullPlan) -> Result<Vec<ClaimOutcome>, PullError> {
        let (store, layers) = (self.store.clone(), plan.layers.clone());
        let claim = move || layers.iter().map(|layer| store.claim(&layer.diff_id, &layer.chain_id)).collect();
        blocking::<Result<Vec<ClaimOutcome>, StoreError>>(claim).await?.map_err(PullError::from)
    }

    /// All layers of the plan, in order, most of their bytes on the disk already.
    pub(super) async fn assemble(
        &self,
        from: &LayerOrigin,
        plan: &PullPlan,
        claims: Vec<ClaimOutcome>,
        worker: PullTaskHandle,
    ) -> Result<Vec<LayerHandle>, PullError> {
        let write_behind = worker.write_behind().clone();
        let layers = self.acquire_layers(from, plan, claims, worker).await?;
        blocking(move || write_behind.finish()).await?.context("sync layers to disk")?;
        Ok(layers)
    }

    async fn acquire_layers(
        &self,
        from: &LayerOrigin,
        plan: &PullPlan,
        claims: Vec<ClaimOutcome>,
        worker: PullTaskHandle,
    ) -> Result<Vec<LayerHandle>, PullError> {
        let (mut own, mut coming) = (LayerFetches::new(worker), Vec::with_capacity(claims.len()));
        for (at, claim) in claims.into_iter().enumerate() {
            coming.push(match claim {
                ClaimOutcome::Present(layer) => LayerAcquisition::Present(layer),
                ClaimOutcome::Wait(waiting) => LayerAcquisition::Waiting(waiting),
                ClaimOutcome::Fetch(claim) => {
                    own.claims.insert(at, claim);
                    LayerAcquisition::Own
                }
            });
        }
        self.begin(from, plan, &mut own);
        let mut layers: Vec<LayerHandle> = Vec::with_capacity(coming.len());
        for (at, coming) in coming.into_iter().enumerate() {
            let wanted = &plan.layers[at];
            let layer = match coming {
                LayerAcquisition::Present(layer) => {
                    self.fitting(from, wanted, layer, &layers, &mut own).await?
                }
                LayerAcquisition::Waiting(waiting) => match await_other(waiting, &mut own).await? {
                    Some(layer) => self.fitting(from, wanted, layer, &layers, &mut own).await?,
                    None => self.again(from, wanted, &layers, &mut own).await?,
                },
                LayerAcquisition::Own => match self.settle_own(at, wanted, &layers, &mut own).await? {
                    Some(layer) => layer,
                    None => self.again(from, wanted, &layers, &mut own).await?,
                },
            };
            let layer = if own.fetched.contains(layer.key()) || from.may_reuse(layer.record(), wanted) {
                layer
            } else {
                let staged = self.fetch_missing(from.clone(), wanted.clone(), own.worker.clone()).await?;
                self.settle_staged(wanted, staged, &layers, &mut own).await?
            };
            from.note(wanted, LayerPhase::Done);
            layers.push(layer);
        }
        Ok(layers)
    }

    /// Waits for a layer that was claimed, and settles it; `None` if the claim was given back.
    async fn settle_own(
        &self,
        at: usize,
        wanted: &PlannedLayer,
        below: &[LayerHandle],
        own: &mut LayerFetches,
    ) -> Result<Option<LayerHandle>, PullError> {
        let Some(claim) = own.claims.remove(&at) else { return Ok(None) };
        let staged = own.staged(at).await?;
        let layer = self.settle_staged(wanted, staged, below, own).await?;
        claim.done(&layer);
        Ok(Some(layer))
    }

    /// Starts to fetch the claimed layers.
    fn begin(&self, from: &LayerOrigin, plan: &PullPlan, own: &mut LayerFetches) {
        let mut fetches: Vec<_> = own.claims.keys().map(|at| (*at, plan.layers[*at].clone())).collect();
        // The largest first, or the last one to begin keeps the others waiting.
        fetches.sort_by_key(|(at, wanted)| (Reverse(wanted.descriptor.size), *at));
        for (at, wanted) in fetches {
            let (this, from, worker) = (self.clone(), from.clone(), own.worker.clone());
            let bringing = {
                let worker = worker.clone();
                async move { this.fetch_missing(from, wanted, worker).await }
            };
            let task = worker.task(bringing);
            own.under_way.push(Box::pin(async move { (at, task.join().await) }));
        }
    }

    async fn fetch_missing(
        &self,
        from: LayerOrigin,
        wanted: PlannedLayer,
        worker: PullTaskHandle,
    ) -> Result<StagedLayer, PullError> {
        let span = tracing::info_span!("layer", digest = %wanted.descriptor.digest);
        self.bring_layer(from, wanted, worker).instrument(span).await
    }

    async fn bring_layer(
        &self,
        from: LayerOrigin,
        wanted: PlannedLayer,
        worker: PullTaskHandle,
    ) -> Result<StagedLayer, PullError> {
        let options = self.options(wanted.descriptor.size, &worker);
        let mut slot = Some(self.slots.acquire().await.map_err(|_| PullError::Abandoned)?);
        from.note(&wanted, LayerPhase::Fetching);
        let (session, tally) = match from {
            LayerOrigin::Import(import) => {
                return take(self.store.clone(), import, wanted, options, &worker).await;
            }
            LayerOrigin::Registry { session, tally, .. } => (session, tally),
        };
        let (tracker, digest) = (Arc::clone(&tally), wanted.descriptor.digest.clone());
        let observer: FetchObserver = Arc::new(move |notice| tracker.notice_of(&digest, &notice));
        loop {
            let (session, observer) = (session.clone(), Arc::clone(&observer));
            match fetch_layer(self.store.clone(), session, wanted.clone(), options.clone(), observer, &worker)
                .await
            {
                // The same bytes under another diff ID: rare and short. The pull that fetches them may need the slot.
                Err(PullError::Store(StoreError::Busy { .. })) => {
                    slot.take();
                    tokio::time::sleep(BUSY_RETRY).await;
                    slot = Some(self.slots.acquire().await.map_err(|_| PullError::Abandoned)?);
                }
                Ok(staged) => {
                    tally.set(&wanted.descriptor.digest, LayerPhase::Unpacked);
                    tracing::debug!(digest = %wanted.descriptor.digest, "fetched and unpacked a layer");
                    return Ok(staged);
                }
                failed => return failed,
            }
        }
    }

    /// A layer whose fetch another pull gave up.
    async fn again(
        &self,
        from: &LayerOrigin,
        wanted: &PlannedLayer,
        below: &[LayerHandle],
        own: &mut LayerFetches,
    ) -> Result<LayerHandle, PullError> {
        loop {
            let layer = match self.turn(from, wanted, below, own, Store::claim).await? {
                Some((layer, true)) => return Ok(layer),
                Some((layer, false)) => layer,
                None => continue,
            };
            return self.fitting(from, wanted, layer, below, own).await;
        }
    }

    /// The layer itself if it looks right on top of `below`, else one of its own for this chain.
    async fn fitting(
        &self,
        from: &LayerOrigin,
        wanted: &PlannedLayer,
        layer: LayerHandle,
        below: &[LayerHandle],
        own: &mut LayerFetches,
    ) -> Result<LayerHandle, PullError> {
        if *layer.key() == LayerKey::from(&wanted.chain_id) || !layer.record().facts.pending {
            return Ok(layer);
        }
        let (dir, lowers) = (layer.path().to_owned(), lowers(below));
        let _open = self.may_open(below).await?;
        let check = move || settled(&dir, &lowers, LowerMergeMode::Check);
        if !own.worker.blocking(check).await?.map_err(|cause| unpacking(wanted, cause))?.changed {
            return Ok(layer);
        }
        loop {
            if let Some((layer, _)) = self.turn(from, wanted, below, own, Store::claim_own).await? {
                return Ok(layer);
            }
        }
    }

    /// Claims a layer, and fetches it or waits for the pull that does. Returns whether it was fetched here, and so fits;
    /// `None` if the other pull gave up.
    async fn turn(
        &self,
        from: &LayerOrigin,
        wanted: &PlannedLayer,
        below: &[LayerHandle],
        own: &mut LayerFetches,
        claim: fn(&Store, &Digest, &Digest) -> Result<ClaimOutcome, StoreError>,
    ) -> Result<Option<(LayerHandle, bool)>, PullError> {
        let (store, layer) = (self.store.clone(), wanted.clone());
        match blocking(move || claim(&store, &layer.diff_id, &layer.chain_id)).await?? {
            ClaimOutcome::Present(layer) => Ok(Some((layer, false))),
            ClaimOutcome::Wait(waiting) => {
                own.release_claims();
                Ok(waiting.wait().await.map(|layer| (layer, false)))
            }
            ClaimOutcome::Fetch(claim) => {
                let staged = self.fetch_missing(from.clone(), wanted.clone(), own.worker.clone()).await?;
                let layer = self.settle_staged(wanted, staged, below, own).await?;
                claim.done(&layer);
                Ok(Some((layer, true)))
            }
        }
    }

    /// Gives a staged layer what it takes from those below, and moves it to its place.
    async fn settle_staged(
        &self,
        wanted: &PlannedLayer,
        staged: StagedLayer,
        below: &[LayerHandle],
        own: &mut LayerFetches,
    ) -> Result<LayerHandle, PullError> {
        let StagedLayer { staging, unpacked, ingest } = staged;
        let (diff_id, chain_id) = (wanted.diff_id.clone(), wanted.chain_id.clone());
        let (digest, lowers) = (wanted.descriptor.digest.clone(), lowers(below));
        let _open = if unpacked.pending.is_empty() { None } else { Some(self.may_open(below).await?) };
        // The thread owns the directory, as during unpacking.
        let settling = own.worker.blocking(move || {
            let settled = if unpacked.pending.is_empty() {
                LowerMergeReport::default()
            } else {
                settled(staging.dir(), &lowers, LowerMergeMode::Apply)
                    .map_err(|cause| PullError::Unpack { digest: digest.clone(), cause })?
            };
            let key = LayerKey::from(if settled.changed { &chain_id } else { &diff_id });
            let facts = facts_of(&unpacked, diff_id, digest);
            let usage = DiskSpace {
                bytes: unpacked.usage.allocated_bytes + settled.added.allocated_bytes,
                inodes: unpacked.usage.inodes + settled.added.inodes,
            };
            let layer = staging.finish(&key, facts, Some(usage))?;
            // Its bytes are of no more use: if the image is not committed now, the layer itself is kept for the next try.
            if let Some(ingest) = ingest {
                ingest.discard()?;
            }
            Ok::<_, PullError>(layer)
        });
        let layer = settling.await??;
        own.fetched.insert(layer.key().clone());
        Ok(layer)
    }

    /// The right to have these layers open. What waits for it holds nothing else that is bounded.
    async fn may_open(&self, below: &[LayerHandle]) -> Result<SemaphorePermit<'_>, PullError> {
        // The layer itself as well; an image of more layers than there may be goes alone.
        let layers = u32::try_from(2 * below.len() + 1).unwrap_or(u32::MAX).min(self.files.lowers);
        self.lowers.acquire_many(layers).await.map_err(|_| PullError::Abandoned)
    }
}

fn settled(
    layer: &Path,
    lowers: &[PathBuf],
    settling: LowerMergeMode,
) -> Result<LowerMergeReport, UnpackError> {
    let (root, files) = (layer.join(FS), layer.join(FILES));
    let lowers: Vec<&Path> = lowers.iter().map(PathBuf::as_path).collect();
    merge_lowers(UnpackTarget { root: &root, files: &files }, &lowers, settling)
}

fn facts_of(unpacked: &UnpackedLayer, diff_id: Digest, digest: Digest) -> LayerMetadata {
    LayerMetadata {
        diff_id,
        digest,
        compressed_bytes: unpacked.compressed_bytes,
        plain_bytes: unpacked.plain_bytes,
        files: unpacked.entries,
        pending: !unpacked.pending.is_empty(),
    }
}

/// The files of the layers below, the nearest first.
fn lowers(below: &[LayerHandle]) -> Vec<PathBuf> {
    below.iter().rev().map(LayerHandle::fs).collect()
}

fn unpacking(wanted: &PlannedLayer, cause: UnpackError) -> PullError {
    PullError::Unpack { digest: wanted.descriptor.digest.clone(), cause }
}

/// Waits for a layer that another pull fetches; `None` if it gave up. Ends early if a fetch of this pull fails during the
/// wait.
async fn await_other(waiting: LayerWait, own: &mut LayerFetches) -> Result<Option<LayerHandle>, PullError> {
    let wait = waiting.wait();
    tokio::pin!(wait);
    loop {
        tokio::select! {
            found = &mut wait => return Ok(found),
            Some(brought) = own.next() => brought?,
        }
    }
}
