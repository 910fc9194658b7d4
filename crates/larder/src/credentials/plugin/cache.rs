//! Cache of provider answers.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::credentials::DockerConfig;

/// How often expired answers are dropped.
const PURGE: Duration = Duration::from_secs(15 * 60);
/// The longest cache duration.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

#[derive(Debug)]
pub(super) struct PluginCache {
    answers: HashMap<Vec<u8>, CachedAuth>,
    purged: Instant,
}

#[derive(Debug)]
struct CachedAuth {
    auth: DockerConfig,
    /// Valid up to and including this instant.
    until: Instant,
}

impl PluginCache {
    pub(super) fn new(now: Instant) -> PluginCache {
        PluginCache { answers: HashMap::new(), purged: now }
    }

    /// Drops expired answers, at most every 15 minutes.
    pub(super) fn purge(&mut self, now: Instant) {
        if now.duration_since(self.purged) > PURGE {
            self.answers.retain(|_, answer| now <= answer.until);
            self.purged = now;
        }
    }

    pub(super) fn get(&mut self, key: &[u8], now: Instant) -> Option<DockerConfig> {
        if self.answers.get(key).is_some_and(|answer| now > answer.until) {
            self.answers.remove(key);
        }
        self.answers.get(key).map(|answer| answer.auth.clone())
    }

    /// Caches an answer for a time; `None` caches it as expired.
    pub(super) fn put(&mut self, key: Vec<u8>, auth: DockerConfig, time: Option<Duration>, now: Instant) {
        let until = match time {
            Some(time) => now + time.min(LONGEST),
            None => now.checked_sub(Duration::from_nanos(1)).unwrap_or(now),
        };
        self.answers.insert(key, CachedAuth { auth, until });
    }

    #[cfg(feature = "internals")]
    pub(super) fn keys(&self) -> Vec<Vec<u8>> {
        let mut keys: Vec<_> = self.answers.keys().cloned().collect();
        keys.sort();
        keys
    }
}
