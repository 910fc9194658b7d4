//! A node: one image backend, and the parts that work on it. Building one starts nothing.
//!
//! ```text
//! Config -> open -> Observability -> Storage -> Collection -> Pulls -> Workloads -> Node -> control service, CRI, run
//! ```
//!
//! Each part is built from the parts to its left; callers receive the parts that they need. A daemon runs its node:
//! health checks, garbage collection on a timer, static pods, prefetch, reloads. A command that works without a daemon
//! opens one for as long as it lives, with the same settings.

pub(crate) mod cluster;
pub(crate) mod collection;
pub(crate) mod cri_images;
pub(crate) mod cri_pins;
mod dead_containers;
pub(crate) mod event_log;
pub(crate) mod health;
mod lazy_layers;
pub(crate) mod metrics;
mod observability;
mod open;
pub(crate) mod peer;
pub(crate) mod pods;
pub(crate) mod pulls;
mod reload;
mod run;
pub(crate) mod settings;
mod storage;
#[cfg(test)]
pub(crate) mod testing;
mod workloads;

use std::sync::Arc;

use larder::gc::{CollectorBuilder, PostImageGcHook};

use crate::error::Error;
use crate::state::StateDir;
#[cfg(feature = "kube")]
pub use cluster::check_cluster;

use cluster::NodeCluster;
pub(crate) use collection::NodeFilesystems;
use collection::{Collection, CollectionSettings};
pub(crate) use observability::Observability;
use observability::ObservabilitySettings;
use pods::desired::DesiredUses;
use pulls::{PullAccess, Pulls, PullsSettings};
use settings::NodeSettings;
pub(crate) use storage::Storage;
use workloads::Workloads;

pub use open::{NodeOptions, StateDirAccess};

/// Dependencies of a node.
pub(crate) struct NodeDependencies {
    pub(crate) storage: Storage,
    /// Knows how to ask the backend.
    pub(crate) collector: CollectorBuilder,
    pub(crate) collection: CollectionSettings,
    /// The state directory, locked for as long as the node lives; without the lock nothing is read from or written to
    /// it.
    pub(crate) state: Arc<StateDir>,
    pub(crate) access: PullAccess,
    pub(crate) observability: Arc<Observability>,
    /// The Kubernetes cluster, if the daemon takes part in one.
    pub(crate) cluster: Option<Arc<NodeCluster>>,
    pub(crate) settings: Arc<NodeSettings>,
}

/// One image backend, and the parts that work on it.
pub struct Node {
    pub(crate) storage: Arc<Storage>,
    pub(crate) pulls: Arc<Pulls>,
    pub(crate) collection: Arc<Collection>,
    pub(crate) observability: Arc<Observability>,
    pub(crate) workloads: Workloads,
    pub(crate) settings: Arc<NodeSettings>,
    /// Dropped last: its lock outlives all that is written.
    pub(crate) state: Arc<StateDir>,
}

impl Node {
    /// Puts it together.
    pub(crate) fn build(parts: NodeDependencies) -> Node {
        let NodeDependencies { storage, mut collector, state, access, observability, .. } = parts;
        let (config, desired_uses) = (parts.settings.now(), DesiredUses::default());
        if let Some(records) = &access.records {
            collector = collector.hook(Arc::clone(records) as Arc<dyn PostImageGcHook>);
        }
        let collection = Arc::new(Collection::build(
            parts.collection,
            collector.retention_source(Arc::new(desired_uses.clone())),
            storage.store(),
            Arc::clone(&state),
            Arc::clone(&observability),
        ));
        let pulls = Arc::new(Pulls::build(
            &PullsSettings::of(&config),
            access,
            storage.backend(),
            Arc::clone(&collection),
            Arc::clone(&observability),
        ));
        let workloads = Workloads::build(
            Arc::clone(&parts.settings),
            parts.cluster,
            &state,
            desired_uses,
            Arc::clone(&pulls),
            Arc::clone(&collection),
            Arc::clone(&observability),
        );
        let (storage, settings) = (Arc::new(storage), parts.settings);
        Node { storage, pulls, collection, observability, workloads, settings, state }
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
        self.pulls.recover().await
    }

    /// Waits until everything that a later process depends on is on disk.
    pub async fn flush(&self) {
        self.collection.flush().await;
    }
}

#[cfg(test)]
mod tests;
