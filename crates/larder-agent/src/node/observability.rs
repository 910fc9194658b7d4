//! Events and metrics of a node.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use larder::events::{Event, EventReason, EventSink, EventType, FanOutSink, LogSink, RingSink};
use larder::pod::ObjectRef;
use larder_store::lazy::LayerDamage;
use larder_store::pull::GuardedBefore;
use tokio::time::Instant;

use super::event_log::{DedupEventSink, RequesterSink};
use super::metrics::NodeMetrics;
use crate::control::caller::CallerEventSink;

/// Settings of events and metrics.
#[derive(Debug, Clone)]
pub(crate) struct ObservabilitySettings {
    /// The name of the node, which events are about.
    pub(crate) node_name: String,
    /// How many events are kept.
    pub(crate) event_ring_size: usize,
    /// Whether events are logged.
    pub(crate) logs_events: bool,
}

/// Events and metrics of a node.
pub(crate) struct Observability {
    node: ObjectRef,
    metrics: Arc<NodeMetrics>,
    journal: Arc<RingSink>,
    sink: Arc<dyn EventSink>,
    started: Instant,
}

impl Observability {
    /// Events go to the journal for `larder events`, the metrics, the call that caused the event, and the log.
    pub(crate) fn build(settings: ObservabilitySettings) -> Observability {
        let metrics = Arc::new(NodeMetrics::default());
        let journal = Arc::new(RingSink::new(settings.event_ring_size));
        let mut sinks: Vec<Arc<dyn EventSink>> =
            vec![journal.clone(), metrics.clone(), Arc::new(CallerEventSink)];
        if settings.logs_events {
            sinks.insert(0, Arc::new(DedupEventSink::new(LogSink)));
        }
        Observability {
            node: ObjectRef::node(settings.node_name),
            metrics,
            journal,
            sink: Arc::new(RequesterSink(FanOutSink(sinks))),
            started: Instant::now(),
        }
    }

    /// The node as the object of events.
    pub(crate) fn node(&self) -> &ObjectRef {
        &self.node
    }

    /// Counters and histograms of what happens.
    pub(crate) fn metrics(&self) -> &Arc<NodeMetrics> {
        &self.metrics
    }

    /// The latest events.
    pub(crate) fn journal(&self) -> &Arc<RingSink> {
        &self.journal
    }

    /// The receiver of all events.
    pub(crate) fn sink(&self) -> &Arc<dyn EventSink> {
        &self.sink
    }

    /// Time since the node was built.
    pub(crate) fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// Records an event about the node.
    pub(crate) fn record(&self, event_type: EventType, reason: EventReason, message: String) {
        self.record_about(self.node.clone(), event_type, reason, message);
    }

    /// Records an event about each image that was read without a guard.
    pub(crate) fn record_lost_guard(&self, before: &GuardedBefore) {
        for image in &before.lost {
            let name = image.name();
            let message = format!(
                "Containers of {name} that were running may have read zeros instead of its files: the guard of its \
                 incomplete layers was killed. Delete their pods"
            );
            self.record(EventType::Warning, EventReason::ImageWarning, message);
        }
    }

    /// Records an event about damage of images that reads have met.
    pub(crate) fn record_damage(&self, damage: &LayerDamage) {
        self.record(EventType::Warning, EventReason::ImageWarning, damage_message(damage));
    }

    /// Records an event about a pod, or the node.
    pub(crate) fn record_about(
        &self,
        object: ObjectRef,
        event_type: EventType,
        reason: EventReason,
        message: String,
    ) {
        let (time, requester) = (SystemTime::now(), String::new());
        self.sink.record(Event { time, event_type, reason, object, message, requester });
    }
}

fn damage_message(damage: &LayerDamage) -> String {
    let images = match &damage.images[..] {
        [] => format!("layer {}", damage.layer),
        images => images.join(", "),
    };
    match &damage.failure {
        None => format!(
            "Files of {images} were damaged on the disk of this node, and are repaired: containers read them as they \
             should be. Check the disk"
        ),
        Some(reason) => format!(
            "Files of {images} are damaged on the disk of this node, and reads of them fail until they are repaired: \
             {reason}"
        ),
    }
}

#[cfg(test)]
mod tests {
    use larder_store::store::LayerKey;

    use super::*;

    #[test]
    fn an_event_about_damage_names_the_images() {
        let layer = LayerKey::parse(&"5".repeat(64)).unwrap();
        let images = vec!["registry.example/a:1".to_owned(), "registry.example/b:2".to_owned()];
        let failure = Some("registry.example: connection refused".to_owned());
        let failed = damage_message(&LayerDamage { layer: layer.clone(), images: images.clone(), failure });
        assert!(
            failed.starts_with("Files of registry.example/a:1, registry.example/b:2 are damaged"),
            "{failed}"
        );
        assert!(
            failed.ends_with("until they are repaired: registry.example: connection refused"),
            "{failed}"
        );
        let repaired = damage_message(&LayerDamage { layer, images, failure: None });
        assert!(
            repaired.contains("/b:2 were damaged on the disk of this node, and are repaired"),
            "{repaired}"
        );
    }
}
