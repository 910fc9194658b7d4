//! Kubelet's image events: type, reason and message as in `kubectl get events`.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use crate::pod::ObjectRef;
use crate::pull::EnsureError;

/// The type of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EventType {
    /// All is well.
    Normal,
    /// Something failed.
    Warning,
}

impl fmt::Display for EventType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            EventType::Normal => "Normal",
            EventType::Warning => "Warning",
        })
    }
}

/// Why an event was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EventReason {
    /// A pull is requested; it may still wait in the queue.
    Pulling,
    /// The image is present, freshly pulled or not.
    Pulled,
    /// A pull failed.
    Failed,
    /// No pull is tried, because the last failed one is in back-off.
    BackOff,
    /// The runtime could not determine whether the image is present, or the name is invalid.
    InspectFailed,
    /// The image is not present and must not be pulled.
    ErrImageNeverPull,
    /// Garbage collection could not free enough.
    FreeDiskSpaceFailed,
    /// The image filesystem reports no size.
    InvalidDiskCapacity,
    /// An image has no ID and is skipped.
    InvalidImageId,
    /// Collection failed at least twice in a row.
    ImageGcFailed,
    /// The backend stopped answering. This and all following reasons are larder's own.
    BackendDown,
    /// The backend answers again.
    BackendUp,
    /// An image was loaded from an archive.
    Loaded,
    /// A client removed an image.
    Removed,
    /// A round of garbage collection that a client requested has removed images.
    Collected,
    /// A client removed names of an image that has others.
    Untagged,
    /// All images that a pod requested are pulled.
    ImagesPulled,
    /// A client could not remove an image.
    RemovalFailed,
    /// A pulled image is not quite what it should be: it is built for another platform, or something of it was left
    /// out.
    ImageWarning,
    /// New settings are in force.
    Reloaded,
    /// The new settings are invalid; the old ones remain in force.
    ReloadFailed,
}

impl EventReason {
    /// All of them.
    pub const ALL: [EventReason; 13] = [
        EventReason::Pulling,
        EventReason::Pulled,
        EventReason::Failed,
        EventReason::BackOff,
        EventReason::InspectFailed,
        EventReason::ErrImageNeverPull,
        EventReason::FreeDiskSpaceFailed,
        EventReason::InvalidDiskCapacity,
        EventReason::InvalidImageId,
        EventReason::ImageGcFailed,
        EventReason::BackendDown,
        EventReason::BackendUp,
        EventReason::ImageWarning,
    ];
}

impl fmt::Display for EventReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            EventReason::Pulling => "Pulling",
            EventReason::Pulled => "Pulled",
            EventReason::Failed => "Failed",
            EventReason::BackOff => "BackOff",
            EventReason::InspectFailed => "InspectFailed",
            EventReason::ErrImageNeverPull => "ErrImageNeverPull",
            EventReason::FreeDiskSpaceFailed => "FreeDiskSpaceFailed",
            EventReason::InvalidDiskCapacity => "InvalidDiskCapacity",
            EventReason::InvalidImageId => "InvalidImageID",
            EventReason::ImageGcFailed => "ImageGCFailed",
            EventReason::BackendDown => "BackendDown",
            EventReason::BackendUp => "BackendUp",
            EventReason::Loaded => "Loaded",
            EventReason::Removed => "Removed",
            EventReason::Collected => "Collected",
            EventReason::Untagged => "Untagged",
            EventReason::ImagesPulled => "ImagesPulled",
            EventReason::RemovalFailed => "RemovalFailed",
            EventReason::ImageWarning => "ImageWarning",
            EventReason::Reloaded => "Reloaded",
            EventReason::ReloadFailed => "ReloadFailed",
        })
    }
}

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// When it happened, by the wall clock.
    pub time: SystemTime,
    /// Normal or Warning.
    pub event_type: EventType,
    /// Why it was sent.
    pub reason: EventReason,
    /// Object of the event.
    pub object: ObjectRef,
    /// Kubelet's text.
    pub message: String,
    /// The process whose request caused it, such as `larder (pid 42)`; empty if unknown or none.
    pub requester: String,
}

impl Event {
    /// Kubelet's event after a failed ensure, in addition to the manager's.
    pub fn failed(object: ObjectRef, error: &EnsureError) -> Event {
        let message = format!("Error: {}", error.reason);
        Event {
            time: SystemTime::now(),
            event_type: EventType::Warning,
            reason: EventReason::Failed,
            object,
            message,
            requester: String::new(),
        }
    }
}

/// A sink of events. Called on the hot path: must be quick and must not fail.
pub trait EventSink: Send + Sync {
    /// Records one event.
    fn record(&self, event: Event);
}

/// Writes events to the log, at `info` or `warn`.
#[derive(Debug, Clone, Copy, Default)]
pub struct LogSink;

impl EventSink for LogSink {
    fn record(&self, event: Event) {
        let Event { event_type, reason, object, message, requester, .. } = event;
        // Empty fields are omitted, and so is the namespace of an object without a name.
        let said = |text: String| (!text.is_empty()).then_some(text);
        let (name, field_path) = (said(object.name), said(object.field_path));
        let namespace = name.as_ref().and(said(object.namespace));
        let (name, namespace, field_path) = (name.as_deref(), namespace.as_deref(), field_path.as_deref());
        let requester = said(requester);
        let requester = requester.as_deref();
        match event_type {
            EventType::Normal => tracing::info!(%reason, namespace, name, field_path, requester, "{message}"),
            EventType::Warning => {
                tracing::warn!(%reason, namespace, name, field_path, requester, "{message}");
            }
        }
    }
}

