//! Room for pulls that were refused for lack of space: those that wait share one round.

use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use crate::backend::ReclaimBytes;

/// Pulls that wait for room. One whose caller gave up is gone.
#[derive(Default)]
pub(super) struct RoomRequests {
    waiting: Mutex<Vec<Weak<RoomRequest>>>,
    /// Locked while one of them makes room.
    pub(super) round: tokio::sync::Mutex<()>,
}

/// One pull that waits for room.
pub(super) struct RoomRequest {
    pub(super) bytes: ReclaimBytes,
    /// Set when a round has made the room.
    pub(super) made: OnceLock<()>,
}

impl RoomRequests {
    pub(super) fn add(&self, bytes: ReclaimBytes) -> Arc<RoomRequest> {
        let request = Arc::new(RoomRequest { bytes, made: OnceLock::new() });
        self.waiting.lock().push(Arc::downgrade(&request));
        request
    }

    /// Takes the requests that wait beside this one.
    pub(super) fn take_others(&self, own: &Arc<RoomRequest>) -> Vec<Arc<RoomRequest>> {
        let mut waiting = self.waiting.lock();
        let waiting = waiting.drain(..).filter_map(|request| request.upgrade());
        waiting.filter(|other| !Arc::ptr_eq(other, own)).collect()
    }
}
