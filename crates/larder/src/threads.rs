//! Threads: blocking work off the async threads, so that a hanging mount blocks only the task that waits for it, and
//! owners of state.

use std::future;
use std::io;
use std::panic::resume_unwind;
use std::process;
use std::thread::{self, Builder, JoinHandle};

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

/// Starts the thread that owns a piece of state. A panic on it ends the process: a request that panics is an error of that
/// request, but no other thread knows how far an owner had come, and the next start reads what is on disk.
pub fn spawn_owner(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, io::Error> {
    Builder::new().name(name.to_owned()).spawn(move || {
        let _guard = AbortOnPanic;
        work();
    })
}

/// Ends the process when it is dropped by a panic.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            process::abort();
        }
    }
}
