//! Work that may block, kept off the threads of the runtime: a mount that hangs holds up only the task that waits for it.

use std::future;
use std::panic::resume_unwind;

use tokio::task::spawn_blocking;

/// Does this on a thread that may block.
pub(crate) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            // The runtime ends, and the caller with it.
            Err(_) => future::pending().await,
        },
    }
}
