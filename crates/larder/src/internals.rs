//! Single steps of decisions, for the conformance vectors.
//!
//! It exists only with the feature `internals`, which the vectors' crate enables. It is not part of the API.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use tokio::time::Instant;

use crate::credentials::plugin::{PluginExecutor, ProviderConfig, exec, keys};
use crate::credentials::{DockerConfigEntry, Secret, ServiceAccountCoordinates, hash, matching};
use crate::pull::{EnsureError, EnsureReason, backoff};

/// Whether a pattern of a docker config covers a target; `None` when the pattern is no URL.
pub fn url_match(pattern: &str, target: &str) -> Option<bool> {
    matching::url_match(pattern, target).ok()
}

/// Whether an image belongs to the hub.
pub fn is_default_registry(image: &str) -> bool {
    matching::is_default_registry(image)
}

/// Returns the text from which the hash of a credential is computed.
pub fn hashed_text(entry: &DockerConfigEntry) -> Secret {
    hash::hashed_text(entry)
}

/// The registry under whose name a provider's answer is kept.
pub fn registry_of(image: &str) -> &str {
    keys::registry_of(image)
}

/// `sha256:` of a token; empty without one.
pub fn token_hash(token: &Secret) -> String {
    keys::token_hash(token)
}

/// The part of a cache key that identifies the service account.
pub fn account_key(
    at: &ServiceAccountCoordinates,
    annotations: &BTreeMap<String, String>,
    token: Option<&Secret>,
) -> Vec<u8> {
    keys::account_key(at, annotations, token)
}

/// The key of a cached answer.
pub fn cache_key(base: &str, account_key: &[u8]) -> Vec<u8> {
    keys::cache_key(base, account_key)
}

/// The key of a run in progress.
pub fn flight_key(image: &str, token: &Secret, annotations: &BTreeMap<String, String>) -> Vec<u8> {
    keys::flight_key(image, token, annotations)
}

/// The program of a provider, in this directory.
pub fn provider_program(config: &ProviderConfig, dir: impl Into<PathBuf>) -> impl PluginExecutor {
    exec::ProviderProgram::new(config, dir)
}

/// The reason and the message of a failed pull.
pub fn evaluate_pull_error(image: &str, error: &str) -> (EnsureReason, String) {
    let failed = EnsureError::of_failed_pull(image, error);
    (failed.reason, failed.message)
}

/// Back-off by key.
pub struct Backoff(backoff::Backoff);

impl Backoff {
    /// No key is in back-off yet.
    pub fn new(initial: Duration, max: Duration) -> Backoff {
        Backoff(backoff::Backoff::new(initial, max))
    }

    /// Counts a failure and returns the delay that follows from it.
    pub fn fail(&mut self, key: &str, now: Instant) -> Duration {
        self.0.fail(key, now)
    }

    /// How long the key is still in back-off.
    pub fn remaining(&self, key: &str, now: Instant) -> Option<Duration> {
        self.0.remaining(key, now)
    }

    /// The key's present delay, expired or not.
    pub fn delay(&self, key: &str) -> Duration {
        self.0.delay(key)
    }

    /// Drops expired entries.
    pub fn gc(&mut self, now: Instant) {
        self.0.gc(now);
    }

    /// Drops one entry.
    pub fn reset(&mut self, key: &str) {
        self.0.reset(key);
    }
}
