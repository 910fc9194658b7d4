//! A node: one image backend, and everything that works on it. Building one starts nothing.
//!
//! ```text
//! Config -> open -> Node { manager, collector, gate, records, events, metrics } -> control service, CRI, run
//! ```
//!
//! A daemon runs its node: health checks, garbage collection on a timer, static pods, prefetch, reloads. A
//! command that works without a daemon opens one for as long as it lives, with the same settings.

pub(crate) mod cluster;
pub(crate) mod cri_images;
pub(crate) mod cri_pins;
mod dead_containers;
pub(crate) mod event_log;
pub(crate) mod health;
pub(crate) mod leases;
pub(crate) mod metrics;
mod observability;
mod open;
mod other_collector;
pub(crate) mod peer;
pub(crate) mod pod_pulls;
pub(crate) mod pods;
mod reload;
pub(crate) mod requests;
mod run;
pub(crate) mod settings;
mod storage;
#[cfg(test)]
pub(crate) mod testing;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use larder::credentials::NodeKeyring;
use larder::gc::{
    Collector, CollectorBuilder, GcCounts, GcIntervals, GcLoops, GcPolicy, HistoryFile, OtherFilesystem,
    PostImageGcHook, UsageRecordFileStore,
};
use larder::hidden::{HiddenImages, PrefetchCredentials};
use larder::image_service::{FilesystemError, FsStats};
use larder::pull::{ImageManager, PullConfig};
use larder::records::{PullRecordStore, PullRecords};
use larder::reference::ImageId;
use larder::retention::{KeepRule, RemovalGate};
use larder_store::backend::StoreBackend;
use tokio::sync::OnceCell;
use tokio::time;

use crate::error::Error;
use crate::state::{EnsureLeaseFile, KeepRuleFile, RecentEnsures, StateDir};
#[cfg(feature = "kube")]
pub use cluster::check_cluster;

use cluster::NodeCluster;
use metrics::MeteredHistory;
pub(crate) use observability::Observability;
use observability::ObservabilitySettings;
use other_collector::OtherCollector;
use pod_pulls::PodPulls;
use pods::desired::DesiredUses;
use settings::NodeSettings;
pub(crate) use storage::Storage;

pub use open::{NodeOptions, StateDirAccess};

/// How long metrics and the status wait for a measurement of the filesystems.
const MEASURE_WITHIN: Duration = Duration::from_secs(2);

/// Dependencies of a node.
pub(crate) struct NodeDependencies {
    pub(crate) storage: Storage,
    /// Knows how to ask the backend.
    pub(crate) collector: CollectorBuilder,
    /// The state directory, locked for as long as the node lives; without the lock nothing is read from or written to it.
    pub(crate) state: StateDir,
    /// The policy of the settings.
    pub(crate) policy: GcPolicy,
    /// Pull records; `None` keeps none.
    pub(crate) records: Option<Arc<PullRecordStore>>,
    pub(crate) pull: PullConfig,
    /// The node's own credentials; requests bring theirs along.
    pub(crate) credentials: NodeKeyring,
    pub(crate) observability: Arc<Observability>,
    /// Treatment of the credentials of pulls ahead of kubelet.
    pub(crate) prefetch_credentials: PrefetchCredentials,
    /// How long an image that was just ensured is leased.
    pub(crate) ensured_lease: Duration,
    pub(crate) periods: GcIntervals,
    /// The Kubernetes cluster, if the daemon takes part in one.
    pub(crate) cluster: Option<Arc<NodeCluster>>,
    pub(crate) settings: NodeSettings,
}

/// The filesystems of a backend as they are now.
#[derive(Default)]
pub(crate) struct NodeFilesystems {
    /// The one that GC measures and frees; `None` if it cannot be measured.
    pub(crate) image: Option<FsStats>,
    /// The others that the runtime reports.
    pub(crate) others: Vec<OtherFilesystem>,
}

/// One image backend, and everything that works on it.
pub struct Node {
    pub(crate) storage: Arc<Storage>,
    pub(crate) manager: Arc<ImageManager>,
    pub(crate) gate: Arc<RemovalGate>,
    collector: Arc<Collector>,
    pub(crate) loops: GcLoops,
    pub(crate) observability: Arc<Observability>,
    /// Pull times of pods whose images are being requested.
    pub(crate) pod_pulls: Arc<PodPulls>,
    /// Uses of images by pods of the cluster, static pods and the prefetch list.
    pub(crate) desired_uses: DesiredUses,
    /// The Kubernetes cluster, if the daemon takes part in one.
    pub(crate) cluster: Option<Arc<NodeCluster>>,
    pub(crate) settings: NodeSettings,
    /// Removals of another collector over CRI.
    pub(crate) others: OtherCollector,
    pub(crate) records: Option<Arc<PullRecordStore>>,
    /// The images that kubelet does not see, where there may be any.
    pub(crate) hidden: Option<Arc<HiddenImages>>,
    /// Whether the pulls of an earlier process are resolved.
    recovered: OnceCell<()>,
    /// The removal history; `None` where no state is kept.
    history: Option<Arc<HistoryFile>>,
    /// Ensures for those who collect later; `None` where no state is kept.
    pub(crate) ensures: Option<RecentEnsures>,
    /// Why the keep rules are not known: nothing is planned or removed until they are.
    unread_rules: Mutex<Option<Error>>,
    /// Dropped last: its lock outlives all that is written.
    pub(crate) state: StateDir,
}

