//! The leases of a node: larder's own, of ensures and of `larder lease`. Those of running pulls and of the runtime are not
//! among them.

use std::collections::BTreeMap;

use larder::backend::Image;
use larder::reference::ImageId;
use larder::retention::{Lease, RetentionError, RetentionPurpose, SourceScope};

use super::Node;
use crate::error::Error;

impl Node {
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
