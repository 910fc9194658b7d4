//! How many pulls of an image run in this process.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// By image as requested.
#[derive(Debug, Default)]
pub(super) struct InFlight(Mutex<HashMap<String, usize>>);

impl InFlight {
    fn map(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn begins(&self, image: &str) {
        *self.map().entry(image.to_owned()).or_default() += 1;
    }

    /// Says whether it was the last, or none was known.
    pub(super) fn ends(&self, image: &str) -> bool {
        let mut map = self.map();
        match map.get_mut(image) {
            Some(count) if *count > 1 => {
                *count -= 1;
                false
            }
            _ => {
                map.remove(image);
                true
            }
        }
    }

    pub(super) fn count(&self, image: &str) -> usize {
        self.map().get(image).copied().unwrap_or(0)
    }
}
