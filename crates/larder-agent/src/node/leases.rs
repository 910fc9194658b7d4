//! The leases of a node: larder's own, of ensures and of `larder lease`. Those of running pulls and of the runtime are not
//! among them.

use std::collections::BTreeMap;
use std::time::Duration;

use larder::gc::{ImageUse, ImageUseError, ImageUseSource as _};
use larder::reference::ImageId;

use super::Node;
use crate::error::Error;
use crate::state::EnsureLeaseFile;

/// A lease on an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ImageLease {
    /// Time until it expires.
    pub(crate) left: Duration,
    /// Whether `larder lease` requested it; otherwise an ensure, a pull or a load made it.
    pub(crate) requested: bool,
}

impl Node {
    /// The longest lease of each leased image.
    pub(crate) async fn leases(&self) -> Result<BTreeMap<ImageId, ImageLease>, Error> {
        let failed = |error: ImageUseError| Error::from(error.into_backend_error());
        let mut found = Vec::new();
        if let Some(store) = self.store() {
            found.extend(store.uses().await.map_err(failed)?);
        } else if self.state.is_locked() {
            let lease = self.settings.now().ensured_lease;
            found.extend(EnsureLeaseFile::at(&self.state, lease).uses().await.map_err(failed)?);
        }
        let mut leases = BTreeMap::new();
        for reported in found {
            let Some(left) = reported.by.lease_left() else { continue };
            let requested = matches!(reported.by, ImageUse::Lease { .. });
            add(&mut leases, reported.image, ImageLease { left, requested });
        }
        // Without a store, the gate alone has requested leases; those of ensures are in the file as well.
        for (image, left) in self.gate.active_leases() {
            let requested = self.store().is_none() && !leases.contains_key(&image);
            add(&mut leases, image, ImageLease { left, requested });
        }
        Ok(leases)
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

fn add(leases: &mut BTreeMap<ImageId, ImageLease>, image: ImageId, lease: ImageLease) {
    let known = leases.entry(image).or_insert(lease);
    if lease.left > known.left {
        *known = lease;
    }
}
