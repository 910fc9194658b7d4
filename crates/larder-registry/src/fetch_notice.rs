//! Notices that a fetch sends to its observer.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use larder::backend::PullWait;
use tokio::time::Instant;

/// A change in a fetch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FetchNotice {
    /// A host serves a part. Sent before its first byte, so that the host is known even if the fetch is dropped.
    Host(String),
    /// Total bytes in the sink, replacing earlier counts. Sent by the owner of the sink when a fetch begins.
    Present(u64),
    /// Bytes added to the sink.
    Bytes(u64),
    /// The fetch waits until the next notice.
    Waiting(FetchWait),
    /// The fetch no longer waits.
    Resumed,
    /// A warning that this registry has not sent before, to show to people.
    Warning(String),
}

/// The reason of a wait.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FetchWait {
    /// All connections of the registry's budget are in use.
    Connection {
        /// The registry's host.
        host: String,
    },
    /// The registry returned 429, or its quota is exhausted.
    RateLimited {
        /// The registry's host.
        host: String,
        /// When the wait ends.
        until: Instant,
    },
    /// The last attempt failed; the next one follows after a back-off.
    Retry {
        /// The registry's host.
        host: String,
        /// When the wait ends.
        until: Instant,
        /// Why the last attempt failed.
        reason: String,
    },
    /// A request for a token is in progress.
    Token {
        /// The token server's host.
        host: String,
    },
}

impl FetchWait {
    /// Converts the wait into the terms of the backend contract.
    pub fn to_pull_wait(&self) -> PullWait {
        let (reason, until) = match self {
            FetchWait::Connection { host } => (format!("no free connection to {host}"), None),
            FetchWait::RateLimited { host, until } => (format!("rate limited by {host}"), Some(*until)),
            FetchWait::Retry { host, until, reason } => (format!("retrying {host} ({reason})"), Some(*until)),
            FetchWait::Token { host } => (format!("requesting a token from {host}"), None),
        };
        PullWait { reason, until }
    }
}

/// `850ms`, `12s`, `3m20s`, `2h5m`.
pub(crate) fn short(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0 => format!("{}ms", time.as_millis()),
        1..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{}s", seconds / 60, seconds % 60),
        _ => format!("{}h{}m", seconds / 3600, seconds / 60 % 60),
    }
}

/// The observer of a fetch. Called from within the fetch, so it must return quickly.
#[derive(Clone, Default)]
pub(crate) struct FetchWatcher(Option<Arc<dyn Fn(FetchNotice) + Send + Sync>>);

impl FetchWatcher {
    pub(crate) fn new(watcher: impl Fn(FetchNotice) + Send + Sync + 'static) -> FetchWatcher {
        FetchWatcher(Some(Arc::new(watcher)))
    }

    pub(crate) fn notify(&self, notice: FetchNotice) {
        if let Some(watcher) = &self.0 {
            watcher(notice);
        }
    }
}

impl fmt::Debug for FetchWatcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watcher")
    }
}
