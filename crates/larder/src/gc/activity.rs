//! What happened between two looks, where a backend can tell: images that came, and uses that began and ended.

use async_trait::async_trait;

use super::unix_millis::UnixMillis;
use crate::backend::{BackendError, Image};
use crate::reference::ImageId;

/// One thing that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageActivity {
    /// Id of the image.
    pub image: ImageId,
    /// When.
    pub at: UnixMillis,
    /// What.
    pub what: ActivityKind,
}

/// What happened to an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ActivityKind {
    /// It came: then it is first seen at that time, if this is the first look that finds it.
    Added,
    /// It was used.
    Used,
}

/// Knows what happened. It may tell the same again: the latest use counts, and the first sight.
#[async_trait]
pub trait ActivityFeed: Send + Sync {
    /// What happened since it was last asked, as far as it is known; `images` are those that are present.
    async fn take_activity(&self, images: &[Image]) -> Result<Vec<ImageActivity>, BackendError>;

    /// Listens until dropped, so that nothing is missed. One that can only be asked has nothing to do.
    async fn follow(&self) {}
}
