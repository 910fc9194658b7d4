//! Events about the node, as `kubectl describe node` shows them.

use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use tokio::time::Instant;

use crate::cluster::Cluster;
use crate::error::ClusterError;
use crate::event_recorder::{EventRecorder, ObjectEvent};

/// How many events about one object are sent at once, and how soon another one is after that: as in client-go.
const BURST: u32 = 25;
const PERIOD: Duration = Duration::from_secs(300);

/// An event about the node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeEvent {
    /// True for the type `Warning`.
    pub is_warning: bool,
    /// Such as `ImageGCFailed`.
    pub reason: String,
    /// The text.
    pub note: String,
}

/// Sends events about the node. Repetitions within six minutes are one series.
pub struct NodeEvents {
    recorder: EventRecorder,
    node: ObjectReference,
}

impl NodeEvents {
    /// Of the node of this cluster.
    pub fn of(cluster: &Cluster) -> NodeEvents {
        let node = ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: Some(cluster.node.clone()),
            // As kubelet has it: kubectl looks for it.
            uid: Some(cluster.node.clone()),
            ..ObjectReference::default()
        };
        NodeEvents { recorder: EventRecorder::new(cluster), node }
    }

    /// Sends one event.
    pub async fn send(&mut self, event: &NodeEvent) -> Result<(), ClusterError> {
        let event = ObjectEvent {
            regarding: self.node.clone(),
            is_warning: event.is_warning,
            reason: event.reason.clone(),
            action: event.reason.clone(),
            note: event.note.clone(),
        };
        self.recorder.send(event).await
    }
}

/// Limits the events about one object.
#[derive(Debug, Clone)]
pub struct EventRateLimit {
    left: u32,
    /// Since when the next one is being earned.
    since: Instant,
}

impl EventRateLimit {
    /// Nothing has been sent yet.
    pub fn new(now: Instant) -> EventRateLimit {
        EventRateLimit { left: BURST, since: now }
    }

    /// Whether another event may be sent; it counts as sent then.
    pub fn admits(&mut self, now: Instant) -> bool {
        let earned = now.saturating_duration_since(self.since).as_secs() / PERIOD.as_secs();
        let earned = u32::try_from(earned).unwrap_or(u32::MAX);
        if earned >= BURST - self.left {
            // What is earned beyond the burst is lost.
            (self.left, self.since) = (BURST, now);
        } else {
            self.left += earned;
            self.since += PERIOD * earned;
        }
        let is_admitted = self.left > 0;
        self.left = self.left.saturating_sub(1);
        is_admitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_of_25_is_admitted_and_one_event_in_five_minutes_after_it() {
        let start = Instant::now();
        let mut limit = EventRateLimit::new(start);
        let admitted = |limit: &mut EventRateLimit, seconds: u64, tries: usize| {
            let now = start + Duration::from_secs(seconds);
            (0..tries).filter(|_| limit.admits(now)).count()
        };
        assert_eq!(admitted(&mut limit, 0, 100), 25);
        assert_eq!(admitted(&mut limit, 299, 1), 0);
        assert_eq!(admitted(&mut limit, 300, 2), 1);
        assert_eq!(admitted(&mut limit, 599, 1), 0);
        assert_eq!(admitted(&mut limit, 900, 5), 2);
        assert_eq!(admitted(&mut limit, 1_000_000, 100), 25);
    }
}
