//! Locks of layers that are extracted where they cannot be mounted.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::LayerKey;

/// One lock for each layer that is being extracted.
#[derive(Debug, Default)]
pub(crate) struct ExtractionLocks(Mutex<HashMap<LayerKey, Weak<Mutex<()>>>>);

impl ExtractionLocks {
    /// The lock of this layer.
    pub(crate) fn of(&self, key: &LayerKey) -> Arc<Mutex<()>> {
        let mut locks = self.0.lock();
        locks.retain(|_, lock| lock.strong_count() > 0);
        if let Some(lock) = locks.get(key).and_then(Weak::upgrade) {
            return lock;
        }
        let lock = Arc::default();
        locks.insert(key.clone(), Arc::downgrade(&lock));
        lock
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_layer_has_a_lock_of_its_own_while_it_is_extracted() {
        let locks = ExtractionLocks::default();
        let key = |digit: &str| LayerKey::parse(&digit.repeat(64)).unwrap();
        let (one, other) = (locks.of(&key("1")), locks.of(&key("2")));
        assert!(Arc::ptr_eq(&one, &locks.of(&key("1"))) && !Arc::ptr_eq(&one, &other));
        drop((one, other));
        let _third = locks.of(&key("3"));
        assert_eq!(locks.0.lock().len(), 1, "those of complete extractions are dropped");
    }
}
