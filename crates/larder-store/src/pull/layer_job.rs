//! One job for each layer of an image: from the claim of the layer until it is ready for the commit of the image.
//!
//! ```text
//! the claim        -> Claimed, or Waiting (another pull fetches it), or Present (in the store)
//! Claimed          -> Fetching -> Unpacked -> Ready (merged with the layers below)
//! Fetching         -> Present (it was damaged, and is repaired, or removed, and data follows what was kept)
//! Waiting          -> Present, or Unclaimed (the other pull gave up, or is slow)
//! Present          -> Ready, or Unclaimed (it does not fit on the layers below)
//! Unclaimed        -> the claim
//! ```
//!
//! Layers are claimed from the bottom up and fetched all at once, within the bounds of the scheduler. They become ready
//! one after another from the bottom up, since a layer takes what it omits from the layers below it. [`LayerState`] has
//! the transitions, which are pure; [`LayerJobs`] runs them.
//!
//! So that two pulls do not wait for each other, a pull that claims a layer again, out of that order, and finds another
//! pull at it, gives up all its claims before it waits. A layer of the store is present only for a source that has sent
//! its bytes (`blob_source.rs`); otherwise its blob is fetched and verified like that of a missing layer.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use larder::backend::LayerPhase;
use tokio::time::{self, Instant};

use super::StorePuller;
use super::error::PullError;
use super::fetch_layer::{
    CancelUnpackOnDrop, FetchedContent, LayerBytes, LayerFetch, LayerOrigin, StagedLayer,
};
use super::fill_sessions::OfferedBlob;
use super::lowers::{check_content, open_lowers};
use super::plan::{PlannedLayer, PullPlan};
use super::pull_workers::{PullWorker, blocking};
use super::spans::merge_span;
use crate::store::error::StoreErrorContext as _;
use crate::store::fetch_progress::FetchProgress;
use crate::store::{
    ClaimOutcome, ClaimRequest, Claimed, LayerClaim, LayerHandle, LayerKey, LayerWait, StoreError,
};
use crate::unpack::{UnpackError, UnpackProgress, fits_lowers};

/// Interval at which a pull checks whether a fetch of another pull that it waits for is slow.
const SLOW_CHECK: Duration = Duration::from_secs(1);

/// The state of a layer. The parameters are its claim, the wait for another pull, what was unpacked, and the layer in
/// the store; tests use others.
#[derive(Debug, Default, PartialEq, Eq)]
enum LayerState<C, W, U, L> {
    /// Nothing fetches it for this pull: it must be claimed.
    #[default]
    Unclaimed,
    /// Another pull fetches it.
    Waiting(W),
    /// This pull fetches it next.
    Claimed(C),
    /// This pull fetches and unpacks it.
    Fetching(C),
    /// It is unpacked, and waits for the layers below it.
    Unpacked(C, U),
    /// It is in the store; it may not fit on the layers below.
    Present(L),
    /// It is part of the image.
    Ready(L),
}

impl<C, W, U, L> LayerState<C, W, U, L> {
    /// The claim of the layer was answered.
    fn claimed(outcome: Claimed<C, W, L>) -> Self {
        match outcome {
            Claimed::Present(layer) => LayerState::Present(layer),
            Claimed::Wait(wait) => LayerState::Waiting(wait),
            Claimed::Fetch(claim) => LayerState::Claimed(claim),
        }
    }

    /// The other pull has made the layer present, or gave up.
    fn other_ended(self, layer: Option<L>) -> Self {
        match (self, layer) {
            (LayerState::Waiting(_), Some(layer)) => LayerState::Present(layer),
            (LayerState::Waiting(_), None) => LayerState::Unclaimed,
            (state, _) => state,
        }
    }

    /// The fetch begins.
    fn begun(self) -> Self {
        match self {
            LayerState::Claimed(claim) => LayerState::Fetching(claim),
            state => state,
        }
    }

    /// The fetch has ended, and all of it is unpacked.
    fn fetched(self, unpacked: U) -> Self {
        match self {
            LayerState::Fetching(claim) => LayerState::Unpacked(claim, unpacked),
            state => state,
        }
    }

