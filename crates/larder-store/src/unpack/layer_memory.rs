//! Bounds the memory of all layers that this process writes or that wait for the layers below them.
//!
//! Layers share an amount. A layer that does not fit moves its names to a file; if that is not enough, it waits until
//! other layers need less, or until it may exceed the amount: one layer at a time may. That one depends on nothing but
//! its own download, which is complete by then, so a wait ends. A layer that waits for its lowers moves to files if it
//! does not fit, and never exceeds the amount.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

/// Bytes that the layers of this process share.
const LIMIT: usize = 48 << 20;

/// Interval at which a layer that waits for memory checks whether it is still wanted.
const CANCEL_CHECK: Duration = Duration::from_millis(50);

/// Memory of this process.
static OF_PROCESS: LazyLock<LayerMemory> = LazyLock::new(|| LayerMemory::new(LIMIT));

/// Memory that layers share. Clones are one.
#[derive(Debug, Clone)]
pub struct LayerMemory(Arc<SharedMemory>);

#[derive(Debug)]
struct SharedMemory {
    limit: usize,
    usage: Mutex<MemoryUsage>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct MemoryUsage {
    /// Bytes of all layers but the one that may exceed the limit.
    used: usize,
    is_exceeded: bool,
}

impl LayerMemory {
    /// So many bytes.
    pub fn new(limit: usize) -> LayerMemory {
        LayerMemory(Arc::new(SharedMemory { limit, usage: Mutex::default(), freed: Condvar::new() }))
    }

    /// Bytes of the layers that share it, without the one that may exceed the limit: never more than the limit.
    pub fn used(&self) -> usize {
        self.usage().used
    }

    /// Returns a share for one layer, still empty.
    pub(super) fn share(&self) -> LayerMemoryShare {
        LayerMemoryShare { memory: self.clone(), bytes: 0, may_exceed: false }
    }

    fn usage(&self) -> MutexGuard<'_, MemoryUsage> {
        self.0.usage.lock()
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
    memory: LayerMemory,
    bytes: usize,
    may_exceed: bool,
}

impl LayerMemoryShare {
    /// Changes to so many bytes. Returns false, and changes nothing, if it would grow and not all layers would fit.
    pub(super) fn resize(&mut self, bytes: usize) -> bool {
        if bytes == self.bytes || self.may_exceed {
            return true;
        }
        let mut usage = self.memory.usage();
        let used = usage.used - self.bytes + bytes;
        if bytes > self.bytes && used > self.memory.0.limit {
            return false;
        }
        usage.used = used;
        drop(usage);
        if bytes < self.bytes {
            self.memory.0.freed.notify_all();
        }
        self.bytes = bytes;
        true
    }

    /// Waits until the layer can change to so many bytes, or until it may exceed the limit. Returns false once
    /// `is_canceled` returns true.
    pub(super) fn wait(&mut self, bytes: usize, is_canceled: impl Fn() -> bool) -> bool {
        while !self.resize(bytes) {
            let mut usage = self.memory.usage();
            if !usage.is_exceeded {
                usage.is_exceeded = true;
                usage.used -= std::mem::take(&mut self.bytes);
                self.may_exceed = true;
                self.memory.0.freed.notify_all();
                return true;
            }
            if is_canceled() {
                return false;
            }
            self.memory.0.freed.wait_for(&mut usage, CANCEL_CHECK);
        }
        true
    }

    /// True if this is the layer that may exceed the limit.
    pub(super) fn may_exceed(&self) -> bool {
        self.may_exceed
    }

    /// Returns all bytes, and the right to exceed the limit.
    pub(super) fn release(&mut self) {
        let mut usage = self.memory.usage();
        usage.used -= std::mem::take(&mut self.bytes);
        if std::mem::take(&mut self.may_exceed) {
            usage.is_exceeded = false;
        }
        drop(usage);
        self.memory.0.freed.notify_all();
    }
}

impl Drop for LayerMemoryShare {
    fn drop(&mut self) {
        self.release();
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
        assert_eq!(memory.used(), 100, "it has what it had");
        assert!(one.resize(50) && other.resize(50));
        drop(other);
        assert!(one.resize(100));
        assert!(!one.resize(101));
    }

    #[test]
    fn one_layer_at_a_time_exceeds_the_limit_and_the_next_one_waits_for_it() {
        let memory = LayerMemory::new(100);
        let (mut first, mut second, mut small) = (memory.share(), memory.share(), memory.share());
        assert!(first.wait(500, || false) && first.may_exceed());
        assert_eq!(memory.used(), 0, "the limit is for the others");
        assert!(small.wait(100, || false) && !small.may_exceed());
        assert!(!second.wait(200, || true), "canceled while it waits");
        let waiting = std::thread::spawn(move || {
            assert!(second.wait(200, || false));
            second
        });
        assert!(first.resize(1000), "it never waits again");
        first.release();
        let second = waiting.join().unwrap();
        assert!(second.may_exceed());
        drop((second, small, first));
        assert_eq!((memory.used(), memory.usage().is_exceeded), (0, false));
    }

    #[test]
    fn a_layer_that_fits_once_others_need_less_does_not_exceed_the_limit() {
        let memory = LayerMemory::new(100);
        let (mut large, mut other, mut waiting) = (memory.share(), memory.share(), memory.share());
        assert!(large.wait(500, || false) && other.resize(60));
        let waiting = std::thread::spawn(move || {
            assert!(waiting.wait(80, || false));
            waiting
        });
        other.release();
        assert!(!waiting.join().unwrap().may_exceed());
    }
}
