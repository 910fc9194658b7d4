//! Every metric, with what it tells. `docs/metrics.md` is made from this list.

/// One metric.
#[cfg_attr(not(test), expect(dead_code, reason = "only the documentation tells kinds and labels"))]
pub(super) struct MetricDoc {
    /// Its name, to which `OpenMetrics` adds `_total` for a counter.
    pub(super) name: &'static str,
    pub(super) kind: MetricKind,
    pub(super) labels: &'static str,
    pub(super) help: &'static str,
}

/// What kind of number it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MetricKind {
    Counter,
    Gauge,
    Histogram,
}

use MetricKind::{Counter, Gauge, Histogram};

const fn metric(name: &'static str, kind: MetricKind, labels: &'static str, help: &'static str) -> MetricDoc {
    MetricDoc { name, kind, labels, help }
}

/// All of them, kubelet's first.
pub(super) const DOCUMENTED: &[MetricDoc] = &[
    metric(
        "kubelet_image_manager_ensure_image_requests",
        Counter,
        "pull_policy, present_locally, pull_required",
        "Requests to make an image present",
    ),
    metric(
        "kubelet_image_pull_duration_seconds",
        Histogram,
        "image_size_in_bytes",
        "Duration of pulls that succeeded, waiting included",
    ),
    metric(
        "kubelet_image_garbage_collected",
        Counter,
        "reason",
        "Images that collection removed, for age or for space",
    ),
    metric(
        "kubelet_imagemanager_image_mustpull_checks",
        Counter,
        "result",
        "Checks whether a pod may use a present image without a pull, by how they ended",
    ),
    metric("kubelet_imagemanager_ondisk_pullintents", Gauge, "", "Pulls that are under way or were cut off"),
    metric(
        "kubelet_imagemanager_ondisk_pulledrecords",
        Gauge,
        "",
        "Images with a record of who may use them",
    ),
    metric(
        "kubelet_imagemanager_inmemory_pulledrecords_usage_percent",
        Gauge,
        "",
        "How much of the memory for these records is taken; intents have no memory of their own",
    ),
    metric(
        "kubelet_credential_provider_plugin_duration",
        Histogram,
        "plugin_name",
        "Seconds that runs of a credential provider took",
    ),
    metric(
        "kubelet_credential_provider_plugin_errors",
        Counter,
        "plugin_name",
        "Runs of a credential provider that gave no answer",
    ),
    metric(
        "kubelet_credential_provider_config_info",
        Gauge,
        "hash",
        "1, with the hash of the files that configure credential providers",
    ),
    metric(
        "larder_pulled_image_bytes",
        Counter,
        "",
        "Sizes of the images that were pulled, as the backend counts them",
    ),
    metric("larder_events", Counter, "event_type, reason", "Events sent"),
    metric("larder_gc_promised_bytes", Counter, "reason", "Bytes that removals promised to free"),
    metric(
        "larder_gc_freed_bytes",
        Counter,
        "reason",
        "Bytes that became free on the file system while images were removed; what others wrote or deleted meanwhile is in it",
    ),
    metric("larder_gc_rounds", Counter, "", "Rounds of collection that ended"),
    metric(
        "larder_gc_failures_in_a_row",
        Gauge,
        "",
        "Rounds of collection that failed since the last that did not",
    ),
    metric("larder_images", Gauge, "", "Images that are present, as of the last listing"),
    metric(
        "larder_images_bytes",
        Gauge,
        "",
        "Sum of their sizes as the backend counts them; shared layers count again",
    ),
    metric("larder_leases", Gauge, "", "Images that collection leaves alone because they were just ensured"),
    metric("larder_pulls", Gauge, "phase", "Pulls under way: queued, throttled, pulling"),
    metric("larder_pull_fetched_bytes", Gauge, "", "Bytes that the pulls under way have fetched so far"),
    metric("larder_pull_oldest_seconds", Gauge, "", "Age of the oldest pull under way"),
    metric(
        "larder_registry_requests",
        Counter,
        "registry",
        "Requests to a registry or mirror, by the embedded store",
    ),
    metric("larder_registry_bytes", Counter, "registry", "Bytes of bodies that came from it"),
    metric("larder_registry_waits", Counter, "registry", "How often it asked to wait"),
    metric("larder_registry_connections", Gauge, "registry", "Connections to it in use for blobs"),
    metric(
        "larder_registry_waiting",
        Gauge,
        "registry",
        "Requests that wait for a connection, or because it asked to",
    ),
    metric(
        "larder_registry_held_seconds",
        Gauge,
        "registry",
        "For how much longer it asked to be left alone",
    ),
    metric("larder_backend_up", Gauge, "", "1 while the backend answers, 0 while it does not"),
    metric("larder_filesystem_size_bytes", Gauge, "", "Size of the file system that holds the store"),
    metric("larder_filesystem_available_bytes", Gauge, "", "Bytes that are free there"),
    metric("larder_filesystem_inodes_free", Gauge, "", "Inodes that are free there"),
    metric("larder_connections", Gauge, "", "Connections open on the socket"),
    metric("larder_calls", Gauge, "", "Calls under way on the socket"),
    metric("larder_start_time_seconds", Gauge, "", "When the daemon started, in seconds since 1970"),
];

/// What a metric tells.
pub(super) fn help(name: &str) -> &'static str {
    DOCUMENTED.iter().find(|metric| metric.name == name).map_or("", |metric| metric.help)
}

/// `docs/metrics.md`, which a test compares.
#[cfg(test)]
pub(super) fn page() -> String {
    use std::fmt::Write as _;

    let mut page = String::from(
        "# Metrics\n\n\
         The daemon serves OpenMetrics at `/metrics`, on its socket and on loopback. Kubelet's metrics have kubelet's \
         names. This page is generated.\n\n\
         | name | kind | labels | what it tells |\n|---|---|---|---|\n",
    );
    for MetricDoc { name, kind, labels, help } in DOCUMENTED {
        let (total, kind) = match kind {
            Counter => ("_total", "counter"),
            Gauge => ("", "gauge"),
            Histogram => ("", "histogram"),
        };
        let labels: Vec<_> =
            labels.split(", ").filter(|label| !label.is_empty()).map(|label| format!("`{label}`")).collect();
        // Writing to a text does not fail.
        let _ = writeln!(page, "| `{name}{total}` | {kind} | {} | {help} |", labels.join(", "));
    }
    page
}
