//! A node on a fake backend, for the tests of what works on it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use larder::gc::{FsStatsProvider, GcPolicy, WhenUnreachable};
use larder_testkit::fake_backend::FakeBackend;

use super::collection::CollectionSettings;
use super::pulls::PullAccess;
use super::settings::NodeSettings;
use super::{Node, NodeDependencies, Observability, ObservabilitySettings, Storage};
use crate::config::{self, Config, SettingsSource, SettingsSources};
use crate::environment::DefaultPaths;
use crate::state::StateDir;

/// A node with its state and its `config.yaml`, if there is one, in this directory. Collection spares no image for its
/// age, and looks at `disk`, if not at the backend's.
pub(crate) fn node(
    backend: &FakeBackend,
    dir: &Path,
    disk: Option<Arc<dyn FsStatsProvider>>,
    change: impl FnOnce(&mut Config),
) -> Node {
    Node::build(parts(backend, dir, disk, change))
}

/// Returns events and metrics of a node, of which ten events are kept.
pub(crate) fn observability() -> Observability {
    let node_name = "node".to_owned();
    Observability::build(ObservabilitySettings { node_name, event_ring_size: 10, logs_events: true })
}

/// Returns the dependencies of a node in tests.
pub(crate) fn parts(
    backend: &FakeBackend,
    dir: &Path,
    disk: Option<Arc<dyn FsStatsProvider>>,
    change: impl FnOnce(&mut Config),
) -> NodeDependencies {
    let observability = Arc::new(observability());
    let file = SettingsSource::File { path: dir.join("config.yaml"), required: false };
    let sources = SettingsSources { places: DefaultPaths::of(true, |_| None), layers: vec![file] };
    let mut config = config::load(&sources).expect("defaults are valid settings");
    config.ensured_lease = Duration::from_secs(600);
    change(&mut config);
    let policy = GcPolicy {
        minimum_age: Duration::ZERO,
        when_unreachable: WhenUnreachable::All,
        ..GcPolicy::default()
    };
    let (storage, mut collector) = Storage::on_backend("a fake", Arc::new(backend.clone()), &observability);
    if let Some(disk) = disk {
        collector = collector.disk(disk);
    }
    let state = StateDir::at(dir.to_owned()).lock();
    NodeDependencies {
        storage,
        collector,
        state: Arc::new(state.expect("the test has a state directory of its own")),
        collection: CollectionSettings { policy, ..CollectionSettings::of(&config) },
        access: PullAccess::default(),
        observability,
        cluster: None,
        settings: Arc::new(NodeSettings::new(sources, config, tracing::Level::WARN)),
    }
}
