//! Garbage collection of a node: the collector and its rounds, leases, and the record of removals.

mod leases;
mod other_collector;
mod removals;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use larder::backend::ReclaimBytes;
use larder::events::{EventReason, EventType};
use larder::gc::{
    Collector, CollectorBuilder, GcIntervals, GcLoops, GcPolicy, GcRoundResult, GcStatus, HistoryFile,
    ImageCache, OtherFilesystem, UsageRecordFileStore,
};
use larder::image_service::{FilesystemError, FsStats};
use larder::pull::{RoomMaker, RoomOutcome};
use larder::retention::RemovalGate;
use larder_store::backend::StoreBackend;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time;

use super::Observability;
use super::metrics::MeteredHistory;
use super::peer::Peer;
use crate::config::Config;
use crate::error::Error;
use crate::state::{KeepRuleFile, StateDir};
use other_collector::OtherCollector;
pub(crate) use removals::RequestApi;

/// How long metrics and the status wait for a measurement of the filesystems.
pub(crate) const MEASURE_WITHIN: Duration = Duration::from_secs(2);

/// Settings of garbage collection.
#[derive(Debug, Clone)]
pub(crate) struct CollectionSettings {
    /// The policy without the rules of `larder keep`.
    pub(crate) policy: GcPolicy,
    pub(crate) intervals: GcIntervals,
    /// How long an image that was just ensured is leased.
    pub(crate) ensured_lease: Duration,
}

impl CollectionSettings {
    pub(crate) fn of(config: &Config) -> CollectionSettings {
        CollectionSettings {
            policy: config.gc.clone(),
            intervals: config.gc_intervals,
            ensured_lease: config.ensured_lease,
        }
    }
}

/// The filesystems of a backend as they are now.
#[derive(Default)]
pub(crate) struct NodeFilesystems {
    /// The one that GC measures and frees; `None` if it cannot be measured.
    pub(crate) image: Option<FsStats>,
    /// The others that the runtime reports.
    pub(crate) others: Vec<OtherFilesystem>,
}

/// Garbage collection of a node.
pub(crate) struct Collection {
    collector: Arc<Collector>,
    gate: Arc<RemovalGate>,
    loops: GcLoops,
    /// Whether rounds run by themselves. A command removes nothing to make room: it asks its user.
    runs: AtomicBool,
    /// Removals of another collector over CRI.
    others: OtherCollector,
    /// The removal history; `None` where no state is kept.
    history: Option<Arc<HistoryFile>>,
    /// Whether all images are larder's, so that it has seen the first use of each.
    is_store: bool,
    /// Why the keep rules are not known: nothing is planned or removed until they are.
    unread_rules: Mutex<Option<Error>>,
    observability: Arc<Observability>,
    /// Dropped last: its lock outlives all that is written.
    state: Arc<StateDir>,
}

impl Collection {
    /// Reads the keep rules; if that fails, [`collector`](Collection::collector) returns the error. `builder` knows how
    /// to ask the backend, and `store` is the backend if that is larder's own store.
    pub(crate) fn build(
        settings: CollectionSettings,
        mut builder: CollectorBuilder,
        store: Option<&StoreBackend>,
        state: Arc<StateDir>,
        observability: Arc<Observability>,
    ) -> Collection {
        let CollectionSettings { mut policy, intervals, ensured_lease } = settings;
        let mut unread_rules = None;
        let mut history = None;
        if state.is_locked() {
            match KeepRuleFile::at(&state).read() {
                Ok(rules) => policy.keep.extend(rules),
                Err(error) => unread_rules = Some(error),
            }
            let file = Arc::new(HistoryFile::new(state.history()));
            let metered =
                MeteredHistory { history: Arc::clone(&file), metrics: Arc::clone(observability.metrics()) };
            builder = builder
                .records(Arc::new(UsageRecordFileStore::new(state.records())))
                .history(Arc::new(metered));
            history = Some(file);
        }
        let gate = if state.is_locked() {
            RemovalGate::with_file(state.leases(), ensured_lease)
        } else {
            RemovalGate::default()
        };
        let gate = Arc::new(gate);
        let builder = builder
            .policy(policy)
            .gate(Arc::clone(&gate))
            .events(Arc::clone(observability.sink()), observability.node().name.clone());
        let collector = Arc::new(builder.build());
        Collection {
            loops: GcLoops::new(Arc::clone(&collector), intervals),
            runs: AtomicBool::new(false),
            others: OtherCollector::default(),
            is_store: store.is_some(),
            unread_rules: Mutex::new(unread_rules),
            collector,
            gate,
            history,
            observability,
            state,
        }
    }

