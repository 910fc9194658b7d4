//! A node: one image backend, and everything that works on it. Building one starts nothing.
//!
//! ```text
//! Config -> open -> Node { manager, collector, gate, records, events, metrics } -> control service, CRI, run
//! ```
//!
//! A daemon runs its node: health checks, garbage collection on a timer, static pods, prefetch, reloads. A
//! command that works without a daemon opens one for as long as it lives, with the same settings.

pub(crate) mod cluster;
pub(crate) mod collection;
pub(crate) mod cri_images;
pub(crate) mod cri_pins;
mod dead_containers;
pub(crate) mod event_log;
pub(crate) mod health;
pub(crate) mod metrics;
mod observability;
mod open;
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

use std::sync::Arc;
use std::time::Duration;

use larder::credentials::NodeKeyring;
use larder::gc::{CollectorBuilder, PostImageGcHook};
use larder::hidden::{HiddenImages, PrefetchCredentials};
use larder::pull::{ImageManager, PullConfig};
use larder::records::{PullRecordStore, PullRecords};
use tokio::sync::OnceCell;

use crate::error::Error;
use crate::state::StateDir;
#[cfg(feature = "kube")]
pub use cluster::check_cluster;

use cluster::NodeCluster;
pub(crate) use collection::NodeFilesystems;
use collection::{Collection, CollectionSettings};
pub(crate) use observability::Observability;
use observability::ObservabilitySettings;
use pod_pulls::PodPulls;
use pods::desired::DesiredUses;
use settings::NodeSettings;
pub(crate) use storage::Storage;

pub use open::{NodeOptions, StateDirAccess};

/// Dependencies of a node.
pub(crate) struct NodeDependencies {
    pub(crate) storage: Storage,
    /// Knows how to ask the backend.
    pub(crate) collector: CollectorBuilder,
    pub(crate) collection: CollectionSettings,
    /// The state directory, locked for as long as the node lives; without the lock nothing is read from or written to it.
    pub(crate) state: Arc<StateDir>,
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
    /// The Kubernetes cluster, if the daemon takes part in one.
    pub(crate) cluster: Option<Arc<NodeCluster>>,
    pub(crate) settings: NodeSettings,
}

/// One image backend, and everything that works on it.
pub struct Node {
    pub(crate) storage: Arc<Storage>,
    pub(crate) manager: Arc<ImageManager>,
    pub(crate) collection: Arc<Collection>,
    pub(crate) observability: Arc<Observability>,
    /// Pull times of pods whose images are being requested.
    pub(crate) pod_pulls: Arc<PodPulls>,
    /// Uses of images by pods of the cluster, static pods and the prefetch list.
    pub(crate) desired_uses: DesiredUses,
    /// The Kubernetes cluster, if the daemon takes part in one.
    pub(crate) cluster: Option<Arc<NodeCluster>>,
    pub(crate) settings: NodeSettings,
    pub(crate) records: Option<Arc<PullRecordStore>>,
    /// The images that kubelet does not see, where there may be any.
    pub(crate) hidden: Option<Arc<HiddenImages>>,
    /// Whether the pulls of an earlier process are resolved.
    recovered: OnceCell<()>,
    /// Dropped last: its lock outlives all that is written.
    pub(crate) state: Arc<StateDir>,
}

impl Node {
    /// Puts it together.
    pub(crate) fn build(parts: NodeDependencies) -> Node {
        let NodeDependencies { storage, mut collector, state, records, observability, .. } = parts;
        let (backend, desired_uses) = (storage.backend(), DesiredUses::default());
        if let Some(records) = &records {
            collector = collector.hook(Arc::clone(records) as Arc<dyn PostImageGcHook>);
        }
        let collection = Collection::build(
            parts.collection,
            collector.retention_source(Arc::new(desired_uses.clone())),
            storage.store(),
            Arc::clone(&state),
            Arc::clone(&observability),
        );
        let (metrics, sink) = (observability.metrics(), observability.sink());
        let pod_pulls = Arc::new(PodPulls::new(metrics.clone(), Arc::clone(sink)));
        let mut manager = ImageManager::builder(Arc::clone(backend))
            .config(parts.pull)
            .credentials(parts.credentials)
            .events(Arc::clone(sink))
            .metrics(metrics.clone())
            .times(pod_pulls.recorder())
            .prefetch_credentials(parts.prefetch_credentials.clone())
            .lease(Arc::clone(collection.gate()), parts.ensured_lease);
        if let Some(records) = &records {
            records.resolve_interrupted_with(Arc::clone(backend));
            records.await_recovery();
            manager = manager.records(Arc::clone(records) as Arc<dyn PullRecords>);
        }
        Node {
            manager: Arc::new(manager.build()),
            cluster: parts.cluster,
            settings: parts.settings,
            storage: Arc::new(storage),
            collection: Arc::new(collection),
            observability,
            pod_pulls,
            desired_uses,
            records,
            hidden: parts.prefetch_credentials.hidden().cloned(),
            recovered: OnceCell::new(),
            state,
        }
    }

    /// A description of the backend, for operators.
    pub fn description(&self) -> &str {
        self.storage.description()
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

    /// Waits until everything that a later process depends on is on disk.
    pub async fn flush(&self) {
        self.collection.flush().await;
    }
}

#[cfg(test)]
mod tests;
