//! Threads: blocking work off the async threads, so that a hanging mount blocks only the task that waits for it, and
//! owners of state.

use std::future;
use std::io;
use std::panic::resume_unwind;
use std::process;
use std::thread::{self, Builder, JoinHandle};

use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::task::{block_in_place, spawn_blocking};

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

/// Runs blocking work on this thread where it cannot be awaited, such as in a drop. If the thread runs tasks, another
/// one takes over the other tasks first, unless the runtime has but one thread.
///
/// # Panics
/// In a task of a `LocalSet` on a runtime of several threads, which cannot move its other tasks.
pub fn in_place<T>(work: impl FnOnce() -> T) -> T {
    let flavor = Handle::try_current().map(|runtime| runtime.runtime_flavor());
    if matches!(flavor, Ok(RuntimeFlavor::MultiThread)) { block_in_place(work) } else { work() }
}

/// Starts the thread that owns a piece of state. A panic on it ends the process: a request that panics is an error of
/// that request, but no other thread knows how far an owner had come, and the next start reads what is on disk.
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
