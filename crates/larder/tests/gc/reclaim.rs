//! Space that is reclaimed from something other than images first.

use std::sync::Arc;

use async_trait::async_trait;
use larder::backend::BackendError;
use larder::gc::SpaceReclaimer;

use crate::world::{FakeNode, failure};

/// A cache on the disk, which is dropped completely or not at all.
struct FakeBuildCache {
    world: FakeNode,
    goes: bool,
}

#[async_trait]
impl SpaceReclaimer for FakeBuildCache {
    async fn reclaim(&self) -> Result<(), BackendError> {
        if !self.goes {
            return Err(failure("the cache is locked"));
        }
        self.world.state().other = 0;
        Ok(())
    }
}

/// The names of the images that a round removes, on a disk of 1000 with an image of 500 and this much in a cache.
async fn removed(cached: u64, goes: bool) -> (Vec<String>, u64) {
    let world = FakeNode::new(1000);
    world.state().other = cached;
    world.have("a", &[("l", 500)]);
    let cache = Arc::new(FakeBuildCache { world: world.clone(), goes });
    let collector = world.collector().reclaimer(cache).build();
    collector.detect().await.expect("nothing fails here");
    world.advance(3_600_000);
    let _ = collector.collect().await;
    (world.removals(), world.state().other)
}

#[tokio::test(start_paused = true)]
async fn a_cache_is_reclaimed_before_images_and_only_when_space_is_needed() {
    assert_eq!(removed(400, true).await, (vec![], 0), "it was enough");
    assert_eq!(removed(400, false).await, (vec!["a".to_owned()], 400), "a failure keeps nothing");
    assert_eq!(removed(100, true).await, (vec![], 100), "there is room");
}
