//! Fetches what containerd's snapshots lack into the store, with the node's credentials.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use larder::credentials::Credential;
use larder::error_chain;
use larder::pod::Pod;
use larder::pull::ImageManager;
use larder::reference::{ImageName, Reference};
use larder_snapshots::LayerFetcher;
use larder_store::backend::StoreBackend;
use larder_store::pull::{FetchedImage, PullError};

/// containerd fetches an image by itself if its registry sends nothing for this time.
const IDLE: Duration = Duration::from_secs(60);

/// The store, with the credentials of the node.
pub(crate) struct NodeLayerFetcher {
    store: StoreBackend,
    manager: Arc<ImageManager>,
}

impl NodeLayerFetcher {
    /// Into this store, with the credentials of this manager.
    pub(crate) fn new(store: StoreBackend, manager: Arc<ImageManager>) -> NodeLayerFetcher {
        NodeLayerFetcher { store, manager }
    }

    /// No pod is known, so none of its secrets is used.
    async fn credentials(&self, image: &Reference) -> Result<Vec<Credential>, String> {
        let name = ImageName::from(image.to_string());
        let found = self.manager.credentials().lookup(&name, &[], &Pod::default()).await;
        found.map_err(|error| error_chain(&error))
    }

    async fn fetch_with(
        &self,
        image: &Reference,
        credential: Option<&Credential>,
    ) -> Result<FetchedImage, PullError> {
        self.store.puller().fetch_layers(image, credential, IDLE).await
    }
}

#[async_trait]
impl LayerFetcher for NodeLayerFetcher {
    async fn fetch(&self, image: &Reference) -> Result<FetchedImage, String> {
        let credentials = self.credentials(image).await?;
        let Some((last, others)) = credentials.split_last() else {
            return self.fetch_with(image, None).await.map_err(|error| error_chain(&error));
        };
        for credential in others {
            match self.fetch_with(image, Some(credential)).await {
                Err(error) if error.is_denied() => tracing::debug!("{}", error_chain(&error)),
                fetched => return fetched.map_err(|error| error_chain(&error)),
            }
        }
        self.fetch_with(image, Some(last)).await.map_err(|error| error_chain(&error))
    }
}
