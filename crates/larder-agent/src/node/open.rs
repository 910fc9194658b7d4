//! From settings to a node: opens what must be open, and starts nothing.

use std::path::Path;
use std::sync::Arc;

use larder::backend::Backend;
use larder::credentials::NodeKeyring;

use super::cluster::NodeCluster;
use super::collection::CollectionSettings;
use super::pulls::PullAccess;
use super::settings::NodeSettings;
use super::{Node, NodeDependencies, Observability, ObservabilitySettings, Storage};
use crate::backend::{OpenMode, RuntimeRequirement, open};
use crate::config::{Config, SettingsSources};
use crate::error::NodeOpenError;
use crate::state::StateDir;

/// How a node is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeOptions {
    /// Whether a store that does not exist is created.
    pub store: OpenMode,
    /// Treatment of a runtime that does not answer yet.
    pub runtime: RuntimeRequirement,
    /// Needed access to the state directory.
    pub state: StateDirAccess,
    /// Whether events are logged: those of a command are sent to its caller alone.
    pub logs_events: bool,
    /// Whether images are published to the containerd of the settings, which asks this process for its snapshots.
    pub publishes: bool,
    /// Whether the node takes part in the Kubernetes cluster of the settings. Requires a runtime.
    pub joins_cluster: bool,
    /// The least severe level that is logged, whatever the settings say.
    pub verbosity: tracing::Level,
}

/// Access to the state directory that a node needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateDirAccess {
    /// None: the node lists and inspects. The state directory of larder's own store is locked all the same.
    None,
    /// This user's own.
    CurrentUser,
    /// The only one there is: refused where root keeps another one of the same runtime.
    Exclusive,
}

impl Node {
    /// Opens the node that these settings describe. `credentials` replace those of the settings and of the process's
    /// user. May block for as long as opening a store takes.
    pub fn open(
        sources: SettingsSources,
        config: Config,
        credentials: Option<NodeKeyring>,
        options: NodeOptions,
    ) -> Result<Node, NodeOpenError> {
        let handle = open(&config, options.store, options.runtime)?;
        let state = StateDir::of(config.state.as_deref(), &handle.target())?;
        let state = match (options.state, handle.store()) {
            (StateDirAccess::None, None) => state,
            (StateDirAccess::CurrentUser, None) => state.lock_beside_root()?,
            _ => state.lock()?,
        };
        let state = Arc::new(state);
        let cluster = if options.joins_cluster { NodeCluster::open(&config)? } else { None };
        let observability = Arc::new(Observability::build(ObservabilitySettings {
            node_name: cluster.as_ref().map_or_else(host_name, |cluster| cluster.name().to_owned()),
            event_ring_size: config.event_ring_size,
            logs_events: options.logs_events,
        }));
        let is_store = handle.store().is_some();
        let access =
            PullAccess::open(&config, &state, is_store, credentials, cluster.as_deref(), &observability)?;
        let hidden = access.prefetch_credentials.hidden();
        let (storage, collector) = Storage::build(&config, handle, options.publishes, hidden, &observability);
        let node = Node::build(NodeDependencies {
            storage,
            collector,
            collection: CollectionSettings::of(&config),
            state,
            access,
            observability,
            cluster,
            settings: Arc::new(NodeSettings::new(sources, config, options.verbosity)),
        });
        if let Err(error) = node.collection.collector() {
            // Images can still be used, and the rules be dropped.
            tracing::debug!("{error}");
        }
        Ok(node)
    }
}

impl Node {
    /// A node on any backend, with its state in `dir`. The credentials are those of the settings and of the process's
    /// user.
    pub fn on_backend(
        backend: Arc<dyn Backend>,
        dir: &Path,
        sources: SettingsSources,
        config: Config,
    ) -> Result<Node, NodeOpenError> {
        let state = Arc::new(StateDir::at(dir.to_owned()).lock()?);
        let observability = Arc::new(Observability::build(ObservabilitySettings {
            node_name: host_name(),
            event_ring_size: config.event_ring_size,
            logs_events: true,
        }));
        let access = PullAccess::open(&config, &state, false, None, None, &observability)?;
        let description = "a backend of the embedding program";
        let (storage, collector) = Storage::on_backend(description, backend, &observability);
        let node = Node::build(NodeDependencies {
            storage,
            collector,
            collection: CollectionSettings::of(&config),
            access,
            cluster: None,
            settings: Arc::new(NodeSettings::new(sources, config, tracing::Level::WARN)),
            state,
            observability,
        });
        node.collection.collector()?;
        Ok(node)
    }
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
