//! Settings: sources, values and errors. Commands and the daemon read the same settings.
//!
//! ```text
//! kubelet's file < larder's file < variables < flags  --load-->  Config, or ConfigErrors
//! ```
//!
//! Kubelet's settings have kubelet's names and rules; larder's own stand in sections. One table has
//! them all: reading, printing, comparing and the reference page go through it. [`load`] reports all errors at once,
//! each with file, line and key. [`diff`] says what of a new configuration can be taken over by a running daemon.

mod check;
mod codecs;
mod config_errors;
mod diff;
mod evictions;
mod file;
mod kubernetes;
pub(crate) mod last_good;
mod lists;
mod print;
mod read;
mod reference;
mod settings;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use larder::config::{FeatureGates, ImageSettings};
use larder::credentials::TokenPolicy;
use larder::gc::{GcIntervals, GcPolicy};
use larder::pull::PullConfig;
use larder::records::Verification;
use larder::retention::{KeepRule, Selector};
use larder_cri::{CriConfig, Endpoint};
use larder_registry::RegistryConfig;
use larder_store::store::StoreConfig;

pub use config_errors::ConfigErrors;
pub use diff::{ConfigDiff, SettingChange, diff};
pub use kubernetes::KubernetesSettings;
pub use lists::{PrefetchItem, PrefetchRetention, PrefetchSchedule};
pub use print::{as_data, as_yaml, explicit_settings, join_settings, kubelet_flags, value_of};
pub(crate) use read::{SettingsFiles, load_with_files};
pub use read::{SettingsSource, SettingsSources, load};
pub use reference::page as reference_page;

/// The `apiVersion` of a settings file.
pub const API_VERSION: &str = "larder.dev/v1alpha1";
/// The `kind` of a settings file.
pub const KIND: &str = "LarderConfiguration";

/// All settings, each with a value that was checked.
#[derive(Debug, Clone)]
pub struct Config {
    /// Kubelet's own settings, with larder's defaults where those differ. `pull`, `gc` and `Config::cri` hold what
    /// they mean.
    pub images: ImageSettings,
    /// Kubelet's feature gate.
    pub gates: FeatureGates,
    /// Programs that give credentials.
    pub credential_plugins: CredentialPlugins,
    /// A directory with manifests of pods whose images are ensured.
    pub static_pod_path: Option<PathBuf>,
    /// The directory of larder's own store.
    pub root: PathBuf,
    /// The state directory; `None` is the default of the backend.
    pub state: Option<PathBuf>,
    /// Where images live.
    pub backend: BackendSetting,
    /// The socket that larder serves.
    pub listen: ListenSettings,
    /// Where metrics are served.
    pub metrics: MetricsSettings,
    /// The page for browsers.
    pub dashboard: DashboardSettings,
    /// Where kubelet asks for images.
    pub kubelet_images: KubeletImageService,
    /// Which images are pinned over CRI.
    pub cri_pins: CriPinSettings,
    /// How containerd uses larder's own store.
    pub containerd: ContainerdSettings,
    /// Level and format of the log.
    pub log: LogSettings,
    /// Where traces go.
    pub tracing: TracingSettings,
    /// How images are pulled, kubelet's settings included.
    pub pull: PullConfig,
    /// How identity and registry tokens are treated.
    pub credential_tokens: TokenPolicy,
    /// Lease of an ensured image.
    pub ensured_lease: Duration,
    /// Images whose containers may start before their layers are complete.
    pub lazy: LazySettings,
    /// Which present images need credentials; `None` where kubelet's feature gate is off, and no pull records are kept.
    pub verification: Option<Verification>,
    /// The GC policy, including kubelet's settings, without the rules of `larder keep`.
    pub gc: GcPolicy,
    /// Intervals of GC and of listings.
    pub gc_intervals: GcIntervals,
    /// The registry client of larder's own store.
    pub registry: RegistryConfig,
    /// larder's own store.
    pub store: StoreSettings,
    /// Connection to a runtime; `Config::cri` completes it.
    pub runtime: CriConfig,
    /// Whether GC removes Docker's build cache before images.
    pub prune_build_cache: bool,
    /// The cluster of the node.
    pub kubernetes: KubernetesSettings,
    /// Images that are kept present.
    pub prefetch: Vec<PrefetchItem>,
    /// How long in-flight calls may continue after a request to stop.
    pub drain_grace_period: Duration,
    /// Number of recent events kept for later watchers.
    pub event_ring_size: usize,
    /// Warnings about accepted settings.
    pub warnings: Vec<String>,
    /// On hosts without kubelet: how long ago a container exited that is removed; `None` removes none.
    pub exited_container_age: Option<Duration>,
    /// Why these are the last good settings and not the present ones: the errors of those.
    pub degraded: Option<String>,
    origins: BTreeMap<&'static str, SettingOrigin>,
    /// The lines of the items of settings that are lists.
    lines: BTreeMap<&'static str, Vec<usize>>,
}

