//! The caller of the ensure that is being carried out: events about its images go to it, and to no other.

use larder::events::{Event, EventSink};
use larder_api::convert;
use larder_api::v1::ensure_update::Update;
use tokio::sync::mpsc;

tokio::task_local! {
    /// Updates for the caller.
    pub(super) static CALLER: mpsc::UnboundedSender<Update>;
}

/// Hands events to the caller whose image they are about.
pub(crate) struct CallerEventSink;

impl EventSink for CallerEventSink {
    fn record(&self, event: Event) {
        // Without a caller, the event has no receiver.
        let _ = CALLER.try_with(|caller| _ = caller.send(Update::Event(convert::event(event, None))));
    }
}
