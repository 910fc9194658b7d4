//! The leases of a node: larder's own, of ensures and of `larder lease`. Those of running pulls and of the runtime are not
//! among them.

use std::collections::BTreeMap;

use larder::backend::Image;
use larder::reference::ImageId;
use larder::retention::{Lease, RetentionError, RetentionPurpose, SourceScope};

use super::Collection;
use crate::error::Error;

impl Collection {
    /// Records that an image was ensured, for later GC processes. An image that was pulled is first seen now. The record is on
    /// disk when this returns, unless it cannot be written, which is logged.
    pub(crate) async fn note_ensured(&self, id: &ImageId, was_pulled: bool) {
        let Some(ensures) = &self.ensures else { return };
        // In a runtime, present images may be older than larder: their ages start with the first listing.
        let is_known = self.is_store || self.collector.has_detected();
        let was_leased = was_pulled && ensures.note_pulled(id);
        if was_pulled || (ensures.note(id) && is_known) {
            self.collector.note_ensured(id);
        }
        // Without leases the record protects nothing.
        if !was_leased && self.leases_ensures {
            ensures.flush().await;
        }
    }

    /// The longest lease of each leased image among these.
    pub(crate) async fn leases(&self, images: &[Image]) -> Result<BTreeMap<ImageId, Lease>, Error> {
        let retentions = self.collector()?.retentions(images, SourceScope::Larder).await;
        let retentions = retentions.map_err(RetentionError::into_backend_error)?;
        let longest = |(image, reasons): (ImageId, Vec<RetentionPurpose>)| {
            let leases = reasons.iter().filter_map(RetentionPurpose::lease);
            Some((image, leases.max_by_key(|lease| lease.left)?))
        };
        Ok(retentions.into_iter().filter_map(longest).collect())
    }

    /// Ends the leases of these images. Durable when it returns.
    pub(crate) async fn end_leases(&self, images: &[ImageId]) -> Result<(), Error> {
        self.gate.end_leases(images);
        match &self.ensures {
            Some(ensures) => ensures.end(images).await,
            None => Ok(()),
        }
    }
}