    /// Runs rounds until dropped.
    pub(crate) async fn run(&self) {
        self.runs.store(true, Ordering::Relaxed);
        self.loops.run().await;
    }

    /// Replaces the policy by one with all keep rules.
    pub(crate) fn set_policy(&self, policy: GcPolicy) {
        self.collector.set_policy(policy);
        *self.unread_rules.lock() = None;
    }

    /// The collector; an error while it is not known what keep rules retain.
    pub(crate) fn collector(&self) -> Result<&Collector, Error> {
        match &*self.unread_rules.lock() {
            Some(error) => Err(error.clone()),
            None => Ok(&self.collector),
        }
    }

    /// The collector, for what removes nothing.
    pub(crate) fn unchecked_collector(&self) -> &Arc<Collector> {
        &self.collector
    }

    /// The gate that each removal passes.
    pub(crate) fn gate(&self) -> &Arc<RemovalGate> {
        &self.gate
    }

    /// Watches the status of the rounds.
    pub(crate) fn status(&self) -> watch::Receiver<GcStatus> {
        self.loops.status()
    }

    /// Notes a round that a client requested: as the last one, and as an event if it removed images.
    pub(crate) fn note_requested(&self, round: Arc<GcRoundResult>) {
        if round.report.removed().next().is_some() {
            let message = format!("{} requested a round: {}", Peer::current(), round);
            self.observability.record(EventType::Normal, EventReason::Collected, message);
        }
        self.loops.note_requested(round);
    }

    /// Watches the list of images.
    pub(crate) fn images(&self) -> watch::Receiver<ImageCache> {
        self.loops.images()
    }

    /// A warning about another collector beside this one.
    pub(crate) fn warning(&self) -> Option<String> {
        self.others.warning(SystemTime::now())
    }

    /// The state directory, for calls that need what is kept there.
    pub(crate) fn require_state_dir(&self) -> Result<&StateDir, Error> {
        if self.state.is_locked() {
            return Ok(&self.state);
        }
        Err(Error::failed("no GC state: the process was opened without a state directory"))
    }

    /// The filesystems of the backend, without those that cannot be measured within [`MEASURE_WITHIN`].
    pub(crate) async fn filesystems(&self) -> NodeFilesystems {
        let (image, others) = tokio::join!(
            time::timeout(MEASURE_WITHIN, self.collector.measure_filesystem()),
            time::timeout(MEASURE_WITHIN, self.collector.measure_other_filesystems()),
        );
        let failed = |error: &FilesystemError| tracing::debug!("cannot measure a filesystem: {error}");
        let image = image.ok().and_then(|image| image.inspect_err(failed).ok());
        let others = others.ok().and_then(|others| others.inspect_err(failed).ok());
        NodeFilesystems { image: image.filter(|disk| disk.capacity > 0), others: others.unwrap_or_default() }
    }

    /// Waits until everything that a later process depends on is on disk.
    pub(super) async fn flush(&self) {
        if let Err(error) = self.save_leases().await {
            tracing::warn!("{}", error.message());
        }
        self.collector.flush().await;
    }
}

#[async_trait]
impl RoomMaker for Collection {
    async fn make_room(&self, bytes: ReclaimBytes) -> RoomOutcome {
        let Ok(collector) = self.collector() else { return RoomOutcome::NotEnough { reclaimable: None } };
        if self.runs.load(Ordering::Relaxed) && self.collector.policy().is_enabled() {
            collector.make_room(bytes).await
        } else {
            collector.reclaimable_room(bytes).await
        }
    }
}
