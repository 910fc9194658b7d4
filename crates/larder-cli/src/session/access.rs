//! How a command needs its images, and the settings that it has of them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use larder::credentials::NodeKeyring;
use larder_agent::NodeOpenError;
use larder_agent::backend::target::{CRI, STORE, nearest_backend};
use larder_agent::backend::{BackendTarget, OpenMode, is_docker, target_of};
use larder_agent::client::socket_path;
use larder_agent::config::{self, Config, SettingOrigin, SettingsSource, SettingsSources};
use larder_agent::environment::variable;
use larder_agent::node::StateDirAccess;

use super::CommandSession;
use crate::args::settings::{BACKEND_VARIABLE, SettingFlags};
use crate::args::{GlobalFlags, PullFlags};
use crate::failure::Failure;

/// Access that a command needs to its images. [`CommandSession::open`] finds or opens them accordingly.
pub(crate) struct ImageAccess {
    /// The images of the selected backend, or those of larder's own store.
    pub(crate) scope: ImageScope,
    /// Whether a daemon has to do the work.
    pub(crate) daemon: DaemonUse,
    /// Whether a store that does not exist is created.
    pub(crate) store: OpenMode,
    /// How much of the state directory a node in this process has.
    pub(crate) state: StateDirAccess,
    /// How long the backend may take until it answers; `None` opens images without asking it.
    pub(crate) backend_within: Option<Duration>,
    /// How images are pulled by a command that pulls.
    pub(crate) pulls: Option<PullSettings>,
    /// Beginnings of the keys of settings that the command depends on; a command that pulls depends on all.
    pub(crate) settings: &'static [&'static str],
}

/// The images that a command is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ImageScope {
    /// Images of the backend that flags, variables or files select.
    Backend,
    /// Images of larder's own store: `LARDER_BACKEND` is not read.
    Store,
}

/// Whether a daemon does the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DaemonUse {
    /// If one serves the images, unless `--daemon none` is given.
    Allowed,
    /// In any case: the command is about the daemon.
    Required,
}

/// Settings that collection depends on.
const OF_COLLECTION: &[&str] =
    &["gc.", "imageGC", "imageMinimumGCAge", "imageMaximumGCAge", "state", "store.", "docker."];

/// How a node in this process pulls.
pub(crate) struct PullSettings {
    /// Flags that change the settings of pulls.
    pub(crate) flags: PullFlags,
    /// Settings that other flags of the command give a value.
    pub(crate) given: Vec<SettingsSource>,
    /// Credentials beside those that come with requests.
    pub(crate) credentials: Arc<dyn Fn() -> NodeKeyring + Send + Sync>,
}

impl ImageAccess {
    /// To list and inspect.
    pub(crate) fn read() -> ImageAccess {
        ImageAccess {
            scope: ImageScope::Backend,
            daemon: DaemonUse::Allowed,
            store: OpenMode::Existing,
            state: StateDirAccess::None,
            backend_within: None,
            pulls: None,
            settings: &[],
        }
    }

    /// To list images with their last use.
    pub(crate) fn list() -> ImageAccess {
        ImageAccess { state: StateDirAccess::Exclusive, settings: &["state"], ..ImageAccess::read() }
    }

    /// To change images, or what is recorded of them.
    pub(crate) fn write() -> ImageAccess {
        ImageAccess {
            state: StateDirAccess::CurrentUser,
            settings: &["state", "store."],
            ..ImageAccess::read()
        }
    }

    /// To pull images, from a backend that answers within this time.
    pub(crate) fn pull(pulls: PullSettings, backend_within: Duration) -> ImageAccess {
        let backend_within = Some(backend_within);
        ImageAccess { pulls: Some(pulls), backend_within, ..ImageAccess::write().create_store() }
    }

    /// To collect, or to say what collection would do.
    pub(crate) fn collect() -> ImageAccess {
        ImageAccess { state: StateDirAccess::Exclusive, settings: OF_COLLECTION, ..ImageAccess::read() }
    }

    /// To list or change what collection keeps.
    pub(crate) fn keep() -> ImageAccess {
        ImageAccess { settings: &["gc.keep", "state"], ..ImageAccess::collect() }
    }

    /// To ask or change a daemon.
    pub(crate) fn daemon() -> ImageAccess {
        ImageAccess { daemon: DaemonUse::Required, settings: &["root", "backend"], ..ImageAccess::read() }
    }

    /// Restricts it to larder's own store.
    pub(crate) fn of_store(self) -> ImageAccess {
        ImageAccess { scope: ImageScope::Store, ..self }
    }

    /// Creates a store that does not exist.
    pub(crate) fn create_store(self) -> ImageAccess {
        ImageAccess { store: OpenMode::Create, ..self }
    }

    /// Whether the setting with this key changes what the command does.
    pub(super) fn depends_on(&self, key: &str) -> bool {
        self.pulls.is_some() || self.settings.iter().any(|start| key.starts_with(start))
    }
}

/// The settings of a node in this process.
pub(super) struct LocalSettings {
    pub(super) sources: SettingsSources,
    pub(super) config: Config,
    /// Where the settings say that the images are.
    pub(super) target: BackendTarget,
}

