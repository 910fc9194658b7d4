//! Which layers the running pulls will make present, for callers that need one of them and pull nothing themselves.

use std::sync::{Arc, Weak};
use std::time::Duration;

use larder::reference::Digest;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use super::StorePuller;
use super::fetched_image::stalled;
use super::plan::PullPlan;
use super::pull_progress::PullProgress;

/// The pulls whose layers are known. Clones share the list.
#[derive(Clone, Default)]
pub(super) struct PullsInProgress(Arc<Mutex<Vec<Weak<PullInProgress>>>>);

/// A pull, which has ended when this is dropped.
pub(super) struct PullInProgress {
    chains: Vec<Digest>,
    progress: Arc<PullProgress>,
    /// Nothing is sent: receivers are notified when this is dropped.
    end: watch::Sender<()>,
}

impl PullsInProgress {
    fn lock(&self) -> MutexGuard<'_, Vec<Weak<PullInProgress>>> {
        self.0.lock()
    }

    pub(super) fn begin(&self, plan: &PullPlan, progress: &Arc<PullProgress>) -> Arc<PullInProgress> {
        let chains = plan.layers.iter().map(|layer| layer.chain_id.clone()).collect();
        let pull =
            Arc::new(PullInProgress { chains, progress: Arc::clone(progress), end: watch::Sender::new(()) });
        let mut pulls = self.lock();
        pulls.retain(|pull| pull.strong_count() > 0);
        pulls.push(Arc::downgrade(&pull));
        pull
    }

    /// The progress of a pull with this layer, and its end.
    fn of(&self, chain: &Digest) -> Option<(Arc<PullProgress>, watch::Receiver<()>)> {
        let pulls = self.lock();
        let found = pulls.iter().filter_map(Weak::upgrade).find(|pull| pull.chains.contains(chain))?;
        Some((Arc::clone(&found.progress), found.end.subscribe()))
    }
}

impl StorePuller {
    /// Waits until no running pull will make the layer with this chain ID present, or until its registry has sent
    /// nothing for the time `idle`. Returns whether there was a pull.
    pub async fn wait_for_layer(&self, chain: &Digest, idle: Duration) -> bool {
        let mut waited = false;
        while let Some((progress, mut end)) = self.running.of(chain) {
            waited = true;
            tokio::select! {
                _ended = end.changed() => {}
                () = stalled(&progress, idle) => break,
            }
        }
        waited
    }
}
