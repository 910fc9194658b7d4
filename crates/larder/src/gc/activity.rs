//! Image activity between two observations, if a backend reports it: images added, and uses that began and ended.

use async_trait::async_trait;

use super::unix_millis::UnixMillis;
use crate::backend::{BackendError, Image};
use crate::reference::ImageId;

/// One event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageActivity {
    /// Id of the image.
    pub image: ImageId,
    /// When.
    pub at: UnixMillis,
    /// Kind of the activity.
    pub what: ActivityKind,
}

/// The kind of activity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ActivityKind {
    /// It was added. It is first seen at that time, if no observation has found it before.
    Added,
    /// It was used.
    Used,
}

/// A source of image activity. It may report the same activity again: the latest use and the first addition count.
#[async_trait]
pub trait ActivityFeed: Send + Sync {
    /// The known activity since the last call; `images` are the present images.
    async fn take_activity(&self, images: &[Image]) -> Result<Vec<ImageActivity>, BackendError>;

    /// Follows activity until dropped. A source that is only polled does nothing here.
    async fn follow(&self) {}
}
