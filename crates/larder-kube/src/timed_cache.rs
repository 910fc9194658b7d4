//! Answers that are valid for a time. Pure: time is an argument.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use tokio::time::Instant;

/// How long a failure is used at most: as long as the first back-off of a pull.
pub(crate) const FAILURE: Duration = Duration::from_secs(10);

/// Answers by key.
#[derive(Debug)]
pub(crate) struct TimedCache<K, V> {
    entries: HashMap<K, Timed<V>>,
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Timed<V> {
    pub(crate) value: V,
    /// From then on another answer is requested; this one serves if that fails.
    pub(crate) refresh: Instant,
    /// From then on it is no longer valid.
    pub(crate) expires: Instant,
}

impl<K, V> Default for TimedCache<K, V> {
    fn default() -> Self {
        TimedCache { entries: HashMap::new() }
    }
}

impl<K: Eq + Hash, V: Clone> TimedCache<K, V> {
    /// The answer, if it is valid.
    pub(crate) fn get(&self, key: &K, now: Instant) -> Option<Timed<V>> {
        self.entries.get(key).filter(|known| now < known.expires).cloned()
    }

    /// Drops expired answers.
    pub(crate) fn put(&mut self, key: K, answer: Timed<V>, now: Instant) {
        self.entries.retain(|_, known| now < known.expires);
        self.entries.insert(key, answer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_valid_until_it_expires_and_dropped_then() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let answer = |value, seconds| Timed { value, refresh: at(seconds), expires: at(seconds) };
        let mut cache = TimedCache::default();
        cache.put("a", answer(1, 10), at(0));
        assert_eq!(cache.get(&"a", at(9)).map(|known| known.value), Some(1));
        assert_eq!(cache.get(&"a", at(10)), None);
        cache.put("b", answer(2, 20), at(10));
        assert_eq!(cache.entries.len(), 1);
    }
}
