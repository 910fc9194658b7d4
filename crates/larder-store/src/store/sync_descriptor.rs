//! The descriptor that commits sync the filesystem with.
//!
//! The kernel writes files back on its own and reports an error once to each descriptor that was open when a write
//! failed. A descriptor that a commit opens for itself misses the errors that another process, such as `sync`, has
//! received. Writers of layers and blobs therefore keep one from before their first write until the commit.
//!
//! One descriptor serves all pulls. The error of a failed sync concerns each of them, although the kernel reports it to
//! the first one only, so the descriptor remembers it; what is written later gets a new one.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::disk::FilesystemSync;

/// A descriptor that several writers share.
#[derive(Debug)]
pub(crate) struct SyncDescriptor {
    filesystem: Box<dyn FilesystemSync>,
    failed: AtomicBool,
    /// Held during a sync: one that overlaps another does not get the error that the other one gets.
    syncing: Mutex<()>,
}

impl SyncDescriptor {
    pub(super) fn new(filesystem: Box<dyn FilesystemSync>) -> SyncDescriptor {
        SyncDescriptor { filesystem, failed: AtomicBool::new(false), syncing: Mutex::new(()) }
    }

    /// Returns once everything written so far is durable. Fails if a write failed since the descriptor was opened.
    pub(super) fn sync(&self) -> io::Result<()> {
        let _alone = self.syncing.lock();
        if self.has_failed() {
            return Err(io::Error::other("an earlier sync of the filesystem failed"));
        }
        self.filesystem.sync().inspect_err(|_| self.failed.store(true, Ordering::Release))
    }

    /// Whether what was written may be lost.
    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }
}

/// Whether what was written may be lost. `None` is the descriptor of a dead process.
pub(super) fn has_failed(written: Option<&Arc<SyncDescriptor>>) -> bool {
    written.is_some_and(|written| written.has_failed())
}

/// Syncs each of these descriptors once.
pub(super) fn sync_each(mut writes: Vec<Arc<SyncDescriptor>>) -> io::Result<()> {
    writes.sort_unstable_by_key(|shared| Arc::as_ptr(shared).addr());
    writes.dedup_by(|a, b| Arc::ptr_eq(a, b));
    writes.iter().try_for_each(|shared| shared.sync())
}
