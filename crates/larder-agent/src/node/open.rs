//! From settings to a node: opens what must be open, and starts nothing.

use std::path::Path;
use std::sync::Arc;

use larder::backend::Backend;
use larder::credentials::plugin::PluginRunObserver;
use larder::credentials::{self, NodeDockerConfig, SearchPath};
use larder::error_chain;
use larder::hidden::{HiddenImages, PrefetchCredentials};
use larder::records::{PullRecordStore, Verification};

use super::cluster::NodeCluster;
use super::collection::CollectionSettings;
use super::metrics::NodeMetrics;
use super::settings::NodeSettings;
use super::{Node, NodeDependencies, Observability, ObservabilitySettings, Storage};
use crate::backend::{OpenMode, RuntimeRequirement, open, providers};
use crate::config::{Config, KubeletImageService, SettingsSources};
use crate::error::{Error, NodeOpenError};
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
    /// Nothing: the node lists and inspects.
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
        credentials: Option<credentials::NodeKeyring>,
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
        let records = if state.is_locked() { opened(config.verification.as_ref(), &state)? } else { None };
        let prefetch_credentials = prefetch_credentials(&config, handle.store().is_some(), &state)?;
        let cluster = if options.joins_cluster { NodeCluster::open(&config)? } else { None };
        let observability = Arc::new(Observability::build(ObservabilitySettings {
            node_name: cluster.as_ref().map_or_else(host_name, |cluster| cluster.name().to_owned()),
            event_ring_size: config.event_ring_size,
            logs_events: options.logs_events,
        }));
        let metrics = observability.metrics();
        let credentials = match credentials {
            Some(credentials) => credentials,
            None => credentials_of(&config, cluster.as_deref(), metrics)?,
        };
        let hidden = prefetch_credentials.hidden();
        let (storage, collector) = Storage::build(&config, handle, options.publishes, hidden, &observability);
        let node = Node::build(NodeDependencies {
            storage,
            collector,
            collection: CollectionSettings::of(&config),
            state,
            records,
            credentials,
            prefetch_credentials,
            pull: config.pull.clone(),
            ensured_lease: config.ensured_lease,
            observability,
            cluster,
            settings: NodeSettings::new(sources, config, options.verbosity),
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
        let description = "a backend of the embedding program";
        let (storage, collector) = Storage::on_backend(description, backend, &observability);
        let node = Node::build(NodeDependencies {
            storage,
            collector,
            collection: CollectionSettings::of(&config),
            records: opened(config.verification.as_ref(), &state)?,
            prefetch_credentials: prefetch_credentials(&config, false, &state)?,
            credentials: credentials_of(&config, None, observability.metrics())?,
            pull: config.pull.clone(),
            ensured_lease: config.ensured_lease,
            cluster: None,
            settings: NodeSettings::new(sources, config, tracing::Level::WARN),
            state,
            observability,
        });
        node.collection.collector()?;
        Ok(node)
    }
}

/// The pull records of a state directory; `None` where kubelet's feature gate is off.
fn opened(
    verification: Option<&Verification>,
    state: &StateDir,
) -> Result<Option<Arc<PullRecordStore>>, Error> {
    let Some(verification) = verification.cloned() else { return Ok(None) };
    let opened = PullRecordStore::open(&state.pull_records(), verification);
    let records = opened.map_err(|error| Error::failed(error_chain(&error)).hint(error.hint()))?;
    Ok(Some(Arc::new(records)))
}

/// Images that are fetched ahead of kubelet with credentials are hidden where kubelet asks larder for images. It sees those
/// of larder's own store in no other way. What was hidden with earlier settings stays so, unless there is no kubelet.
fn prefetch_credentials(
    config: &Config,
    is_store: bool,
    state: &StateDir,
) -> Result<PrefetchCredentials, Error> {
    if config.kubelet_images == KubeletImageService::None {
        return Ok(PrefetchCredentials::Use);
    }
    if !state.is_locked() {
        return Ok(PrefetchCredentials::Withhold(None));
    }
    let (hides, path) = (is_store || config.kubelet_images == KubeletImageService::Larder, state.hidden());
    let failed = |error: std::io::Error| {
        Error::failed(format!("cannot determine which images are hidden from kubelet: {error}"))
            .hint("repair the file or its directory")
    };
    if !hides && !path.try_exists().map_err(failed)? {
        return Ok(PrefetchCredentials::Withhold(None));
    }
    let hidden = Arc::new(HiddenImages::open(&path).map_err(failed)?);
    Ok(if hides { PrefetchCredentials::Hide(hidden) } else { PrefetchCredentials::Withhold(Some(hidden)) })
}

/// The Docker configuration of the user that the process runs as, read again every five minutes, and the programs that
/// give more: credential helpers and kubelet's credential providers.
fn credentials_of(
    config: &Config,
    cluster: Option<&NodeCluster>,
    metrics: &Arc<NodeMetrics>,
) -> Result<credentials::NodeKeyring, Error> {
    let files = NodeDockerConfig::search(SearchPath::user());
    let mut credentials =
        credentials::NodeKeyring::new(files, Vec::new()).with_tokens(config.credential_tokens);
    if let Some(helpers) = providers::helpers(config.credential_tokens) {
        credentials = credentials.with_helpers(helpers);
    }
    let configured = &config.credential_plugins;
    if let (Some(file), Some(programs)) = (&configured.config, &configured.bin_dir) {
        let accounts = cluster.and_then(NodeCluster::accounts);
        let plugins = providers::plugins(file, programs, accounts)?;
        metrics.providers_configured(plugins.config_hash(), plugins.names());
        let runs = Arc::clone(metrics) as Arc<dyn PluginRunObserver>;
        credentials = credentials.with_provider(Arc::new(plugins.with_run_observer(&runs)));
    }
    Ok(credentials)
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use larder::backend::Image;
    use larder_testkit::fake_backend::FakeBackend;

    use super::*;
    use crate::node::testing;

    #[test]
    fn images_that_were_hidden_stay_so_where_kubelet_does_not_use_larder() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = None;
        let state =
            testing::parts(&FakeBackend::new(), dir.path(), None, |own| config = Some(own.clone())).state;
        let mut config = config.unwrap();
        let opened = prefetch_credentials(&config, false, &state).unwrap();
        assert!(matches!(opened, PrefetchCredentials::Withhold(None)), "{opened:?}");
        let document = r#"{"version":1,"hidden":["sha256:1"],"pulls":{},"isLost":false,"visible":[]}"#;
        fs_err::write(state.hidden(), document).unwrap();
        let opened = prefetch_credentials(&config, false, &state).unwrap();
        assert!(matches!(opened, PrefetchCredentials::Withhold(Some(_))), "{opened:?}");
        let image = Image { id: "sha256:1".into(), ..Image::default() };
        assert!(opened.hidden().unwrap().hides(&image));
        config.kubelet_images = KubeletImageService::None;
        for is_store in [false, true] {
            let opened = prefetch_credentials(&config, is_store, &state).unwrap();
            assert!(matches!(opened, PrefetchCredentials::Use), "{opened:?}");
        }
        assert!(state.hidden().exists(), "for a kubelet that is installed later");
    }
}