    /// The layer was placed without being unpacked.
    fn placed(self, layer: L) -> Self {
        match self {
            LayerState::Fetching(_) => LayerState::Present(layer),
            state => state,
        }
    }

    /// This pull gives up its claim or its wait. The fetched bytes remain on disk.
    fn released(self) -> Self {
        match self {
            LayerState::Present(_) | LayerState::Ready(_) => self,
            _ => LayerState::Unclaimed,
        }
    }

    /// The present layer was checked for whether it has the right content on top of the layers below. One that does not
    /// fit is claimed again, as a layer of its own for this chain.
    fn checked(self, fits: bool) -> Self {
        match self {
            LayerState::Present(layer) if fits => LayerState::Ready(layer),
            LayerState::Present(_) => LayerState::Unclaimed,
            state => state,
        }
    }
}

type JobState = LayerState<LayerClaim, LayerWait, StagedLayer, LayerHandle>;

/// One layer.
struct LayerJob {
    planned: PlannedLayer,
    /// For claiming it again.
    request: ClaimRequest,
    state: JobState,
}

impl LayerJob {
    fn update(&mut self, transition: impl FnOnce(JobState) -> JobState) {
        self.state = transition(std::mem::take(&mut self.state));
    }
}

/// The layers of one pull, from the bottom up.
pub(super) struct LayerJobs<'p> {
    puller: &'p StorePuller,
    origin: &'p LayerOrigin,
    worker: PullWorker,
    jobs: Vec<LayerJob>,
    fetches: FuturesUnordered<BoxFuture<'static, (usize, Result<FetchedContent, PullError>)>>,
}

impl StorePuller {
    /// Claims each layer, from the bottom up.
    pub(super) async fn claim(
        &self,
        origin: &LayerOrigin,
        plan: &PullPlan,
    ) -> Result<Vec<ClaimOutcome>, PullError> {
        let (store, minimum) = (self.store.clone(), self.config.minimum_rate);
        let callers = origin.progress().callers().clone();
        let requests: Vec<_> = plan.layers.iter().map(|layer| origin.request(layer)).collect();
        let claim = move || {
            let progress = || FetchProgress::new(minimum, &callers, Instant::now());
            let claims = requests.iter().map(|request| store.claim_for(request, progress()));
            claims.collect::<Result<Vec<_>, StoreError>>()
        };
        Ok(blocking(claim).await??)
    }

    /// Returns all layers of the plan, in order, most of their bytes on the disk already.
    pub(super) async fn run_layer_jobs(
        &self,
        origin: &LayerOrigin,
        plan: &PullPlan,
        claims: Vec<ClaimOutcome>,
        worker: PullWorker,
    ) -> Result<Vec<LayerHandle>, PullError> {
        let write_behind = worker.write_behind().clone();
        let jobs = plan.layers.iter().zip(claims).map(|(planned, claim)| LayerJob {
            planned: planned.clone(),
            request: origin.request(planned),
            state: LayerState::claimed(claim),
        });
        let fetches = FuturesUnordered::new();
        let jobs = LayerJobs { puller: self, origin, worker, jobs: jobs.collect(), fetches };
        let layers = jobs.run().await?;
        blocking(move || write_behind.finish()).await?.context("sync layers to disk")?;
        Ok(layers)
    }
}

