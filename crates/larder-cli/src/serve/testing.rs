//! A node on a fake backend, for the tests of what works on it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use larder::credentials::Sources as Credentials;
use larder::gc::{Collector, GcPolicy, Measure, Periods};
use larder::pull::PullConfig;
use larder_testkit::fake_backend::FakeBackend;

use super::node::{Backed, Node, Parts};
use super::reload::Settings;
use crate::collect::Place;
use crate::commands::df::UsageSource;
use crate::config::{self, Config, Places, Source, Sources};

/// A node with its state and its `config.yaml`, if there is one, in this folder. Collection spares no image for its age, and
/// looks at `disk`, if not at the backend's.
pub(super) fn node(
    backend: &FakeBackend,
    folder: &Path,
    disk: Option<Arc<dyn Measure>>,
    change: impl FnOnce(&mut Config),
) -> Node {
    Node::build(parts(backend, folder, disk, change))
}

/// What such a node is built from.
pub(super) fn parts(
    backend: &FakeBackend,
    folder: &Path,
    disk: Option<Arc<dyn Measure>>,
    change: impl FnOnce(&mut Config),
) -> Parts {
    let backend: Arc<FakeBackend> = Arc::new(backend.clone());
    let file = Source::File { path: folder.join("config.yaml"), required: false };
    let sources = Sources { places: Places::of(true, |_| None), layers: vec![file] };
    let mut config = config::load(&sources).unwrap();
    change(&mut config);
    let mut collector = Collector::builder(backend.clone());
    if let Some(disk) = disk {
        collector = collector.disk(disk);
    }
    Parts {
        chosen: Backed {
            told: "a fake".into(),
            collector,
            backend,
            store: None,
            usage: UsageSource::Nothing,
        },
        place: Place::at(folder.to_owned()),
        policy: GcPolicy { minimum_age: Duration::ZERO, ..GcPolicy::default() },
        credentials: Credentials::default(),
        metrics: Arc::default(),
        records: None,
        pull: PullConfig::default(),
        events: 10,
        name: "node".into(),
        spared: Duration::from_secs(600),
        periods: Periods::default(),
        settings: Settings::new(sources, config, tracing::Level::WARN),
    }
}
