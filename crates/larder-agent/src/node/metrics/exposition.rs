//! State metrics, read on each request.

use std::sync::atomic::AtomicU64;
use std::time::{SystemTime, UNIX_EPOCH};

use larder::hidden::HiddenImages;
use larder::image_service::{FsStats, ImageStats};
use larder::pull::{ImageManager, PullPhase};
use larder::records::MustPullCheckResult;
use larder_api::{EnumWord as _, convert};
use larder_registry::RegistryLoad;
use larder_store::store::IncompleteLayer;
use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use super::format::with_own_names;
use super::process_stats::ProcessStats;
use super::{ExpositionFormat, Labels, add, labels};
use crate::node::cluster::NodeCluster;
use crate::node::collection::Collection;
use crate::node::pulls::Pulls;
use crate::node::{Node, NodeFilesystems, Storage};
use crate::serve::connections::Connections;

type IntegerGauge = Gauge<u64, AtomicU64>;

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

/// Registers the metrics of a process that Prometheus clients report.
fn process(registry: &mut Registry) {
    // `count by (version) (larder_build_info)` shows a rollout.
    gauges(registry, "larder_build_info", [(labels([("version", env!("CARGO_PKG_VERSION"))]), 1)]);
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
    let of = |measure: fn(&FsStats) -> u64| {
        disks.others.iter().map(move |other| {
            let content = convert::filesystem_content(other.content).word();
            let mountpoint = other.mountpoint.display().to_string();
            (labels([("content", content), ("mountpoint", &mountpoint)]), measure(&other.disk))
        })
    };
    gauges(registry, "larder_other_filesystem_size_bytes", of(|disk| disk.capacity));
    gauges(registry, "larder_other_filesystem_available_bytes", of(|disk| disk.available));
    gauges(registry, "larder_other_filesystem_inodes_free", of(|disk| disk.inodes_free));
}