impl LocalSettings {
    /// Whether anything but a default says where the images are.
    pub(super) fn name_images(&self) -> bool {
        let named = |key| *self.config.origin(key) != SettingOrigin::Default;
        ["root", "backend", "state", "containerRuntimeEndpoint", "imageServiceEndpoint"]
            .into_iter()
            .any(named)
    }
}

impl CommandSession {
    pub(super) fn local_settings(&self, access: &ImageAccess) -> Result<LocalSettings, NodeOpenError> {
        let (sources, config) = self.config(access)?;
        let target = target_of(&config)?;
        Ok(LocalSettings { sources, config, target })
    }

    /// The backend that flags and variables name. Settings files are not read: they may have errors.
    pub(super) fn target_of_flags(&self) -> Option<BackendTarget> {
        if !self.flags_name_images() {
            return None;
        }
        let mut sources = SettingFlags::default().sources(&self.connection);
        sources.layers.retain(|layer| matches!(layer, SettingsSource::Given { .. }));
        target_of(&config::load(&sources).ok()?).ok()
    }

    /// Whether flags or variables say where images are.
    pub(super) fn flags_name_images(&self) -> bool {
        let GlobalFlags { root, backend, state, .. } = &self.connection;
        let variable = variable(BACKEND_VARIABLE).filter(|text| text != STORE);
        root.is_some() || backend.is_some() || state.is_some() || variable.is_some()
    }

    /// The settings of this command. Flags that contradict each other are refused.
    pub(crate) fn config(&self, access: &ImageAccess) -> Result<(SettingsSources, Config), Failure> {
        self.check_flags(access.scope)?;
        let sources = self.sources(access);
        let mut config = config::load(&sources).map_err(|errors| Failure::from(&errors))?;
        if let Some(root) = &self.connection.root {
            config.root.clone_from(root); // as it was typed, for messages
        }
        // The settings are read each time that the command looks for the process that serves the images.
        if !self.warned.swap(true, Ordering::Relaxed) {
            for warning in &config.warnings {
                tracing::info!("{warning}");
            }
        }
        if let Some(PullSettings { flags, .. }) = &access.pulls {
            config.set_pull(flags.adjust(config.pull.clone())?);
            for (flag, key) in flags.given() {
                config.set_origin(key, SettingOrigin::Flag(flag));
            }
        }
        Ok((sources, config))
    }

    fn sources(&self, access: &ImageAccess) -> SettingsSources {
        let flags = SettingFlags::default();
        let mut sources = match access.scope {
            ImageScope::Backend => flags.sources(&self.connection),
            ImageScope::Store => flags.sources_of_store(&self.connection),
        };
        if let Some(PullSettings { flags, given, .. }) = &access.pulls {
            sources.layers.extend(given.iter().cloned().chain(flags.credential_tokens()));
        }
        if !self.reads_files {
            sources.layers.retain(|layer| matches!(layer, SettingsSource::Given { .. }));
            let (by, key) = (SettingOrigin::Default, "pull.ensuredLease");
            sources.layers.push(SettingsSource::Given { by, key, value: "0s".to_owned() });
        }
        sources
    }

    fn check_flags(&self, scope: ImageScope) -> Result<(), Failure> {
        let connection = &self.connection;
        let of_store = scope == ImageScope::Store;
        let backend = connection.backend.as_deref();
        if let (true, Some(other)) = (of_store, backend.filter(|backend| *backend != STORE)) {
            return Err(Failure::bad_input(format!(
                "--backend {other}: this command requires larder's own store"
            ))
            .hint("omit --backend, or select a store with --root DIR"));
        }
        let variable = || variable(BACKEND_VARIABLE).filter(|_| connection.root.is_none() && !of_store);
        let named = backend.map(|text| (text.to_owned(), "--backend"));
        let named = named.or_else(|| Some((variable()?, BACKEND_VARIABLE)));
        if let Some((text, by)) = &named {
            check_backend(text, by)?;
        }
        if let (Some(dir), Some(_)) = (&connection.certs_d, named.filter(|(named, _)| named != STORE)) {
            return Err(Failure::bad_input(format!(
                "--certs-d {}: has no effect on a runtime",
                dir.display()
            ))
            .hint("configure the runtime (containerd: config_path), or omit --backend and LARDER_BACKEND"));
        }
        if let Some(dir) = connection.certs_d.as_ref().filter(|dir| !dir.is_dir()) {
            return Err(Failure::bad_input(format!("--certs-d {}: no such directory", dir.display()))
                .hint("use a directory with REGISTRY/hosts.toml"));
        }
        Ok(())
    }
}

/// Fails unless the text of a flag or a variable can name a backend.
fn check_backend(text: &str, by: &str) -> Result<(), Failure> {
    if matches!(text, STORE | CRI) || is_docker(text) {
        return Ok(());
    }
    if let Some(meant) = nearest_backend(text) {
        return Err(Failure::bad_input(format!("{by} {text}: no such backend"))
            .hint(format!("did you mean {meant}?")));
    }
    socket_path(text).map(drop).map_err(|error| {
        Failure::bad_input(format!("{by} {text}: {error}"))
            .hint("write unix:///path/to.sock, cri for the CRI runtime of this machine, docker for Docker Engine, podman for Podman, or store for larder's own store")
    })
}
