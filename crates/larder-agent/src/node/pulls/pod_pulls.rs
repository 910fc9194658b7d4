//! How long the images of each pod are being pulled, over all requests for them, as metric and event.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;

use larder::events::{Event, EventReason, EventSink, EventType};
use larder::go_format;
use larder::pod::{ObjectRef, Pod};
use larder::pull::{PullTimeRecorder, PullTimes};
use parking_lot::Mutex;

use crate::node::metrics::NodeMetrics;

/// The pods whose images are being requested.
pub(crate) struct PodPulls {
    times: Arc<PullTimes>,
    /// How many requests of each pod are in progress.
    requests: Mutex<HashMap<String, usize>>,
    metrics: Arc<NodeMetrics>,
    events: Arc<dyn EventSink>,
}

/// A request of a pod for images, until dropped. The last one of the pod reports the time.
pub(crate) struct PodPullRequest {
    pulls: Arc<PodPulls>,
    /// By which the pulls of the pod are counted.
    key: String,
    pod: ObjectRef,
}

impl PodPulls {
    pub(crate) fn new(metrics: Arc<NodeMetrics>, events: Arc<dyn EventSink>) -> PodPulls {
        PodPulls { times: Arc::default(), requests: Mutex::default(), metrics, events }
    }

    /// Where the manager records its pulls.
    pub(in crate::node) fn recorder(&self) -> Arc<dyn PullTimeRecorder> {
        Arc::clone(&self.times) as Arc<dyn PullTimeRecorder>
    }

    /// Begins a request; `None` for images that no pod requests.
    pub(crate) fn begin(self: &Arc<Self>, pod: &Pod) -> Option<PodPullRequest> {
        if pod.name.is_empty() {
            return None;
        }
        let key = pod.key();
        *self.requests.lock().entry(key.clone()).or_default() += 1;
        self.times.track(&key);
        Some(PodPullRequest { pulls: Arc::clone(self), key, pod: ObjectRef::new(pod, "") })
    }
}

impl Drop for PodPullRequest {
    fn drop(&mut self) {
        let PodPulls { times, metrics, events, .. } = &*self.pulls;
        let total = {
            let mut requests = self.pulls.requests.lock();
            let Some(left) = requests.get_mut(&self.key) else { return };
            *left -= 1;
            if *left > 0 {
                return;
            }
            requests.remove(&self.key);
            let total = times.total(&self.key);
            times.forget(&self.key);
            total
        };
        if total.is_zero() {
            return;
        }
        metrics.pod_pulled(total);
        let took = go_format::duration(go_format::truncated_to_millis(total));
        events.record(Event {
            time: SystemTime::now(),
            event_type: EventType::Normal,
            reason: EventReason::ImagesPulled,
            object: self.pod.clone(),
            message: format!("Pulled the images of the pod in {took}, including waiting"),
            requester: String::new(),
        });
    }
}
