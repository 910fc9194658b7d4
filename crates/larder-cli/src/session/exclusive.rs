//! Waits for other processes of larder's own store, for `fsck`, which needs the store alone.

use std::time::Duration;

use larder::go_format;
use larder::hint::Hint;
use larder::retry::{RetryAdvice, RetryPolicy, retry};
use larder_agent::NodeOpenError;
use larder_agent::backend::target_of;
use larder_agent::client::{ControlServerAddress, find_server};
use larder_agent::config::Config;

use super::failures::DaemonProcess;
use super::wait_notes::WaitNotes;
use super::{CommandSession, OPEN_RETRY, OPEN_RETRY_MAX, OPEN_WITHIN};
use crate::failure::Failure;

/// How long `fsck` waits for the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoreWait {
    /// For commands, which end by themselves, up to `--timeout`; not for a daemon.
    Default,
    /// For any process, however long it takes.
    Unlimited,
    /// Not at all.
    Never,
}

impl StoreWait {
    /// For how long; `None` without limit.
    fn limit(self, by_daemon: bool, timeout: Option<Duration>) -> Option<Duration> {
        match self {
            StoreWait::Unlimited => None,
            StoreWait::Default if !by_daemon => Some(timeout.unwrap_or(OPEN_WITHIN)),
            StoreWait::Default | StoreWait::Never => Some(Duration::ZERO),
        }
    }
}

/// Another process that has the store, as a message says it.
struct StoreUser {
    message: String,
    /// The process, if it is a daemon.
    daemon: Option<DaemonProcess>,
}

impl StoreUser {
    fn of(config: &Config, name: &str, daemon: Option<DaemonProcess>) -> StoreUser {
        let message = format!("the store {} is in use by {name}", config.root.display());
        StoreUser { message, daemon }
    }

    fn refusal(&self, waited: Duration) -> Failure {
        let failure = Failure::unreachable(format!("fsck requires exclusive access: {}", self.message));
        if let Some(daemon) = &self.daemon {
            let stop = daemon.stop_command().map_or_else(String::new, |stop| format!(" ({stop})"));
            return failure
                .hint(format!("stop the daemon{stop}, rerun the command, then start the daemon again"));
        }
        let hint = if waited.is_zero() {
            Hint::new()
        } else {
            Hint::from(format!("waited {} (--timeout); ", go_format::duration(waited)))
        };
        failure.hint(hint.command(["fsck", "--wait"]).text(" waits until the store is free"))
    }
}

/// Why a store could not be opened in one attempt.
enum AloneFailure {
    /// Another process has it.
    Busy(StoreUser),
    /// Another attempt would fail in the same way.
    Failed(Failure),
}

impl From<Failure> for AloneFailure {
    fn from(failure: Failure) -> Self {
        AloneFailure::Failed(failure)
    }
}

impl CommandSession {
    /// Opens the store with `open` when no other process has it.
    pub(crate) async fn open_alone<T>(
        &self,
        wait: StoreWait,
        config: &Config,
        open: impl Fn() -> Result<T, NodeOpenError>,
    ) -> Result<T, Failure> {
        let text = |failure: &AloneFailure| match failure {
            AloneFailure::Busy(user) => format!("waiting: {} (Ctrl-C ends the wait)", user.message),
            AloneFailure::Failed(_) => String::new(), // is not retried
        };
        let notes = WaitNotes::new(&self.out, Duration::ZERO, true, text);
        let limit = |user: &StoreUser| wait.limit(user.daemon.is_some(), self.connection.timeout);
        let advice = |failure: &AloneFailure| match failure {
            AloneFailure::Busy(user) if limit(user).is_none_or(|limit| notes.elapsed() < limit) => {
                RetryAdvice::Backoff
            }
            _ => RetryAdvice::GiveUp,
        };
        let policy = RetryPolicy::unlimited(OPEN_RETRY, OPEN_RETRY_MAX);
        let opened = retry(&policy, &notes, advice, || self.try_open_alone(config, &open)).await;
        opened.map_err(|failure| match failure {
            AloneFailure::Busy(user) => user.refusal(limit(&user).unwrap_or_default()),
            AloneFailure::Failed(failure) => failure,
        })
    }

    async fn try_open_alone<T>(
        &self,
        config: &Config,
        open: &impl Fn() -> Result<T, NodeOpenError>,
    ) -> Result<T, AloneFailure> {
        let named = match self.store_user(config).await? {
            Some(user) if user.daemon.is_some() => return Err(AloneFailure::Busy(user)),
            named => named,
        };
        open().map_err(|error| match error {
            NodeOpenError::InUse(error) => AloneFailure::Busy(
                named.unwrap_or_else(|| StoreUser { message: error.message().to_owned(), daemon: None }),
            ),
            error => AloneFailure::Failed(error.into()),
        })
    }

    /// The process that serves the store, if one does.
    async fn store_user(&self, config: &Config) -> Result<Option<StoreUser>, Failure> {
        Ok(match find_server(&target_of(config)?, config.state.as_deref())? {
            Some(ControlServerAddress::Daemon(socket)) => {
                let name = format!("the daemon at {}", socket.display());
                let daemon = self.daemon_process(socket).await;
                Some(StoreUser::of(config, &name, Some(daemon)))
            }
            Some(ControlServerAddress::Command(socket)) => {
                self.process_of(socket).await.map(|name| StoreUser::of(config, &name, None))
            }
            None => None,
        })
    }
}
