//! Work that must complete even if its caller is cancelled.

use std::future;
use std::panic;

use tracing::Instrument as _;

/// Runs the work on a task of its own and waits for it: cancelling the caller does not cancel the work.
pub async fn run_to_completion<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> T {
    match tokio::spawn(work.in_current_span()).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panicked) => panic::resume_unwind(panicked),
            // The process ends, and nothing that still waits goes on.
            Err(_cancelled) => future::pending().await,
        },
    }
}
