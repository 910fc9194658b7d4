//! What a [`Collector`](super::Collector) works with.

use std::sync::Arc;

use async_trait::async_trait;

use super::disk::Measure;
use super::feed::UseFeed;
use super::gate::Gate;
use super::history::History;
use super::layers::LayerSource;
use super::policy::GcPolicy;
use super::records::{Clock, RecordStore};
use super::sweep::Patience;
use super::time::Stamp;
use super::uses::UseSource;
use crate::backend::{Backend, BackendError};
use crate::events::EventSink;
use crate::pod::ObjectRef;
use crate::reference::ImageId;

/// Called after a collection; by [`HookRule::Examined`](super::HookRule::Examined) only after one for room.
pub trait Hook: Send + Sync {
    /// `kept` are ids of images that are still present, which ones [`HookRule`](super::HookRule) says; the collection
    /// began at `started`. Must be quick.
    fn collected(&self, kept: &[ImageId], started: Stamp);
}

/// Something else than images that takes room, and of which some can go first.
#[async_trait]
pub trait Reclaim: Send + Sync {
    /// Frees what it can. Called when a round finds the disk past a limit, before any image is removed for room; the disk
    /// is then measured again. A failure keeps no image from being removed.
    async fn reclaim(&self) -> Result<(), BackendError>;
}

pub(super) struct Parts {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) policy: GcPolicy,
    pub(super) disk: Arc<dyn Measure>,
    pub(super) sources: Vec<Arc<dyn UseSource>>,
    pub(super) layers: Option<Arc<dyn LayerSource>>,
    pub(super) feed: Option<Arc<dyn UseFeed>>,
    pub(super) reclaim: Option<Arc<dyn Reclaim>>,
    pub(super) store: Arc<dyn RecordStore>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) events: Arc<dyn EventSink>,
    pub(super) node: ObjectRef,
    pub(super) hooks: Vec<Arc<dyn Hook>>,
    pub(super) history: Option<Arc<dyn History>>,
    pub(super) gate: Option<Arc<Gate>>,
    pub(super) patience: Patience,
}
