//! The tasks and threads of a pull, so that its outcome is reported only after all of them have ended.
//!
//! A pull that fails or is canceled still has tasks and threads running, which notice it at their next step. Until then
//! they keep files open and unpack into directories that no pull will use; on a full disk, the next pull needs that
//! space. A failed pull therefore reports its error after they have ended. A dropped pull cannot wait: the pull that
//! needs the space waits for its workers instead ([`EndingPulls`]). Each of these waits may be dropped as well, so a
//! pull leaves that list only after its workers have ended.

use std::panic::resume_unwind;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::task::{JoinError, JoinHandle};
use tracing::{Instrument as _, Span};

use super::error::PullError;
use crate::unpack::{ImageByteCounts, WriteBehind};

/// The workers of one pull.
pub(super) struct PullWorkers {
    worker: PullWorker,
    ended: WorkersEnd,
    ending: EndingPulls,
}

/// A worker of a pull: the pull has not ended before this is dropped.
#[derive(Clone)]
pub(super) struct PullWorker {
    write_behind: WriteBehind,
    image_bytes: Arc<ImageByteCounts>,
    /// Nothing is sent: the receivers are notified when the last sender is dropped.
    _alive: watch::Sender<()>,
}

/// Waits for the workers of a pull. Clones wait for the same ones.
#[derive(Clone)]
struct WorkersEnd {
    alive: watch::Receiver<()>,
    write_behind: WriteBehind,
}

/// Pulls that have ended or were dropped, and may still have workers. Clones share the list.
#[derive(Clone, Default)]
pub(super) struct EndingPulls(Arc<Mutex<Vec<WorkersEnd>>>);

impl PullWorkers {
    /// A pull without workers. When the pull ends or is dropped, its remaining workers are added to `ending`.
    pub(super) fn new(write_behind: WriteBehind, ending: &EndingPulls) -> PullWorkers {
        let (sender, alive) = watch::channel(());
        let ended = WorkersEnd { alive, write_behind: write_behind.clone() };
        let worker = PullWorker { write_behind, image_bytes: Arc::default(), _alive: sender };
        PullWorkers { worker, ended, ending: ending.clone() }
    }

    pub(super) fn worker(&self) -> PullWorker {
        self.worker.clone()
    }

    /// Waits until all workers have ended, after the tasks were stopped.
    pub(super) async fn end(self) {
        let ended = self.ended.clone();
        drop(self);
        ended.wait().await;
    }
}

impl Drop for PullWorkers {
    fn drop(&mut self) {
        self.worker.write_behind.cancel();
        self.ending.add(self.ended.clone());
    }
}

impl PullWorker {
    /// Gets large files early to the disk.
    pub(super) fn write_behind(&self) -> &WriteBehind {
        &self.write_behind
    }

    /// Bytes of the layers that the pull unpacks.
    pub(super) fn image_bytes(&self) -> Arc<ImageByteCounts> {
        Arc::clone(&self.image_bytes)
    }

    /// Runs what blocks on a thread where it may. The pull does not end before it, nor before what it returned is
    /// dropped if the caller no longer waits for it.
    pub(super) fn blocking<T, W>(&self, work: W) -> impl Future<Output = Result<T, PullError>> + use<T, W>
    where
        T: Send + 'static,
        W: FnOnce() -> T + Send + 'static,
    {
        let worker = self.clone();
        // The order matters: an unused result is dropped before the worker.
        let work = in_current_span(work);
        let working = tokio::task::spawn_blocking(move || (work(), worker));
        async { working.await.map(|(done, _worker)| done).map_err(abandoned) }
    }

    /// Starts a task that is aborted when its handle is dropped; it is a worker of the pull until then.
    pub(super) fn task<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, PullError>> + Send + 'static,
    ) -> WorkerTask<T> {
        let worker = self.clone();
        WorkerTask(tokio::spawn(async move { (work.await, worker) }.in_current_span()))
    }
}

/// A task that is aborted when this handle is dropped.
pub(super) struct WorkerTask<T>(JoinHandle<(Result<T, PullError>, PullWorker)>);

impl<T> WorkerTask<T> {
    pub(super) async fn join(mut self) -> Result<T, PullError> {
        (&mut self.0).await.map_err(abandoned).and_then(|(done, _worker)| done)
    }
}

impl<T> Drop for WorkerTask<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl WorkersEnd {
    async fn wait(mut self) {
        let _no_sender = self.alive.changed().await;
        // How the pull ended is known: what else the disk says is of no interest.
        let _ = blocking(move || self.write_behind.finish()).await;
    }

    fn is_over(&self) -> bool {
        self.alive.has_changed().is_err() && !self.write_behind.is_syncing()
    }
}

