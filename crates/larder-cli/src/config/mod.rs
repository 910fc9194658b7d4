//! The daemon's settings: where they come from, what they mean, and what is wrong with them.
//!
//! ```text
//! kubelet's file < larder's file < variables < flags  --load-->  Config, or Mistakes
//! ```
//!
//! Kubelet's settings have kubelet's names and rules; larder's own stand in sections. One [table](settings::all) has
//! them all: reading, printing, comparing and the reference page go through it. [`load`] reports every mistake at once,
//! each with file, line and key. [`diff`] says what of a new configuration can be taken over by a running daemon.

mod check;
mod diff;
mod file;
mod flags;
mod forms;
mod lists;
mod mistakes;
mod print;
mod read;
mod reference;
mod settings;
mod surroundings;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use larder::config::{Gates, ImageConfig};
use larder::credentials::Tokens;
use larder::gc::{GcPolicy, Periods};
use larder::pull::PullConfig;
use larder_cri::{CriConfig, Endpoint};
use larder_registry::RegistryConfig;
use larder_store::store::StoreConfig;

pub(crate) use diff::{Change, Changes, diff};
pub(crate) use flags::Flags;
pub(crate) use lists::{Hold, Prefetch, When};
pub(crate) use mistakes::Mistakes;
pub(crate) use print::{as_data, as_yaml};
pub(crate) use read::{Source, Sources, load};
pub(crate) use reference::page as reference_page;
pub(crate) use surroundings::Places;

/// What `apiVersion` and `kind` of larder's file must be.
pub(crate) const API_VERSION: &str = "larder.dev/v1alpha1";
pub(crate) const KIND: &str = "LarderConfiguration";

/// All settings, each with a value that was checked.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// Kubelet's own settings, with larder's defaults where those differ. `pull`, `gc` and [`Config::cri`] hold what
    /// they mean.
    pub(crate) images: ImageConfig,
    /// Kubelet's feature gate.
    pub(crate) gates: Gates,
    /// Programs that give credentials.
    pub(crate) credential_plugins: CredentialPlugins,
    /// A folder with manifests of pods whose images are ensured.
    pub(crate) static_pod_path: Option<PathBuf>,
    /// The folder of larder's own store.
    pub(crate) root: PathBuf,
    /// Where use of images is noted; `None` is the usual place of the backend.
    pub(crate) state: Option<PathBuf>,
    /// Where images live.
    pub(crate) backend: BackendAt,
    /// The socket that larder serves.
    pub(crate) listen: Listen,
    /// Where metrics are served.
    pub(crate) metrics: Metrics,
    /// What is logged.
    pub(crate) log: Log,
    /// How images are pulled, kubelet's settings included.
    pub(crate) pull: PullConfig,
    /// What is done with identity and registry tokens.
    pub(crate) credential_tokens: Tokens,
    /// How long an image that was just ensured is spared by collection.
    pub(crate) ensured_lease: Duration,
    /// How images are collected, kubelet's settings included; rules of `larder keep` come on top.
    pub(crate) gc: GcPolicy,
    /// How often things are done.
    pub(crate) periods: Periods,
    /// How larder's own store talks to registries.
    pub(crate) registry: RegistryConfig,
    /// How larder's own store works.
    pub(crate) store: StoreSettings,
    /// How a runtime is talked to; [`Config::cri`] completes it.
    pub(crate) runtime: CriConfig,
    /// Whether the cache of Docker's builder goes before images.
    pub(crate) prune_build_cache: bool,
    /// Images that are kept present.
    pub(crate) prefetch: Vec<Prefetch>,
    /// How long calls may go on once larder is told to stop.
    pub(crate) drain_grace_period: Duration,
    /// How many events are kept for those who watch later.
    pub(crate) event_ring_size: usize,
    /// What is odd and was taken as it is.
    pub(crate) warnings: Vec<String>,
    origins: BTreeMap<&'static str, Origin>,
    /// The lines of the items of settings that are lists.
    lines: BTreeMap<&'static str, Vec<usize>>,
}

