//! Takes over settings that changed while the daemon runs: at SIGHUP, when the file changes, and when asked.
//!
//! Promise: settings that are wrong change nothing; the old ones stay, and the status says why. If one change needs a
//! restart, all wait for it: thresholds for the disk of another root must not collect in this one.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;

use larder::events::{EventReason, EventType};
use tokio::task::{JoinError, spawn_blocking};
use tokio::time;

use super::Node;
use super::settings::keys;
use crate::config::{self, ConfigErrors};
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
    /// Keys that wait for those, and could be in force alone.
    pub(crate) held: Vec<&'static str>,
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
        self.settings.note_file_states();
        let outcome = self.take_over();
        let error = outcome.as_ref().err().map(ReloadError::line);
        self.settings.note_reload(error);
        match &outcome {
            Ok(reloaded) if *reloaded == ReloadReport::default() => {
                tracing::info!("reloaded: no changes");
            }
            Ok(ReloadReport { applied, needs_restart, held }) => {
                if !applied.is_empty() {
                    let changed = format!("Changed: {}", applied.join(", "));
                    self.observability.record(EventType::Normal, EventReason::Reloaded, changed);
                }
                if !needs_restart.is_empty() {
                    tracing::warn!("these changes need a restart: {}", needs_restart.join(", "));
                    if !held.is_empty() {
                        tracing::warn!("these changes wait for that restart: {}", held.join(", "));
                    }
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
        let reloadable = keys(config::diff(&old, &new).reloadable);
        let needs_restart = keys(config::diff(self.settings.started(), &new).needs_restart);
        self.settings.note_pending(needs_restart.clone());
        // After a degraded start as much as possible is taken over: GC is off until then.
        if !needs_restart.is_empty() && old.degraded.is_none() {
            self.collection.set_policy(old.policy(kept));
            return Ok(ReloadReport { applied: Vec::new(), needs_restart, held: reloadable });
        }
        config::last_good::save(&self.settings.sources, &files);
        self.pulls.apply(&old, &new);
        self.collection.set_policy(new.policy(kept));
        log::change(new.log.level.max(self.settings.log_level()), log::LogLineFormat::of(new.log.format));
        self.settings.replace(new);
        Ok(ReloadReport { applied: reloadable, needs_restart, held: Vec::new() })
    }

    /// Reports that the daemon started with the last good settings.
    pub(crate) fn report_degraded(&self) {
        if let Some(why) = self.settings.degraded() {
            self.observability.record(EventType::Warning, EventReason::ReloadFailed, why);
        }
    }

    /// Reloads when the files of settings change, until dropped.
    pub(super) async fn watch_files(self: &Arc<Node>) {
        loop {
            let node = Arc::clone(self);
            let looked = spawn_blocking(move || {
                if node.settings.have_files_changed() {
                    let _ = node.reload();
                }
            });
            match looked.await.map_err(JoinError::try_into_panic) {
                Ok(()) => {}
                Err(Ok(panic)) => resume_unwind(panic),
                // The runtime stops.
                Err(Err(_)) => return,
            }
            time::sleep(CHECK_INTERVAL).await;
        }
    }
}
