//! Every documented metric is served, and moves.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use larder::credentials::NodeFiles;
use larder::credentials::plugin::{
    ExecError, Execute, NoServiceAccounts, Plugin, Plugins, ProviderConfig, Request, Response,
};
use larder::gc::{Goal, Measure};
use larder::image_service::{Disk as LocalDisk, FilesystemError};
use larder::pod::Pod;
use larder::pull::{EnsureRequest, Known, PullPolicy};
use larder::records::{ImageRecords, PullRecords as _, Verification};
use larder_testkit::fake_backend::{FakeBackend, Pull, image};

use super::documented::{self, DOCUMENTED, Kind};
use super::*;
use crate::node::testing;
use crate::node::{Node, Parts};
use crate::serve::connections::Connections;

/// What only the embedded store can tell; a scenario looks at it there.
const OF_THE_STORE: [&str; 2] = ["larder_registry_", "larder_filesystem_"];

/// A disk of 1000 bytes with nothing on it but the images.
struct Disk(Arc<FakeBackend>);

#[async_trait]
impl Measure for Disk {
    async fn measure(&self) -> Result<LocalDisk, FilesystemError> {
        let used: u64 = self.0.images().iter().map(|image| image.size).sum();
        Ok(LocalDisk { capacity: 1000, available: 1000 - used, inodes: 1000, inodes_free: 1000, reserved: 0 })
    }
}

/// A provider that is asked for one image, and fails.
struct Broken;

#[async_trait]
impl Execute for Broken {
    async fn execute(&self, _request: &Request) -> Result<Response, ExecError> {
        tokio::time::sleep(Duration::from_secs(1)).await;
        Err(ExecError::Other("broken".into()))
    }
}

fn broken_provider() -> ProviderConfig {
    ProviderConfig {
        name: "broken".into(),
        match_images: vec!["r.example".into()],
        ..ProviderConfig::default()
    }
}

fn node(backend: &FakeBackend, folder: &tempfile::TempDir) -> Node {
    let disk: Arc<dyn Measure> = Arc::new(Disk(Arc::new(backend.clone())));
    let metrics = Arc::new(Metrics::default());
    metrics.configured("sha256:0");
    let plugin = Plugin::new(&broken_provider(), Arc::new(Broken), Arc::new(NoServiceAccounts));
    let runs = Arc::clone(&metrics) as Arc<dyn Runs>;
    let provider = Arc::new(Plugins::new(vec![plugin]).told(&runs));
    let always = Verification::parse("AlwaysVerify", []).unwrap();
    Node::build(Parts {
        credentials: larder::credentials::Sources::new(NodeFiles::none(), vec![provider]),
        metrics,
        records: Some(Arc::new(ImageRecords::open(&folder.path().join("records"), always).unwrap())),
        ..testing::parts(backend, folder.path(), Some(disk), |_| ())
    })
}

/// The sum of a metric's samples.
fn value(page: &str, metric: &documented::Documented) -> Option<f64> {
    let sample = match metric.kind {
        Kind::Counter => format!("{}_total", metric.name),
        Kind::Gauge => metric.name.to_owned(),
        Kind::Histogram => format!("{}_count", metric.name),
    };
    let values: Vec<f64> = page
        .lines()
        .filter(|line| line.split(['{', ' ']).next() == Some(&sample))
        .filter_map(|line| line.rsplit(' ').next()?.parse().ok())
        .collect();
    (!values.is_empty()).then(|| values.iter().sum())
}

#[tokio::test(start_paused = true)]
async fn each_documented_metric_is_served_and_all_that_count_move() {
    let (backend, folder) = (FakeBackend::new(), tempfile::tempdir().unwrap());
    let node = Arc::new(node(&backend, &folder));
    let connections = Connections::default();
    backend.on_pull_of("a:1", Pull::ok("sha256:1", 100));
    backend.on_pull_of("b:1", Pull::fails("no route"));
    backend.on_pull_of("c:1", Pull::ok("sha256:3", 100).after(Duration::from_secs(3600)));
    let ensure = async |image: &str| {
        let request = EnsureRequest {
            target: Some(larder::pod::ObjectRef::node("node")),
            ..EnsureRequest::new(image, PullPolicy::Always, Pod::default())
        };
        node.manager.ensure(&request).await.map(drop)
    };
    assert!(ensure("a:1").await.is_ok());
    assert!(ensure("b:1").await.is_err());
    assert!(ensure("r.example/private:1").await.is_err());
    let request = EnsureRequest::new("a:1", PullPolicy::IfNotPresent, Pod::default());
    node.manager.ensure(&request).await.unwrap();
    // The simulated clock does not wait for the thread that writes intents: this one is there before it moves.
    node.records.as_ref().unwrap().record_pull_intent(&"d:1".into()).await.unwrap();
    backend.add_image("old:1", image("sha256:9", 50));
    let swept = node.collector.round(Goal::AllUnused).await;
    assert_eq!(swept.report.swept.len(), 1, "{swept:?}");
    let page = tokio::select! {
        () = node.run() => unreachable!("it runs until dropped"),
        _ = ensure("c:1") => unreachable!("it takes an hour"),
        page = async {
            while node.manager.pulls().is_empty() {
                tokio::task::yield_now().await; // the clock stands still
            }
            tokio::time::sleep(Duration::from_secs(60)).await;
            exposition(&node, &connections).unwrap()
        } => page,
    };
    assert!(page.ends_with("# EOF\n"), "{page}");
    // Nobody is connected, all rounds succeed, and the fake tells no bytes.
    let still = [
        "larder_connections",
        "larder_calls",
        "larder_gc_failures_in_a_row",
        "larder_pull_fetched_bytes",
        "kubelet_imagemanager_inmemory_pulledrecords_usage_percent", // of 128 MiB
    ];
    let of_the_store = |name: &str| OF_THE_STORE.iter().any(|prefix| name.starts_with(prefix));
    for metric in DOCUMENTED.iter().filter(|metric| !of_the_store(metric.name)) {
        let found = value(&page, metric).unwrap_or_else(|| panic!("{} is not served:\n{page}", metric.name));
        assert!(found > 0.0 || still.contains(&metric.name), "{} does not move:\n{page}", metric.name);
    }
    for name in page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()) {
        assert!(DOCUMENTED.iter().any(|metric| metric.name == name), "{name} is not documented");
    }
}

#[test]
fn what_clients_write_makes_no_new_series() {
    let metrics = Metrics::default();
    for policy in ["always", "sometimes", "1", "2"] {
        metrics.ensure_requested(&EnsureLabels {
            pull_policy: policy.into(),
            present_locally: Known::Unknown,
            pull_required: Known::True,
        });
    }
    let (mut registry, mut page) = (Registry::default(), String::new());
    metrics.register(&mut registry);
    prometheus_client::encoding::text::encode(&mut page, &registry).unwrap();
    assert_eq!(page.matches("pull_policy=").count(), 2, "{page}");
    assert!(page.contains("pull_policy=\"other\""), "{page}");
}

#[test]
fn the_documentation_is_that_of_the_list() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
    if std::env::var_os("LARDER_WRITE_DOCS").is_some() {
        fs_err::write(path, documented::page()).unwrap();
    }
    let page = fs_err::read_to_string(path).unwrap();
    assert!(
        page == documented::page(),
        "docs/metrics.md is old: run the tests once with LARDER_WRITE_DOCS=1"
    );
}
