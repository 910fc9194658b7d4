//! What a fetch tells whoever watches it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use larder::backend::PullWait;
use tokio::time::Instant;

/// What happens to a fetch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FetchNotice {
    /// A host serves some of it. Told before its first byte, so that it is known who lied even when a fetch is dropped.
    Host(String),
    /// So many bytes are in the sink, whatever was told before. Told by who owns the sink, when a fetch begins.
    Present(u64),
    /// So many bytes were written to the sink.
    Bytes(u64),
    /// It waits, until another notice comes.
    Waiting(FetchWait),
    /// It waits no more.
    Resumed,
}

/// What a fetch waits for. Prints as a sentence's end: `rate limited by registry.example for 12s`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum FetchWait {
    /// All connections that the registry gets are in use.
    Connection {
        /// The registry's host.
        host: String,
    },
    /// The registry said 429, or that its quota is used up.
    RateLimited {
        /// The registry's host.
        host: String,
        /// When the wait ends.
        until: Instant,
    },
    /// The last try failed; the next one comes soon.
    Retry {
        /// The registry's host.
        host: String,
        /// When the wait ends.
        until: Instant,
        /// Why the last try failed.
        because: String,
    },
    /// A token server is asked for a token.
    Token {
        /// The token server's host.
        host: String,
    },
}

impl FetchWait {
    /// The same for those who know no registries.
    pub fn to_pull_wait(&self) -> PullWait {
        let (reason, until) = match self {
            FetchWait::Connection { host } => (format!("waiting for a free connection to {host}"), None),
            FetchWait::RateLimited { host, until } => (format!("rate limited by {host}"), Some(*until)),
            FetchWait::Retry { host, until, because } => {
                (format!("retrying {host} after {because}"), Some(*until))
            }
            FetchWait::Token { host } => (format!("requesting a token from {host}"), None),
        };
        PullWait { reason, until }
    }
}

impl fmt::Display for FetchWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let left = |until: &Instant| short(until.saturating_duration_since(Instant::now()));
        match self {
            FetchWait::Connection { host } => write!(f, "waiting for a free connection to {host}"),
            FetchWait::RateLimited { host, until } => write!(f, "rate limited by {host} for {}", left(until)),
            FetchWait::Retry { host, until, because } => {
                write!(f, "retrying {host} in {} ({because})", left(until))
            }
            FetchWait::Token { host } => write!(f, "requesting a token from {host}"),
        }
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

/// Whoever watches. Called from the fetch itself, so it must be quick.
#[derive(Clone, Default)]
pub(crate) struct FetchWatcher(Option<Arc<dyn Fn(FetchNotice) + Send + Sync>>);

impl FetchWatcher {
    pub(crate) fn new(watcher: impl Fn(FetchNotice) + Send + Sync + 'static) -> FetchWatcher {
        FetchWatcher(Some(Arc::new(watcher)))
    }

    pub(crate) fn tell(&self, notice: FetchNotice) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn reasons_say_how_long_it_still_takes() {
        let host = "registry.example".to_owned();
        let until = Instant::now() + Duration::from_secs(200);
        assert_eq!(
            FetchWait::RateLimited { host: host.clone(), until }.to_string(),
            "rate limited by registry.example for 3m20s"
        );
        let because = "500 Internal Server Error".to_owned();
        let until = Instant::now() + Duration::from_millis(850);
        assert_eq!(
            FetchWait::Retry { host, until, because }.to_string(),
            "retrying registry.example in 850ms (500 Internal Server Error)"
        );
    }
}
