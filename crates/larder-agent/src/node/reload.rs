//! Takes over settings that changed while the daemon runs: at SIGHUP, when the file changes, and when asked.
//!
//! Promise: settings that are wrong change nothing; the old ones stay, and the status says why.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use larder::events::{EventReason, EventType};
use tokio::task::spawn_blocking;
use tokio::time;

use super::Node;
use super::settings::keys;
use crate::config::{self, ConfigDiff, ConfigErrors};
use crate::error::Error;
use crate::log;
use crate::state::KeepRuleFile;

/// How often the files of the settings are checked for changes.
const CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Outcome of a reload.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct ReloadReport {
    /// Keys that changed and are in force.
    pub(crate) applied: Vec<&'static str>,
    /// Keys that changed and keep their old value until the daemon is started again.
    pub(crate) needs_restart: Vec<&'static str>,
}

/// Why a reload changed nothing.
#[derive(Debug)]
pub(crate) enum ReloadError {
    /// The settings are invalid.
    Settings(ConfigErrors),
    /// The file of keep rules cannot be read.
    KeepRules(Error),
}

impl ReloadError {
    /// For a log.
    fn line(&self) -> String {
        match self {
            ReloadError::Settings(errors) => errors.line(),
            ReloadError::KeepRules(error) => error.message().to_owned(),
        }
    }
}

impl From<ReloadError> for Error {
    fn from(error: ReloadError) -> Error {
        match error {
            ReloadError::Settings(errors) => Error::from(&errors),
            ReloadError::KeepRules(error) => error,
        }
    }
}

impl Node {
    /// Reads all settings again, and applies those that can change. Blocks on the disk.
    pub(crate) fn reload(&self) -> Result<ReloadReport, ReloadError> {
        let _alone = self.settings.changing();
        self.note_stamps();
        let outcome = self.take_over();
        let error = outcome.as_ref().err().map(ReloadError::line);
        *self.settings.last_error.lock().unwrap_or_else(PoisonError::into_inner) = error;
        match &outcome {
            Ok(reloaded) if *reloaded == ReloadReport::default() => {
                tracing::info!("reloaded: no changes");
            }
            Ok(ReloadReport { applied, needs_restart }) => {
                if !applied.is_empty() {
                    let changed = format!("Changed: {}", applied.join(", "));
                    self.observability.record(EventType::Normal, EventReason::Reloaded, changed);
                }
                if !needs_restart.is_empty() {
                    tracing::warn!("these changes need a restart: {}", needs_restart.join(", "));
                }
            }
            Err(error) => self.observability.record(
                EventType::Warning,
                EventReason::ReloadFailed,
                format!("The settings are unchanged: {}", error.line()),
            ),
        }
        outcome
    }

    fn take_over(&self) -> Result<ReloadReport, ReloadError> {
        let old = self.settings.now();
        let (new, files) = config::load_with_files(&self.settings.sources).map_err(ReloadError::Settings)?;
        for warning in &new.warnings {
            tracing::warn!("{warning}");
        }
        let kept = KeepRuleFile::at(&self.state).read().map_err(ReloadError::KeepRules)?;
        let ConfigDiff { reloadable, .. } = config::diff(&old, &new);
        self.pulls.apply(&old, &new);
        self.collection.set_policy(new.policy(kept));
        config::last_good::save(&self.settings.sources, &files);
        log::change(new.log.level.max(self.settings.log_level), log::LogLineFormat::of(new.log.format));
        self.settings.now.send_replace(Arc::new(new));
        Ok(ReloadReport { applied: keys(reloadable), needs_restart: self.settings.pending() })
    }

    /// Reports that the daemon started with the last good settings.
    pub(crate) fn report_degraded(&self) {
        if let Some(why) = self.degraded() {
            self.observability.record(EventType::Warning, EventReason::ReloadFailed, why);
        }
    }

    /// That the last good settings are in force instead of the present ones, and why.
    pub(crate) fn degraded(&self) -> Option<String> {
        let config = self.settings.now();
        let errors = config.degraded.as_ref()?;
        Some(format!("The settings are invalid; the last good ones are in force and GC is off: {errors}"))
    }

    /// Returns the problems beside errors of single calls.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let others = self.collection.warning();
        let of_settings = self.settings.now().warnings.clone();
        self.degraded().into_iter().chain(others).chain(self.storage.warnings()).chain(of_settings).collect()
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

    /// Whether the settings were fixed after a degraded start and before the first stamps of their files.
    fn is_fixed(&self) -> bool {
        self.settings.now().degraded.is_some() && config::load(&self.settings.sources).is_ok()
    }

    /// Remembers the files of the settings as they are. Whether they have changed since the last time; `None` at the first.
    fn note_stamps(&self) -> Option<bool> {
        let now = stamps(&self.settings.files());
        let mut known = self.settings.stamps.lock().unwrap_or_else(PoisonError::into_inner);
        let before = known.replace(now);
        before.map(|before| known.as_ref() != Some(&before))
    }

    /// Reloads when the files of settings change, until dropped.
    pub(super) async fn watch_files(self: &Arc<Node>) {
        loop {
            let node = Arc::clone(self);
            let looked = spawn_blocking(move || {
                if node.note_stamps().unwrap_or_else(|| node.is_fixed()) {
                    let _ = node.reload();
                }
            });
            // It fails only when the runtime stops.
            if looked.await.is_err() {
                return;
            }
            time::sleep(CHECK_INTERVAL).await;
        }
    }
}

/// Stamps that identify the states of some files.
pub(super) type FileStamps = Vec<(PathBuf, Option<(i64, i64, u64)>)>;

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
