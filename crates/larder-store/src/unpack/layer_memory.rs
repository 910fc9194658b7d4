//! Bounds the memory of all layers that are written at the same time: each has names in memory until its end, as many as fit.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

/// Limit of the names of one layer, and of those of all layers together, in bytes.
const LIMIT: usize = 48 << 20;

/// Memory of this process.
static OF_PROCESS: LazyLock<LayerMemory> = LazyLock::new(|| LayerMemory::new(LIMIT));

/// Memory that layers share. Clones are one.
#[derive(Debug, Clone)]
pub struct LayerMemory {
    limit: usize,
    used: Arc<AtomicUsize>,
}

impl LayerMemory {
    /// So many bytes.
    pub fn new(limit: usize) -> LayerMemory {
        LayerMemory { limit, used: Arc::default() }
    }

    /// Returns a share for one layer, still empty.
    pub(super) fn share(&self) -> LayerMemoryShare {
        LayerMemoryShare { of: self.clone(), bytes: 0 }
    }
}

impl Default for LayerMemory {
    /// 48 MiB for all layers of this process.
    fn default() -> LayerMemory {
        OF_PROCESS.clone()
    }
}

/// Share of one layer in the memory; returned when this is dropped.
#[derive(Debug)]
pub(super) struct LayerMemoryShare {
    of: LayerMemory,
    bytes: usize,
}

impl LayerMemoryShare {
    /// Changes to so many bytes. Returns false if it has grown and not all layers fit any more.
    pub(super) fn resize(&mut self, bytes: usize) -> bool {
        let more = bytes.saturating_sub(self.bytes);
        let before = self.of.used.fetch_add(more, Ordering::AcqRel);
        self.of.used.fetch_sub(self.bytes.saturating_sub(bytes), Ordering::AcqRel);
        self.bytes = bytes;
        more == 0 || before + more <= self.of.limit
    }
}

impl Drop for LayerMemoryShare {
    fn drop(&mut self) {
        self.of.used.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_share_the_memory_until_they_end() {
        let memory = LayerMemory::new(100);
        let (mut one, mut other) = (memory.share(), memory.share());
        assert!(one.resize(60) && other.resize(40));
        assert!(!other.resize(41), "both together");
        assert!(one.resize(50) && other.resize(50));
        drop(other);
        assert!(one.resize(100));
        assert!(!one.resize(101));
    }
}