impl EndingPulls {
    fn add(&self, ended: WorkersEnd) {
        let mut list = self.0.lock();
        list.retain(|ended| !ended.is_over());
        list.push(ended);
    }

    /// Waits until all workers have ended of the pulls that are in the list now.
    pub(super) async fn wait(&self) {
        let list = {
            let mut list = self.0.lock();
            list.retain(|ended| !ended.is_over());
            list.clone()
        };
        for ended in list {
            ended.wait().await;
        }
    }
}

/// Runs what blocks on a thread where it may.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, PullError> {
    tokio::task::spawn_blocking(in_current_span(work)).await.map_err(abandoned)
}

/// The error of a task that has ended without a result. A panic is that of the pull.
fn abandoned(error: JoinError) -> PullError {
    match error.try_into_panic() {
        Ok(panic) => resume_unwind(panic),
        Err(_canceled) => PullError::Abandoned,
    }
}

/// Runs work on another thread with the span of this one.
fn in_current_span<T>(work: impl FnOnce() -> T) -> impl FnOnce() -> T {
    let span = Span::current();
    move || span.in_scope(work)
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::FutureExt as _;

    use super::*;
    use crate::unpack::BackgroundSyncer;

    #[tokio::test]
    async fn a_pull_ends_after_its_threads_and_drops_results_without_a_receiver() {
        struct DropLog(Arc<Mutex<Vec<&'static str>>>);
        impl Drop for DropLog {
            fn drop(&mut self) {
                self.0.lock().push("the result went");
            }
        }
        let seen: Arc<Mutex<Vec<&str>>> = Arc::default();
        let workers = PullWorkers::new(BackgroundSyncer::new(1).begin(), &EndingPulls::default());
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let kept = DropLog(seen.clone());
        drop(workers.worker().blocking(move || {
            let _ = wait.recv();
            kept
        }));
        let mut ending = pin!(workers.end());
        assert!((&mut ending).now_or_never().is_none(), "the thread is at work");
        drop(go);
        ending.await;
        assert_eq!(*seen.lock(), ["the result went"]);
    }

    #[tokio::test]
    async fn a_pull_that_needs_space_waits_for_workers_of_a_dropped_pull() {
        let ending = EndingPulls::default();
        let workers = PullWorkers::new(BackgroundSyncer::new(1).begin(), &ending);
        let worker = workers.worker();
        drop(workers);
        let mut waiting = pin!(ending.wait());
        assert!((&mut waiting).now_or_never().is_none());
        drop(worker);
        waiting.await;
    }

    #[tokio::test]
    async fn workers_of_a_dropped_pull_are_waited_for_after_a_waiter_is_dropped() {
        let ending = EndingPulls::default();
        let [(pull, first), (other, second)] = [(); 2].map(|()| {
            let workers = PullWorkers::new(BackgroundSyncer::new(1).begin(), &ending);
            let worker = workers.worker();
            (workers, worker)
        });
        drop((pull, other));
        let canceled = pin!(ending.wait()).now_or_never();
        assert!(canceled.is_none());
        let (mut waiting, mut also) = (pin!(ending.wait()), pin!(ending.wait()));
        assert!((&mut waiting).now_or_never().is_none() && (&mut also).now_or_never().is_none());
        drop(first);
        assert!((&mut waiting).now_or_never().is_none(), "the second pull has a worker");
        drop(second);
        waiting.await;
        also.await;
    }

    #[tokio::test]
    async fn workers_of_a_pull_that_is_dropped_while_it_ends_are_waited_for() {
        let ending = EndingPulls::default();
        let workers = PullWorkers::new(BackgroundSyncer::new(1).begin(), &ending);
        let worker = workers.worker();
        let canceled = pin!(workers.end()).now_or_never();
        assert!(canceled.is_none());
        let mut waiting = pin!(ending.wait());
        assert!((&mut waiting).now_or_never().is_none(), "the worker is at work");
        drop(worker);
        waiting.await;
        let next = PullWorkers::new(BackgroundSyncer::new(1).begin(), &ending);
        drop(next);
        assert_eq!(ending.0.lock().len(), 1, "a pull without workers leaves the list");
    }

    #[tokio::test]
    async fn a_task_is_a_worker_until_it_ends() {
        let workers = PullWorkers::new(BackgroundSyncer::new(1).begin(), &EndingPulls::default());
        let task = workers.worker().task(std::future::pending::<Result<(), PullError>>());
        tokio::task::yield_now().await;
        drop(task); // the runtime drops the future later
        let mut ending = pin!(workers.end());
        assert!((&mut ending).now_or_never().is_none());
        ending.await;
    }
}
