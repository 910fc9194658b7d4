//! How long to leave an image alone after a failed pull. Pure: time is an argument.
//!
//! Counted per key; a failure starts at the initial delay and each further one doubles it, up to the maximum. An entry
//! is forgotten once its last failure is more than twice the maximum ago. Success does not reset a key.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use tokio::time::Instant;

use super::ensure::BackendAdvice;
use crate::credentials::Credential;

/// How many entries may pile up before expired ones are dropped on a failure.
const PURGE_AT: usize = 1024;

/// What a pull shows to a registry, as far as people write it down: hashes, in order. What programs give is left out, since
/// they may give a new token each time, and there would be no back-off for their images.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct CredentialHashes(Vec<String>);

impl CredentialHashes {
    /// What these credentials show.
    pub(crate) fn of(credentials: &[Credential]) -> Self {
        let written = credentials.iter().filter(|credential| !credential.origin.is_program());
        CredentialHashes(written.map(|credential| credential.hash.clone()).collect())
    }
}

/// Says how many: short passwords can be guessed from a hash.
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
    /// What was shown to the registry at the last failure.
    shown: Option<CredentialHashes>,
    /// The last failure as text with what could be tried next, until a new attempt starts.
    remembered: Option<(String, Option<BackendAdvice>)>,
}

impl Backoff {
    /// No key is in back-off yet. An `initial` above `max` is used once as it is; only doubling is capped.
    pub(crate) fn new(initial: Duration, max: Duration) -> Self {
        Backoff { initial, max, entries: HashMap::new() }
    }

    /// Other limits, for the failures that come.
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

    /// Notes what was shown to the registry at a key's last failure. Without an entry there is nothing to note it for.
    pub(crate) fn note_shown(&mut self, key: &str, shown: CredentialHashes) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.shown = Some(shown);
        }
    }

    /// Whether something else was shown at a key's last failure, as far as that was noted.
    pub(crate) fn has_new_credentials(&self, key: &str, shown: &CredentialHashes) -> bool {
        let noted = self.entries.get(key).and_then(|entry| entry.shown.as_ref());
        noted.is_some_and(|noted| noted != shown)
    }

    /// Remembers the text of a key's last failure, and what could be tried next. Without an entry there is nothing to remember it for.
    pub(crate) fn remember(&mut self, key: &str, failure: String, advice: Option<BackendAdvice>) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.remembered = Some((failure, advice));
        }
    }

    /// What was remembered of a key's last failure.
    pub(crate) fn remembered(&self, key: &str) -> Option<(&str, Option<&BackendAdvice>)> {
        let (failure, advice) = self.entries.get(key)?.remembered.as_ref()?;
        Some((failure, advice.as_ref()))
    }

    /// Forgets the text of a key's last failure, because a new attempt starts. The delay stays.
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
        let advice = Some(BackendAdvice { kind: CallErrorKind::NotFound, hint: "check the tag".into() });
        backoff.fail("k", start);
        backoff.remember("k", "ErrImagePull: 404".into(), advice.clone());
        assert_eq!(backoff.remembered("k"), Some(("ErrImagePull: 404", advice.as_ref())));
        backoff.forget("k");
        assert_eq!(backoff.remembered("k"), None);
        assert_eq!(backoff.fail("k", start), Duration::from_secs(20));
    }
}
