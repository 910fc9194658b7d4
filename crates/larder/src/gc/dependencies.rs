//! What a [`Collector`](super::Collector) works with.

use std::sync::Arc;

use async_trait::async_trait;

use super::activity::ActivityFeed;
use super::filesystem_stats::FsStatsProvider;
use super::history::RemovalHistory;
use super::layers::LayerSource;
use super::policy::GcPolicy;
use super::removal_gate::RemovalGate;
use super::sweep::ReclaimWait;
use super::unix_millis::UnixMillis;
use super::usage_records::{Clock, UsageRecordStore};
use super::uses::ImageUseSource;
use crate::backend::{Backend, BackendError};
use crate::events::EventSink;
use crate::pod::ObjectRef;
use crate::reference::ImageId;

/// Called after a collection; by [`HookRule::Examined`](super::HookRule::Examined) only after one for room.
pub trait PostImageGcHook: Send + Sync {
    /// `kept` are ids of images that are still present, which ones [`HookRule`](super::HookRule) says; the collection
    /// began at `started`. Must be quick.
    fn collected(&self, kept: &[ImageId], started: UnixMillis);
}

/// Something else than images that takes room, and of which some can go first.
#[async_trait]
pub trait SpaceReclaimer: Send + Sync {
    /// Frees what it can. Called when a round finds the disk past a limit, before any image is removed for room; the disk
    /// is then measured again. A failure keeps no image from being removed.
    async fn reclaim(&self) -> Result<(), BackendError>;
}

pub(super) struct CollectorDependencies {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) policy: GcPolicy,
    pub(super) disk: Arc<dyn FsStatsProvider>,
    pub(super) sources: Vec<Arc<dyn ImageUseSource>>,
    pub(super) layers: Option<Arc<dyn LayerSource>>,
    pub(super) feed: Option<Arc<dyn ActivityFeed>>,
    pub(super) reclaim: Option<Arc<dyn SpaceReclaimer>>,
    pub(super) store: Arc<dyn UsageRecordStore>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) events: Arc<dyn EventSink>,
    pub(super) node: ObjectRef,
    pub(super) hooks: Vec<Arc<dyn PostImageGcHook>>,
    pub(super) history: Option<Arc<dyn RemovalHistory>>,
    pub(super) gate: Option<Arc<RemovalGate>>,
    pub(super) patience: ReclaimWait,
}
