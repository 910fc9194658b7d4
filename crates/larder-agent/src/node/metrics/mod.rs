//! The metrics of a node. Those that kubelet has are registered under kubelet's names, and served under larder's own
//! unless a setting says otherwise.
//!
//! Events are counted when they happen ([`NodeMetrics`]); state is read on each request ([`exposition`]).
//! `metric_docs.rs` lists all metrics; the documentation is generated from it.

mod exposition;
mod format;
mod metric_docs;
mod process_stats;

use std::io;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use larder::credentials::plugin::PluginRunObserver;
use larder::events::{Event, EventReason, EventSink, EventType};
use larder::gc::{GcGoal, RemovalHistory, RemovalHistoryEntry};
use larder::pull::{EnsureLabels, PullFailureReason, PullMetrics, image_size_bucket};
use larder_cri::OperationObserver;
use larder_store::lazy::{FetchPurpose, FillObserver, ReadEnd};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::exemplar::HistogramWithExemplars;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry};

use crate::traces::current_trace_id;

pub(crate) use exposition::exposition;
pub(crate) use format::ExpositionFormat;

/// Labels of a sample, by their names.
type Labels = Vec<(&'static str, String)>;

fn labels<const N: usize>(labels: [(&'static str, &str); N]) -> Labels {
    labels.map(|(name, value)| (name, value.to_owned())).into()
}

/// Kubelet's buckets of `kubelet_image_pull_duration_seconds`.
const PULL_SECONDS: [f64; 18] = [
    1.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0, 1200.0, 1800.0,
    2700.0, 3600.0,
];

/// Kubelet's buckets of `kubelet_credential_provider_plugin_duration`.
const PROVIDER_SECONDS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Kubelet's buckets of `kubelet_runtime_operations_duration_seconds`: 0.005, and each 2.5 times the one before,
/// computed as kubelet does.
fn operation_seconds() -> impl Iterator<Item = f64> {
    std::iter::successors(Some(0.005), |seconds| Some(seconds * 2.5)).take(14)
}

/// A histogram that remembers the last trace of each bucket.
type TracedHistogram = HistogramWithExemplars<Labels>;

/// From a read that a nearby registry answers to the longest wait that is usual.
const READ_WAIT_SECONDS: [f64; 12] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0];

/// Counters and histograms of layers whose data comes while containers read them.
#[derive(Debug)]
struct FillMetrics {
    requests: Family<Labels, Counter>,
    received_bytes: Family<Labels, Counter>,
    read_waits: Histogram,
    failed_reads: Counter,
}

impl FillMetrics {
    fn new() -> FillMetrics {
        let (requests, received_bytes) = (Family::default(), Family::default());
        for purpose in FetchPurpose::ALL.map(purpose_labels) {
            for family in [&requests, &received_bytes] {
                drop(Family::<Labels, Counter>::get_or_create(family, &purpose));
            }
        }
        let read_waits = Histogram::new(READ_WAIT_SECONDS);
        FillMetrics { requests, received_bytes, read_waits, failed_reads: Counter::default() }
    }
}

/// Counters and histograms of events.
#[derive(Debug)]
pub(crate) struct NodeMetrics {
    ensures: Family<Labels, Counter>,
    pulls: Family<Labels, TracedHistogram, fn() -> TracedHistogram>,
    pulled_bytes: Counter,
    pod_pulls: TracedHistogram,
    pull_failures: Family<Labels, Counter>,
    removals: Family<Labels, Counter>,
    cri_calls: Family<Labels, Counter>,
    events: Family<Labels, Counter>,
    promised: Family<Labels, Counter>,
    freed: Family<Labels, Counter>,
    provider_runs: Family<Labels, TracedHistogram, fn() -> TracedHistogram>,
    provider_errors: Family<Labels, Counter>,
    provider_config: Family<Labels, Gauge>,
    operations: Family<Labels, Counter>,
    operation_seconds: Family<Labels, TracedHistogram, fn() -> TracedHistogram>,
    operation_errors: Family<Labels, Counter>,
    fills: OnceLock<FillMetrics>,
    /// The trace that the caller belongs to, if it is sampled.
    current_trace: fn() -> Option<String>,
    started: SystemTime,
}

impl Default for NodeMetrics {
    /// Counters that alerts are about start with a sample of 0: the first failure is an increase.
    fn default() -> NodeMetrics {
        let metrics = NodeMetrics::without_samples();
        for reason in PullFailureReason::ALL {
            drop(metrics.pull_failures.get_or_create(&labels([("reason", reason.word())])));
        }
        let alert = event_labels(EventType::Warning, EventReason::FreeDiskSpaceFailed);
        drop(metrics.events.get_or_create(&alert));
        for goal in GcGoal::REMOVING {
            let reason = labels([("reason", goal.name())]);
            drop(metrics.promised.get_or_create(&reason));
            drop(metrics.freed.get_or_create(&reason));
        }
        metrics
    }
}

impl NodeMetrics {
    fn without_samples() -> NodeMetrics {
        NodeMetrics {
            ensures: Family::default(),
            pulls: Family::new_with_constructor(pull_histogram),
            pulled_bytes: Counter::default(),
            pod_pulls: pull_histogram(),
            pull_failures: Family::default(),
            removals: Family::default(),
            cri_calls: Family::default(),
            events: Family::default(),
            promised: Family::default(),
            freed: Family::default(),
            provider_runs: Family::new_with_constructor(provider_histogram),
            provider_errors: Family::default(),
            provider_config: Family::default(),
            operations: Family::default(),
            operation_seconds: Family::new_with_constructor(operation_histogram),
            operation_errors: Family::default(),
            fills: OnceLock::new(),
            current_trace: current_trace_id,
            started: SystemTime::now(),
        }
    }

    /// Records the credential providers, and the hash of their configuration files.
    pub(crate) fn providers_configured<'a>(&self, hash: &str, names: impl Iterator<Item = &'a str>) {
        // The earlier files are no longer in force.
        self.provider_config.clear();
        self.provider_config.get_or_create(&labels([("hash", hash)])).set(1);
        for name in names {
            drop(self.provider_errors.get_or_create(&labels([("plugin_name", name)])));
        }
    }

    /// Records that the node has a runtime over CRI.
    pub(crate) fn runtime_configured(&self) {
        for operation in larder_cri::OPERATIONS {
            let operation = labels([("operation_type", operation)]);
            drop(self.operations.get_or_create(&operation));
            drop(self.operation_errors.get_or_create(&operation));
        }
    }

    /// Records that the node has a store of its own.
    pub(crate) fn store_configured(self: &Arc<Self>) -> Arc<dyn FillObserver> {
        self.fills.get_or_init(FillMetrics::new);
        Arc::clone(self) as Arc<dyn FillObserver>
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        add(registry, "kubelet_image_manager_ensure_image_requests", self.ensures.clone());
        add(registry, "kubelet_image_pull_duration_seconds", self.pulls.clone());
        add(registry, "larder_pulled_image_bytes", self.pulled_bytes.clone());
        add(registry, "larder_pod_image_pull_seconds", self.pod_pulls.clone());
        add(registry, "larder_pull_failures", self.pull_failures.clone());
        add(registry, "larder_removals", self.removals.clone());
        add(registry, "larder_cri_calls", self.cri_calls.clone());
        add(registry, "larder_events", self.events.clone());
        add(registry, "larder_gc_promised_bytes", self.promised.clone());
        add(registry, "larder_gc_freed_bytes", self.freed.clone());
        add(registry, "kubelet_credential_provider_plugin_duration", self.provider_runs.clone());
        add(registry, "kubelet_credential_provider_plugin_errors", self.provider_errors.clone());
        add(registry, "kubelet_credential_provider_config_info", self.provider_config.clone());
        add(registry, "kubelet_runtime_operations", self.operations.clone());
        add(registry, "kubelet_runtime_operations_duration_seconds", self.operation_seconds.clone());
        add(registry, "kubelet_runtime_operations_errors", self.operation_errors.clone());
        if let Some(fills) = self.fills.get() {
            add(registry, "larder_lazy_requests", fills.requests.clone());
            add(registry, "larder_lazy_received_bytes", fills.received_bytes.clone());
            add(registry, "larder_lazy_read_wait_seconds", fills.read_waits.clone());
            add(registry, "larder_lazy_failed_reads", fills.failed_reads.clone());
        }
    }

    /// Adds an observation, with the current trace as its exemplar.
    fn observe(&self, histogram: &TracedHistogram, seconds: Duration) {
        let trace = (self.current_trace)().map(|trace| labels([("trace_id", &trace)]));
        let observed = trace.is_some().then(SystemTime::now);
        histogram.observe(seconds.as_secs_f64(), trace, observed);
    }
}

/// Registers a metric with its help text.
fn add(registry: &mut Registry, name: &'static str, metric: impl Metric) {
    registry.register(name, metric_docs::help(name), metric);
}

impl NodeMetrics {
    /// Counts a call over CRI. Method and code are from fixed lists.
    pub(crate) fn cri_called(&self, method: &'static str, code: &'static str) {
        self.cri_calls.get_or_create(&labels([("method", method), ("code", code)])).inc();
    }

    /// Counts the time that the images of one pod took.
    pub(crate) fn pod_pulled(&self, total: Duration) {
        self.observe(&self.pod_pulls, total);
    }

    /// Counts a removed image by who requested it: `gc`, `cri` or `control`.
    pub(crate) fn image_removed(&self, requester: &'static str) {
        self.removals.get_or_create(&labels([("requester", requester)])).inc();
    }

    /// How many images were removed since the start.
    #[cfg(feature = "dashboard")]
    pub(crate) fn removals(&self) -> u64 {
        let count =
            |requester| self.removals.get(&labels([("requester", requester)])).map_or(0, |count| count.get());
        ["gc", "cri", "control"].into_iter().map(count).sum()
    }
}

impl PullMetrics for NodeMetrics {
    fn ensure_requested(&self, ensure: &EnsureLabels) {
        let labels = labels([
            ("pull_policy", known_policy(&ensure.pull_policy)),
            ("present_locally", &ensure.present_locally.to_string()),
            ("pull_required", &ensure.pull_required.to_string()),
        ]);
        self.ensures.get_or_create(&labels).inc();
    }

    fn image_pulled(&self, size_bytes: u64, duration: Duration) {
        let size = labels([("image_size_in_bytes", image_size_bucket(size_bytes))]);
        self.observe(&self.pulls.get_or_create(&size), duration);
    }

    fn image_downloaded(&self, size_bytes: u64) {
        self.pulled_bytes.inc_by(size_bytes);
    }

    fn pull_failed(&self, reason: PullFailureReason) {
        self.pull_failures.get_or_create(&labels([("reason", reason.word())])).inc();
    }
}

impl PluginRunObserver for NodeMetrics {
    fn plugin_finished(&self, provider: &str, took: Duration, failed: bool) {
        let provider = labels([("plugin_name", provider)]);
        self.observe(&self.provider_runs.get_or_create(&provider), took);
        self.provider_errors.get_or_create(&provider).inc_by(u64::from(failed));
    }
}

impl OperationObserver for NodeMetrics {
    fn operation_finished(&self, operation: &'static str, took: Duration, failed: bool) {
        let operation = labels([("operation_type", operation)]);
        self.operations.get_or_create(&operation).inc();
        self.observe(&self.operation_seconds.get_or_create(&operation), took);
        self.operation_errors.get_or_create(&operation).inc_by(u64::from(failed));
    }
}

impl FillObserver for NodeMetrics {
    fn range_requested(&self, purpose: FetchPurpose) {
        if let Some(fills) = self.fills.get() {
            fills.requests.get_or_create(&purpose_labels(purpose)).inc();
        }
    }

    fn bytes_received(&self, purpose: FetchPurpose, bytes: u64) {
        if let Some(fills) = self.fills.get() {
            fills.received_bytes.get_or_create(&purpose_labels(purpose)).inc_by(bytes);
        }
    }

    fn read_waited(&self, waited: Duration, end: ReadEnd) {
        if let Some(fills) = self.fills.get() {
            fills.read_waits.observe(waited.as_secs_f64());
            fills.failed_reads.inc_by(u64::from(end == ReadEnd::Error));
        }
    }
}

fn purpose_labels(purpose: FetchPurpose) -> Labels {
    labels([("purpose", purpose.word())])
}

impl EventSink for NodeMetrics {
    fn record(&self, event: Event) {
        self.events.get_or_create(&event_labels(event.event_type, event.reason)).inc();
    }
}

fn event_labels(event_type: EventType, reason: EventReason) -> Labels {
    labels([("event_type", &event_type.to_string()), ("reason", &reason.to_string())])
}

/// Maps unknown policies to `other`: clients may send any text, and each new label value is a series forever.
fn known_policy(policy: &str) -> &'static str {
    ["always", "ifnotpresent", "never"].into_iter().find(|known| *known == policy).unwrap_or("other")
}

/// A removal history of GC that counts removals, and estimated and freed bytes.
pub(crate) struct MeteredHistory<H> {
    pub(crate) history: Arc<H>,
    pub(crate) metrics: Arc<NodeMetrics>,
}

impl<H: RemovalHistory> RemovalHistory for MeteredHistory<H> {
    fn record(&self, entry: &RemovalHistoryEntry) -> io::Result<()> {
        let reason = labels([("reason", &entry.reason)]);
        self.metrics.image_removed("gc");
        self.metrics.promised.get_or_create(&reason).inc_by(entry.promised.bytes);
        if let Some(freed) = entry.freed {
            self.metrics.freed.get_or_create(&reason).inc_by(freed.bytes);
        }
        self.history.record(entry)
    }
}

fn provider_histogram() -> TracedHistogram {
    TracedHistogram::new(PROVIDER_SECONDS.into_iter())
}

fn pull_histogram() -> TracedHistogram {
    TracedHistogram::new(PULL_SECONDS.into_iter())
}

fn operation_histogram() -> TracedHistogram {
    TracedHistogram::new(operation_seconds())
}

#[cfg(test)]
pub(super) mod tests;
