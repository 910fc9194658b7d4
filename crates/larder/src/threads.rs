//! Runs blocking work off the async threads, so that a hanging mount blocks only the task that waits for it.

use std::future;
use std::panic::resume_unwind;

use tokio::task::spawn_blocking;

/// Runs the work on a blocking thread.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            // The runtime is shutting down, and so is the caller.
            Err(_) => future::pending().await,
        },
    }
}
