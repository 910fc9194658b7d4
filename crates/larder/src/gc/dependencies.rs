//! The dependencies of a [`Collector`](super::Collector).

use std::sync::Arc;

use super::activity::ActivityFeed;
use super::filesystem_stats::FsStatsProvider;
use super::history::RemovalHistory;
use super::layers::LayerSource;
use super::meter::ReclaimWait;
use super::policy::GcPolicy;
use super::reclaim::SpaceReclaimer;
use super::unix_millis::UnixMillis;
use super::usage_records::{Clock, UsageRecordStore};
use crate::backend::Backend;
use crate::events::EventSink;
use crate::pod::ObjectRef;
use crate::reference::ImageId;
use crate::retention::{RemovalGate, RetentionSource};

/// Called after a collection; with kubelet's strategy only after a space pass.
pub trait PostImageGcHook: Send + Sync {
    /// `retained` are IDs of present images: all, or with kubelet's strategy those that the space pass examined and
    /// retained. The collection began at `started`. Must be quick.
    fn collected(&self, retained: &[ImageId], started: UnixMillis);
}

pub(super) struct CollectorDependencies {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) policy: GcPolicy,
    pub(super) disk: Arc<dyn FsStatsProvider>,
    pub(super) sources: Vec<Arc<dyn RetentionSource>>,
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
    pub(super) reclaim_wait: ReclaimWait,
}
