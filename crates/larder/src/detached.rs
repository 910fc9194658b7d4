//! Work that must not be left in the middle when nobody waits for it any more.

use std::future;
use std::panic;

use tracing::Instrument as _;

/// Runs on a task of its own and waits for it: whoever stops waiting does not stop the work.
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
