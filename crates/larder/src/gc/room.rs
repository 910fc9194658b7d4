//! Room for pulls that were refused for lack of space: those that wait share one round.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::backend::ReclaimBytes;

/// Pulls that wait for room. One whose caller gave up is gone.
#[derive(Default)]
pub(super) struct RoomRequests {
    waiting: Mutex<Vec<Weak<RoomRequest>>>,
    /// Locked while one of them makes room.
    pub(super) round: tokio::sync::Mutex<()>,
    /// Bytes that were freed so far.
    freed: AtomicU64,
}

/// One pull that waits for room.
pub(super) struct RoomRequest {
    pub(super) bytes: ReclaimBytes,
    /// Set when a round has made the room.
    pub(super) made: OnceLock<()>,
    /// Bytes that had been freed before.
    freed_before: u64,
}

impl RoomRequests {
    pub(super) fn add(&self, bytes: ReclaimBytes) -> Arc<RoomRequest> {
        let freed_before = self.freed.load(Ordering::Relaxed);
        let request = Arc::new(RoomRequest { bytes, made: OnceLock::new(), freed_before });
        self.waiting.lock().push(Arc::downgrade(&request));
        request
    }

    /// Notes that a round has freed this much.
    pub(super) fn note_freed(&self, bytes: u64) {
        self.freed.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Whether rounds for others have freed since what this one needs. They may have left enough of it.
    pub(super) fn has_freed_since(&self, request: &RoomRequest) -> bool {
        let freed = self.freed.load(Ordering::Relaxed).saturating_sub(request.freed_before);
        freed > 0 && freed >= request.bytes.least
    }

    /// Takes the requests that wait beside this one.
    pub(super) fn take_others(&self, own: &Arc<RoomRequest>) -> Vec<Arc<RoomRequest>> {
        let mut waiting = self.waiting.lock();
        let waiting = waiting.drain(..).filter_map(|request| request.upgrade());
        waiting.filter(|other| !Arc::ptr_eq(other, own)).collect()
    }
}
