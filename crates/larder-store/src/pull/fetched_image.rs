//! Fetches all layers of an image without making it an image of the store: containerd has its own record of it, and
//! snapshots of these layers.

use std::sync::Arc;
use std::time::Duration;

use larder::backend::ProgressReporter;
use larder::credentials::Credential;
use larder::gc::ClockReading;
use larder::reference::{Digest, Reference};
use tokio::time::{self, Instant};

use super::pull_progress::PullProgress;
use super::pull_workers::PullWorkers;
use super::{PullError, StorePuller};
use crate::store::{LayerKey, LeaseRecord, LeaseResources};

/// How long fetched layers wait for the snapshots that are to retain them.
const FETCHED_LEASE: Duration = Duration::from_secs(600);

/// How often a fetch is looked at.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// An image whose layers were fetched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchedImage {
    /// The lease that retains the layers until snapshots do.
    pub lease: String,
    /// From the bottom up.
    pub layers: Vec<FetchedLayer>,
}

/// A layer of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchedLayer {
    /// Identity of the layer on top of those below it.
    pub chain_id: Digest,
    /// Digest of its archive in the manifest.
    pub archive: Digest,
    /// Where it is in the store.
    pub key: LayerKey,
}

impl StorePuller {
    /// Makes all layers of an image present and durable, retained by a lease of some minutes. Fails if the registry
    /// sends nothing for the time `idle`. When this returns an error, no worker of it is left.
    pub async fn fetch_layers(
        &self,
        name: &Reference,
        credential: Option<&Credential>,
        idle: Duration,
    ) -> Result<FetchedImage, PullError> {
        let workers = PullWorkers::new(self.syncer.begin(), &self.ending);
        let progress = PullProgress::begin(&ProgressReporter::unwatched());
        let fetched = tokio::select! {
            fetched = Box::pin(self.fetch_and_lease(name, credential, &progress, &workers)) => fetched,
            () = stalled(&progress, idle) => Err(PullError::Stalled(idle)),
        };
        workers.end().await;
        self.reclaim_if_full(fetched).await
    }

    async fn fetch_and_lease(
        &self,
        name: &Reference,
        credential: Option<&Credential>,
        progress: &Arc<PullProgress>,
        workers: &PullWorkers,
    ) -> Result<FetchedImage, PullError> {
        let (_, acquired) = Box::pin(self.acquire(name, credential, progress, workers)).await?;
        let (plan, layers) = (&acquired.plan, &acquired.layers);
        let found = plan.layers.iter().zip(layers).map(|(planned, layer)| FetchedLayer {
            chain_id: planned.chain_id.clone(),
            archive: planned.descriptor.digest.clone(),
            key: layer.key().clone(),
        });
        let fetched = FetchedImage {
            lease: format!("fetched/{}@{}", name.name(), plan.config.0),
            layers: found.collect(),
        };
        let keys = layers.iter().map(|layer| layer.key().clone()).collect();
        let leased = LeaseResources { layers: keys, ..LeaseResources::default() };
        let now = ClockReading::now();
        let lease = LeaseRecord::granted(fetched.lease.clone(), leased, FETCHED_LEASE, &now);
        let store = self.store.clone();
        let commit = move || {
            store.commit_layers(&acquired.layers, Some(&lease))?;
            acquired.lease.iter().try_for_each(|lease| store.end_lease(lease))
        };
        workers.worker().blocking(commit).await??;
        Ok(fetched)
    }
}

/// Ends when the registry has sent nothing for the time `idle`.
pub(super) async fn stalled(progress: &PullProgress, idle: Duration) {
    let (mut received, mut since) = (progress.received(), Instant::now());
    loop {
        time::sleep(CHECK_INTERVAL.min(idle)).await;
        let now = Instant::now();
        if progress.received() != received || !progress.awaits_registry(now) {
            (received, since) = (progress.received(), now);
        }
        if now.duration_since(since) >= idle {
            return;
        }
    }
}
