//! Every metric with its help text. `docs/metrics.md` is generated from this list.

/// One metric.
#[cfg_attr(not(test), expect(dead_code, reason = "only the documentation shows kinds and labels"))]
pub(super) struct MetricDoc {
    /// The name, without the suffix `_total` that `OpenMetrics` adds to a counter.
    pub(super) name: &'static str,
    pub(super) kind: MetricKind,
    pub(super) labels: &'static [&'static str],
    pub(super) help: &'static str,
}

/// The metric type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MetricKind {
    Counter,
    Gauge,
    Histogram,
}

/// The list of all metrics. A row has the help text, the name, the kind and the labels.
macro_rules! metrics {
    ($($(#[doc = $help:literal])+ $name:literal: $kind:ident $(($($label:ident),+))?;)+) => {
        /// All metrics, kubelet's first.
        pub(super) const DOCUMENTED: &[MetricDoc] = &[$(
            MetricDoc {
                name: $name,
                kind: MetricKind::$kind,
                labels: &[$($(stringify!($label)),+)?],
                help: concat!($($help),+).trim_ascii_start(),
            }
        ),+];
    };
}

metrics! {
    /// Requests to make an image present
    "kubelet_image_manager_ensure_image_requests": Counter(pull_policy, present_locally, pull_required);

    /// Duration of successful pulls, including time in the queue
    "kubelet_image_pull_duration_seconds": Histogram(image_size_in_bytes);

    /// Images removed by GC, for age or for space
    "kubelet_image_garbage_collected": Counter(reason);

    /// Checks whether a pod may use a present image without a pull, by result
    "kubelet_imagemanager_image_mustpull_checks": Counter(result);

    /// Pull intents on disk: in-flight and interrupted pulls
    "kubelet_imagemanager_ondisk_pullintents": Gauge;

    /// Pulled records on disk: images with the credentials that may use them
    "kubelet_imagemanager_ondisk_pulledrecords": Gauge;

    /// Usage of the in-memory cache of pull intents, in percent. Always 0: larder does not cache them
    "kubelet_imagemanager_inmemory_pullintents_usage_percent": Gauge;

    /// Usage of the in-memory cache of pulled records, in percent
    "kubelet_imagemanager_inmemory_pulledrecords_usage_percent": Gauge;

    /// Duration of credential provider runs, in seconds
    "kubelet_credential_provider_plugin_duration": Histogram(plugin_name);

    /// Failed runs of a credential provider
    "kubelet_credential_provider_plugin_errors": Counter(plugin_name);

    /// Always 1; the label is the hash of the credential provider configuration files
    "kubelet_credential_provider_config_info": Gauge(hash);

    /// Calls of larder to a container runtime over CRI, such as `pull_image`. larder's own store and Docker have none
    "kubelet_runtime_operations": Counter(operation_type);

    /// Duration of calls to a container runtime over CRI
    "kubelet_runtime_operations_duration_seconds": Histogram(operation_type);

    /// Failed and canceled calls to a container runtime over CRI
    "kubelet_runtime_operations_errors": Counter(operation_type);

    /// Total size of pulled images, as reported by the backend
    "larder_pulled_image_bytes": Counter;

    /// Time that the images of a pod were being pulled over the control API or for a static pod, the queue and retries
    /// included; parallel pulls count once. Prefetches have no pod
    "larder_pod_image_pull_seconds": Histogram;

    /// Failed pulls of the backend: access_denied, not_found, unavailable, no_space, signature, deadline, other
    "larder_pull_failures": Counter(reason);

    /// Removed images by requester: gc, cri, control
    "larder_removals": Counter(requester);

    /// Calls over CRI by method and gRPC code
    "larder_cri_calls": Counter(method, code);

    /// Events recorded
    "larder_events": Counter(event_type, reason);

    /// Bytes that image removals were planned to free
    "larder_gc_promised_bytes": Counter(reason);

    /// Bytes of removed files; where the runtime does not report them, bytes that became free on the filesystem
    "larder_gc_freed_bytes": Counter(reason);

    /// Completed GC rounds
    "larder_gc_rounds": Counter;

    /// GC rounds in a row that ended with an error. A round that removed all candidates and freed too little has none
    "larder_gc_consecutive_failures": Gauge;

    /// Time at which the last GC round ended, in seconds since the Unix epoch
    "larder_gc_last_round_timestamp_seconds": Gauge;

    /// Disk usage from which GC frees space, 0 to 1; 1 is never (imageGCHighThresholdPercent)
    "larder_gc_high_threshold_ratio": Gauge;

    /// Disk usage down to which GC frees space, 0 to 1 (imageGCLowThresholdPercent)
    "larder_gc_low_threshold_ratio": Gauge;

    /// Present images, as of the last listing
    "larder_images": Gauge;

    /// Present images that kubelet does not see yet: fetched with credentials before it asked for them, as of the last
    /// listing
    "larder_images_hidden": Gauge;

    /// Sum of the image sizes reported by the backend; shared layers count for each image
    "larder_images_bytes": Gauge;

    /// Time of the last listing, in seconds since the Unix epoch
    "larder_images_listed_timestamp_seconds": Gauge;

    /// Images retained by a lease after an ensure
    "larder_leases": Gauge;

    /// In-flight pulls by phase: queued, throttled, pulling
    "larder_pulls": Gauge(phase);

    /// Bytes that in-flight pulls have fetched so far
    "larder_pull_fetched_bytes": Gauge;

    /// Age of the oldest in-flight pull
    "larder_pull_oldest_age_seconds": Gauge;

    /// Longest time for which an in-flight pull has received nothing, of all that do not wait. A runtime over CRI
    /// reports no progress: the time since its pull started
    "larder_pull_longest_stall_seconds": Gauge;

    /// Requests of larder's own store to a registry or mirror: to each of the first 32 since the start by name, to all
    /// others as `other`
    "larder_registry_requests": Counter(registry);

    /// Bytes of response bodies received from a registry or mirror
    "larder_registry_received_bytes": Counter(registry);

    /// Responses of a registry that asked to wait (429, Retry-After)
    "larder_registry_throttled": Counter(registry);

    /// Connections to a registry in use for blobs
    "larder_registry_connections": Gauge(registry);

    /// Requests that wait for a connection or for the end of a requested wait
    "larder_registry_waiting_requests": Gauge(registry);

    /// Remaining time of the wait that a registry requested
    "larder_registry_retry_after_seconds": Gauge(registry);

    /// Layers of larder's own store whose data comes while containers read them
    "larder_lazy_incomplete_layers": Gauge;

    /// Age of the oldest incomplete layer, since an image has it; 0 without any
    "larder_lazy_oldest_age_seconds": Gauge;

    /// Bytes of incomplete layers that are here
    "larder_lazy_filled_bytes": Gauge;

    /// Bytes of incomplete layers, here or not
    "larder_lazy_total_bytes": Gauge;

    /// Reads of containers that wait for data of incomplete layers
    "larder_lazy_waiting_reads": Gauge;

    /// Time that reads of containers have waited for data of incomplete layers. Reads that found their data have none
    "larder_lazy_read_wait_seconds": Histogram;

    /// Reads of containers that have failed since the data did not come in time
    "larder_lazy_failed_reads": Counter;

    /// Requests for ranges of incomplete layers: for a `read` that waits, for one that is likely to follow
    /// (`read_ahead`), or to complete a layer (`fill`)
    "larder_lazy_requests": Counter(purpose);

    /// Bytes of such ranges that were received
    "larder_lazy_received_bytes": Counter(purpose);

    /// Mounts and containers that may have read zeros, since the guard of incomplete layers was killed, and are still
    /// there; `larder status` names them
    "larder_lazy_suspects": Gauge;

    /// Complete layers in use that have data which was not read and verified yet, with `store.verifyReads`
    "larder_store_unverified_layers": Gauge;

    /// Bytes of complete layers that were verified when they were read
    "larder_store_verified_bytes": Counter;

    /// MiB of complete layers that were found damaged when they were read
    "larder_store_damaged_pieces": Counter;

    /// Of these, those that were repaired
    "larder_store_repaired_pieces": Counter;

    /// 1 if the backend responds, 0 if not
    "larder_backend_up": Gauge;

    /// Size of the image filesystem
    "larder_filesystem_size_bytes": Gauge;

    /// Available bytes on the image filesystem
    "larder_filesystem_available_bytes": Gauge;

    /// Inodes of the image filesystem; 0 on a filesystem without a fixed number
    "larder_filesystem_inodes": Gauge;

    /// Free inodes on the image filesystem
    "larder_filesystem_inodes_free": Gauge;

    /// Size of a filesystem that the runtime reports beside the image filesystem; `content` is `containers` or
    /// `images`. GC does not act on it
    "larder_other_filesystem_size_bytes": Gauge(content, mountpoint);

    /// Available bytes on such a filesystem
    "larder_other_filesystem_available_bytes": Gauge(content, mountpoint);

    /// Free inodes on such a filesystem
    "larder_other_filesystem_inodes_free": Gauge(content, mountpoint);

    /// Open connections on the socket
    "larder_connections": Gauge;

    /// In-flight calls on the socket
    "larder_inflight_calls": Gauge;

    /// Always 1; the label is the version of larder
    "larder_build_info": Gauge(version);

    /// 1 if the present settings are in force, 0 if they are invalid and earlier ones are
    "larder_settings_valid": Gauge;

    /// Spans that the collector of traces has taken; only while traces are exported
    "larder_trace_spans_exported": Counter;

    /// Spans that were not exported: the queue was full, or the collector did not take them
    "larder_trace_spans_dropped": Counter(reason);

    /// 1 if requests to the API server succeed with this identity, 0 also where a rule or custom resource is missing:
    /// `node` is that of kubelet, `larder` its own; only with `kubernetes.enabled`
    "larder_kubernetes_connected": Gauge(identity);

    /// Pods that are bound to the node and need images; only with `kubernetes.enabled`
    "larder_kubernetes_pods": Gauge;

    /// Images that image sets want on the node, each once: `waiting` for `parallelism`, `pulling`, `present` or
    /// `failed`; only while image sets are followed
    "larder_kubernetes_image_set_images": Gauge(state);

    /// Events about the node that the API server has taken; only with `kubernetes.enabled`
    "larder_kubernetes_events_sent": Counter;

    /// Events about the node that were not sent: above the rate limit, not taken by the API server, or dropped while it
    /// was down
    "larder_kubernetes_events_dropped": Counter(reason);

    /// User and system CPU time of the daemon, in seconds
    "process_cpu_seconds": Counter;

    /// Resident memory of the daemon
    "process_resident_memory_bytes": Gauge;

    /// Virtual memory of the daemon
    "process_virtual_memory_bytes": Gauge;

    /// Open file descriptors of the daemon
    "process_open_fds": Gauge;

    /// Limit of open file descriptors
    "process_max_fds": Gauge;

    /// Start time of the daemon, in seconds since the Unix epoch
    "process_start_time_seconds": Gauge;
}

/// The help text of a metric.
pub(super) fn help(name: &str) -> &'static str {
    DOCUMENTED.iter().find(|metric| metric.name == name).map_or("", |metric| metric.help)
}

/// The text of `docs/metrics.md`; a test compares.
#[cfg(test)]
pub(super) fn page() -> String {
    use std::fmt::Write as _;

    use super::format::KUBELET_PREFIX;

    let mut page = String::from(
        "# Metrics\n\n\
         All metrics of the daemon, at `/metrics` on its socket and on `metrics.address`: in OpenMetrics format for clients that\n\
         accept it, otherwise in the Prometheus text format.\n\n    \
         curl http://127.0.0.1:9464/metrics\n\n\
         The first metrics, up to `larder_runtime_operations_errors_total`, are kubelet's. With `metrics.kubeletNames: true` they\n\
         have kubelet's names, which begin with `kubelet_` instead of `larder_`. How to scrape them, with alerts and a dashboard:\n\
         [monitoring](monitoring.md). A test generates this page.\n\n\
         | name | type | labels | meaning |\n|---|---|---|---|\n",
    );
    for MetricDoc { name, kind, labels, help } in DOCUMENTED {
        let (total, kind) = match kind {
            MetricKind::Counter => ("_total", "counter"),
            MetricKind::Gauge => ("", "gauge"),
            MetricKind::Histogram => ("", "histogram"),
        };
        let labels: Vec<_> = labels.iter().map(|label| format!("`{label}`")).collect();
        let name = name
            .strip_prefix(KUBELET_PREFIX)
            .map_or_else(|| (*name).to_owned(), |name| format!("larder_{name}"));
        // Writing to a `String` does not fail.
        let _ = writeln!(page, "| `{name}{total}` | {kind} | {} | {help} |", labels.join(", "));
    }
    page
}
