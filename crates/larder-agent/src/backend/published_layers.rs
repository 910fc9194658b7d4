//! The layers of a store whose images a containerd has as well: it may retain some of them when an image is removed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;
use larder::backend::{BackendError, Image};
use larder::gc::{LayerSource, LayerUsageIndex};
use larder_containerd::SharedSnapshots;
use larder_store::backend::StoreBackend;

/// The layers of the store, with what containerd retains.
pub(crate) struct PublishedLayers {
    store: StoreBackend,
    shared: SharedSnapshots,
    /// True once it was logged that containerd does not answer.
    warned: AtomicBool,
}

impl PublishedLayers {
    pub(crate) fn new(store: StoreBackend, shared: SharedSnapshots) -> PublishedLayers {
        PublishedLayers { store, shared, warned: AtomicBool::new(false) }
    }

    /// Returns the objects of containerd that retain layers; `None` if it does not answer: then it may be everything.
    async fn holders(&self, images: &[Image]) -> Option<HashMap<String, String>> {
        let holders = self.shared.holders(images).await;
        match &holders {
            Ok(_) => self.warned.store(false, Ordering::Relaxed),
            Err(error) => {
                if !self.warned.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        "cannot determine which layers containerd retains, counting none as freed: {error}"
                    );
                }
            }
        }
        holders.ok()
    }
}

#[async_trait]
impl LayerSource for PublishedLayers {
    async fn layers(&self, images: &[Image]) -> Result<LayerUsageIndex, BackendError> {
        let mut index = self.store.layers(images).await?;
        let holders = self.holders(images).await;
        for (layer, chain) in self.store.layer_snapshots().await? {
            let by = match &holders {
                Some(holders) => holders.get(&chain).map(String::as_str),
                None => Some("containerd, which does not answer"),
            };
            if let Some(by) = by {
                index.set_reference(&layer, by);
            }
        }
        Ok(index)
    }
}
