//! The cache of the engine's builder. It is the builder's: larder tells how large it is, and removes it only when told to,
//! through the engine's own prune.

use std::sync::Arc;

use async_trait::async_trait;
use larder::backend::BackendError;
use larder::gc::Reclaim;
use larder::gotext;
use reqwest::Method;
use reqwest::header::HeaderMap;

use crate::answers::{Pruned, count};
use crate::engine::Engine;

/// The cache of one engine's builder.
pub struct BuilderCache {
    engine: Arc<Engine>,
}

impl BuilderCache {
    pub(crate) fn new(engine: Arc<Engine>) -> BuilderCache {
        BuilderCache { engine }
    }

    /// Has the engine remove what its builder does not use right now and no image shares, as `docker builder prune`
    /// does; returns the bytes that the engine says came free. Has no time limit of its own.
    pub async fn prune(&self) -> Result<u64, BackendError> {
        let response = self.engine.call(Method::POST, "/build/prune", &[], HeaderMap::new()).await?;
        let pruned: Pruned = self.engine.read("/build/prune", response).await?;
        Ok(count(pruned.space_reclaimed))
    }
}

#[async_trait]
impl Reclaim for BuilderCache {
    async fn reclaim(&self) -> Result<(), BackendError> {
        let freed = self.prune().await?;
        tracing::info!("the engine says that {} of its builder's cache came free", gotext::bytes(freed));
        Ok(())
    }
}
