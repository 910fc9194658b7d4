//! Leases: content that is retained until a time although no image uses it, also across restarts.

use larder::gc::ClockReading;
use larder::reference::Digest;

use super::db::{DbRead as _, LEASES};
use super::error::StoreError;
use super::handle::Store;
use super::records::{LeaseKind, LeaseRecord, LeaseResources};

impl Store {
    /// Creates a lease, or replaces the one with this ID. Durable when it returns.
    pub fn lease(&self, lease: &LeaseRecord) -> Result<(), StoreError> {
        self.lease_all(std::slice::from_ref(lease))
    }

    /// Creates or replaces these leases. Durable when it returns.
    pub fn lease_all(&self, leases: &[LeaseRecord]) -> Result<(), StoreError> {
        self.0.db.write("create a lease", |writer| {
            leases.iter().try_for_each(|lease| Ok(writer.put(LEASES, &lease.id, lease)?))
        })
    }

    /// Ends a lease; succeeds if it has already ended.
    pub fn end_lease(&self, id: &str) -> Result<(), StoreError> {
        self.0.db.write("end a lease", |writer| Ok(writer.delete(LEASES, id)?))
    }

    /// Ends the leases on these images, except those of pulls. Other images and layers of a lease stay leased.
    pub fn end_image_leases(&self, images: &[Digest]) -> Result<(), StoreError> {
        self.0.db.write("end leases of images", |writer| {
            for mut lease in writer.all::<LeaseRecord>(LEASES)? {
                let before = lease.leased.images.len();
                lease.leased.images.retain(|image| !images.contains(image));
                if lease.kind == LeaseKind::Pull || lease.leased.images.len() == before {
                    continue;
                }
                if lease.leased == LeaseResources::default() {
                    writer.delete(LEASES, &lease.id)?;
                } else {
                    writer.put(LEASES, &lease.id, &lease)?;
                }
            }
            Ok(())
        })
    }

    /// The leases that have not expired at `now`.
    pub fn leases(&self, now: &ClockReading) -> Result<Vec<LeaseRecord>, StoreError> {
        let mut leases: Vec<LeaseRecord> = self.0.db.read("list leases", |reader| reader.all(LEASES))?;
        leases.retain(|lease| !lease.left(now).is_zero());
        Ok(leases)
    }
}