impl LayerJobs<'_> {
    /// Runs all jobs until each layer is ready, from the bottom up.
    async fn run(mut self) -> Result<Vec<LayerHandle>, PullError> {
        let mut ready: Vec<LayerHandle> = Vec::with_capacity(self.jobs.len());
        for at in 0..self.jobs.len() {
            let layer = self.run_job(at, &ready).await?;
            self.origin.note(&self.jobs[at].planned, LayerPhase::Done);
            ready.push(layer);
        }
        Ok(ready)
    }

    /// Runs the job at this index until its layer is ready on top of `below`. The fetches of other jobs go on.
    async fn run_job(&mut self, at: usize, below: &[LayerHandle]) -> Result<LayerHandle, PullError> {
        loop {
            self.begin_fetches();
            match &self.jobs[at].state {
                LayerState::Unclaimed => self.claim_again(at).await?,
                LayerState::Waiting(wait) => {
                    let ended = wait.ended();
                    self.wait_for_other(at, ended).await?;
                }
                LayerState::Claimed(_) | LayerState::Fetching(_) => {
                    let (at, fetched) = self.fetches.next().await.ok_or(PullError::Abandoned)?;
                    self.note_fetched(at, fetched?);
                }
                LayerState::Unpacked(..) => self.merge(at, below).await?,
                LayerState::Present(layer) => {
                    let layer = layer.clone();
                    self.check(at, &layer, below).await?;
                }
                LayerState::Ready(layer) => return Ok(layer.clone()),
            }
        }
    }

    /// The fetch of a layer has ended. Pulls that wait for a placed one find it in the store.
    fn note_fetched(&mut self, at: usize, fetched: FetchedContent) {
        let job = &mut self.jobs[at];
        match fetched {
            FetchedContent::Staged(staged) => job.update(|state| state.fetched(*staged)),
            FetchedContent::Placed(layer) => job.update(|state| state.placed(layer)),
        }
    }

    /// Begins the fetches of claimed layers, the largest first, or the last one to begin keeps the others waiting.
    fn begin_fetches(&mut self) {
        let claimed =
            self.jobs.iter().enumerate().filter(|(_, job)| matches!(job.state, LayerState::Claimed(_)));
        let mut claimed: Vec<_> =
            claimed.map(|(at, job)| (Reverse(job.planned.descriptor.size), at)).collect();
        claimed.sort_unstable();
        for (_, at) in claimed {
            let job = &mut self.jobs[at];
            job.update(LayerState::begun);
            let LayerState::Fetching(claim) = &job.state else { continue };
            let (progress, worker) = (Arc::clone(claim.progress()), self.worker.clone());
            let (puller, origin) = (self.puller.clone(), self.origin.clone());
            let fetch =
                LayerFetch { puller, origin, planned: job.planned.clone(), progress, worker, into: None };
            let task = self.worker.task(fetch.run());
            self.fetches.push(Box::pin(async move { (at, task.join().await) }));
        }
    }

    /// Claims a layer that another pull gave up, or that must be fetched for this chain.
    async fn claim_again(&mut self, at: usize) -> Result<(), PullError> {
        let (store, request) = (self.puller.store.clone(), self.jobs[at].request.clone());
        let callers = self.origin.progress().callers();
        let progress = FetchProgress::new(self.puller.config.minimum_rate, callers, Instant::now());
        let outcome = self.worker.blocking(move || store.claim_for(&request, progress)).await??;
        if matches!(outcome, ClaimOutcome::Wait(_)) {
            self.release_claims();
        }
        self.jobs[at].state = LayerState::claimed(outcome);
        Ok(())
    }

    /// Releases all claims and waits: a pull that waits out of the order of claims must not hold claims that others
    /// wait for.
    fn release_claims(&mut self) {
        self.fetches = FuturesUnordered::new();
        for job in &mut self.jobs {
            job.update(LayerState::released);
        }
    }

    /// Waits until the other pull has ended the fetch of this layer, or is slow and this pull fetches it itself. Fails
    /// early if a fetch of this pull fails.
    async fn wait_for_other(
        &mut self,
        at: usize,
        ended: impl Future<Output = Option<LayerHandle>>,
    ) -> Result<(), PullError> {
        let mut checks = time::interval(SLOW_CHECK);
        tokio::pin!(ended);
        while matches!(self.jobs[at].state, LayerState::Waiting(_)) {
            tokio::select! {
                layer = &mut ended => self.jobs[at].update(|state| state.other_ended(layer)),
                Some((at, fetched)) = self.fetches.next() => {
                    self.note_fetched(at, fetched?);
                }
                _ = checks.tick() => self.claim_slow_layers().await?,
            }
            self.begin_fetches();
        }
        Ok(())
    }

    /// Claims each layer whose fetch by another pull is slow, to fetch it from the repository of this one.
    async fn claim_slow_layers(&mut self) -> Result<(), PullError> {
        let now = Instant::now();
        for at in 0..self.jobs.len() {
            let job = &mut self.jobs[at];
            if matches!(&job.state, LayerState::Waiting(wait) if wait.is_slow(now)) {
                let (image, digest) = (self.origin.image(), &job.planned.descriptor.digest);
                tracing::info!(image, %digest, "fetching a layer whose fetch by another pull is too slow");
                job.request.require_repository();
                self.claim_again(at).await?;
            }
        }
        Ok(())
    }

    /// Gives an unpacked layer what it takes from those below, moves it to its place, and passes it to the pulls that
    /// wait for it.
    async fn merge(&mut self, at: usize, below: &[LayerHandle]) -> Result<(), PullError> {
        let job = &mut self.jobs[at];
        let LayerState::Unpacked(claim, staged) = std::mem::take(&mut job.state) else { return Ok(()) };
        let StagedLayer { staging, unpacked, file, bytes, blob, partial, table } = staged;
        let (planned, lowers) = (job.planned.clone(), below.to_vec());
        let (puller, origin) = (self.puller.clone(), self.origin.clone());
        let is_merged = !unpacked.lower_work.is_empty();
        if unpacked.lower_work.cross_layer_links > 0 {
            self.puller.wait_for_data_of(below).await?;
        }
        if partial.is_none() {
            let keys = [&planned.diff_id, &planned.chain_id].map(LayerKey::from);
            let offer = |used| {
                let (LayerOrigin::Registry { session, .. }, LayerBytes::Ingest(ingest)) = (&origin, &bytes)
                else {
                    return None;
                };
                let (session, planned) = (session.clone(), planned.clone());
                Some(OfferedBlob {
                    session,
                    planned,
                    ingest: ingest.clone(),
                    source: blob.clone(),
                    _used: used,
                })
            };
            self.puller.wait_for_fill(&keys, offer).await;
        }
        let permit = if is_merged { Some(self.puller.permit_lowers(below).await?) } else { None };
        let progress = Arc::<UnpackProgress>::default();
        let _cancel = CancelUnpackOnDrop(Arc::clone(&progress));
        // The thread owns the directory, as during unpacking.
        let merge = move || {
            let failed = |cause| unpack_error(&planned, cause);
            let visible = match permit {
                None => 0,
                Some(_) if file.needs_nearest_only() => 1,
                Some(_) => lowers.len(),
            };
            if unpacked.lower_work.cross_layer_links > 0 {
                check_content(&lowers, &progress).map_err(failed)?;
            }
            let merged = open_lowers(&lowers, visible).map_err(|cause| {
                puller.store.0.find_damage(&lowers);
                failed(cause)
            })?;
            let file = file.finish(&merged, &progress).map_err(failed)?;
            let id = if file.depends_on_lowers { &planned.chain_id } else { &planned.diff_id };
            let facts = planned.metadata(&unpacked);
            let key = LayerKey::from(id);
            let index = planned.index(unpacked, &file);
            if let (Some((source, missing)), LayerBytes::Ingest(ingest)) = (partial, &bytes) {
                let layer = staging.finish_partial(&key, facts, file.file, source.clone())?;
                // Another pull has placed the layer in between: it is not this one.
                if layer.record().partial != Some(source) {
                    return Err(PullError::NotLazily);
                }
                let LayerOrigin::Registry { session, .. } = &origin else { return Ok(layer) };
                puller.begin_fill(session, &layer, missing, planned, ingest.clone(), table)?;
                return Ok(layer);
            }
            // A layer that is here stays, with its index.
            let is_here = puller.store.layer(&key)?.is_some_and(|layer| layer.record().is_whole());
            if matches!(origin, LayerOrigin::Registry { .. }) && !is_here {
                puller.keep_index(&key, &index);
            }
            let layer = match &bytes {
                LayerBytes::Ingest(ingest) if !planned.files.is_empty() => {
                    ingest.become_layer(|path| staging.finish_at(path, &key, facts, file.file, &blob))
                }
                _ => staging.finish(&key, facts, file.file, &blob),
            };
            let layer = layer.inspect_err(|_| puller.store.0.discard_stray_index(&key))?;
            // Its bytes are of no more use: if the image is not committed now, the layer itself is kept for the next
            // attempt.
            if let LayerBytes::Ingest(ingest) = bytes {
                ingest.discard()?;
            }
            Ok::<_, PullError>(layer)
        };
        let layer = merge_span(&job.planned).in_scope(|| self.worker.blocking(merge)).await??;
        claim.done(&layer);
        job.state = LayerState::Ready(layer);
        Ok(())
    }

    /// Checks whether a layer of the store has the right content on top of the layers below.
    async fn check(
        &mut self,
        at: usize,
        layer: &LayerHandle,
        below: &[LayerHandle],
    ) -> Result<(), PullError> {
        let planned = &self.jobs[at].planned;
        let mut fits = planned.surely_fits(layer);
        if !fits {
            let (layer, lowers, store) = (layer.clone(), below.to_vec(), self.puller.store.clone());
            let permit = self.puller.permit_lowers(below).await?;
            let check = move || {
                let fits = open_lowers(&lowers, lowers.len()).and_then(|merged| {
                    let fits = layer
                        .open()
                        .and_then(|file| fits_lowers(&file, &layer.implied_directories()?, &merged));
                    fits.map_err(|error| UnpackError::file("read", layer.path(), error))
                });
                drop(permit);
                fits.inspect_err(|_| drop(store.0.find_damage(lowers.iter().chain([&layer]))))
            };
            fits = self.worker.blocking(check).await?.map_err(|cause| unpack_error(planned, cause))?;
        }
        let job = &mut self.jobs[at];
        if !fits {
            job.request.require_chain();
        }
        job.update(|state| state.checked(fits));
        Ok(())
    }
}

