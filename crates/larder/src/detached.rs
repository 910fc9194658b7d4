//! Work that must complete even if its caller is canceled.

use std::future;
use std::panic;

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