/// Registers the current state.
fn register(registry: &mut Registry, node: &Node, connections: &Connections) {
    pulls(registry, node.pulls.manager());
    collection(registry, &node.collection, node.pulls.hidden());
    store(registry, &node.storage);
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

/// Registers a gauge with a sample for each of these labels.
fn gauges(registry: &mut Registry, name: &'static str, samples: impl IntoIterator<Item = (Labels, u64)>) {
    let gauges = Family::<Labels, IntegerGauge>::default();
    for (labels, value) in samples {
        gauges.get_or_create(&labels).set(value);
    }
    add(registry, name, gauges);
}

/// Registers a counter with a sample for each value of a label.
fn counters<'a>(
    registry: &mut Registry,
    name: &'static str,
    label: &'static str,
    samples: impl IntoIterator<Item = (&'a str, u64)>,
) {
    let counters = Family::<Labels, Counter>::default();
    for (value, count) in samples {
        counters.get_or_create(&labels([(label, value)])).inc_by(count);
    }
    add(registry, name, counters);
}

/// Without traces there are no samples.
fn traces(registry: &mut Registry) {
    let Some(counts) = crate::traces::counts() else { return };
    let dropped = [("queue_full", counts.queue_full), ("export_failed", counts.export_failed)];
    counters(registry, "larder_trace_spans_dropped", "reason", dropped);
    counter(registry, "larder_trace_spans_exported", counts.exported);
}

/// Of each identity that the node has in a cluster.
fn kubernetes(registry: &mut Registry, cluster: Option<&NodeCluster>) {
    let Some(cluster) = cluster else { return };
    let status = cluster.status();
    let identities = [("node", status.node_identity), ("larder", status.own_identity)];
    let connected = identities.into_iter().filter_map(|(identity, connection)| {
        Some((labels([("identity", identity)]), connection?.connected.into()))
    });
    gauges(registry, "larder_kubernetes_connected", connected);
    gauge(registry, "larder_kubernetes_pods", status.pods.into());
    let images = cluster.image_counts().into_iter().map(|(state, count)| (labels([("state", state)]), count));
    gauges(registry, "larder_kubernetes_image_set_images", images);
    let counts = cluster.event_counts();
    counter(registry, "larder_kubernetes_events_sent", counts.sent);
    let dropped =
        [("rate_limited", counts.rate_limited), ("failed", counts.failed), ("missed", counts.missed)];
    counters(registry, "larder_kubernetes_events_dropped", "reason", dropped);
}

fn pulls(registry: &mut Registry, manager: &ImageManager) {
    let now = Instant::now();
    let pulls = manager.pulls();
    let phases = [PullPhase::Queued, PullPhase::Throttled, PullPhase::Pulling].map(|phase| {
        let count = pulls.iter().filter(|pull| pull.phase == phase).count();
        (labels([("phase", &phase.to_string())]), count as u64)
    });
    gauges(registry, "larder_pulls", phases);
    let fetched = pulls.iter().filter_map(|pull| pull.bytes).map(|bytes| bytes.done).sum();
    gauge(registry, "larder_pull_fetched_bytes", fetched);
    let oldest = pulls.iter().map(|pull| now.saturating_duration_since(pull.since)).max();
    gauge(registry, "larder_pull_oldest_age_seconds", oldest.unwrap_or_default().as_secs());
    let stall = manager.longest_stall(now).unwrap_or_default();
    gauge(registry, "larder_pull_longest_stall_seconds", stall.as_secs());
}

fn collection(registry: &mut Registry, collection: &Collection, hidden: Option<&HiddenImages>) {
    let counts = collection.unchecked_collector().counts();
    let removed = [("age", counts.age), ("space", counts.space)];
    counters(registry, "kubelet_image_garbage_collected", "reason", removed);
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
    let checks = MustPullCheckResult::ALL.map(|result| (result.name(), records.checks(result)));
    counters(registry, "kubelet_imagemanager_image_mustpull_checks", "result", checks);
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

/// Gauges of layers of larder's own store whose data comes while containers read them.
fn lazy_pulls(registry: &mut Registry, storage: &Storage) {
    match storage.incomplete_layers() {
        Ok(layers) => {
            let (total, fill) = IncompleteLayer::sum(&layers);
            gauge(registry, "larder_lazy_incomplete_layers", layers.len() as u64);
            gauge(registry, "larder_lazy_filled_bytes", total.saturating_sub(fill.missing_bytes));
            gauge(registry, "larder_lazy_total_bytes", total);
            gauge(registry, "larder_lazy_waiting_reads", fill.waiting_reads);
            let oldest = layers.first().map_or(0, |layer| layer.age.as_secs());
            gauge(registry, "larder_lazy_oldest_age_seconds", oldest);
        }
        Err(error) => tracing::debug!("cannot list incomplete layers: {error}"),
    }
    match storage.suspects() {
        Ok(suspects) => gauge(registry, "larder_lazy_suspects", suspects.len() as u64),
        Err(error) => tracing::debug!("cannot list containers that may have read zeros: {error}"),
    }
}

/// Of larder's own store.
fn store(registry: &mut Registry, storage: &Storage) {
    if storage.store().is_none() {
        return;
    }
    let verification = storage.read_verification().unwrap_or_default();
    gauge(registry, "larder_store_unverified_layers", verification.guarded_layers);
    counter(registry, "larder_store_verified_bytes", verification.verified_bytes);
    counter(registry, "larder_store_damaged_pieces", verification.damaged_pieces);
    counter(registry, "larder_store_repaired_pieces", verification.repaired_pieces);
    lazy_pulls(registry, storage);
    let loads = storage.registry_series();
    for (name, count) in [
        ("larder_registry_requests", (|load| load.requests) as fn(&RegistryLoad) -> u64),
        ("larder_registry_received_bytes", |load| load.bytes),
        ("larder_registry_throttled", |load| load.waits),
    ] {
        counters(registry, name, "registry", loads.iter().map(|load| (&*load.host, count(load))));
    }
    for (name, level) in [
        ("larder_registry_connections", (|load| load.connections as u64) as fn(&RegistryLoad) -> u64),
        ("larder_registry_waiting_requests", |load| load.waiting as u64),
        ("larder_registry_retry_after_seconds", |load| load.held_for.as_secs()),
    ] {
        gauges(registry, name, loads.iter().map(|load| (labels([("registry", &load.host)]), level(load))));
    }
}
