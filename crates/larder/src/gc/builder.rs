//! Puts a [`Collector`] together.

use std::sync::Arc;

use super::activity::ActivityFeed;
use super::collector::Collector;
use super::dependencies::{CollectorDependencies, PostImageGcHook, SpaceReclaimer};
use super::filesystem_stats::{BackendFsStats, FsStatsProvider};
use super::history::RemovalHistory;
use super::layers::LayerSource;
use super::policy::GcPolicy;
use super::removal_gate::RemovalGate;
use super::sweep::ReclaimWait;
use super::usage_records::{Clock, SystemClock, UsageRecordStore, VolatileUsageRecords};
use super::uses::{BackendUseSource, ImageUseSource};
use crate::backend::Backend;
use crate::events::{EventSink, LogSink};
use crate::pod::ObjectRef;

/// Puts a [`Collector`] together. What is not given is left out: records live in memory, layers are not known, events
/// go to the log.
pub struct CollectorBuilder(CollectorDependencies);

impl Collector {
    /// Begins with a backend and larder's defaults.
    pub fn builder(backend: Arc<dyn Backend>) -> CollectorBuilder {
        CollectorBuilder::new(backend)
    }
}

impl CollectorBuilder {
    pub(super) fn new(backend: Arc<dyn Backend>) -> CollectorBuilder {
        CollectorBuilder(CollectorDependencies {
            policy: GcPolicy::default(),
            disk: Arc::new(BackendFsStats::new(backend.clone())),
            sources: vec![Arc::new(BackendUseSource::new(backend.clone()))],
            layers: None,
            feed: None,
            reclaim: None,
            store: Arc::new(VolatileUsageRecords::default()),
            clock: Arc::new(SystemClock::new()),
            events: Arc::new(LogSink),
            node: ObjectRef::node(""),
            hooks: Vec::new(),
            history: None,
            gate: None,
            patience: ReclaimWait::default(),
            backend,
        })
    }

    /// When to collect, and what. Must have no [problems](GcPolicy::problems).
    #[must_use]
    pub fn policy(mut self, policy: GcPolicy) -> Self {
        self.0.policy = policy;
        self
    }

    /// What reads the file system, instead of asking the backend where it is.
    #[must_use]
    pub fn disk(mut self, disk: Arc<dyn FsStatsProvider>) -> Self {
        self.0.disk = disk;
        self
    }

    /// One more source of use, beside the backend's own containers and mounts.
    #[must_use]
    pub fn use_source(mut self, source: Arc<dyn ImageUseSource>) -> Self {
        self.0.sources.push(source);
        self
    }

    /// Who knows the layers of images.
    #[must_use]
    pub fn layers(mut self, layers: Arc<dyn LayerSource>) -> Self {
        self.0.layers = Some(layers);
        self
    }

    /// Who knows what happened between two looks.
    #[must_use]
    pub fn feed(mut self, feed: Arc<dyn ActivityFeed>) -> Self {
        self.0.feed = Some(feed);
        self
    }

    /// What frees room before any image goes.
    #[must_use]
    pub fn reclaimer(mut self, reclaim: Arc<dyn SpaceReclaimer>) -> Self {
        self.0.reclaim = Some(reclaim);
        self
    }

    /// Where records are kept beyond the process. They are loaded when the collector is built.
    #[must_use]
    pub fn records(mut self, store: Arc<dyn UsageRecordStore>) -> Self {
        self.0.store = store;
        self
    }

    /// What tells the time.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.0.clock = clock;
        self
    }

    /// Where events go, and which node they are about.
    #[must_use]
    pub fn events(mut self, events: Arc<dyn EventSink>, node: impl Into<String>) -> Self {
        (self.0.events, self.0.node) = (events, ObjectRef::node(node));
        self
    }

    /// What is called after each collection for room.
    #[must_use]
    pub fn hook(mut self, hook: Arc<dyn PostImageGcHook>) -> Self {
        self.0.hooks.push(hook);
        self
    }

    /// Where removals are written down.
    #[must_use]
    pub fn history(mut self, history: Arc<dyn RemovalHistory>) -> Self {
        self.0.history = Some(history);
        self
    }

    /// What it agrees on with ensures: the same gate that the [`ImageManager`](crate::pull::ImageManager) has. Its leases count
    /// as uses.
    #[must_use]
    pub fn gate(mut self, gate: Arc<RemovalGate>) -> Self {
        self.0.sources.push(gate.clone());
        self.0.gate = Some(gate);
        self
    }

    /// How long to wait for room that is freed in the background.
    #[must_use]
    pub fn reclaim_wait(mut self, patience: ReclaimWait) -> Self {
        self.0.patience = patience;
        self
    }

    /// The collector. Loads the records, and starts nothing.
    pub fn build(self) -> Collector {
        Collector::new(self.0)
    }
}
