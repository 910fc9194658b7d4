//! Status of the daemon: its process, its work and its connections.

use std::path::{Path, PathBuf};

use larder::error_chain;
use larder::gc::filesystem_stats::used_percent;
use larder::gc::{ClockReading, GcPolicy, GcStatus, ImageCache, NodeImage, images_for_node_status};
use larder::image_service::{FsStats, ImageStats};
use larder_api::v1 as api;
use larder_registry::RegistryLoad;
use larder_store::lazy::ReadVerification;
use larder_store::store::{DamagedImage, IncompleteLayer};
use tokio::task::spawn_blocking;
use tokio::time::Instant;

use super::report::running_round;
use super::{DaemonAddresses, ServingProcess};
use crate::backend::publisher::Comparison;
use crate::config::Config;
use crate::node::cluster::NodeCluster;
use crate::node::collection::Collection;
use crate::node::health::BackendHealth;
use crate::node::pulls::Pulls;
use crate::node::settings::NodeSettings;
use crate::node::{Node, Storage};
use crate::serve::connections::Connections;
use larder_api::convert::{self, millis};

/// Returns the present status of the process, its work and its connections.
pub(super) async fn now(
    node: &Node,
    connections: &Connections,
    process: &ServingProcess,
) -> api::StatusResponse {
    let (configuration, disks) = (configuration(&node.settings).await, node.collection.filesystems().await);
    let (now, config) = (Instant::now(), node.settings.now());
    let health = node.storage.health().state().clone();
    let (backend_available, backend_message) = match &health {
        BackendHealth::Unknown => (true, "not checked yet".to_owned()),
        // Of a store, its format and that of its layers.
        BackendHealth::Up(info) if node.storage.store().is_some() => {
            (true, format!("{} {}, {}", info.name, info.version, info.api_version))
        }
        BackendHealth::Up(info) => (true, format!("{} {}", info.name, info.version)),
        BackendHealth::Down { why, .. } => (false, why.clone()),
    };
    let images = node.collection.images().borrow().clone();
    let addresses = match process {
        ServingProcess::Daemon(addresses) => addresses.clone(),
        ServingProcess::Command => DaemonAddresses::default(),
    };
    let calls = connections.calls().into_iter().map(|call| api::CallStatus {
        path: call.path,
        milliseconds: millis(now.saturating_duration_since(call.since)),
    });
    api::StatusResponse {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        uptime_seconds: node.observability.uptime().as_secs(),
        backend: node.storage.description().to_owned(),
        backend_available,
        backend_message,
        socket: addresses.socket.map(|socket| socket.display().to_string()),
        dashboard: addresses.dashboard,
        state: node.state.path().display().to_string(),
        pulls: node.pulls.manager().pulls().iter().map(|pull| convert::pull(pull, now)).collect(),
        gc: Some(gc_status(&node.collection, now)),
        calls: calls.collect(),
        connections: u32::try_from(connections.open()).unwrap_or(u32::MAX),
        configuration,
        reload_error: node.settings.reload_error(),
        needs_restart: node.settings.pending().into_iter().map(str::to_owned).collect(),
        node_images: node_images(&node.pulls, config.images.node_status_max_images, &images),
        images_listed: images.listed.map(convert::time),
        images_bytes: ImageStats::of(&images.images).total_storage_bytes,
        next_event: node.observability.journal().next_number(),
        pid: i32::try_from(std::process::id()).unwrap_or_default(),
        mode: mode(&node.storage, &config).to_owned(),
        containerd: containerd(&node.storage, &config),
        disk: disks.image.map(|disk| disk_use(disk, &node.collection.unchecked_collector().policy())),
        other_filesystems: disks.others.iter().map(convert::other_filesystem).collect(),
        warnings: warnings(node).await,
        registries: registries(&node.storage),
        kubernetes: node.workloads.cluster().map(NodeCluster::status),
        lazy_pulls: lazy_pulls(&node.storage, &config).await,
        read_verification: read_verification(&node.storage, &config).await,
        damaged_images: node.storage.damaged_images().await.into_iter().map(damaged_image).collect(),
    }
}

fn damaged_image(image: DamagedImage) -> api::DamagedImage {
    api::DamagedImage { image: image.name, layers: image.layers.into_iter().map(String::from).collect() }
}

/// The problems beside errors of single calls.
async fn warnings(node: &Node) -> Vec<String> {
    let own = node.settings.degraded().into_iter().chain(node.collection.warning());
    own.chain(node.suspect_warnings().await)
        .chain(node.storage.warnings())
        .chain(node.settings.now().warnings.iter().cloned())
        .collect()
}

/// Where images are.
fn mode(storage: &Storage, config: &Config) -> &'static str {
    match storage.store() {
        Some(_) if config.containerd.snapshotter => "snapshotter",
        Some(_) => "store",
        None => "runtime",
    }
}

/// Layers whose data comes while containers read them. `None` where no image is pulled so.
async fn lazy_pulls(storage: &Storage, config: &Config) -> Option<api::LazyPullStatus> {
    let store = storage.store()?.store().clone();
    let is_selected = !config.lazy.images.is_empty();
    let asked = spawn_blocking(move || {
        let layers = store.incomplete_layers(&ClockReading::now()).unwrap_or_else(|error| {
            tracing::warn!(error = error_chain(&error), "cannot list incomplete layers");
            Vec::new()
        });
        let unguarded = store.unguarded();
        if !is_selected && layers.is_empty() && unguarded.is_none() {
            return None;
        }
        let failed = unguarded.map_or_else(|| store.check_guard().map_err(|error| error_chain(&error)), Err);
        let state = match failed {
            Ok(()) if is_selected => "ready".to_owned(),
            Ok(()) => "ready for pods and image sets that ask for it (no image is selected)".to_owned(),
            Err(reason) => format!("not possible: {reason}"),
        };
        Some((state, layers))
    });
    // It fails only when the runtime stops.
    let (state, layers) = asked.await.ok()??;
    let count = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    let (total_bytes, fill) = IncompleteLayer::sum(&layers);
    Some(api::LazyPullStatus {
        state,
        incomplete_layers: count(layers.len() as u64),
        filled_bytes: total_bytes.saturating_sub(fill.missing_bytes),
        total_bytes,
        waiting_reads: count(fill.waiting_reads),
        layers: layers.into_iter().map(incomplete_layer).collect(),
    })
}

