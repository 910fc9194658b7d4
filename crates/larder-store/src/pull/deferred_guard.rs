//! Guards the reads of incomplete layers from the first pull on that wants an image lazily: where the settings select
//! no image, nothing has to be kept for them.

use std::fmt;
use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};

use super::StorePuller;
use super::error::PullError;
use super::pull_workers::blocking;
use crate::lazy::GroupKeeper;
use crate::store::error::StoreErrorContext as _;

type ChooseKeeper = Arc<dyn Fn() -> io::Result<Arc<dyn GroupKeeper>> + Send + Sync>;

/// The guard of a store that has no incomplete layer.
pub(super) struct DeferredGuard {
    keeper: ChooseKeeper,
    longest_wait: Duration,
    /// Goes on if the pull that began it is dropped: there is one group of events.
    opened: OnceLock<Shared<BoxFuture<'static, ()>>>,
}

impl fmt::Debug for DeferredGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeferredGuard").field("begun", &self.opened.get().is_some()).finish_non_exhaustive()
    }
}

impl StorePuller {
    /// Guards reads once a pull asks for a lazily pulled image; see [`guard_reads`](StorePuller::guard_reads). No layer
    /// is incomplete.
    pub fn guard_reads_on_demand(
        &self,
        keeper: impl Fn() -> io::Result<Arc<dyn GroupKeeper>> + Send + Sync + 'static,
        longest_wait: Duration,
    ) {
        let guard = DeferredGuard { keeper: Arc::new(keeper), longest_wait, opened: OnceLock::new() };
        let _ = self.deferred_guard.set(guard);
    }
}

impl DeferredGuard {
    /// Opens the guard, unless that was tried. Where it cannot be, images are pulled in full.
    pub(super) async fn open(&self, puller: &StorePuller) {
        let opened = self.opened.get_or_init(|| {
            let (puller, keeper, longest_wait) = (puller.clone(), self.keeper.clone(), self.longest_wait);
            let opening = tokio::spawn(async move {
                if let Err(error) = open(&puller, keeper, longest_wait).await {
                    let reason = larder::error_chain(&error);
                    tracing::warn!(
                        reason,
                        "layers cannot be read before they are complete: images are pulled in full"
                    );
                }
            });
            opening.map(|_| ()).boxed().shared()
        });
        opened.clone().await;
    }
}

async fn open(puller: &StorePuller, keeper: ChooseKeeper, longest_wait: Duration) -> Result<(), PullError> {
    let keeper = blocking(move || keeper()).await?.context("choose what keeps the guard of reads")?;
    puller.guard_reads(keeper, longest_wait).await.map(drop)
}
