//! Puts a [`Collector`] together.

use std::sync::Arc;

use super::activity::ActivityFeed;
use super::collector::Collector;
use super::dependencies::{CollectorDependencies, PostImageGcHook};
use super::filesystem_stats::{BackendFsStats, FsStatsProvider};
use super::history::RemovalHistory;
use super::layers::LayerSource;
use super::meter::ReclaimWait;
use super::policy::GcPolicy;
use super::reclaim::SpaceReclaimer;
use super::usage_records::{Clock, SystemClock, UsageRecordStore, VolatileUsageRecords};
use crate::backend::Backend;
use crate::events::{EventSink, LogSink};
use crate::pod::ObjectRef;
use crate::retention::{BackendRetentions, RemovalGate, RetentionSource};

/// Puts a [`Collector`] together. By default records are in memory only, layers are unknown, and events go to the log.
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
            sources: vec![Arc::new(BackendRetentions::new(backend.clone()))],
            layers: None,
            feed: None,
            reclaim: None,
            store: Arc::new(VolatileUsageRecords::default()),
            clock: Arc::new(SystemClock),
            events: Arc::new(LogSink),
            node: ObjectRef::node(""),
            hooks: Vec::new(),
            history: None,
            gate: None,
            reclaim_wait: ReclaimWait::default(),
            backend,
        })
    }

    /// The policy. Must have no [problems](GcPolicy::problems).
    #[must_use]
    pub fn policy(mut self, policy: GcPolicy) -> Self {
        self.0.policy = policy;
        self
    }

    /// The source of filesystem statistics, instead of the backend.
    #[must_use]
    pub fn disk(mut self, disk: Arc<dyn FsStatsProvider>) -> Self {
        self.0.disk = disk;
        self
    }

    /// Another source of retention, in addition to the backend's containers and mounts.
    #[must_use]
    pub fn retention_source(mut self, source: Arc<dyn RetentionSource>) -> Self {
        self.0.sources.push(source);
        self
    }

    /// The source of image layers.
    #[must_use]
    pub fn layers(mut self, layers: Arc<dyn LayerSource>) -> Self {
        self.0.layers = Some(layers);
        self
    }

    /// The source of image activity.
    #[must_use]
    pub fn feed(mut self, feed: Arc<dyn ActivityFeed>) -> Self {
        self.0.feed = Some(feed);
        self
    }

    /// The reclaimer of space beside images. It runs before any image is removed.
    #[must_use]
    pub fn reclaimer(mut self, reclaim: Arc<dyn SpaceReclaimer>) -> Self {
        self.0.reclaim = Some(reclaim);
        self
    }

    /// The store of usage records. They are loaded when the collector is built.
    #[must_use]
    pub fn records(mut self, store: Arc<dyn UsageRecordStore>) -> Self {
        self.0.store = store;
        self
    }

    /// The clock.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.0.clock = clock;
        self
    }

    /// The sink of events, and their node.
    #[must_use]
    pub fn events(mut self, events: Arc<dyn EventSink>, node: impl Into<String>) -> Self {
        (self.0.events, self.0.node) = (events, ObjectRef::node(node));
        self
    }

    /// The hook that is called after each space pass.
    #[must_use]
    pub fn hook(mut self, hook: Arc<dyn PostImageGcHook>) -> Self {
        self.0.hooks.push(hook);
        self
    }

    /// The removal history.
    #[must_use]
    pub fn history(mut self, history: Arc<dyn RemovalHistory>) -> Self {
        self.0.history = Some(history);
        self
    }

    /// The removal gate, shared with the [`ImageManager`](crate::pull::ImageManager). Its leases retain images.
    #[must_use]
    pub fn gate(mut self, gate: Arc<RemovalGate>) -> Self {
        self.0.sources.push(gate.clone());
        self.0.gate = Some(gate);
        self
    }

    /// How long to wait for space that is freed in the background.
    #[must_use]
    pub fn reclaim_wait(mut self, wait: ReclaimWait) -> Self {
        self.0.reclaim_wait = wait;
        self
    }

    /// The collector. Loads the records, and starts nothing.
    pub fn build(self) -> Collector {
        Collector::new(self.0)
    }
}