fn incomplete_layer(layer: IncompleteLayer) -> api::IncompleteLayer {
    let IncompleteLayer { key, images, total_bytes, fill, age } = layer;
    api::IncompleteLayer {
        layer: key.to_string(),
        total_bytes,
        fill: Some(convert::fill(fill)),
        age_milliseconds: millis(age),
        images,
    }
}

/// Verification of layers when they are read. `None` where that is not set.
async fn read_verification(storage: &Storage, config: &Config) -> Option<api::ReadVerificationStatus> {
    let store = storage.store()?.store().clone();
    if !config.store.verify_reads {
        return None;
    }
    let Some(report) = store.read_verification() else {
        let reason = spawn_blocking(move || match store.check_guard() {
            Ok(()) => "see the log of the start".to_owned(),
            Err(error) => error_chain(&error),
        });
        let problem = Some(reason.await.ok()?);
        return Some(api::ReadVerificationStatus { problem, ..Default::default() });
    };
    let ReadVerification { guarded_layers, verified_bytes, damaged_pieces, repaired_pieces } = report;
    Some(api::ReadVerificationStatus {
        problem: None,
        unverified_layers: guarded_layers,
        verified_bytes,
        damaged_pieces,
        repaired_pieces,
    })
}

/// The containerd that runs containers from the store.
fn containerd(storage: &Storage, config: &Config) -> Option<api::ContainerdStatus> {
    if mode(storage, config) != "snapshotter" {
        return None;
    }
    let count = |images: usize| u32::try_from(images).unwrap_or(u32::MAX);
    let last = storage.publisher().map_or_else(Comparison::default, |publisher| publisher.last_comparison());
    Some(api::ContainerdStatus {
        socket: config.containerd.socket.clone(),
        version: last.version,
        published: count(last.published),
        pending: count(last.pending),
        compared: last.at.map(|at| at.to_string()),
        problem: last.problem,
    })
}

/// The images as kubelet reports them in the status of its node.
fn node_images(pulls: &Pulls, most: i32, images: &ImageCache) -> Vec<api::NodeImage> {
    let visible = images.images.iter().filter(|image| !pulls.hides(image)).cloned().collect();
    // A list that is at hand cannot fail.
    let reported = images_for_node_status(most, Ok(visible)).unwrap_or_default();
    let image = |image: NodeImage| api::NodeImage { names: image.names, size_bytes: image.size_bytes };
    reported.into_iter().map(image).collect()
}

/// The image filesystem, on which GC acts.
fn disk_use(disk: FsStats, policy: &GcPolicy) -> api::DiskUse {
    let limits = (policy.high_threshold_percent < 100)
        .then_some((policy.high_threshold_percent, policy.low_threshold_percent));
    let has_inodes = disk.inodes > 0;
    api::DiskUse {
        size_bytes: disk.capacity,
        available_bytes: disk.available,
        inodes: disk.inodes,
        inodes_free: disk.inodes_free,
        used_percent: used_percent(disk.capacity, disk.available),
        gc_starts_at_percent: limits.map(|(high, _)| high.into()),
        gc_frees_to_percent: limits.map(|(_, low)| low.into()),
        inodes_used_percent: has_inodes.then(|| used_percent(disk.inodes, disk.inodes_free)),
        gc_starts_at_inodes_percent: policy
            .inodes
            .filter(|limits| has_inodes && limits.high_percent < 100)
            .map(|limits| limits.high_percent.into()),
    }
}

/// The files that the settings come from.
async fn configuration(settings: &NodeSettings) -> Option<String> {
    let mut files: Vec<PathBuf> = settings.files().into_iter().map(Path::to_owned).collect();
    let present = spawn_blocking(move || {
        files.retain(|file| file.exists());
        files
    });
    // It fails only when the runtime stops.
    let files: Vec<_> = present.await.ok()?.iter().map(|file| file.display().to_string()).collect();
    (!files.is_empty()).then(|| files.join(", "))
}

/// The registries and mirrors of the store.
fn registries(storage: &Storage) -> Vec<api::RegistryStatus> {
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    let registry = |load: RegistryLoad| api::RegistryStatus {
        connections: count(load.connections),
        connection_limit: count(load.limit),
        waiting_requests: count(load.waiting),
        retry_after_milliseconds: (!load.held_for.is_zero()).then(|| millis(load.held_for)),
        requests: load.requests,
        throttled: load.waits,
        received_bytes: load.bytes,
        quota_remaining: load.quota.map(|quota| quota.remaining),
        quota_limit: load.quota.and_then(|quota| quota.limit),
        host: load.host,
    };
    storage.registry_loads().into_iter().map(registry).collect()
}

fn gc_status(collection: &Collection, now: Instant) -> api::GcStatus {
    let round = collection.unchecked_collector().progress();
    let status = collection.status();
    let status: &GcStatus = &status.borrow();
    api::GcStatus {
        round: round.map(|round| running_round(&round, now)),
        rounds: status.rounds,
        running: status.running,
        ended: status.ended.map(convert::time),
        result: status.last.as_ref().map(ToString::to_string),
        failures: status.failures,
    }
}
