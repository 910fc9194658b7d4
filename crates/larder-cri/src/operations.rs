//! Observes the calls to a runtime, by kubelet's names of operations.

use std::future::Future;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::time::Instant;
use tonic::Status;

/// Is called after each call to a runtime. Must be quick.
pub trait OperationObserver: Send + Sync {
    /// A call has ended. `operation` is kubelet's word, such as `pull_image`; a call that was given up has failed.
    fn operation_finished(&self, operation: &'static str, took: Duration, failed: bool);
}

/// Kubelet's words for the calls of the client.
pub const OPERATIONS: [&str; 12] = [
    "container_status",
    "image_fs_info",
    "image_status",
    "list_containers",
    "list_images",
    "list_podsandbox",
    "podsandbox_status",
    "pull_image",
    "remove_container",
    "remove_image",
    "status",
    "version",
];

/// The observer of one client; none at first.
#[derive(Default)]
pub(crate) struct Operations(OnceLock<Arc<dyn OperationObserver>>);

impl Operations {
    /// Sets the observer. Only the first one is used.
    pub(crate) fn observe_with(&self, observer: Arc<dyn OperationObserver>) {
        let _ = self.0.set(observer);
    }

    /// Makes a call.
    pub(crate) async fn observe<T>(
        &self,
        operation: &'static str,
        call: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, Status> {
        debug_assert!(OPERATIONS.contains(&operation), "{operation}");
        let observer = self.0.get().map(|observer| &**observer);
        let mut running = RunningOperation { observer, operation, started: Instant::now(), failed: true };
        let done = call.await;
        running.failed = done.is_err();
        done
    }
}

/// A call in progress. Reports its end, which may be that its future is dropped.
struct RunningOperation<'a> {
    observer: Option<&'a dyn OperationObserver>,
    operation: &'static str,
    started: Instant,
    failed: bool,
}

impl Drop for RunningOperation<'_> {
    fn drop(&mut self) {
        if let Some(observer) = self.observer {
            observer.operation_finished(self.operation, self.started.elapsed(), self.failed);
        }
    }
}

#[cfg(test)]
mod tests {

    use parking_lot::Mutex;

    use super::*;

    #[derive(Default)]
    struct Recorder(Mutex<Vec<(&'static str, Duration, bool)>>);

    impl OperationObserver for Recorder {
        fn operation_finished(&self, operation: &'static str, took: Duration, failed: bool) {
            self.0.lock().push((operation, took, failed));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_is_counted_once_however_it_ends() {
        let (operations, recorder) = (Operations::default(), Arc::new(Recorder::default()));
        let call = async |outcome: Result<(), Status>| {
            tokio::time::sleep(Duration::from_secs(2)).await;
            outcome
        };
        let _ = operations.observe("version", call(Ok(()))).await; // without an observer
        operations.observe_with(recorder.clone());
        let _ = operations.observe("list_images", call(Ok(()))).await;
        let _ = operations.observe("image_status", call(Err(Status::unknown("broken")))).await;
        let given_up = operations.observe("pull_image", call(Ok(())));
        assert!(tokio::time::timeout(Duration::from_secs(1), given_up).await.is_err());
        let seconds = Duration::from_secs;
        let expected = [
            ("list_images", seconds(2), false),
            ("image_status", seconds(2), true),
            ("pull_image", seconds(1), true),
        ];
        assert_eq!(*recorder.0.lock(), expected);
    }
}
