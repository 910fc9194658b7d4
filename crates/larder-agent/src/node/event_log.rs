//! Events in the daemon's log, each failure once.

use larder::events::{Event, EventReason, EventSink};
use parking_lot::Mutex;

use super::peer::Peer;

/// Hands events to a log. Kubelet sends `ImageGCFailed` beside the event that says what failed, with the same text: who
/// reads a log wants it once.
pub(crate) struct DedupEventSink<S> {
    log: S,
    /// Text of the last event about the disk, until the event beside it came.
    said: Mutex<Option<String>>,
}

impl<S> DedupEventSink<S> {
    /// In front of this log.
    pub(crate) fn new(log: S) -> DedupEventSink<S> {
        DedupEventSink { log, said: Mutex::default() }
    }
}

impl<S: EventSink> EventSink for DedupEventSink<S> {
    fn record(&self, event: Event) {
        {
            let mut said = self.said.lock();
            match event.reason {
                EventReason::FreeDiskSpaceFailed | EventReason::InvalidDiskCapacity => {
                    *said = Some(event.message.clone());
                }
                EventReason::ImageGcFailed if said.take().as_ref() == Some(&event.message) => return,
                _ => {}
            }
        }
        self.log.record(event);
    }
}

/// Adds the process whose call is carried out to its events.
pub(crate) struct RequesterSink<S>(pub(crate) S);

impl<S: EventSink> EventSink for RequesterSink<S> {
    fn record(&self, event: Event) {
        let requester = Peer::of_call().map_or_else(String::new, |peer| peer.to_string());
        self.0.record(Event { requester, ..event });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::SystemTime;

    use larder::events::{EventType, RingSink};
    use larder::pod::ObjectRef;

    use super::*;

    fn event(reason: EventReason, message: &str) -> Event {
        Event {
            time: SystemTime::UNIX_EPOCH,
            event_type: EventType::Warning,
            reason,
            object: ObjectRef::node("n"),
            message: message.to_owned(),
            requester: String::new(),
        }
    }

    #[test]
    fn a_failed_collection_is_logged_once_each_time_it_fails() {
        let ring = Arc::new(RingSink::new(10));
        let log = DedupEventSink::new(SharedRing(Arc::clone(&ring)));
        for _ in 0..2 {
            log.record(event(EventReason::FreeDiskSpaceFailed, "full"));
            log.record(event(EventReason::ImageGcFailed, "full"));
            log.record(event(EventReason::ImageGcFailed, "the runtime is down"));
        }
        let messages: Vec<_> = ring.snapshot().into_iter().map(|event| event.message).collect();
        assert_eq!(messages, ["full", "the runtime is down", "full", "the runtime is down"]);
    }

    #[test]
    fn a_failure_is_logged_again_after_another_one() {
        let ring = Arc::new(RingSink::new(10));
        let log = DedupEventSink::new(SharedRing(Arc::clone(&ring)));
        for _ in 0..2 {
            log.record(event(EventReason::ImageGcFailed, "the runtime is down"));
        }
        log.record(event(EventReason::InvalidDiskCapacity, "no size"));
        log.record(event(EventReason::Pulled, "a:1"));
        for _ in 0..2 {
            log.record(event(EventReason::ImageGcFailed, "no size"));
        }
        log.record(event(EventReason::Pulled, "full"));
        log.record(event(EventReason::ImageGcFailed, "full"));
        let messages: Vec<_> = ring.snapshot().into_iter().map(|event| event.message).collect();
        let twice = ["the runtime is down", "the runtime is down"];
        assert_eq!(messages, [&twice[..], &["no size", "a:1", "no size", "full", "full"]].concat());
    }

    struct SharedRing(Arc<RingSink>);

    impl EventSink for SharedRing {
        fn record(&self, event: Event) {
            self.0.record(event);
        }
    }
}
