//! Records in memory, for concurrent readers. Bounded: evicts the least recently used first.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::indexed_record::IndexedRecord;
use crate::reference::ImageId;

/// Approximate memory limit in bytes: some hundred thousand recorded credentials.
pub(super) const MEMORY_BYTES: usize = 128 << 20;

#[derive(Debug)]
pub(super) struct RecordCache {
    all: RwLock<CachedRecords>,
    /// Counts lookups: a record's last number orders records by recency.
    asked: AtomicU64,
    limit: usize,
}

#[derive(Debug, Default)]
struct CachedRecords {
    by_ref: HashMap<ImageId, CachedRecord>,
    weight: usize,
}

#[derive(Debug)]
struct CachedRecord {
    known: Arc<IndexedRecord>,
    asked: AtomicU64,
}

impl RecordCache {
    pub(super) fn new(limit: usize) -> RecordCache {
        RecordCache { all: RwLock::default(), asked: AtomicU64::new(0), limit }
    }

    pub(super) fn get(&self, image_ref: &ImageId) -> Option<Arc<IndexedRecord>> {
        let all = self.read();
        let kept = all.by_ref.get(image_ref)?;
        // A store that all readers do would make them wait for each other's cache line; a read does not.
        let now = self.asked.load(Ordering::Relaxed);
        if kept.asked.load(Ordering::Relaxed) != now {
            kept.asked.store(now, Ordering::Relaxed);
        }
        Some(Arc::clone(&kept.known))
    }

    pub(super) fn put(&self, image_ref: &ImageId, known: Arc<IndexedRecord>) {
        let mut all = self.write();
        let weight = known.weight;
        let asked = AtomicU64::new(self.asked.fetch_add(1, Ordering::Relaxed) + 1);
        let before = all.by_ref.insert(image_ref.clone(), CachedRecord { known, asked });
        all.weight += weight;
        all.weight -= before.map_or(0, |kept| kept.known.weight);
        if all.weight > self.limit {
            all.shrink_to(self.limit - self.limit / 8);
        }
    }

    /// Memory use in percent of the limit.
    pub(super) fn percent(&self) -> usize {
        self.read().weight.saturating_mul(100) / self.limit.max(1)
    }

    pub(super) fn forget(&self, image_ref: &ImageId) {
        let mut all = self.write();
        let removed = all.by_ref.remove(image_ref);
        all.weight -= removed.map_or(0, |kept| kept.known.weight);
    }

    fn read(&self) -> RwLockReadGuard<'_, CachedRecords> {
        self.all.read()
    }

    fn write(&self) -> RwLockWriteGuard<'_, CachedRecords> {
        self.all.write()
    }
}

impl CachedRecords {
    fn shrink_to(&mut self, weight: usize) {
        let mut oldest: Vec<_> = self
            .by_ref
            .iter()
            .map(|(image_ref, kept)| {
                (kept.asked.load(Ordering::Relaxed), image_ref.clone(), kept.known.weight)
            })
            .collect();
        oldest.sort_unstable_by_key(|(asked, ..)| *asked);
        for (_, image_ref, freed) in oldest {
            if self.weight <= weight {
                break;
            }
            self.by_ref.remove(&image_ref);
            self.weight -= freed;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::document::ImagePulledRecord;
    use super::*;

    #[test]
    fn the_least_recently_used_entry_is_dropped_first() {
        let known = || Arc::new(IndexedRecord::new(&ImagePulledRecord::default()));
        let memory = RecordCache::new(100 * known().weight);
        for number in 0..100 {
            memory.put(&format!("r{number}").into(), known());
        }
        for round in 0..500 {
            assert!(memory.get(&"r0".into()).is_some(), "asked for all the time");
            memory.put(&format!("n{round}").into(), known());
            assert!(memory.read().weight <= memory.limit);
        }
        assert!(memory.get(&"r1".into()).is_none());
        memory.forget(&"r0".into());
        assert!(memory.get(&"r0".into()).is_none());
    }
}