impl Node {
    /// Puts it together.
    pub(crate) fn build(parts: NodeDependencies) -> Node {
        let NodeDependencies { storage, mut collector, state, policy, records, observability, .. } = parts;
        let backend = storage.backend();
        let (metrics, sink) = (observability.metrics(), observability.sink());
        let (gate, desired_uses) = (Arc::new(RemovalGate::default()), DesiredUses::default());
        let pod_pulls = Arc::new(PodPulls::new(metrics.clone(), Arc::clone(sink)));
        let mut manager = ImageManager::builder(Arc::clone(backend))
            .config(parts.pull)
            .credentials(parts.credentials)
            .events(Arc::clone(sink))
            .metrics(metrics.clone())
            .times(pod_pulls.recorder())
            .prefetch_credentials(parts.prefetch_credentials.clone())
            .lease(Arc::clone(&gate), parts.ensured_lease);
        if let Some(records) = &records {
            records.resolve_interrupted_with(Arc::clone(backend));
            records.await_recovery();
            manager = manager.records(Arc::clone(records) as Arc<dyn PullRecords>);
            collector = collector.hook(Arc::clone(records) as Arc<dyn PostImageGcHook>);
        }
        let history = state.is_locked().then(|| Arc::new(HistoryFile::new(state.history())));
        if let Some(history) = history.clone() {
            collector = collector
                .records(Arc::new(UsageRecordFileStore::new(state.records())))
                .history(Arc::new(MeteredHistory { history, metrics: metrics.clone() }))
                .retention_source(Arc::new(EnsureLeaseFile::at(&state, parts.ensured_lease)));
        }
        let collector = collector
            .policy(policy)
            .gate(Arc::clone(&gate))
            .retention_source(Arc::new(desired_uses.clone()))
            .events(Arc::clone(sink), observability.node().name.clone())
            .build();
        let collector = Arc::new(collector);
        Node {
            ensures: recent_ensures(&state, storage.store(), parts.ensured_lease),
            loops: GcLoops::new(Arc::clone(&collector), parts.periods),
            manager: Arc::new(manager.build()),
            cluster: parts.cluster,
            settings: parts.settings,
            others: OtherCollector::default(),
            storage: Arc::new(storage),
            gate,
            collector,
            observability,
            pod_pulls,
            desired_uses,
            records,
            hidden: parts.prefetch_credentials.hidden().cloned(),
            history,
            recovered: OnceCell::new(),
            unread_rules: Mutex::default(),
            state,
        }
    }

    /// Reads the keep rules and puts them into the policy, after those of the settings.
    pub(crate) fn read_rules(&self) -> Result<(), Error> {
        let read = KeepRuleFile::at(&self.state).read();
        match read {
            Ok(rules) => self.set_rules(rules),
            Err(error) => {
                *self.unread_rules() = Some(error.clone());
                return Err(error);
            }
        }
        Ok(())
    }

    /// From now on these are the rules of `larder keep`.
    pub(crate) fn set_rules(&self, rules: Vec<KeepRule>) {
        self.collector.set_policy(self.settings.now().policy(rules));
        *self.unread_rules() = None;
    }

    /// The collector; an error while it is not known what keep rules retain.
    pub(crate) fn collector(&self) -> Result<&Collector, Error> {
        match &*self.unread_rules() {
            Some(error) => Err(error.clone()),
            None => Ok(&self.collector),
        }
    }

    /// The collector, for what removes nothing.
    pub(crate) fn unchecked_collector(&self) -> &Collector {
        &self.collector
    }

    /// How many images were removed since the start.
    pub(crate) fn counts(&self) -> GcCounts {
        self.collector.counts()
    }

    fn unread_rules(&self) -> MutexGuard<'_, Option<Error>> {
        self.unread_rules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A description of the backend, for operators.
    pub fn description(&self) -> &str {
        self.storage.description()
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

    /// Whether the backend answers.
    pub async fn check_backend(&self) -> Result<(), Error> {
        Ok(self.storage.backend().info().await.map(drop)?)
    }

    /// Resolves pulls that an earlier process did not finish; `false` if the backend did not answer. Until this has
    /// succeeded, pods have no access to images that those pulls may have stored. Does nothing after a success.
    pub async fn recover(&self) -> bool {
        let Some(records) = &self.records else { return true };
        let recover =
            async || if records.recover(&**self.storage.backend()).await { Ok(()) } else { Err(()) };
        self.recovered.get_or_try_init(recover).await.is_ok()
    }

    /// Records that an image was ensured, for later GC processes. An image that was pulled is first seen now. The record is on
    /// disk when this returns, unless it cannot be written, which is logged.
    pub(crate) async fn note_ensured(&self, id: &ImageId, was_pulled: bool) {
        let Some(ensures) = &self.ensures else { return };
        // In a runtime, present images may be older than larder: their ages start with the first listing.
        let is_known = self.storage.store().is_some() || self.collector.has_detected();
        let was_leased = was_pulled && ensures.note_pulled(id);
        if was_pulled || (ensures.note(id) && is_known) {
            self.collector.note_ensured(id);
        }
        // Without leases the record protects nothing.
        if !was_leased && !self.settings.now().ensured_lease.is_zero() {
            ensures.flush().await;
        }
    }

    /// Waits until everything that a later process depends on is on disk.
    pub async fn flush(&self) {
        if let Some(ensures) = &self.ensures {
            ensures.flush().await;
        }
        self.collector.flush().await;
    }
}

/// The records of ensures for later GC processes, if the state directory is locked.
fn recent_ensures(state: &StateDir, store: Option<&StoreBackend>, lease: Duration) -> Option<RecentEnsures> {
    state.is_locked().then(|| match store {
        Some(store) => RecentEnsures::in_store(store.clone()),
        None => RecentEnsures::in_file(EnsureLeaseFile::at(state, lease)),
    })
}

#[cfg(test)]
mod tests;
