//! The build cache of the engine. larder reports its size, and removes it only when configured to, through the engine's
//! own prune.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use larder::backend::{BackendError, CallErrorKind};
use larder::gc::{DiskSpace, ReclaimOutcome, ReclaimTrigger, ReclaimableSpace, SpaceReclaimer};
use larder::go_format;
use larder::hint::Hint;
use reqwest::Method;
use reqwest::header::HeaderMap;

use crate::api::{BuildPruneReport, count};
use crate::engine::EngineClient;

/// Time limit of a prune: a large cache on a slow disk takes minutes, and GC waits for it.
const PRUNE_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// The build cache of one engine.
pub struct BuildCachePruner {
    engine: Arc<EngineClient>,
}

impl BuildCachePruner {
    pub(crate) fn new(engine: Arc<EngineClient>) -> BuildCachePruner {
        BuildCachePruner { engine }
    }

    /// Makes the engine remove the cache that no build uses and no image shares, as `docker builder prune` does;
    /// returns the bytes that the engine reports as freed. Takes at most half an hour.
    pub async fn prune(&self) -> Result<u64, BackendError> {
        let prune = async {
            let response = self.engine.call(Method::POST, "/build/prune", &[], HeaderMap::new()).await?;
            let pruned: BuildPruneReport = self.engine.read("/build/prune", response).await?;
            Ok(count(pruned.space_reclaimed))
        };
        tokio::time::timeout(PRUNE_TIMEOUT, prune).await.unwrap_or_else(|_| Err(too_late()))
    }
}

fn too_late() -> BackendError {
    let message =
        format!("the engine did not prune its build cache within {}", go_format::duration(PRUNE_TIMEOUT));
    let hint = Hint::from("the prune may still be running: see the engine's log and docker builder du");
    BackendError::call(CallErrorKind::DeadlineExceeded, message).with_hint(hint)
}

#[async_trait]
impl SpaceReclaimer for BuildCachePruner {
    /// Prunes only under pressure: a build cache is of use until then. The bytes are those that the engine reports.
    async fn reclaim(&self, trigger: ReclaimTrigger) -> ReclaimOutcome {
        if trigger != ReclaimTrigger::Pressure {
            return ReclaimOutcome::default();
        }
        let pruned = self.prune().await;
        let build_cache = pruned.map(|bytes| DiskSpace { bytes, inodes: 0 });
        build_cache.map(|build_cache| ReclaimableSpace { build_cache, ..ReclaimableSpace::default() }).into()
    }
}
