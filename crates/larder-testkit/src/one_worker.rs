//! A runtime with one worker, like that of the command line: a task that blocks stops all others.

use std::sync::mpsc::channel;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;

/// How long a task may take to run. A task that is stopped by another one never runs.
const RUNS_WITHIN: Duration = Duration::from_secs(20);

/// The runtime.
pub struct OneWorker(Runtime);

impl OneWorker {
    /// Starts the worker.
    ///
    /// # Panics
    /// When threads cannot be started.
    #[allow(clippy::new_without_default, reason = "it starts a thread")]
    pub fn new() -> OneWorker {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        OneWorker(runtime.expect("the runtime starts"))
    }

    /// Starts a task.
    pub fn spawn<T: Send + 'static>(&self, task: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
        self.0.spawn(task)
    }

    /// Returns true if a task runs that is started now: the worker polls those of before first.
    pub fn runs_tasks(&self) -> bool {
        let (ran, runs) = channel();
        self.spawn(async move {
            let _ = ran.send(());
        });
        runs.recv_timeout(RUNS_WITHIN).is_ok()
    }

    /// Waits for a task.
    ///
    /// # Panics
    /// When the task does.
    pub fn join<T>(&self, task: JoinHandle<T>) -> T {
        self.0.block_on(task).expect("the task ends")
    }
}
