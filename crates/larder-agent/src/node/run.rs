//! Background tasks of a node.

use std::sync::Arc;

use super::{Node, dead_containers};

impl Node {
    /// Runs the background tasks of all parts until dropped.
    pub(crate) async fn run(self: &Arc<Node>) {
        // The first collection waits until it is known what has to stay.
        let first = self.workloads.begin_first_scan();
        let on_runtime = async {
            self.storage.wait_for_runtime().await;
            tokio::join!(self.collection.run(), self.workloads.run(first));
        };
        tokio::join!(
            self.storage.run(),
            on_runtime,
            self.watch_files(),
            self.pulls.run(),
            dead_containers::run(&self.storage, &self.settings),
        );
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use larder::backend::{BackendError, CallErrorKind, Image, ImageSpec};
    use larder::events::{Event, EventReason, EventType};
    use larder_testkit::fake_backend::FakeBackend;
    use tokio::time;

    use super::*;
    use crate::config::{PrefetchItem, PrefetchRetention, PrefetchSchedule};
    use crate::node::testing;

    const IMAGE: &str = "registry.example/pause:1";

    /// The node's warnings when its runtime starts this late, but for that it is unavailable, and whether the image of
    /// its prefetch list is present then.
    async fn started(late: Duration) -> (Vec<String>, bool) {
        let (backend, dir) = (FakeBackend::new(), tempfile::tempdir().expect("a directory"));
        backend.offer(IMAGE, Image { id: "sha256:1".into(), ..Image::default() });
        let down = BackendError::call(CallErrorKind::Unavailable, "socket not found".to_owned());
        backend.set_down(Some(down));
        let item = PrefetchItem {
            image: IMAGE.into(),
            when: PrefetchSchedule::Start,
            jitter: Duration::ZERO,
            hold: PrefetchRetention::Nothing,
        };
        let node = testing::node(&backend, dir.path(), None, |config| config.prefetch = vec![item]);
        let node = Arc::new(node);
        let starts = async {
            time::sleep(late).await;
            backend.set_down(None);
            time::sleep(Duration::from_secs(5)).await;
        };
        tokio::select! {
            () = node.run() => {}
            () = starts => {}
        }
        let events = node.observability.journal().snapshot();
        let of_work = |event: &Event| {
            event.event_type == EventType::Warning && event.reason != EventReason::BackendDown
        };
        let warnings = events.into_iter().filter(of_work);
        let is_present =
            node.storage.backend().status(&ImageSpec::named(IMAGE)).await.expect("it answers").is_some();
        (warnings.map(|event| event.message).collect(), is_present)
    }

    #[tokio::test(start_paused = true)]
    async fn a_runtime_that_starts_later_is_waited_for_without_a_warning_for_a_minute() {
        assert_eq!(Box::pin(started(Duration::from_secs(55))).await, (Vec::new(), true));
        let (warnings, _) = Box::pin(started(Duration::from_secs(65))).await;
        assert!(warnings.iter().any(|warning| warning.contains("socket not found")), "{warnings:?}");
    }
}