/// Programs that give credentials: both or none are set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CredentialPlugins {
    /// File or directory that configures the programs.
    pub config: Option<PathBuf>,
    /// The directory that they are in.
    pub bin_dir: Option<PathBuf>,
}

/// Where images live.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackendSetting {
    /// In larder's own store, at [`Config::root`].
    Store,
    /// In the runtime that kubelet's settings name; where they name none, whatever runtime runs here.
    Cri,
    /// In a Docker Engine: `docker`, or `docker://` with its address.
    Docker(String),
    /// In this runtime.
    Runtime(Endpoint),
}

/// Images whose containers may start before their layers are complete.
#[derive(Debug, Clone)]
pub struct LazySettings {
    /// The images, by name or digest.
    pub images: Vec<Selector>,
    /// Compressed bytes of a layer that is pulled lazily, at least.
    pub minimum_size: u64,
    /// How long a read waits for data.
    pub read_timeout: Duration,
}

/// The socket that larder serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenSettings {
    /// Its path.
    pub socket: PathBuf,
    /// Its mode.
    pub mode: u32,
    /// Name or number of its group; `None` leaves it as it is made.
    pub group: Option<String>,
}

/// Where metrics are served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetricsSettings {
    /// The address; `None` is nowhere.
    pub address: Option<SocketAddr>,
    /// Whether the address may be one that other machines reach.
    pub allow_remote: bool,
    /// Whether metrics that kubelet has are under kubelet's names.
    pub kubelet_names: bool,
}

/// The page for browsers, on the address of the metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DashboardSettings {
    /// When it is served.
    pub serve: DashboardServing,
    /// Names in the `Host` header that are accepted beside loopback and the address itself.
    pub hosts: Vec<String>,
}

/// When the dashboard is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DashboardServing {
    /// On a loopback address.
    Loopback,
    /// On any address.
    Always,
    /// On none.
    Never,
}

/// Where the kubelet of this host asks for images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KubeletImageService {
    /// Over larder's socket, which can hide images from it.
    Larder,
    /// The runtime or Docker, which shows all images.
    Runtime,
    /// There is no kubelet.
    None,
}

/// Which images callers of CRI see as pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CriPinSettings {
    /// Images of keep rules, of the prefetch list and of static pods.
    pub kept: bool,
    /// Mounted images of larder's own store.
    pub mounted: bool,
    /// Images with a lease of `larder lease` in larder's own store.
    pub leased: bool,
}

/// How containerd uses larder's own store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerdSettings {
    /// Serve containerd's snapshot service on the socket.
    pub snapshotter: bool,
    /// Fetch the layers that the store lacks, if containerd says of which image they are.
    pub fetch_layers: bool,
    /// Socket of the containerd to which images are published.
    pub socket: Option<String>,
}

/// Level and format of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogSettings {
    /// The least important level that is.
    pub level: tracing::Level,
    /// Format of lines.
    pub format: LogFormat,
}

/// Where traces go, as kubelet's `tracing` says it. Unset, the environment decides.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TracingSettings {
    /// The collector: `host:port`, a socket, or a URL.
    pub endpoint: Option<String>,
    /// How it is called.
    pub protocol: TraceProtocol,
    /// How many of a million traces that begin in this process are sampled.
    pub sampled_per_million: u32,
    /// Whether kubelet's file has the section `tracing`, which turns kubelet's traces on even if it is empty.
    pub in_kubelet_file: bool,
}

impl TracingSettings {
    /// Whether traces are on by these settings.
    pub fn is_set(&self) -> bool {
        self.endpoint.is_some() || self.sampled_per_million > 0 || self.in_kubelet_file
    }
}

/// A protocol of OTLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TraceProtocol {
    /// gRPC.
    #[default]
    Grpc,
    /// HTTP with protocol buffers.
    HttpProtobuf,
    /// HTTP with JSON.
    HttpJson,
}

/// Format of the lines of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// How larder's own store works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreSettings {
    /// Database and half-fetched blobs.
    pub config: StoreConfig,
    /// Layers of one registry fetched and unpacked at once, over all pulls.
    pub layers_at_once: usize,
    /// The rate below which a layer's fetch gives way to waiting pulls.
    pub minimum_rate: larder::backend::MinimumRate,
    /// Bytes that must stay free after a pull.
    pub reserve_bytes: u64,
    /// Inodes that must stay free after a pull.
    pub reserve_inodes: u64,
    /// Uncompressed bytes of one layer.
    pub max_layer_bytes: u64,
    /// Uncompressed bytes of all layers of an image.
    pub max_image_bytes: u64,
    /// Uncompressed bytes of an image for each compressed byte; 0 is no limit.
    pub max_expansion: u64,
    /// Whether complete layers are verified when they are read.
    pub verify_reads: bool,
}

impl Config {
    /// Where a setting's value came from.
    pub fn origin(&self, key: &str) -> &SettingOrigin {
        self.origins.get(key).unwrap_or(&SettingOrigin::Default)
    }

