//! Guards the reads of incomplete layers from the first pull on that wants an image lazily: where the settings select
//! no image, nothing has to be kept for them.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OnceCell;

use super::StorePuller;
use crate::lazy::GroupKeeper;

type ChooseKeeper = Box<dyn Fn() -> io::Result<Arc<dyn GroupKeeper>> + Send + Sync>;

/// The guard of a store that has no incomplete layer.
pub(super) struct DeferredGuard {
    keeper: ChooseKeeper,
    longest_wait: Duration,
    opened: OnceCell<()>,
}

impl fmt::Debug for DeferredGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeferredGuard").field("opened", &self.opened.initialized()).finish_non_exhaustive()
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
        let guard = DeferredGuard { keeper: Box::new(keeper), longest_wait, opened: OnceCell::new() };
        let _ = self.deferred_guard.set(guard);
    }
}

impl DeferredGuard {
    /// Opens the guard, unless that was tried. Where it cannot be, images are pulled in full.
    pub(super) async fn open(&self, puller: &StorePuller) {
        let open = async {
            let opened = match (self.keeper)() {
                Ok(keeper) => {
                    let opened = Box::pin(puller.guard_reads(keeper, self.longest_wait)).await;
                    opened.map(drop).map_err(|error| larder::error_chain(&error))
                }
                Err(error) => Err(error.to_string()),
            };
            if let Err(reason) = opened {
                tracing::warn!(
                    reason,
                    "layers cannot be read before they are complete: images are pulled in full"
                );
            }
        };
        self.opened.get_or_init(|| open).await;
    }
}
