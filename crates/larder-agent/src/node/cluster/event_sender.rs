//! Sends larder's events about the node to the cluster.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use larder::events::{Event, EventFollower, EventReason, EventStreamItem, EventType};
use larder::pod::ObjectKind;
use larder::retry::{RetryAdvice, RetryPolicy, retry};
use larder_kube::{Cluster, ClusterError, EventRateLimit, NodeEvent, NodeEvents};
use tokio::sync::Mutex;
use tokio::time::Instant;

use super::EventCounts;

/// Attempts to send an event while the API server does not answer, and the wait in between: as in client-go.
const RETRIES: RetryPolicy = RetryPolicy::fixed(12, Duration::from_secs(10));

/// Counts of events about the node.
#[derive(Default)]
pub(super) struct EventCounters {
    sent: AtomicU64,
    limited: AtomicU64,
    failed: AtomicU64,
    missed: AtomicU64,
}

impl EventCounters {
    pub(super) fn counts(&self) -> EventCounts {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        EventCounts {
            sent: count(&self.sent),
            rate_limited: count(&self.limited),
            failed: count(&self.failed),
            missed: count(&self.missed),
        }
    }
}

/// Sends events until dropped. What the journal drops in the meantime because it is full is counted. `collects` is
/// whether no other program collects images.
pub(super) async fn send_events(
    cluster: &Cluster,
    counters: &EventCounters,
    mut events: EventFollower,
    collects: impl Fn() -> bool,
) {
    let (mut sender, mut limit) = (NodeEvents::of(cluster), EventRateLimit::new(Instant::now()));
    loop {
        let event = match events.next().await {
            EventStreamItem::Event(_, event) => event,
            EventStreamItem::Missed(missed) => {
                counters.missed.fetch_add(missed, Ordering::Relaxed);
                continue;
            }
        };
        if !is_for_cluster(&event, collects()) {
            continue;
        }
        let counter = if !limit.admits(Instant::now()) {
            &counters.limited
        } else if send(&mut sender, &event).await {
            &counters.sent
        } else {
            &counters.failed
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// Sends an event, and returns true if it was sent.
async fn send(sender: &mut NodeEvents, event: &Event) -> bool {
    let event = NodeEvent {
        is_warning: event.event_type == EventType::Warning,
        reason: event.reason.to_string(),
        note: event.message.clone(),
    };
    let advice = |error: &ClusterError| {
        if error.is_temporary() { RetryAdvice::Backoff } else { RetryAdvice::GiveUp }
    };
    let sender = Mutex::new(sender);
    let attempt = || async { sender.lock().await.send(&event).await };
    retry(&RETRIES, &(), advice, attempt).await.is_ok()
}

/// Whether the cluster is to know of it. kubelet reports pulls of pods itself, and its own collections with the same
/// reasons.
fn is_for_cluster(event: &Event, collects: bool) -> bool {
    use EventReason::{
        BackendDown, BackendUp, FreeDiskSpaceFailed, ImageGcFailed, InvalidDiskCapacity, InvalidImageId,
        ReloadFailed, RemovalFailed,
    };
    event.object.kind == ObjectKind::Node
        && match event.reason {
            FreeDiskSpaceFailed | ImageGcFailed | InvalidDiskCapacity | InvalidImageId => collects,
            BackendDown | BackendUp | ReloadFailed | RemovalFailed => true,
            _ => false,
        }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use EventReason::{
        BackendDown, FreeDiskSpaceFailed, ImageGcFailed, InvalidDiskCapacity, InvalidImageId, Pulled,
        Pulling, ReloadFailed,
    };
    use larder::pod::{ObjectRef, Pod};

    use super::*;

    #[test]
    fn nothing_that_kubelet_reports_is_sent_and_collections_only_by_the_collector() {
        let about = |reason: EventReason, object: ObjectRef, collects: bool| {
            let time = SystemTime::UNIX_EPOCH;
            let (message, requester) = (String::new(), String::new());
            let event_type = EventType::Warning;
            is_for_cluster(&Event { time, event_type, reason, object, message, requester }, collects)
        };
        let (node, pod) = (ObjectRef::node("n1"), ObjectRef::new(&Pod::default(), ""));
        for reason in EventReason::ALL {
            assert!(!about(reason, pod.clone(), true), "{reason} of a pod");
        }
        for reason in [FreeDiskSpaceFailed, ImageGcFailed, InvalidDiskCapacity, InvalidImageId] {
            assert!(about(reason, node.clone(), true) && !about(reason, node.clone(), false), "{reason}");
        }
        for (reason, is_sent) in
            [(BackendDown, true), (ReloadFailed, true), (Pulling, false), (Pulled, false)]
        {
            assert_eq!(about(reason, node.clone(), false), is_sent, "{reason}");
        }
    }
}
