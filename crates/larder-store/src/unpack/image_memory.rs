//! Bounds the memory of all images that are written at the same time: each has its names in memory until its end.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

/// What the names of one layer may take, and those of all layers together.
const LIMIT: usize = 48 << 20;

/// That of this process.
static OF_PROCESS: LazyLock<ImageMemory> = LazyLock::new(|| ImageMemory::new(LIMIT));

/// Memory that images share. Clones are one.
#[derive(Debug, Clone)]
pub struct ImageMemory {
    limit: usize,
    used: Arc<AtomicUsize>,
}

impl ImageMemory {
    /// So many bytes.
    pub fn new(limit: usize) -> ImageMemory {
        ImageMemory { limit, used: Arc::default() }
    }

    /// What one image has of it: nothing yet.
    pub(super) fn share(&self) -> ImageMemoryShare {
        ImageMemoryShare { of: self.clone(), bytes: 0 }
    }
}

impl Default for ImageMemory {
    /// 48 MiB for all images of this process.
    fn default() -> ImageMemory {
        OF_PROCESS.clone()
    }
}

/// What one image has of the shared memory; given back when this is dropped.
#[derive(Debug)]
pub(super) struct ImageMemoryShare {
    of: ImageMemory,
    bytes: usize,
}

impl ImageMemoryShare {
    /// Grows to so many bytes; false if not all images fit then.
    pub(super) fn grow_to(&mut self, bytes: usize) -> bool {
        let more = bytes.saturating_sub(self.bytes);
        if more == 0 {
            return true;
        }
        let before = self.of.used.fetch_add(more, Ordering::AcqRel);
        self.bytes += more;
        before + more <= self.of.limit
    }
}

impl Drop for ImageMemoryShare {
    fn drop(&mut self) {
        self.of.used.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_share_the_memory_until_they_end() {
        let memory = ImageMemory::new(100);
        let (mut one, mut other) = (memory.share(), memory.share());
        assert!(one.grow_to(60) && one.grow_to(50) && other.grow_to(40));
        assert!(!other.grow_to(41), "both together");
        drop(other);
        assert!(one.grow_to(100));
        assert!(!one.grow_to(101));
    }
}
