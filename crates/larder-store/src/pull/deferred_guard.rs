//! Guards the reads of incomplete layers: when the daemon starts, or from the first pull on that wants an image lazily:
//! where the settings select no image, nothing has to be kept for them. What fails is tried again.

use std::error::Error;
use std::fmt;
use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};
use tokio::sync::oneshot;
use tokio::time;

use super::error::PullError;
use super::pull_workers::blocking;
use super::{GuardedBefore, StorePuller};
use crate::lazy::GroupKeeper;
use crate::store::error::StoreErrorContext as _;

/// Times between two attempts: the first, and the longest.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

type ChooseKeeper = dyn Fn() -> io::Result<Arc<dyn GroupKeeper>> + Send + Sync;

/// How a store guards reads.
pub struct GuardPlan {
    /// Chooses what keeps the guard when this process ends.
    pub keeper: Box<ChooseKeeper>,
    /// How long a read waits; then it fails.
    pub longest_wait: Duration,
    /// Receives what an earlier process left, once reads are guarded.
    pub guarded: Box<dyn Fn(GuardedBefore) + Send + Sync>,
}

/// The guard of a store, which is opened once.
pub(super) struct DeferredGuard {
    plan: Arc<GuardPlan>,
    /// Ends with the first attempt. Goes on if the pull that began it is dropped: there is one group of events.
    opened: OnceLock<Shared<BoxFuture<'static, ()>>>,
}

impl fmt::Debug for DeferredGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeferredGuard").field("begun", &self.opened.get().is_some()).finish_non_exhaustive()
    }
}

impl StorePuller {
    /// Guards reads once a pull asks for a lazily pulled image, or [`open_guard`](StorePuller::open_guard) does; see
    /// [`guard_reads`](StorePuller::guard_reads).
    pub fn guard_reads_on_demand(&self, plan: GuardPlan) {
        let _ = self.deferred_guard.set(DeferredGuard { plan: Arc::new(plan), opened: OnceLock::new() });
    }

    /// Opens the guard, unless that was tried. Where it cannot be, images are pulled in full, and
    /// [`Store::unguarded`](crate::store::Store::unguarded) says why.
    pub async fn open_guard(&self) {
        if let Some(guard) = self.deferred_guard.get() {
            guard.open(self).await;
        }
    }
}

impl DeferredGuard {
    async fn open(&self, puller: &StorePuller) {
        let opened = self.opened.get_or_init(|| {
            let (tried, first) = oneshot::channel();
            tokio::spawn(keep_trying(puller.clone(), Arc::clone(&self.plan), tried));
            first.map(|_| ()).boxed().shared()
        });
        opened.clone().await;
    }
}

/// Opens the guard, again after a failure that may pass.
async fn keep_trying(puller: StorePuller, plan: Arc<GuardPlan>, tried: oneshot::Sender<()>) {
    let (mut tried, mut wait) = (Some(tried), RETRY.0);
    loop {
        let error = match open(&puller, &plan).await {
            Ok(before) => return (plan.guarded)(before),
            Err(error) => error,
        };
        let partials = &puller.store().0.partials;
        // A second group would not have the reads of the first.
        let is_final = is_unsupported(&error) || partials.reads().is_some();
        let reason = larder::error_chain(&error);
        if tried.is_some() {
            tracing::warn!(
                reason,
                "layers cannot be read before they are complete: images are pulled in full"
            );
        }
        let retry = if is_final { String::new() } else { format!("; next attempt in {}s", wait.as_secs()) };
        partials.note_unguarded(reason + &retry);
        drop(tried.take());
        if is_final {
            return;
        }
        time::sleep(wait).await;
        wait = RETRY.1.min(wait * 2);
    }
}

async fn open(puller: &StorePuller, plan: &Arc<GuardPlan>) -> Result<GuardedBefore, PullError> {
    let choosing = Arc::clone(plan);
    let keeper =
        blocking(move || (choosing.keeper)()).await?.context("choose what keeps the guard of reads")?;
    puller.guard_reads(keeper, plan.longest_wait).await
}

/// Whether this machine cannot do it.
fn is_unsupported(error: &(dyn Error + 'static)) -> bool {
    let io = error.downcast_ref::<io::Error>();
    io.is_some_and(|io| io.kind() == io::ErrorKind::Unsupported) || error.source().is_some_and(is_unsupported)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use larder_registry::{RegistryClient, RegistryConfig};
    use tokio::time::Instant;

    use super::*;
    use crate::pull::StorePullConfig;
    use crate::store::{Store, StoreConfig};

    async fn attempts(kind: io::ErrorKind, time: Duration) -> (usize, Option<String>) {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), StoreConfig::default()).unwrap();
        let client = RegistryClient::new(RegistryConfig::default());
        let puller = StorePuller::new(store.clone(), client, StorePullConfig::default());
        let tried = Arc::<AtomicUsize>::default();
        let counted = Arc::clone(&tried);
        puller.guard_reads_on_demand(GuardPlan {
            keeper: Box::new(move || {
                counted.fetch_add(1, Ordering::Relaxed);
                Err(io::Error::new(kind, "no process can be started"))
            }),
            longest_wait: time,
            guarded: Box::new(|_| panic!("nothing is guarded")),
        });
        puller.open_guard().await;
        let begun = Instant::now();
        while begun.elapsed() < time {
            time::sleep(Duration::from_millis(100)).await;
        }
        puller.open_guard().await;
        (tried.load(Ordering::Relaxed), store.unguarded())
    }

    #[tokio::test]
    async fn a_guard_that_cannot_be_opened_is_tried_again_unless_the_machine_cannot_do_it() {
        let (tried, unguarded) = attempts(io::ErrorKind::OutOfMemory, Duration::from_millis(1500)).await;
        assert_eq!(tried, 2);
        let unguarded = unguarded.unwrap();
        assert!(unguarded.ends_with("no process can be started; next attempt in 2s"), "{unguarded}");
        let (tried, unguarded) = attempts(io::ErrorKind::Unsupported, Duration::from_millis(1500)).await;
        assert_eq!(tried, 1);
        assert!(unguarded.unwrap().ends_with("no process can be started"));
    }
}