fn unpack_error(planned: &PlannedLayer, cause: UnpackError) -> PullError {
    PullError::Unpack { digest: planned.descriptor.digest.clone(), cause }
}

#[cfg(test)]
mod tests {
    use super::*;

    type TestState = LayerState<&'static str, &'static str, &'static str, &'static str>;

    const CLAIM: &str = "claim";

    fn fetching() -> TestState {
        LayerState::claimed(Claimed::Fetch(CLAIM)).begun()
    }

    #[test]
    fn a_missing_layer_is_fetched_and_unpacked_with_its_claim() {
        let unpacked = fetching().fetched("staged");
        assert_eq!(unpacked, LayerState::Unpacked(CLAIM, "staged"));
        assert_eq!(unpacked.begun(), LayerState::Unpacked(CLAIM, "staged"), "it is fetched once");
    }

    #[test]
    fn a_layer_that_another_pull_fetches_is_present_then_or_claimed_again() {
        let waiting = || TestState::claimed(Claimed::Wait("wait"));
        assert_eq!(waiting().other_ended(Some("layer")), LayerState::Present("layer"));
        assert_eq!(waiting().other_ended(None), LayerState::Unclaimed);
    }

    #[test]
    fn a_present_layer_is_ready_only_if_it_fits() {
        assert_eq!(TestState::Present("layer").checked(true), LayerState::Ready("layer"));
        assert_eq!(TestState::Present("layer").checked(false), LayerState::Unclaimed);
    }

    #[test]
    fn a_placed_layer_is_one_of_the_store() {
        assert_eq!(fetching().placed("layer"), LayerState::Present("layer"));
        assert_eq!(TestState::Unclaimed.placed("layer"), LayerState::Unclaimed, "the claim was released");
    }

    #[test]
    fn released_claims_are_claimed_again() {
        let waiting = TestState::Waiting("wait");
        for state in [waiting, TestState::Claimed(CLAIM), fetching(), fetching().fetched("staged")] {
            assert_eq!(state.released(), LayerState::Unclaimed);
        }
        assert_eq!(TestState::Ready("layer").released(), LayerState::Ready("layer"));
        assert_eq!(TestState::Present("layer").released(), LayerState::Present("layer"));
    }
}
