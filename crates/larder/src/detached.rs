//! Work that must complete even if its caller is canceled.

use std::future;
use std::panic;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared, WeakShared};
use parking_lot::Mutex;
use tracing::Instrument as _;

/// Runs the work on a task of its own and waits for it: canceling the caller does not cancel the work.
pub async fn run_to_completion<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> T {
    match tokio::spawn(work.in_current_span()).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panicked) => panic::resume_unwind(panicked),
            // The runtime shuts down: the waiting task does not continue.
            Err(_canceled) => future::pending().await,
        },
    }
}

/// One call at a time, whose result all callers share that ask while it runs: a call that hangs takes one thread
/// however many callers give up waiting for it.
pub struct SharedCall<T: Clone>(Mutex<Option<WeakShared<BoxFuture<'static, T>>>>);

impl<T: Clone> Default for SharedCall<T> {
    fn default() -> Self {
        SharedCall(Mutex::default())
    }
}

impl<T: Clone + Send + Sync + 'static> SharedCall<T> {
    /// Waits for the running call, or starts this one. Canceling a caller does not cancel the call.
    pub async fn join(&self, call: impl Future<Output = T> + Send + 'static) -> T {
        self.running_or(call).await
    }

    fn running_or(&self, call: impl Future<Output = T> + Send + 'static) -> Shared<BoxFuture<'static, T>> {
        let mut current = self.0.lock();
        let running = current.as_ref().and_then(WeakShared::upgrade);
        if let Some(running) = running.filter(|running| running.peek().is_none()) {
            return running;
        }
        let started = call.boxed().shared();
        tokio::spawn(started.clone().in_current_span());
        *current = started.downgrade();
        started
    }
}