/// Programs that give credentials: both or none are set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CredentialPlugins {
    /// What says which there are, a file or a folder.
    pub(crate) config: Option<PathBuf>,
    /// The folder that they are in.
    pub(crate) bin_dir: Option<PathBuf>,
}

/// Where images live.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum BackendAt {
    /// In larder's own store, at [`Config::root`].
    Store,
    /// In the runtime that kubelet's settings name; where they name none, whatever runtime runs here.
    Cri,
    /// In a Docker Engine: `docker`, or `docker://` with its address.
    Docker(String),
    /// In this runtime.
    Runtime(Endpoint),
}

/// The socket that larder serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Listen {
    /// Its path.
    pub(crate) socket: PathBuf,
    /// Its mode.
    pub(crate) mode: u32,
    /// Name or number of its group; `None` leaves it as it is made.
    pub(crate) group: Option<String>,
}

/// Where metrics are served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Metrics {
    /// The address; `None` is nowhere.
    pub(crate) address: Option<SocketAddr>,
    /// Whether the address may be one that other machines reach.
    pub(crate) allow_remote: bool,
}

/// What is logged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Log {
    /// The least important level that is.
    pub(crate) level: tracing::Level,
    /// What lines look like.
    pub(crate) format: LogFormat,
}

/// What lines of the log look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// How larder's own store works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StoreSettings {
    /// Database and half-fetched blobs.
    pub(crate) config: StoreConfig,
    /// Layers fetched and unpacked at once, over all pulls.
    pub(crate) layers_at_once: usize,
    /// Bytes that must stay free after a pull.
    pub(crate) reserve_bytes: u64,
    /// Inodes that must stay free after a pull.
    pub(crate) reserve_inodes: u64,
}

impl Config {
    /// Where a setting's value came from.
    pub(crate) fn origin(&self, key: &str) -> &Origin {
        self.origins.get(key).unwrap_or(&Origin::Default)
    }

    /// Where one item of a setting that is a list came from.
    pub(crate) fn origin_of_item(&self, key: &str, index: usize) -> Origin {
        let line = self.lines.get(key).and_then(|lines| lines.get(index)).copied();
        match (self.origin(key).clone(), line) {
            (Origin::File { path, .. }, Some(line)) => Origin::File { path, line },
            (origin, _) => origin,
        }
    }

    /// How layers come into larder's own store.
    pub(crate) fn store_pull(&self) -> larder_store::pull::PullConfig {
        let reserve =
            larder_store::disk::Amount { bytes: self.store.reserve_bytes, inodes: self.store.reserve_inodes };
        larder_store::pull::PullConfig {
            layers_at_once: self.store.layers_at_once,
            reserve,
            ensured_lease: self.ensured_lease,
            ..larder_store::pull::PullConfig::default()
        }
    }

    /// The runtime that is the backend: where it is (`None`: look for it), and how it is talked to. `None` where images
    /// are in larder's own store, or in Docker.
    pub(crate) fn cri(&self) -> Option<(Option<Endpoint>, CriConfig)> {
        let mut config = self.runtime.clone();
        config.request_timeout = self.images.runtime_request_timeout.to_std().unwrap_or_default();
        let named = |text: &str| Endpoint::parse(text).ok().filter(|_| !text.is_empty());
        match &self.backend {
            BackendAt::Store | BackendAt::Docker(_) => None,
            BackendAt::Runtime(endpoint) => Some((Some(endpoint.clone()), config)),
            BackendAt::Cri => {
                config.image_endpoint = named(&self.images.image_service_endpoint);
                Some((named(&self.images.container_runtime_endpoint), config))
            }
        }
    }
}

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Nobody wrote it.
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

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = |f: &mut fmt::Formatter<'_>, path: &Path, line: usize| match line {
            0 => write!(f, "{}", path.display()),
            line => write!(f, "{}:{line}", path.display()),
        };
        match self {
            Origin::Default => f.write_str("default"),
            Origin::File { path, line } => at(f, path, *line),
            Origin::KubeletFile { path, line } => {
                f.write_str("kubelet's ")?;
                at(f, path, *line)
            }
            Origin::Flag(name) | Origin::Variable(name) => f.write_str(name),
        }
    }
}

#[cfg(test)]
mod tests;
