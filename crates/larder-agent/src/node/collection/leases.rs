//! The leases of a node: larder's own, of ensures and of `larder lease`. Those of running pulls and of the runtime are
//! not among them.

use std::collections::BTreeMap;

use larder::backend::Image;
use larder::reference::ImageId;
use larder::retention::{Lease, LeasePurpose, RetentionError, RetentionPurpose, SourceScope};

use super::Collection;
use crate::error::Error;

impl Collection {
    /// Records that an image was ensured, for later GC processes. An image that was pulled is first seen now. The
    /// record is on disk when this returns, unless it cannot be written, which is logged.
    pub(crate) async fn note_ensured(&self, id: &ImageId, was_pulled: bool) {
        if !self.state.is_locked() {
            return;
        }
        // In a runtime, present images may be older than larder: their ages start with the first listing.
        if was_pulled || self.is_store || self.collector.has_detected() {
            self.collector.note_ensured(id);
        }
        if let Err(error) = self.save_leases().await {
            tracing::warn!("GC may remove ensured images before they are used: {}", error.message());
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

    /// Ends the leases of these images for these purposes. Durable when it returns.
    pub(crate) async fn end_leases(
        &self,
        images: &[ImageId],
        purposes: &[LeasePurpose],
    ) -> Result<(), Error> {
        self.gate.end_leases(images, purposes);
        self.save_leases().await
    }

    /// Waits until the ends of leases on removed images are on disk. A failure is logged: the images are removed.
    pub(crate) async fn save_ended_leases(&self) {
        if let Err(error) = self.save_leases().await {
            tracing::warn!(
                "a later process may retain a removed image that is pulled again: {}",
                error.message()
            );
        }
    }

    /// Waits until the leases taken and ended so far are on disk.
    pub(crate) async fn save_leases(&self) -> Result<(), Error> {
        let saved = self.gate.save_leases().await;
        saved.map_err(|error| Error::failed(error.to_string()).hints(error.hint()))
    }
}
