//! What collection asks the store: the layers of its images, and its leases.

use std::time::SystemTime;

use async_trait::async_trait;
use larder::backend::{BackendError, CallErrorKind, Image};
use larder::gc::{Found, LayerSource, Layers, Use, UseError, UseSource};

use crate::backend::{StoreBackend, failed};

#[async_trait]
impl LayerSource for StoreBackend {
    async fn layers(&self, _: &[Image]) -> Result<Layers, BackendError> {
        let store = self.store().clone();
        match tokio::task::spawn_blocking(move || store.sharing()).await {
            Ok(sharing) => sharing.map_err(|error| failed(&error, CallErrorKind::Other)),
            Err(error) => Err(failed(&error, CallErrorKind::Canceled)),
        }
    }
}

/// The leases on images. Mounts are told by [`Backend::in_use`](larder::backend::Backend::in_use).
#[async_trait]
impl UseSource for StoreBackend {
    async fn uses(&self) -> Result<Vec<Found>, UseError> {
        let store = self.store().clone();
        let leases = match tokio::task::spawn_blocking(move || store.leases(SystemTime::now())).await {
            Ok(leases) => {
                leases.map_err(|error| UseError(failed(&error, CallErrorKind::Other).to_string()))?
            }
            Err(error) => return Err(UseError(error.to_string())),
        };
        let found = leases.into_iter().flat_map(|lease| {
            let id = lease.id;
            lease.leased.images.into_iter().map(move |image| Found {
                image: image.to_string(),
                handler: None,
                by: Use::Lease { id: id.clone() },
            })
        });
        Ok(found.collect())
    }
}
