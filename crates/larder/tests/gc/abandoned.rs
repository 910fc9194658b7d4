//! Removals whose caller is canceled: they complete, the gate remains closed until then, and they are recorded.

use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use larder::backend::ImageSpec;
use larder::gc::{GcPolicy, RemovalHistory, RemovalHistoryEntry};
use larder::pod::Pod;
use larder::pull::{EnsureRequest, ImageManager, ImagePresence, PullPolicy};
use larder::retention::RemovalGate;
use tokio::time::sleep;

use crate::world::{FakeNode, OwnPolicy as _};

const SLOW: Duration = Duration::from_secs(5);
const LEASE: Duration = Duration::from_secs(600);

#[derive(Default)]
struct RecordingHistory(Mutex<Vec<RemovalHistoryEntry>>);

impl RemovalHistory for RecordingHistory {
    fn record(&self, entry: &RemovalHistoryEntry) -> io::Result<()> {
        self.0.lock().expect("no test panics with it").push(entry.clone());
        Ok(())
    }
}

fn world() -> FakeNode {
    let world = FakeNode::new(100);
    world.have("a:1", &[("l", 10)]);
    world
}

/// Polls a future until a condition holds, and drops it.
async fn abandon<T>(work: impl Future<Output = T>, until: impl Fn() -> bool) {
    let mut work = pin!(work);
    poll_fn(|context| {
        assert!(work.as_mut().poll(context).is_pending(), "it was to be abandoned");
        if until() {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_collection_that_is_abandoned_ends_the_removal_it_began() {
    for slow in [SLOW, Duration::ZERO] {
        let world = world();
        let (gate, journal) = (Arc::new(RemovalGate::default()), Arc::new(RecordingHistory::default()));
        let policy = GcPolicy { minimum_age: Duration::ZERO, ..GcPolicy::default() };
        let collector = world.collector().policy(policy).gate(gate.clone()).history(journal.clone()).build();
        let manager = ImageManager::new(Arc::new(world.clone())).with_lease(gate, LEASE);
        world.advance(1000);
        if slow.is_zero() {
            // The image is removed, and the sweep waits for its space.
            world.frees_after(SLOW);
            abandon(collector.delete_unused(), || !world.removals().is_empty()).await;
        } else {
            world.removes_slowly(slow);
            abandon(collector.delete_unused(), || world.state().removing).await;
        }
        let request = EnsureRequest::new("a:1", PullPolicy::IfNotPresent, Pod::default());
        let ensured = manager.ensure(&request).await.unwrap();
        assert!(matches!(ensured.outcome, ImagePresence::Pulled { .. }), "{ensured:?}");
        sleep(2 * SLOW).await;
        assert!(world.state().present.contains("a:1"), "it is leased");
        assert_eq!(collector.counts().space, 1);
        collector.flush().await;
        let journal = journal.0.lock().unwrap();
        assert_eq!(journal.iter().map(|entry| entry.id.as_str()).collect::<Vec<_>>(), ["sha256:a:1"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_removal_over_cri_that_is_abandoned_continues_behind_the_closed_gate() {
    let world = world();
    let gate = Arc::new(RemovalGate::default());
    let manager = Arc::new(ImageManager::new(Arc::new(world.clone())).with_lease(gate, LEASE));
    world.removes_slowly(SLOW);
    abandon(manager.remove(&ImageSpec::named("a:1")), || world.state().removing).await;
    let request = EnsureRequest::new("a:1", PullPolicy::IfNotPresent, Pod::default());
    let ensured = manager.ensure(&request).await.unwrap();
    assert!(matches!(ensured.outcome, ImagePresence::Pulled { .. }), "{ensured:?}");
    sleep(2 * SLOW).await;
    assert!(world.state().present.contains("a:1"), "it is leased");
}
