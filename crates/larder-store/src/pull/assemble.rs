//! Fetches or unpacks the layers of an image, and settles them from the bottom up.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use larder::backend::LayerPhase;
use larder::reference::Digest;
use larder::trace_context;
use larder_registry::FetchNotice;
use tokio::time::Instant;
use tracing::Instrument as _;

use super::StorePuller;
use super::error::PullError;
use super::fetch_layer::{FetchObserver, StagedLayer, fetch_layer, take};
use super::layer_fetches::LayerFetches;
use super::layer_origin::LayerOrigin;
use super::plan::{PlannedLayer, PullPlan};
use super::pull_tasks::{PullTaskHandle, blocking};
use super::settle::open_lowers;
use super::spans::{FetchSpanFields, layer_span};
use crate::store::error::StoreErrorContext as _;
use crate::store::fetch_progress::{FetchProgress, FetchSource};
use crate::store::{ClaimOutcome, LayerClaim, LayerHandle, LayerKey, LayerWait, Store, StoreError};
use crate::unpack::{UnpackError, fits_lowers};

/// Interval at which a pull checks whether the fetch of another pull that it waits for is stuck.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Retry interval for a blob that another pull of this process is fetching.
const BUSY_RETRY: Duration = Duration::from_millis(100);

/// The source of a layer of the plan.
enum LayerAcquisition {
    Present(LayerHandle),
    /// Another pull fetches it.
    Waiting,
    /// This pull fetches it.
    Own,
}

