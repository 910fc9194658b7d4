//! Which settings a command has, and which daemon its flags and variables name. Flags that contradict each other are
//! refused here, before anything is opened.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use larder_agent::NodeOpenError;
use larder_agent::backend::target::{CRI, STORE, nearest_backend};
use larder_agent::backend::{BackendTarget, is_docker, target_of};
use larder_agent::client::{ControlServerAddress, find_server, is_listening, socket_path};
use larder_agent::config::{self, Config, SettingOrigin, SettingsSource, SettingsSources};
use larder_agent::environment::variable;

use super::{CommandSession, ImageAccess};
use crate::args::GlobalFlags;
use crate::args::settings::{BACKEND_VARIABLE, SettingFlags};
use crate::failure::Failure;

/// Names the socket of a daemon, as `--daemon` does.
const DAEMON_VARIABLE: &str = "LARDER_DAEMON";
/// The value that means no daemon.
const NO_DAEMON: &str = "none";
/// What it takes to work on the images in this process.
pub(super) struct LocalNodeSettings {
    pub(super) sources: SettingsSources,
    pub(super) config: Config,
    pub(super) target: BackendTarget,
    /// Another command that has them open.
    pub(super) command: Option<ControlServerAddress>,
}

impl LocalNodeSettings {
    /// Whether anything but defaults says where the images are.
    pub(super) fn is_named(&self) -> bool {
        let named = |key| *self.config.origin(key) != SettingOrigin::Default;
        ["root", "backend", "state", "containerRuntimeEndpoint", "imageServiceEndpoint"]
            .into_iter()
            .any(named)
    }
}

/// The daemon that flags or variables name.
pub(super) enum DaemonFlag {
    Nothing,
    Never,
    At(PathBuf),
}

impl CommandSession {
    /// The settings, and where they say that images are.
    pub(super) fn local_settings(&self, need: &ImageAccess) -> Result<LocalNodeSettings, NodeOpenError> {
        let (sources, config) = self.config(need)?;
        let target = target_of(&config)?;
        Ok(LocalNodeSettings { sources, config, target, command: None })
    }

    /// The backend that flags and variables name. Settings files are not read: they may have errors.
    pub(super) fn target_of_flags(&self) -> Option<BackendTarget> {
        if !self.names_images() {
            return None;
        }
        let mut sources = SettingFlags::default().sources(&self.connection);
        sources.layers.retain(|layer| matches!(layer, SettingsSource::Given { .. }));
        target_of(&config::load(&sources).ok()?).ok()
    }

    /// The settings of this command.
    pub(crate) fn config(&self, need: &ImageAccess) -> Result<(SettingsSources, Config), Failure> {
        self.check_flags(need)?;
        let flags = SettingFlags::default();
        let mut sources = if need.store_only {
            flags.sources_of_store(&self.connection)
        } else {
            flags.sources(&self.connection)
        };
        if let Some(pulling) = &need.pulling {
            sources.layers.extend(pulling.settings.iter().cloned());
        }
        if !self.reads_files {
            sources.layers.retain(|layer| matches!(layer, SettingsSource::Given { .. }));
            let (by, key) = (SettingOrigin::Default, "pull.ensuredLease");
            sources.layers.push(SettingsSource::Given { by, key, value: "0s".to_owned() });
        }
        let mut config = config::load(&sources).map_err(|errors| Failure::from(&errors))?;
        if let Some(root) = &self.connection.root {
            config.root.clone_from(root); // as it was typed, for messages
        }
        // The settings are read again each time that the command looks who has the images.
        if !self.warned.swap(true, Ordering::Relaxed) {
            for warning in &config.warnings {
                tracing::info!("{warning}");
            }
        }
        if let Some(pulling) = &need.pulling {
            config.set_pull((pulling.adjust)(config.pull.clone())?);
            for (flag, key) in &pulling.given {
                config.set_origin(key, SettingOrigin::Flag(flag));
            }
        }
        Ok((sources, config))
    }

    /// Flags that contradict each other.
    fn check_flags(&self, need: &ImageAccess) -> Result<(), Failure> {
        let connection = &self.connection;
        let backend = connection.backend.as_deref();
        if let (true, Some(other)) = (need.store_only, backend.filter(|backend| *backend != STORE)) {
            return Err(Failure::bad_input(format!(
                "--backend {other}: this command requires larder's own store"
            ))
            .hint("omit --backend, or select a store with --root DIR"));
        }
        let variable =
            || variable(BACKEND_VARIABLE).filter(|_| connection.root.is_none() && !need.store_only);
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

    /// Whether flags or variables say where images are.
    pub(super) fn names_images(&self) -> bool {
        let GlobalFlags { root, backend, state, .. } = &self.connection;
        let variable = variable(BACKEND_VARIABLE).filter(|text| text != STORE);
        root.is_some() || backend.is_some() || state.is_some() || variable.is_some()
    }

    pub(super) fn named(&self) -> Result<DaemonFlag, Failure> {
        let (text, by) = match (&self.connection.daemon, variable(DAEMON_VARIABLE)) {
            (Some(text), _) => (text.clone(), "--daemon"),
            (None, Some(text)) => (text, DAEMON_VARIABLE),
            (None, None) => return Ok(DaemonFlag::Nothing),
        };
        if text == NO_DAEMON {
            return Ok(DaemonFlag::Never);
        }
        let socket = socket_path(&text).map_err(|error| {
            Failure::bad_input(format!("{by} {text}: {error}"))
                .hint("write unix:///path/to.sock, or none for no daemon")
        })?;
        Ok(DaemonFlag::At(socket))
    }

    /// Fails where a flag names images that the named daemon does not serve.
    pub(super) fn check_agreed(&self, socket: &Path) -> Result<(), Failure> {
        let place = match (&self.connection.root, &self.connection.backend) {
            (Some(root), _) => format!("--root {}", root.display()),
            (None, Some(backend)) => format!("--backend {backend}"),
            (None, None) => return Ok(()),
        };
        // A daemon that does not answer is reported by the call.
        if !is_listening(socket).unwrap_or(false) {
            return Ok(());
        }
        let same = |a: &Path, b: &Path| {
            a == b || matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
        };
        let theirs = self.local_settings(&ImageAccess::read()).ok().and_then(|opening| {
            find_server(&opening.target, self.connection.state.as_deref()).ok().flatten()
        });
        if matches!(theirs, Some(ControlServerAddress::Daemon(theirs)) if same(&theirs, socket)) {
            return Ok(());
        }
        Err(Failure::bad_input(format!("{place}: the daemon at {} serves other images", socket.display()))
            .hint("omit one of the two, or use --daemon none"))
    }
}

/// Whether a text that a flag or a variable gives can name a backend.
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
