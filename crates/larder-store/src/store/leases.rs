//! Leases of pulls: content that is retained until a time although no image uses it, also across restarts.
//!
//! They say whether bytes on disk are worth keeping for the next attempt, and reclaiming ends them when space is needed. That
//! is no question of [retention](larder::retention), which is about images: leases on images are in the
//! [`RemovalGate`](larder::retention::RemovalGate).

use larder::gc::ClockReading;

use super::db::{DbRead as _, LEASES};
use super::error::StoreError;
use super::handle::Store;
use super::records::LeaseRecord;

impl Store {
    /// Creates a lease, or replaces the one with this ID. Durable when it returns.
    pub fn lease(&self, lease: &LeaseRecord) -> Result<(), StoreError> {
        self.0.db.write("create a lease", |writer| Ok(writer.put(LEASES, &lease.id, lease)?))
    }

    /// Ends a lease; succeeds if it has already ended.
    pub fn end_lease(&self, id: &str) -> Result<(), StoreError> {
        self.0.db.write("end a lease", |writer| Ok(writer.delete(LEASES, id)?))
    }

    /// The leases that have not expired at `now`.
    pub fn leases(&self, now: &ClockReading) -> Result<Vec<LeaseRecord>, StoreError> {
        let mut leases: Vec<LeaseRecord> = self.0.db.read("list leases", |reader| reader.all(LEASES))?;
        leases.retain(|lease| !lease.left(now).is_zero());
        Ok(leases)
    }
}
