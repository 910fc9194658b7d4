//! The settings in force, and where they come from.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;
use tracing::Level;

use crate::config::{self, Config, SettingChange, SettingsSource, SettingsSources};
use crate::error::Error;

/// The settings in force, and where they come from.
pub(crate) struct NodeSettings {
    pub(crate) sources: SettingsSources,
    now: watch::Sender<Arc<Config>>,
    /// The settings that the daemon was started with: some stay in force whatever is reloaded.
    started: Config,
    /// Keys of the changes that wait for a restart.
    pending: Mutex<Vec<&'static str>>,
    /// The minimum log level, as set by `-v`.
    log_level: Level,
    /// Held while settings or rules change.
    changing: Mutex<()>,
    /// Why the last reload changed nothing.
    last_error: Mutex<Option<String>>,
    /// The files as they were last read or looked at.
    stamps: Mutex<Option<FileStamps>>,
}

impl NodeSettings {
    /// Begins with these.
    pub(crate) fn new(sources: SettingsSources, config: Config, log_level: Level) -> NodeSettings {
        NodeSettings {
            sources,
            started: config.clone(),
            pending: Mutex::default(),
            log_level,
            changing: Mutex::default(),
            last_error: Mutex::new(config.degraded.clone()),
            stamps: Mutex::default(),
            now: watch::Sender::new(Arc::new(config)),
        }
    }

    /// Keeps others from changing settings and rules. Not to be held across an await.
    pub(crate) fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock()
    }

    /// The settings that the daemon was started with.
    pub(super) fn started(&self) -> &Config {
        &self.started
    }

    /// Keys whose value waits for a restart.
    pub(crate) fn pending(&self) -> Vec<&'static str> {
        self.pending.lock().clone()
    }

    /// Notes the keys whose value waits for a restart.
    pub(super) fn note_pending(&self, keys: Vec<&'static str>) {
        *self.pending.lock() = keys;
    }

    /// The settings in force.
    pub(crate) fn now(&self) -> Arc<Config> {
        self.now.borrow().clone()
    }

    /// Works with a setting until it changes, and then with the new one.
    pub(super) async fn for_each<T: PartialEq + Clone>(
        &self,
        setting: impl Fn(&Config) -> T,
        mut work: impl AsyncFnMut(T),
    ) {
        let mut subscriber = self.now.subscribe();
        loop {
            let now = setting(&subscriber.borrow_and_update());
            let changed = async {
                // The sender lives as long as the settings.
                let _ = subscriber.wait_for(|config| setting(config) != now).await;
            };
            tokio::select! {
                () = work(now.clone()) => return,
                () = changed => {}
            }
        }
    }

    /// Why the last reload changed nothing, if it failed.
    pub(crate) fn reload_error(&self) -> Option<String> {
        self.last_error.lock().clone()
    }

    /// Puts other settings in force.
    pub(super) fn replace(&self, config: Config) {
        self.now.send_replace(Arc::new(config));
    }

    /// The minimum log level, as set by `-v`.
    pub(super) fn log_level(&self) -> Level {
        self.log_level
    }

    /// Records why a reload changed nothing, or that it succeeded.
    pub(super) fn note_reload(&self, error: Option<String>) {
        *self.last_error.lock() = error;
    }

    /// That the last good settings are in force instead of the present ones, and why.
    pub(crate) fn degraded(&self) -> Option<String> {
        let config = self.now();
        let errors = config.degraded.as_ref()?;
        Some(format!("The settings are invalid; the last good ones are in force and GC is off: {errors}"))
    }

    /// Fails while GC is off because the settings are invalid.
    pub(crate) fn require_gc(&self) -> Result<(), Error> {
        match self.degraded() {
            Some(why) => {
                Err(Error::failed(why).hint("fix the settings: larder reads them again within seconds"))
            }
            None => Ok(()),
        }
    }

    /// Whether the files of the settings have changed since this was last asked; at first, whether the settings were
    /// fixed after a degraded start.
    pub(super) fn have_files_changed(&self) -> bool {
        let is_fixed = || self.now().degraded.is_some() && config::load(&self.sources).is_ok();
        self.note_file_states().unwrap_or_else(is_fixed)
    }

    /// Remembers the files of the settings as they are. Whether they have changed since the last time; `None` at the
    /// first.
    pub(super) fn note_file_states(&self) -> Option<bool> {
        let now = stamps(&self.files());
        let mut known = self.stamps.lock();
        let before = known.replace(now);
        before.map(|before| known.as_ref() != Some(&before))
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

/// Stamps that identify the states of some files.
type FileStamps = Vec<(PathBuf, Option<(i64, i64, u64)>)>;

/// Identifies a state of a file without reading it: its change time, which a `chmod` sets as well, and its length.
fn stamps(files: &[&Path]) -> FileStamps {
    let stamp = |path: &Path| {
        let found = fs_err::metadata(path).ok()?;
        Some((found.ctime(), found.ctime_nsec(), found.len()))
    };
    files.iter().map(|path| ((*path).to_owned(), stamp(path))).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::time::Duration;

    use larder_testkit_peers::process::poll;

    use super::*;

    #[test]
    fn a_file_that_is_made_readable_has_changed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let before = stamps(&[file.path()]);
        assert_eq!(before, stamps(&[file.path()]));
        // The kernel's clock for these times is coarse.
        let changed = poll(Duration::from_secs(10), || {
            fs_err::set_permissions(file.path(), std::fs::Permissions::from_mode(0o600)).unwrap();
            (stamps(&[file.path()]) != before).then_some(())
        });
        assert!(changed.is_some());
    }
}
