//! Waits for other processes of larder's own store, for `fsck`, which needs the store alone.

use std::time::Duration;

use larder::go_format;
use larder::hint::Hint;
use larder_agent::NodeOpenError;
use larder_agent::backend::target_of;
use larder_agent::client::{ControlServerAddress, find_server};
use larder_agent::config::Config;
use tokio::time::{self, Instant};

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
    is_daemon: bool,
}

impl StoreUser {
    fn of(config: &Config, name: &str, is_daemon: bool) -> StoreUser {
        let message = format!("the store {} is in use by {name}", config.root.display());
        StoreUser { message, is_daemon }
    }

    fn refusal(&self, waited: Duration) -> Failure {
        let failure = Failure::unreachable(format!("fsck requires exclusive access: {}", self.message));
        if self.is_daemon {
            return failure.hint(
                "stop the daemon (systemctl stop larder), rerun the command, then start the daemon again",
            );
        }
        let hint = if waited.is_zero() {
            Hint::new()
        } else {
            Hint::from(format!("waited {} (--timeout); ", go_format::duration(waited)))
        };
        failure.hint(hint.command(["fsck", "--wait"]).text(" waits until the store is free"))
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
        let (started, mut retry, mut printed) = (Instant::now(), OPEN_RETRY, String::new());
        loop {
            let user = match self.store_user(config).await? {
                Some(daemon) if daemon.is_daemon => daemon,
                named => match open() {
                    Err(NodeOpenError::InUse(error)) => named.unwrap_or_else(|| StoreUser {
                        message: error.message().to_owned(),
                        is_daemon: false,
                    }),
                    opened => return Ok(opened?),
                },
            };
            if let Some(limit) = wait.limit(user.is_daemon, self.connection.timeout)
                && started.elapsed() >= limit
            {
                return Err(user.refusal(limit));
            }
            if printed != user.message {
                self.out.info(format_args!("note: waiting: {} (Ctrl-C ends the wait)", user.message));
                printed = user.message;
            }
            time::sleep(retry).await;
            retry = (retry * 2).min(OPEN_RETRY_MAX);
        }
    }

    /// The process that serves the store, if one does.
    async fn store_user(&self, config: &Config) -> Result<Option<StoreUser>, Failure> {
        Ok(match find_server(&target_of(config)?, config.state.as_deref())? {
            Some(ControlServerAddress::Daemon(socket)) => {
                Some(StoreUser::of(config, &format!("the daemon at {}", socket.display()), true))
            }
            Some(ControlServerAddress::Command(socket)) => {
                self.process_of(socket).await.map(|name| StoreUser::of(config, &name, false))
            }
            None => None,
        })
    }
}
