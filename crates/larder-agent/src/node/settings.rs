//! The settings in force, and where they come from.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use tracing::Level;

use super::reload::FileStamps;
use crate::config::{self, Config, SettingChange, SettingsSource, SettingsSources};

/// The settings in force, and where they come from.
pub(crate) struct NodeSettings {
    pub(crate) sources: SettingsSources,
    pub(super) now: watch::Sender<Arc<Config>>,
    /// The settings that the daemon was started with: some stay in force whatever is reloaded.
    started: Config,
    /// The minimum log level, as set by `-v`.
    pub(super) log_level: Level,
    /// Held while settings or rules change.
    changing: Mutex<()>,
    /// Why the last reload changed nothing.
    pub(super) last_error: Mutex<Option<String>>,
    /// The files as they were last read or looked at.
    pub(super) stamps: Mutex<Option<FileStamps>>,
}

impl NodeSettings {
    /// Begins with these.
    pub(crate) fn new(sources: SettingsSources, config: Config, log_level: Level) -> NodeSettings {
        NodeSettings {
            sources,
            started: config.clone(),
            log_level,
            changing: Mutex::default(),
            last_error: Mutex::new(config.degraded.clone()),
            stamps: Mutex::default(),
            now: watch::Sender::new(Arc::new(config)),
        }
    }

    /// Keeps others from changing settings and rules. Not to be held across an await.
    pub(crate) fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keys whose value needs a restart to be in force.
    pub(crate) fn pending(&self) -> Vec<&'static str> {
        keys(config::diff(&self.started, &self.now()).needs_restart)
    }

    /// The settings in force.
    pub(crate) fn now(&self) -> Arc<Config> {
        self.now.borrow().clone()
    }

    /// Notified on each change.
    pub(crate) fn changes(&self) -> watch::Receiver<Arc<Config>> {
        self.now.subscribe()
    }

    /// Why the last reload changed nothing, if it failed.
    pub(crate) fn reload_error(&self) -> Option<String> {
        self.last_error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether a kubelet's file is among the sources.
    pub(super) fn reads_kubelet_file(&self) -> bool {
        self.sources.layers.iter().any(|source| matches!(source, SettingsSource::KubeletFile(_)))
    }

    /// The files that they come from, whether they exist or not.
    pub(crate) fn files(&self) -> Vec<&Path> {
        self.sources
            .layers
            .iter()
            .filter_map(|source| match source {
                SettingsSource::File { path, .. } | SettingsSource::KubeletFile(path) => Some(path.as_path()),
                SettingsSource::Given { .. } | SettingsSource::GivenList { .. } => None,
            })
            .collect()
    }
}

/// The keys of these changes.
pub(super) fn keys(changes: Vec<SettingChange>) -> Vec<&'static str> {
    changes.into_iter().map(|change| change.key).collect()
}
