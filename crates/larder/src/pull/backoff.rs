//! Back-off after failed pulls. Pure: time is an argument.
//!
//! Counted per key: the first failure sets the initial delay, and each further one doubles it, up to the maximum. An
//! entry expires when its last failure is more than twice the maximum ago. Success does not reset a key.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use tokio::time::Instant;

use super::ensure::BackendFailure;
use crate::credentials::Credential;

/// Number of entries from which a failure drops expired ones.
const PURGE_AT: usize = 1024;

/// Hashes of the credentials of a pull, in order. Excludes credentials from programs, which may return a new token each
/// time and so would disable the back-off.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct CredentialHashes(Vec<String>);

impl CredentialHashes {
    /// The hashes of these credentials.
    pub(crate) fn of(credentials: &[Credential]) -> Self {
        let written = credentials.iter().filter(|credential| !credential.origin.is_program());
        CredentialHashes(written.map(|credential| credential.hash.clone()).collect())
    }
}

/// Prints only the count: short passwords can be guessed from a hash.
impl fmt::Debug for CredentialHashes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Shown({})", self.0.len())
    }
}

/// Back-off by key, with the failure that led to it.
#[derive(Debug)]
pub(crate) struct Backoff {
    initial: Duration,
    max: Duration,
    entries: HashMap<String, FailureBackoff>,
}

#[derive(Debug)]
struct FailureBackoff {
    delay: Duration,
    last_failure: Instant,
    /// The credentials of the last failure.
    shown: Option<CredentialHashes>,
    /// The last failure as text with the backend's details, until a new attempt starts.
    remembered: Option<(String, Option<BackendFailure>)>,
}

impl Backoff {
    /// No key is in back-off yet. An `initial` above `max` is used once as it is; only doubling is capped.
    pub(crate) fn new(initial: Duration, max: Duration) -> Self {
        Backoff { initial, max, entries: HashMap::new() }
    }

    /// Sets the limits for later failures.
    pub(crate) fn set_limits(&mut self, initial: Duration, max: Duration) {
        (self.initial, self.max) = (initial, max);
    }

    /// Counts a failure and returns the delay that follows from it.
    pub(crate) fn fail(&mut self, key: &str, now: Instant) -> Duration {
        if self.entries.len() >= PURGE_AT {
            self.gc(now);
        }
        let delay = match self.entries.get(key) {
            Some(entry) if !self.expired(entry, now) => entry.delay.saturating_mul(2).min(self.max),
            _ => self.initial,
        };
        let entry = FailureBackoff { delay, last_failure: now, shown: None, remembered: None };
        self.entries.insert(key.to_owned(), entry);
        delay
    }

    /// Records the credentials of a key's last failure. No effect without an entry.
    pub(crate) fn note_shown(&mut self, key: &str, shown: CredentialHashes) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.shown = Some(shown);
        }
    }

    /// Whether a key's last failure had other credentials, if these were recorded.
    pub(crate) fn has_new_credentials(&self, key: &str, shown: &CredentialHashes) -> bool {
        let noted = self.entries.get(key).and_then(|entry| entry.shown.as_ref());
        noted.is_some_and(|noted| noted != shown)
    }

    /// Records the text and the details of a key's last failure. No effect without an entry.
    pub(crate) fn remember(&mut self, key: &str, text: String, failure: Option<BackendFailure>) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.remembered = Some((text, failure));
        }
    }

    /// The text and details of a key's last failure.
    pub(crate) fn remembered(&self, key: &str) -> Option<(&str, Option<&BackendFailure>)> {
        let (text, failure) = self.entries.get(key)?.remembered.as_ref()?;
        Some((text, failure.as_ref()))
    }

    /// Drops the text of a key's last failure when a new attempt starts, but not the delay.
    pub(crate) fn forget(&mut self, key: &str) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.remembered = None;
        }
    }

    /// How long the key is still in back-off; `None` when it is free. At exactly the delay it is free.
    pub(crate) fn remaining(&self, key: &str, now: Instant) -> Option<Duration> {
        let entry = self.entries.get(key).filter(|entry| !self.expired(entry, now))?;
        let elapsed = now.saturating_duration_since(entry.last_failure);
        entry.delay.checked_sub(elapsed).filter(|left| !left.is_zero())
    }

    /// The key's present delay, expired or not; zero without an entry.
    pub(crate) fn delay(&self, key: &str) -> Duration {
        self.entries.get(key).map_or(Duration::ZERO, |entry| entry.delay)
    }

    /// Drops expired entries.
    pub(crate) fn gc(&mut self, now: Instant) {
        let max_age = self.max_age();
        self.entries.retain(|_, entry| now.saturating_duration_since(entry.last_failure) <= max_age);
    }

    /// Drops one entry.
    #[cfg(feature = "internals")]
    pub(crate) fn reset(&mut self, key: &str) {
        self.entries.remove(key);
    }

    fn expired(&self, entry: &FailureBackoff, now: Instant) -> bool {
        now.saturating_duration_since(entry.last_failure) > self.max_age()
    }

    fn max_age(&self) -> Duration {
        self.max.saturating_mul(2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::CallErrorKind;

    #[test]
    fn entries_do_not_pile_up_without_a_success() {
        let start = Instant::now();
        let mut backoff = Backoff::new(Duration::from_secs(10), Duration::from_secs(300));
        for i in 0..10 * PURGE_AT {
            backoff.fail(&format!("pod-{i}_app"), start + Duration::from_secs(i as u64));
        }
        assert!(backoff.entries.len() <= PURGE_AT + 601, "{} entries", backoff.entries.len());
    }

    #[test]
    fn a_new_attempt_forgets_the_failure_and_keeps_the_delay() {
        let start = Instant::now();
        let mut backoff = Backoff::new(Duration::from_secs(10), Duration::from_secs(300));
        let failure = Some(BackendFailure { kind: CallErrorKind::NotFound, hint: None });
        backoff.fail("k", start);
        backoff.remember("k", "ErrImagePull: 404".into(), failure.clone());
        assert_eq!(backoff.remembered("k"), Some(("ErrImagePull: 404", failure.as_ref())));
        backoff.forget("k");
        assert_eq!(backoff.remembered("k"), None);
        assert_eq!(backoff.fail("k", start), Duration::from_secs(20));
    }
}
