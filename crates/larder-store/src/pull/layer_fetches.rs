//! The layers that one pull fetches or waits for, by their index in the plan, until they are finished.

use std::collections::{HashMap, HashSet};

use futures_util::StreamExt as _;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use larder::reference::Digest;

use super::error::PullError;
use super::fetch_layer::StagedLayer;
use super::pull_tasks::{PullTask, PullTaskHandle};
use crate::store::{LayerClaim, LayerKey, LayerWait};

/// A running fetch. `None` if another pull took it over.
type Fetch = BoxFuture<'static, (usize, Option<Result<StagedLayer, PullError>>)>;

pub(super) struct LayerFetches {
    pub(super) worker: PullTaskHandle,
    pub(super) claims: HashMap<usize, LayerClaim>,
    /// Layers that other pulls fetch.
    pub(super) waits: HashMap<usize, LayerWait>,
    begun: HashSet<usize>,
    under_way: FuturesUnordered<Fetch>,
    staged: HashMap<usize, StagedLayer>,
    /// Each ends when another pull took over a staged layer.
    staged_lost: FuturesUnordered<BoxFuture<'static, usize>>,
    /// Finished layers whose whole blob was served to this pull.
    pub(super) fetched: HashSet<LayerKey>,
    /// Chain IDs of the layers that this pull took over.
    pub(super) taken_over: HashSet<Digest>,
}

impl LayerFetches {
    pub(super) fn new(worker: PullTaskHandle) -> LayerFetches {
        LayerFetches {
            worker,
            claims: HashMap::new(),
            waits: HashMap::new(),
            begun: HashSet::new(),
            under_way: FuturesUnordered::new(),
            staged: HashMap::new(),
            staged_lost: FuturesUnordered::new(),
            fetched: HashSet::new(),
            taken_over: HashSet::new(),
        }
    }

    /// The claimed layers whose fetch has not begun.
    pub(super) fn to_begin(&self) -> impl Iterator<Item = usize> {
        self.claims.keys().copied().filter(|at| !self.begun.contains(at))
    }

    /// Adds a running fetch, which is dropped when `taken_over` ends.
    pub(super) fn begin(
        &mut self,
        at: usize,
        task: PullTask<StagedLayer>,
        taken_over: impl Future<Output = ()> + Send + 'static,
    ) {
        self.begun.insert(at);
        self.under_way.push(Box::pin(async move {
            tokio::select! {
                fetched = task.join() => (at, Some(fetched)),
                () = taken_over => (at, None),
            }
        }));
    }

    /// Waits for the next change of a fetch. `None` if no fetch is running.
    pub(super) async fn next(&mut self) -> Option<Result<(), PullError>> {
        tokio::select! {
            biased;
            Some(at) = self.staged_lost.next() => self.drop_taken_over(at),
            Some((at, fetched)) = self.under_way.next() => match fetched {
                Some(Ok(staged)) => self.add_staged(at, staged),
                Some(Err(error)) => return Some(Err(error)),
                None => self.drop_taken_over(at),
            },
            else => return None,
        }
        Some(Ok(()))
    }

    fn add_staged(&mut self, at: usize, staged: StagedLayer) {
        if let Some(claim) = self.claims.get(&at) {
            let taken_over = claim.taken_over();
            self.staged_lost.push(Box::pin(async move {
                taken_over.await;
                at
            }));
            self.staged.insert(at, staged);
        }
    }

    /// Another pull took the layer over, and needs its download.
    fn drop_taken_over(&mut self, at: usize) {
        self.claims.remove(&at);
        self.staged.remove(&at);
    }

    /// Waits until the layer at this index of the plan is fetched. `None` if this pull has no claim for it any more.
    pub(super) async fn staged(&mut self, at: usize) -> Result<Option<(LayerClaim, StagedLayer)>, PullError> {
        while self.claims.contains_key(&at) && !self.staged.contains_key(&at) {
            self.next().await.ok_or(PullError::Abandoned)??;
        }
        Ok(self.claims.remove(&at).zip(self.staged.remove(&at)))
    }

    /// Releases all claims: a pull that waits out of claim order must not hold claims that others wait for. Fetched bytes
    /// remain in the ingest files.
    pub(super) fn release_claims(&mut self) {
        let (fetched, taken_over) = (std::mem::take(&mut self.fetched), std::mem::take(&mut self.taken_over));
        let waits = std::mem::take(&mut self.waits);
        *self = LayerFetches { waits, fetched, taken_over, ..LayerFetches::new(self.worker.clone()) };
    }
}