/// Keeps the latest events in memory for followers.
#[derive(Debug)]
pub struct RingSink {
    capacity: usize,
    ring: Mutex<EventRing>,
    /// The number of the next event.
    next: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct EventRing {
    events: VecDeque<Event>,
    /// The number of the event after the last one.
    next: u64,
}

impl EventRing {
    /// The number of the oldest event that is kept.
    fn first(&self) -> u64 {
        self.next - self.events.len() as u64
    }
}

impl RingSink {
    /// Keeps at most `capacity` events; drops the oldest first.
    pub fn new(capacity: usize) -> Self {
        RingSink { capacity, ring: Mutex::default(), next: watch::Sender::new(0) }
    }

    /// The events kept, oldest first.
    pub fn snapshot(&self) -> Vec<Event> {
        self.ring().events.iter().cloned().collect()
    }

    /// Follows events from this number on, those that are kept first. Events count from 0, and again from 0 after a
    /// restart: a number that is not reached yet comes from before the restart, and gets all events.
    pub fn follow(self: &Arc<Self>, from: u64) -> EventFollower {
        let from = if from > self.ring().next { 0 } else { from };
        EventFollower { next: from, next_seen: self.next.subscribe(), ring: Arc::clone(self) }
    }

    /// The number that the next event will have.
    pub fn next_number(&self) -> u64 {
        self.ring().next
    }

    fn ring(&self) -> MutexGuard<'_, EventRing> {
        self.ring.lock()
    }
}

impl EventSink for RingSink {
    fn record(&self, event: Event) {
        let next = {
            let mut ring = self.ring();
            ring.next += 1;
            if ring.events.len() >= self.capacity {
                ring.events.pop_front();
            }
            if self.capacity > 0 {
                ring.events.push_back(event);
            }
            ring.next
        };
        // Outside of the lock, which woken followers take.
        self.next.send_modify(|known| *known = next.max(*known));
    }
}

/// Events in their order, for one reader. A slow reader blocks nothing and misses the oldest events.
#[derive(Debug)]
pub struct EventFollower {
    ring: Arc<RingSink>,
    next: u64,
    next_seen: watch::Receiver<u64>,
}

/// An item of the event stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EventStreamItem {
    /// The event of this number.
    Event(u64, Event),
    /// This many events were dropped before they were read.
    Missed(u64),
}

impl EventFollower {
    /// The next item, if available.
    pub fn try_next(&mut self) -> Option<EventStreamItem> {
        let ring = self.ring.ring();
        let first = ring.first();
        if self.next < first {
            let missed = first - self.next;
            self.next = first;
            return Some(EventStreamItem::Missed(missed));
        }
        let event = ring.events.get(usize::try_from(self.next - first).ok()?)?.clone();
        self.next += 1;
        Some(EventStreamItem::Event(self.next - 1, event))
    }

    /// Waits for the next item.
    pub async fn next(&mut self) -> EventStreamItem {
        loop {
            self.next_seen.mark_unchanged();
            if let Some(item) = self.try_next() {
                return item;
            }
            // The ring, and with it the sender, lives as long as this reader.
            let _ = self.next_seen.changed().await;
        }
    }
}

/// Hands each event to several sinks, in order.
pub struct FanOutSink(pub Vec<Arc<dyn EventSink>>);

impl EventSink for FanOutSink {
    fn record(&self, event: Event) {
        for sink in &self.0 {
            sink.record(event.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(message: &str) -> Event {
        Event {
            time: SystemTime::UNIX_EPOCH,
            event_type: EventType::Normal,
            reason: EventReason::Pulled,
            object: ObjectRef::node("n"),
            message: message.to_owned(),
            requester: String::new(),
        }
    }

    fn said(item: EventStreamItem) -> String {
        match item {
            EventStreamItem::Event(number, event) => format!("{number} {}", event.message),
            EventStreamItem::Missed(count) => format!("missed {count}"),
        }
    }

    #[tokio::test]
    async fn a_reader_gets_kept_events_then_new_ones_and_the_count_of_missed_ones() {
        let ring = Arc::new(RingSink::new(2));
        let mut follower = ring.follow(0);
        for message in ["a", "b", "c"] {
            ring.record(event(message));
        }
        assert_eq!(said(follower.next().await), "missed 1");
        assert_eq!(said(follower.next().await), "1 b");
        let mut late = ring.follow(ring.next_number());
        assert_eq!(late.try_next(), None);
        let (item, ()) = tokio::join!(late.next(), async { ring.record(event("d")) });
        assert_eq!(said(item), "3 d");
        assert_eq!(said(follower.next().await), "2 c");
        assert_eq!(said(follower.next().await), "3 d");
        assert_eq!(follower.try_next(), None);
    }

    #[test]
    fn a_follower_from_before_a_restart_gets_all_events() {
        let ring = Arc::new(RingSink::new(2));
        ring.record(event("a"));
        assert!(matches!(ring.follow(7).try_next(), Some(EventStreamItem::Event(0, _))));
        assert_eq!(ring.follow(1).try_next(), None);
    }

    #[test]
    fn a_ring_without_capacity_keeps_nothing_and_still_counts() {
        let ring = Arc::new(RingSink::new(0));
        ring.record(event("a"));
        assert_eq!(ring.snapshot(), []);
        assert_eq!(ring.follow(0).try_next(), Some(EventStreamItem::Missed(1)));
    }
}
