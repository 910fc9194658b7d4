//! Events in the daemon's log, each text once.

use std::sync::{Mutex, PoisonError};

use larder::events::{Event, EventSink, Reason};

/// Hands events to a log. Kubelet sends `ImageGCFailed` beside the event that says what failed, with the same text: who
/// reads a log wants it once.
pub(super) struct EventLog<S> {
    log: S,
    /// The text of the last event.
    last: Mutex<String>,
}

impl<S> EventLog<S> {
    /// In front of this log.
    pub(super) fn new(log: S) -> EventLog<S> {
        EventLog { log, last: Mutex::default() }
    }
}

impl<S: EventSink> EventSink for EventLog<S> {
    fn record(&self, event: Event) {
        {
            let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
            if event.reason == Reason::ImageGcFailed && event.message == *last {
                return;
            }
            last.clone_from(&event.message);
        }
        self.log.record(event);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::SystemTime;

    use larder::events::{EventType, RingSink};
    use larder::pod::ObjectRef;

    use super::*;

    #[test]
    fn a_failed_collection_is_logged_once_each_time_it_fails() {
        let ring = Arc::new(RingSink::new(10));
        let log = EventLog::new(Shared(Arc::clone(&ring)));
        let event = |reason, message: &str| Event {
            time: SystemTime::UNIX_EPOCH,
            event_type: EventType::Warning,
            reason,
            object: ObjectRef::node("n"),
            message: message.to_owned(),
        };
        for _ in 0..2 {
            log.record(event(Reason::FreeDiskSpaceFailed, "full"));
            log.record(event(Reason::ImageGcFailed, "full"));
            log.record(event(Reason::ImageGcFailed, "the runtime is down"));
        }
        let told: Vec<_> = ring.snapshot().into_iter().map(|event| event.message).collect();
        assert_eq!(told, ["full", "the runtime is down", "full", "the runtime is down"]);
    }

    struct Shared(Arc<RingSink>);

    impl EventSink for Shared {
        fn record(&self, event: Event) {
            self.0.record(event);
        }
    }
}