    /// Whether this build serves the dashboard on the address of the metrics.
    pub(crate) fn serves_dashboard(&self) -> bool {
        cfg!(feature = "dashboard")
            && match self.dashboard.serve {
                DashboardServing::Loopback => {
                    self.metrics.address.is_some_and(|address| address.ip().is_loopback())
                }
                DashboardServing::Always => true,
                DashboardServing::Never => false,
            }
    }

    /// Notes that something that is no source gave a setting its value.
    pub fn set_origin(&mut self, key: &'static str, origin: SettingOrigin) {
        self.origins.insert(key, origin);
    }

    /// Where one item of a setting that is a list came from.
    pub fn origin_of_item(&self, key: &str, index: usize) -> SettingOrigin {
        let line = self.lines.get(key).and_then(|lines| lines.get(index)).copied();
        match (self.origin(key).clone(), line) {
            (SettingOrigin::File { path, .. }, Some(line)) => SettingOrigin::File { path, line },
            (origin, _) => origin,
        }
    }

    /// Changes how images are pulled, and the settings of kubelet's that say so.
    pub fn set_pull(&mut self, pull: PullConfig) {
        let whole = |number: u32| i32::try_from(number).unwrap_or(i32::MAX);
        self.images.serialize_image_pulls = pull.serialize_image_pulls;
        self.images.max_parallel_image_pulls = pull.max_parallel_image_pulls.map(|bound| whole(bound.get()));
        self.images.registry_pull_qps = whole(pull.registry_pull_qps);
        self.images.registry_burst = whole(pull.registry_burst);
        self.pull = pull;
    }

    /// How layers come into larder's own store.
    pub fn store_pull(&self) -> larder_store::pull::StorePullConfig {
        let reserve = larder_store::disk::DiskSpace {
            bytes: self.store.reserve_bytes,
            inodes: self.store.reserve_inodes,
        };
        larder_store::pull::StorePullConfig {
            scheduler: larder::scheduler::Scheduler::for_layers(self.store.layers_at_once),
            minimum_rate: self.store.minimum_rate,
            reserve,
            lazy: larder_store::pull::LazyPulls {
                images: self.lazy.images.clone(),
                minimum_size: self.lazy.minimum_size,
            },
            verify_reads: self.store.verify_reads,
            limits: larder_store::unpack::UnpackLimits {
                max_plain_bytes: self.store.max_layer_bytes,
                max_image_bytes: self.store.max_image_bytes,
                max_expansion: self.store.max_expansion,
                ..larder_store::unpack::UnpackLimits::default()
            },
            ..larder_store::pull::StorePullConfig::default()
        }
    }

    /// The runtime that is the backend: its endpoint (`None`: look for one), and how it is talked to. `None` where
    /// images are in larder's own store, or in Docker.
    pub(crate) fn cri(&self) -> Option<(Option<Endpoint>, CriConfig)> {
        let mut config = CriConfig { refuse_larder: true, ..self.runtime.clone() };
        config.request_timeout = self.images.runtime_request_timeout.to_std().unwrap_or_default();
        config.connect_timeout = config.connect_timeout.min(config.request_timeout);
        let named = |text: &str| Endpoint::parse(text).ok().filter(|_| !text.is_empty());
        match &self.backend {
            BackendSetting::Store | BackendSetting::Docker(_) => None,
            BackendSetting::Runtime(endpoint) => Some((Some(endpoint.clone()), config)),
            BackendSetting::Cri => {
                config.image_endpoint = named(&self.images.image_service_endpoint);
                Some((named(&self.images.container_runtime_endpoint), config))
            }
        }
    }

    /// The GC policy, with the rules of `larder keep` after those of the settings.
    pub fn policy(&self, kept: Vec<KeepRule>) -> GcPolicy {
        let mut policy = self.gc.clone();
        policy.keep.extend(kept);
        policy
    }
}

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SettingOrigin {
    /// larder's default.
    Default,
    /// Larder's file.
    File {
        /// As the user named it.
        path: PathBuf,
        /// The line, from 1; 0 if not known.
        line: usize,
    },
    /// A file of kubelet's.
    KubeletFile {
        /// As the user named it.
        path: PathBuf,
        /// The line, from 1; 0 if not known.
        line: usize,
    },
    /// A flag of this name.
    Flag(&'static str),
    /// A variable of this name.
    Variable(&'static str),
}

impl fmt::Display for SettingOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = |f: &mut fmt::Formatter<'_>, path: &Path, line: usize| match line {
            0 => write!(f, "{}", path.display()),
            line => write!(f, "{}:{line}", path.display()),
        };
        match self {
            SettingOrigin::Default => f.write_str("default"),
            SettingOrigin::File { path, line } => at(f, path, *line),
            SettingOrigin::KubeletFile { path, line } => {
                f.write_str("kubelet's ")?;
                at(f, path, *line)
            }
            SettingOrigin::Flag(name) | SettingOrigin::Variable(name) => f.write_str(name),
        }
    }
}

#[cfg(test)]
mod tests;