impl StorePuller {
    /// Claims each layer, from the bottom up. In that order, or two pulls could wait for each other.
    pub(super) async fn claim(
        &self,
        plan: &PullPlan,
        source: FetchSource,
    ) -> Result<Vec<ClaimOutcome>, PullError> {
        let (store, layers, minimum) = (self.store.clone(), plan.layers.clone(), self.config.minimum_rate);
        let claim = move || {
            let progress = || FetchProgress::new(source.clone(), minimum, Instant::now());
            layers.iter().map(|layer| store.claim_for(&layer.diff_id, &layer.chain_id, progress())).collect()
        };
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
                ClaimOutcome::Wait(waiting) => {
                    own.waits.insert(at, waiting);
                    LayerAcquisition::Waiting
                }
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
            let found = match coming {
                LayerAcquisition::Present(layer) => Some(layer),
                LayerAcquisition::Waiting => self.await_other(at, from, plan, &mut own).await?,
                LayerAcquisition::Own => None,
            };
            let layer = match found {
                Some(layer) => self.fitting(from, wanted, layer, &layers, &mut own).await?,
                None => match self.settle_own(at, wanted, &layers, &mut own).await? {
                    Some(layer) => layer,
                    None => self.again(from, wanted, &layers, &mut own).await?,
                },
            };
            let layer = if own.fetched.contains(layer.key()) || from.may_reuse(layer.record(), wanted) {
                layer
            } else {
                let progress = Arc::default();
                let staged =
                    self.fetch_missing(from.clone(), wanted.clone(), progress, own.worker.clone()).await?;
                self.settle_staged(wanted, staged, &layers, &mut own).await?
            };
            from.note(wanted, LayerPhase::Done);
            layers.push(layer);
        }
        Ok(layers)
    }

    /// Waits for a layer that this pull claimed, and settles it; `None` if the claim was given back or taken over.
    async fn settle_own(
        &self,
        at: usize,
        wanted: &PlannedLayer,
        below: &[LayerHandle],
        own: &mut LayerFetches,
    ) -> Result<Option<LayerHandle>, PullError> {
        let Some((claim, staged)) = own.staged(at).await? else { return Ok(None) };
        let layer = self.settle_staged(wanted, staged, below, own).await?;
        claim.done(&layer);
        Ok(Some(layer))
    }

    /// Starts to fetch the claimed layers that are not being fetched yet.
    fn begin(&self, from: &LayerOrigin, plan: &PullPlan, own: &mut LayerFetches) {
        let mut fetches: Vec<_> = own.to_begin().map(|at| (at, plan.layers[at].clone())).collect();
        // The largest first, or the last one to begin keeps the others waiting.
        fetches.sort_by_key(|(at, wanted)| (Reverse(wanted.descriptor.size), *at));
        for (at, wanted) in fetches {
            let Some(claim) = own.claims.get(&at) else { continue };
            let (this, from, worker) = (self.clone(), from.clone(), own.worker.clone());
            let (progress, taken_over) = (Arc::clone(claim.progress()), claim.taken_over());
            let fetching = {
                let worker = worker.clone();
                async move { this.fetch_missing(from, wanted, progress, worker).await }
            };
            own.begin(at, worker.task(fetching), taken_over);
        }
    }

    /// Waits for a layer that another pull fetches; `None` if it gave up, or if this pull took the fetch over. Ends early
    /// if a fetch of this pull fails during the wait.
    async fn await_other(
        &self,
        at: usize,
        from: &LayerOrigin,
        plan: &PullPlan,
        own: &mut LayerFetches,
    ) -> Result<Option<LayerHandle>, PullError> {
        let Some(waiting) = own.waits.remove(&at) else { return Ok(None) };
        let mut check = tokio::time::interval(CHECK_INTERVAL);
        loop {
            tokio::select! {
                found = waiting.wait() => return Ok(found),
                Some(fetched) = own.next() => fetched?,
                _ = check.tick() => {
                    let others = own.waits.keys().copied().collect::<Vec<_>>();
                    let taken = take_over(from, &plan.layers[at], &waiting, own);
                    let is_taken = taken.is_some();
                    own.claims.extend(taken.map(|claim| (at, claim)));
                    for other in others {
                        let Some(waiting) = own.waits.remove(&other) else { continue };
                        match take_over(from, &plan.layers[other], &waiting, own) {
                            Some(claim) => drop(own.claims.insert(other, claim)),
                            None => drop(own.waits.insert(other, waiting)),
                        }
                    }
                    self.begin(from, plan, own);
                    if is_taken {
                        return Ok(None);
                    }
                }
            }
        }
    }

    async fn fetch_missing(
        &self,
        from: LayerOrigin,
        wanted: PlannedLayer,
        progress: Arc<FetchProgress>,
        worker: PullTaskHandle,
    ) -> Result<StagedLayer, PullError> {
        let span = layer_span(&wanted);
        let fetch = Box::pin(self.fetch_in_slot(from, wanted, progress, worker));
        let fetched = fetch.instrument(span.clone()).await;
        if let Err(error) = &fetched {
            trace_context::fail(&span, "fetch", error);
        }
        fetched
    }

    async fn fetch_in_slot(
        &self,
        from: LayerOrigin,
        wanted: PlannedLayer,
        progress: Arc<FetchProgress>,
        worker: PullTaskHandle,
    ) -> Result<StagedLayer, PullError> {
        let (source, blob) = (from.source(), &wanted.descriptor.digest);
        let work = source.work();
        loop {
            let wait = tracing::trace_span!("pull.Wait", larder.wait.reason = "layer slot");
            progress.set_queued(true, Instant::now());
            let slot = self.config.scheduler.acquire(&work).instrument(wait).await;
            progress.set_queued(false, Instant::now());
            self.downloads.begin(blob, &progress);
            from.note(&wanted, LayerPhase::Fetching);
            tokio::select! {
                fetched = self.fetch_from(&from, &wanted, &progress, &worker) => match fetched {
                    // Another fetch has the download of these bytes, and may need the slot.
                    Err(PullError::Store(StoreError::Busy { .. })) => {
                        drop(slot);
                        self.downloads.interrupt_stuck(blob, &source, Instant::now());
                        tokio::time::sleep(BUSY_RETRY).await;
                    }
                    fetched => return fetched,
                },
                () = slot.gives_way(self.config.minimum_rate, |now| progress.observe(now)) => {
                    tracing::info!("a slow fetch gives way to layers that wait for its slot");
                    from.note(&wanted, LayerPhase::Queued);
                }
                () = progress.interrupted() => {
                    tracing::info!("a slow fetch gives way to another fetch of its blob");
                    from.note(&wanted, LayerPhase::Queued);
                }
            }
        }
    }

    async fn fetch_from(
        &self,
        from: &LayerOrigin,
        wanted: &PlannedLayer,
        progress: &Arc<FetchProgress>,
        worker: &PullTaskHandle,
    ) -> Result<StagedLayer, PullError> {
        let (store, options) = (self.store.clone(), self.options(wanted.descriptor.size, worker));
        let (session, tally) = match from {
            LayerOrigin::Import(import) => {
                progress.set_unpacking(options.progress.clone());
                return take(store, import.clone(), wanted.clone(), options, worker).await;
            }
            LayerOrigin::Registry { session, tally, .. } => (session.clone(), tally),
        };
        let (tracker, counted, digest) =
            (Arc::clone(tally), Arc::clone(progress), wanted.descriptor.digest.clone());
        let seen = FetchSpanFields::of_current_span();
        let observer: FetchObserver = Arc::new(move |notice| {
            seen.note(&notice);
            if let FetchNotice::Bytes(count) = notice {
                counted.add_received(count, Instant::now());
            }
            tracker.notice_of(&digest, &notice);
        });
        let staged =
            fetch_layer(store, session, wanted.clone(), options, (observer, progress), worker).await?;
        tally.set(&wanted.descriptor.digest, LayerPhase::Unpacked);
        tracing::debug!(digest = %wanted.descriptor.digest, "fetched and unpacked a layer");
        Ok(staged)
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
            let layer = match self.turn(from, wanted, below, own, Store::claim_for).await? {
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
        if *layer.key() == LayerKey::from(&wanted.chain_id) || layer.record().fits_any_lowers() {
            return Ok(layer);
        }
        let (own_layer, below_layers) = (layer.clone(), below.to_vec());
        let open = self.may_open_lowers(below).await?;
        let check = move || {
            let lowers = open_lowers(&below_layers, below_layers.len())?;
            let fits = own_layer
                .open()
                .and_then(|layer| fits_lowers(&layer, &own_layer.implied_directories()?, &lowers));
            drop(open);
            fits.map_err(|error| UnpackError::file("read", own_layer.path(), error))
        };
        if own.worker.blocking(check).await?.map_err(|cause| unpacking(wanted, cause))? {
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
        claim: fn(&Store, &Digest, &Digest, FetchProgress) -> Result<ClaimOutcome, StoreError>,
    ) -> Result<Option<(LayerHandle, bool)>, PullError> {
        let (store, layer) = (self.store.clone(), wanted.clone());
        let progress = FetchProgress::new(from.source(), self.config.minimum_rate, Instant::now());
        match blocking(move || claim(&store, &layer.diff_id, &layer.chain_id, progress)).await?? {
            ClaimOutcome::Present(layer) => Ok(Some((layer, false))),
            ClaimOutcome::Wait(waiting) => {
                own.release_claims();
                let mut check = tokio::time::interval(CHECK_INTERVAL);
                loop {
                    tokio::select! {
                        found = waiting.wait() => return Ok(found.map(|layer| (layer, false))),
                        _ = check.tick() => {
                            if let Some(claim) = take_over(from, wanted, &waiting, own) {
                                return self.fetch_claimed(from, wanted, claim, below, own).await;
                            }
                        }
                    }
                }
            }
            ClaimOutcome::Fetch(claim) => self.fetch_claimed(from, wanted, claim, below, own).await,
        }
    }

    /// Fetches a claimed layer and settles it; `None` if another pull took the fetch over.
    async fn fetch_claimed(
        &self,
        from: &LayerOrigin,
        wanted: &PlannedLayer,
        claim: LayerClaim,
        below: &[LayerHandle],
        own: &mut LayerFetches,
    ) -> Result<Option<(LayerHandle, bool)>, PullError> {
        let progress = Arc::clone(claim.progress());
        let staged = tokio::select! {
            staged = self.fetch_missing(from.clone(), wanted.clone(), progress, own.worker.clone()) => staged?,
            () = claim.taken_over() => return Ok(None),
        };
        let layer = self.settle_staged(wanted, staged, below, own).await?;
        claim.done(&layer);
        Ok(Some((layer, true)))
    }
}

fn unpacking(wanted: &PlannedLayer, cause: UnpackError) -> PullError {
    PullError::Unpack { digest: wanted.descriptor.digest.clone(), cause }
}

/// Takes over a fetch that makes no real progress, once for each layer.
fn take_over(
    from: &LayerOrigin,
    wanted: &PlannedLayer,
    waiting: &LayerWait,
    own: &mut LayerFetches,
) -> Option<LayerClaim> {
    if own.taken_over.contains(&wanted.chain_id) {
        return None;
    }
    let claim = waiting.take_over(&from.source(), Instant::now())?;
    tracing::info!(digest = %wanted.descriptor.digest, "fetching a layer whose fetch by another pull is too slow");
    own.taken_over.insert(wanted.chain_id.clone());
    Some(claim)
}
