//! Takes over settings that changed while the daemon runs: at SIGHUP, when the file changes, and when asked.
//!
//! Promise: settings that are wrong change nothing; the old ones stay, and the status says why.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use larder::events::{Event, EventType, Reason};
use tokio::sync::watch;
use tokio::time;
use tracing::Level;

use super::build;
use super::node::Node;
use crate::collect::KeepFile;
use crate::config::{self, Change, Changes, Config, Source, Sources};
use crate::log;

/// How often it is looked whether the files of settings changed.
const LOOK: Duration = Duration::from_secs(5);

/// The settings in force, and where they come from.
pub(crate) struct Settings {
    sources: Sources,
    now: watch::Sender<Arc<Config>>,
    /// The settings that the daemon was started with: some stay in force whatever is reloaded.
    started: Config,
    /// The log tells at least this much, as `-v` asked.
    loud: Level,
    /// Held while settings or rules change.
    changing: Mutex<()>,
    /// Why the last reload changed nothing.
    trouble: Mutex<Option<String>>,
}

/// What a reload did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Reloaded {
    /// Keys that changed and are in force.
    pub(crate) applied: Vec<&'static str>,
    /// Keys that changed and keep their old value until the daemon is started again.
    pub(crate) needs_restart: Vec<&'static str>,
}

impl Settings {
    /// Begins with these.
    pub(super) fn new(sources: Sources, config: Config, loud: Level) -> Settings {
        Settings {
            sources,
            started: config.clone(),
            now: watch::Sender::new(Arc::new(config)),
            loud,
            changing: Mutex::default(),
            trouble: Mutex::default(),
        }
    }

    /// Keeps others from changing settings and rules. Not to be held across an await.
    pub(super) fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keys whose value needs a restart to be in force.
    pub(super) fn pending(&self) -> Vec<&'static str> {
        keys(config::diff(&self.started, &self.now()).needs_restart)
    }

    /// The settings in force.
    pub(crate) fn now(&self) -> Arc<Config> {
        self.now.borrow().clone()
    }

    /// Told when they change.
    pub(super) fn changes(&self) -> watch::Receiver<Arc<Config>> {
        self.now.subscribe()
    }

    /// Why the last reload changed nothing, if it failed.
    pub(crate) fn trouble(&self) -> Option<String> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The files that they come from, whether they exist or not.
    pub(crate) fn files(&self) -> Vec<&Path> {
        self.sources
            .layers
            .iter()
            .filter_map(|source| match source {
                Source::File { path, .. } | Source::KubeletFile(path) => Some(path.as_path()),
                Source::Given { .. } => None,
            })
            .collect()
    }
}

impl Node {
    /// Reads all settings again, and takes over what can change. The error is all that is wrong with them.
    pub(crate) fn reload(&self) -> Result<Reloaded, String> {
        let _alone = self.settings.changing();
        let outcome = self.take_over();
        let trouble = outcome.as_ref().err().cloned();
        *self.settings.trouble.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
        match &outcome {
            Ok(reloaded) if *reloaded == Reloaded::default() => {
                tracing::info!("reloaded: nothing has changed");
            }
            Ok(Reloaded { applied, needs_restart }) => {
                if !applied.is_empty() {
                    let changed = format!("Changed: {}", applied.join(", "));
                    self.tell(EventType::Normal, Reason::Reloaded, &changed);
                }
                if !needs_restart.is_empty() {
                    tracing::warn!("these changes need a restart: {}", needs_restart.join(", "));
                }
            }
            Err(why) => self.tell(
                EventType::Warning,
                Reason::ReloadFailed,
                &format!("The settings stay as they were: {why}"),
            ),
        }
        outcome
    }

    fn take_over(&self) -> Result<Reloaded, String> {
        let old = self.settings.now();
        let new = config::load(&self.settings.sources).map_err(|mistakes| mistakes.line())?;
        for warning in &new.warnings {
            tracing::warn!("{warning}");
        }
        let kept = KeepFile::at(&self.place).read().map_err(|failure| failure.message().to_owned())?;
        let Changes { reloadable, .. } = config::diff(&old, &new);
        // Another puller begins with a queue of its own.
        if new.pull != old.pull {
            self.manager.set_config(&new.pull);
        }
        self.collector.set_policy(build::policy(&new, kept));
        if let (Some(records), Some(verification)) = (&self.records, build::verification(&new)) {
            records.set_verification(verification);
        }
        log::change(new.log.level.max(self.settings.loud), log::Format::of(new.log.format));
        self.settings.now.send_replace(Arc::new(new));
        Ok(Reloaded { applied: keys(reloadable), needs_restart: self.settings.pending() })
    }

    /// Tells what happened on the node.
    pub(super) fn tell(&self, event_type: EventType, reason: Reason, message: &str) {
        let (time, object, message) = (SystemTime::now(), self.object.clone(), message.to_owned());
        self.sink.record(Event { time, event_type, reason, object, message });
    }

    /// Reloads when the files of settings change, until dropped.
    pub(super) async fn watch_files(&self) {
        let mut before = stamps(&self.settings.files());
        loop {
            time::sleep(LOOK).await;
            let now = stamps(&self.settings.files());
            if now != before {
                before = now;
                let _ = self.reload();
            }
        }
    }
}

fn keys(changes: Vec<Change>) -> Vec<&'static str> {
    changes.into_iter().map(|change| change.key).collect()
}

/// What tells one state of a file from another, without reading it.
fn stamps(files: &[&Path]) -> Vec<(PathBuf, Option<(SystemTime, u64)>)> {
    let stamp = |path: &Path| {
        let found = fs_err::metadata(path).ok()?;
        Some((found.modified().ok()?, found.len()))
    };
    files.iter().map(|path| ((*path).to_owned(), stamp(path))).collect()
}
