//! State metrics, read on each request.

use std::sync::atomic::AtomicU64;
use std::time::{SystemTime, UNIX_EPOCH};

use larder::hidden::HiddenImages;
use larder::image_service::ImageStats;
use larder::pull::{ImageManager, PullPhase};
use larder::records::MustPullCheckResult;
use larder_api::{EnumWord as _, convert};
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use super::format::with_own_names;
use super::process_stats::ProcessStats;
use super::{ExpositionFormat, add};
use crate::node::cluster::NodeCluster;
use crate::node::collection::Collection;
use crate::node::pulls::Pulls;
use crate::node::{Node, NodeFilesystems, Storage};
use crate::serve::connections::Connections;

type IntegerGauge = Gauge<u64, AtomicU64>;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PhaseLabel {
    phase: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabel {
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabel {
    state: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct IdentityLabel {
    identity: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RegistryLabel {
    registry: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FilesystemLabels {
    content: &'static str,
    mountpoint: String,
}

/// All metrics, with the filesystems as measured before.
pub(crate) fn exposition(
    node: &Node,
    connections: &Connections,
    disks: &NodeFilesystems,
    format: ExpositionFormat,
) -> Result<String, std::fmt::Error> {
    let mut registry = Registry::default();
    node.observability.metrics().register(&mut registry);
    register(&mut registry, node, connections);
    filesystems(&mut registry, disks);
    process(&mut registry);
    let mut page = String::new();
    text::encode(&mut page, &registry)?;
    if !node.settings.now().metrics.kubelet_names {
        page = with_own_names(&page);
    }
    Ok(format.of_open_metrics(page))
}

/// The version, as a label: `count by (version) (larder_build_info)` shows a rollout.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VersionLabel {
    version: &'static str,
}

/// Registers the metrics of a process that Prometheus clients report.
fn process(registry: &mut Registry) {
    let build = Family::<VersionLabel, IntegerGauge>::default();
    build.get_or_create(&VersionLabel { version: env!("CARGO_PKG_VERSION") }).set(1);
    add(registry, "larder_build_info", build);
    let Some(stats) = ProcessStats::read() else { return };
    add(registry, "process_cpu_seconds", ConstCounter::new(stats.cpu_seconds));
    gauge(registry, "process_resident_memory_bytes", stats.resident_bytes);
    gauge(registry, "process_virtual_memory_bytes", stats.virtual_bytes);
    gauge(registry, "process_open_fds", stats.open_fds);
    gauge(registry, "process_max_fds", stats.max_fds);
}

fn filesystems(registry: &mut Registry, disks: &NodeFilesystems) {
    if let Some(disk) = disks.image {
        gauge(registry, "larder_filesystem_size_bytes", disk.capacity);
        gauge(registry, "larder_filesystem_available_bytes", disk.available);
        gauge(registry, "larder_filesystem_inodes", disk.inodes);
        gauge(registry, "larder_filesystem_inodes_free", disk.inodes_free);
    }
    if disks.others.is_empty() {
        return;
    }
    let gauges = || Family::<FilesystemLabels, IntegerGauge>::default();
    let (size, available, inodes_free) = (gauges(), gauges(), gauges());
    for other in &disks.others {
        let content = convert::filesystem_content(other.content).word();
        let labels = FilesystemLabels { content, mountpoint: other.mountpoint.display().to_string() };
        size.get_or_create(&labels).set(other.disk.capacity);
        available.get_or_create(&labels).set(other.disk.available);
        inodes_free.get_or_create(&labels).set(other.disk.inodes_free);
    }
    add(registry, "larder_other_filesystem_size_bytes", size);
    add(registry, "larder_other_filesystem_available_bytes", available);
    add(registry, "larder_other_filesystem_inodes_free", inodes_free);
}

/// Registers the current state.
fn register(registry: &mut Registry, node: &Node, connections: &Connections) {
    pulls(registry, node.pulls.manager());
    collection(registry, &node.collection, node.pulls.hidden());
    registries(registry, &node.storage);
    records(registry, &node.pulls);
    gauge(registry, "larder_backend_up", u64::from(node.storage.health().state().is_up()));
    gauge(registry, "larder_connections", connections.open() as u64);
    gauge(registry, "larder_inflight_calls", connections.calls().len() as u64);
    timestamp(registry, "process_start_time_seconds", node.observability.metrics().started);
    traces(registry);
    kubernetes(registry, node.workloads.cluster());
    gauge(registry, "larder_settings_valid", u64::from(node.settings.reload_error().is_none()));
}

fn gauge(registry: &mut Registry, name: &'static str, value: u64) {
    let gauge = IntegerGauge::default();
    gauge.set(value);
    add(registry, name, gauge);
}

fn timestamp(registry: &mut Registry, name: &'static str, at: SystemTime) {
    gauge(registry, name, at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs());
}

fn ratio(registry: &mut Registry, name: &'static str, percent: i32) {
    let gauge = Gauge::<f64, AtomicU64>::default();
    gauge.set(f64::from(percent) / 100.0);
    add(registry, name, gauge);
}

fn counter(registry: &mut Registry, name: &'static str, value: u64) {
    add(registry, name, ConstCounter::new(value));
}

/// Without traces there are no samples.
fn traces(registry: &mut Registry) {
    let Some(counts) = crate::traces::counts() else { return };
    let dropped = Family::<ReasonLabel, prometheus_client::metrics::counter::Counter>::default();
    for (reason, count) in [("queue_full", counts.queue_full), ("export_failed", counts.export_failed)] {
        dropped.get_or_create(&ReasonLabel { reason }).inc_by(count);
    }
    add(registry, "larder_trace_spans_dropped", dropped);
    counter(registry, "larder_trace_spans_exported", counts.exported);
}

/// Of each identity that the node has in a cluster.
fn kubernetes(registry: &mut Registry, cluster: Option<&NodeCluster>) {
    let Some(cluster) = cluster else { return };
    let status = cluster.status();
    let connected = Family::<IdentityLabel, IntegerGauge>::default();
    for (identity, connection) in [("node", status.node_identity), ("larder", status.own_identity)] {
        if let Some(connection) = connection {
            connected.get_or_create(&IdentityLabel { identity }).set(connection.connected.into());
        }
    }
    add(registry, "larder_kubernetes_connected", connected);
    gauge(registry, "larder_kubernetes_pods", status.pods.into());
    let images = Family::<StateLabel, IntegerGauge>::default();
    for (state, count) in cluster.image_counts() {
        images.get_or_create(&StateLabel { state }).set(count);
    }
    add(registry, "larder_kubernetes_image_set_images", images);
    let counts = cluster.event_counts();
    counter(registry, "larder_kubernetes_events_sent", counts.sent);
    let dropped = Family::<ReasonLabel, prometheus_client::metrics::counter::Counter>::default();
    let reasons =
        [("rate_limited", counts.rate_limited), ("failed", counts.failed), ("missed", counts.missed)];
    for (reason, count) in reasons {
        dropped.get_or_create(&ReasonLabel { reason }).inc_by(count);
    }
    add(registry, "larder_kubernetes_events_dropped", dropped);
}

fn pulls(registry: &mut Registry, manager: &ImageManager) {
    let now = Instant::now();
    let pulls = manager.pulls();
    let phases = Family::<PhaseLabel, IntegerGauge>::default();
    for phase in [PullPhase::Queued, PullPhase::Throttled, PullPhase::Pulling] {
        let count = pulls.iter().filter(|pull| pull.phase == phase).count();
        phases.get_or_create(&PhaseLabel { phase: phase.to_string() }).set(count as u64);
    }
    add(registry, "larder_pulls", phases);
    let fetched = pulls.iter().filter_map(|pull| pull.bytes).map(|bytes| bytes.done).sum();
    gauge(registry, "larder_pull_fetched_bytes", fetched);
    let oldest = pulls.iter().map(|pull| now.saturating_duration_since(pull.since)).max();
    gauge(registry, "larder_pull_oldest_age_seconds", oldest.unwrap_or_default().as_secs());
    let stall = manager.longest_stall(now).unwrap_or_default();
    gauge(registry, "larder_pull_longest_stall_seconds", stall.as_secs());
}

fn collection(registry: &mut Registry, collection: &Collection, hidden: Option<&HiddenImages>) {
    let counts = collection.unchecked_collector().counts();
    let removed = Family::<ReasonLabel, prometheus_client::metrics::counter::Counter>::default();
    removed.get_or_create(&ReasonLabel { reason: "age" }).inc_by(counts.age);
    removed.get_or_create(&ReasonLabel { reason: "space" }).inc_by(counts.space);
    add(registry, "kubelet_image_garbage_collected", removed);
    let (status, images) = (collection.status(), collection.images());
    let (status, images) = (status.borrow(), images.borrow());
    counter(registry, "larder_gc_rounds", status.rounds);
    gauge(registry, "larder_gc_consecutive_failures", status.errors);
    if let Some(ended) = status.ended {
        timestamp(registry, "larder_gc_last_round_timestamp_seconds", ended);
    }
    let policy = collection.unchecked_collector().policy();
    ratio(registry, "larder_gc_high_threshold_ratio", policy.high_threshold_percent);
    ratio(registry, "larder_gc_low_threshold_ratio", policy.low_threshold_percent);
    gauge(registry, "larder_images", images.images.len() as u64);
    gauge(registry, "larder_images_bytes", ImageStats::of(&images.images).total_storage_bytes);
    if let Some(listed) = images.listed {
        timestamp(registry, "larder_images_listed_timestamp_seconds", listed);
    }
    if let Some(hidden) = hidden {
        let hidden = images.images.iter().filter(|image| hidden.hides(image));
        gauge(registry, "larder_images_hidden", hidden.count() as u64);
    }
    gauge(registry, "larder_leases", collection.gate().active_leases().len() as u64);
}

/// Pull records. Without them there are no samples, as in a kubelet with its gate off.
fn records(registry: &mut Registry, pulls: &Pulls) {
    let Some(records) = pulls.records() else { return };
    let checks = Family::<ResultLabel, prometheus_client::metrics::counter::Counter>::default();
    for result in MustPullCheckResult::ALL {
        checks.get_or_create(&ResultLabel { result: result.name() }).inc_by(records.checks(result));
    }
    add(registry, "kubelet_imagemanager_image_mustpull_checks", checks);
    match records.on_disk() {
        Ok((intents, pulled)) => {
            gauge(registry, "kubelet_imagemanager_ondisk_pullintents", intents as u64);
            gauge(registry, "kubelet_imagemanager_ondisk_pulledrecords", pulled as u64);
        }
        Err(error) => tracing::debug!("cannot count pull records: {error}"),
    }
    gauge(registry, "kubelet_imagemanager_inmemory_pullintents_usage_percent", 0);
    let percent = records.memory_percent() as u64;
    gauge(registry, "kubelet_imagemanager_inmemory_pulledrecords_usage_percent", percent);
}

fn registries(registry: &mut Registry, storage: &Storage) {
    if storage.store().is_none() {
        return;
    }
    let counted = || Family::<RegistryLabel, prometheus_client::metrics::counter::Counter>::default();
    let measured = Family::<RegistryLabel, IntegerGauge>::default;
    let (requests, bytes, waits) = (counted(), counted(), counted());
    let (connections, waiting, held) = (measured(), measured(), measured());
    for load in storage.registry_series() {
        let label = RegistryLabel { registry: load.host };
        requests.get_or_create(&label).inc_by(load.requests);
        bytes.get_or_create(&label).inc_by(load.bytes);
        waits.get_or_create(&label).inc_by(load.waits);
        connections.get_or_create(&label).set(load.connections as u64);
        waiting.get_or_create(&label).set(load.waiting as u64);
        held.get_or_create(&label).set(load.held_for.as_secs());
    }
    for (name, counts) in [
        ("larder_registry_requests", requests),
        ("larder_registry_received_bytes", bytes),
        ("larder_registry_throttled", waits),
    ] {
        add(registry, name, counts);
    }
    for (name, levels) in [
        ("larder_registry_connections", connections),
        ("larder_registry_waiting_requests", waiting),
        ("larder_registry_retry_after_seconds", held),
    ] {
        add(registry, name, levels);
    }
}
