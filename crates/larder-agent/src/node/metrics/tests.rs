//! Every documented metric is served, and changes.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use larder::credentials::NodeDockerConfig;
use larder::credentials::plugin::{
    CredentialProviderRequest, CredentialProviderResponse, NoServiceAccountClient, Plugin, PluginExecError,
    PluginExecutor, Plugins, ProviderConfig,
};
use larder::gc::{FilesystemContent, FsStatsProvider, GcGoal, OtherFilesystem};
use larder::hidden::{HiddenImages, PrefetchCredentials};
use larder::image_service::{FilesystemError, FsStats as LocalDisk};
use larder::pod::Pod;
use larder::pull::{EnsureRequest, PullPolicy, TriState};
use larder::records::{PullRecordStore, PullRecords as _, Verification};
use larder_testkit::fake_backend::{FakeBackend, ScriptedPull, image};

use super::metric_docs::{self, DOCUMENTED, MetricKind};
use super::*;
use crate::node::pulls::PullAccess;
use crate::node::testing;
use crate::node::{Node, NodeDependencies};
use crate::serve::connections::Connections;

/// Metrics of larder's own store and of the exporter of traces, which scenario tests check, and of a cluster, which its
/// tests check with [`assert_served`].
const CHECKED_ELSEWHERE: [&str; 5] =
    ["larder_lazy_", "larder_store_", "larder_registry_", "larder_trace_", "larder_kubernetes_"];

/// A disk of 1000 bytes with nothing on it but the images.
struct TestFsStats(Arc<FakeBackend>);

#[async_trait]
impl FsStatsProvider for TestFsStats {
    async fn measure(&self) -> Result<LocalDisk, FilesystemError> {
        let used: u64 = self.0.images().iter().map(|image| image.size).sum();
        Ok(LocalDisk { capacity: 1000, available: 1000 - used, inodes: 1000, inodes_free: 1000, reserved: 0 })
    }

    async fn measure_others(&self) -> Result<Vec<OtherFilesystem>, FilesystemError> {
        let (content, disk) = (FilesystemContent::Containers, self.measure().await?);
        Ok(vec![OtherFilesystem { mountpoint: "/containers".into(), content, disk }])
    }
}

/// A credential provider that fails.
struct FailingProvider;

#[async_trait]
impl PluginExecutor for FailingProvider {
    async fn execute(
        &self,
        _request: &CredentialProviderRequest,
    ) -> Result<CredentialProviderResponse, PluginExecError> {
        tokio::time::sleep(Duration::from_secs(1)).await;
        Err(PluginExecError::Other("broken".into()))
    }
}

fn broken_provider() -> ProviderConfig {
    ProviderConfig {
        name: "broken".into(),
        match_images: vec!["r.example".into()],
        ..ProviderConfig::default()
    }
}

fn node(backend: &FakeBackend, dir: &tempfile::TempDir) -> Node {
    let disk: Arc<dyn FsStatsProvider> = Arc::new(TestFsStats(Arc::new(backend.clone())));
    let parts = testing::parts(backend, dir.path(), Some(disk), |config| config.metrics.kubelet_names = true);
    let metrics = parts.observability.metrics();
    metrics.providers_configured("sha256:0", ["broken"].into_iter());
    let plugin = Plugin::new(&broken_provider(), Arc::new(FailingProvider), Arc::new(NoServiceAccountClient));
    let runs = Arc::clone(metrics) as Arc<dyn PluginRunObserver>;
    let provider = Arc::new(Plugins::new(vec![plugin]).with_run_observer(&runs));
    let always = Verification::parse("AlwaysVerify", []).unwrap();
    let hidden = dir.path().join("hidden.json");
    fs_err::write(&hidden, r#"{"version":1,"hidden":["sha256:7"],"pulls":{},"isLost":false,"visible":[]}"#)
        .unwrap();
    let hidden = Arc::new(HiddenImages::open(&hidden).unwrap());
    Node::build(NodeDependencies {
        access: PullAccess {
            prefetch_credentials: PrefetchCredentials::Hide(hidden),
            credentials: larder::credentials::NodeKeyring::new(NodeDockerConfig::none(), vec![provider]),
            records: Some(Arc::new(PullRecordStore::open(&dir.path().join("records"), always).unwrap())),
        },
        ..parts
    })
}

/// The labels of a family's samples, `le` excepted.
fn labels(page: &str, name: &str) -> BTreeSet<String> {
    let samples = page.lines().map(|line| line.split(" # {").next().unwrap_or(line));
    let own = samples.filter(|line| {
        let found = line.split(['{', ' ']).next().unwrap_or_default();
        found
            .strip_prefix(name)
            .is_some_and(|suffix| ["", "_total", "_bucket", "_count", "_sum"].contains(&suffix))
    });
    let all = own.filter_map(|line| Some(line.split_once('{')?.1.rsplit_once('}')?.0));
    all.flat_map(|labels| {
        labels.split("\",").map(|label| label.split('=').next().unwrap_or_default().to_owned())
    })
    .filter(|label| label != "le")
    .collect()
}

/// The upper bounds of a histogram's buckets, as texts of 12 digits: JSON numbers are not read to the last bit.
fn buckets(page: &str, name: &str) -> BTreeSet<String> {
    let bucket = format!("{name}_bucket{{");
    let bounds = page.lines().filter(|line| line.starts_with(&bucket)).filter_map(|line| {
        let bound = line.split_once("le=\"")?.1.split_once('"')?.0.parse::<f64>().ok()?;
        bound.is_finite().then(|| format!("{bound:.12}"))
    });
    bounds.collect()
}

/// The data of kubelet's families.
#[derive(serde::Deserialize)]
struct KubeletFamilies {
    families: Vec<KubeletFamily>,
}

#[derive(serde::Deserialize)]
struct KubeletFamily {
    name: String,
    r#type: String,
    labels: BTreeSet<String>,
    #[serde(default)]
    buckets: Vec<f64>,
}

/// Checks kubelet's families on a page with kubelet's names: name, type, labels and buckets, and that there are no
/// others.
fn assert_kubelet_families(page: &str) {
    let kubelet: KubeletFamilies = serde_json::from_str(include_str!("kubelet_families.json")).unwrap();
    let text = ExpositionFormat::Text.of_open_metrics(page.to_owned());
    for family in &kubelet.families {
        let header = format!("# TYPE {} {}\n", family.name, family.r#type);
        assert!(text.contains(&header), "missing: {header}");
        let name = family.name.strip_suffix("_total").unwrap_or(&family.name);
        assert_eq!(labels(page, name), family.labels, "{name}");
        let expected: BTreeSet<_> = family.buckets.iter().map(|bound| format!("{bound:.12}")).collect();
        assert_eq!(buckets(page, name), expected, "{name}");
    }
    let served = text.lines().filter(|line| line.starts_with("# TYPE kubelet_")).count();
    assert_eq!(served, kubelet.families.len(), "kubelet has no such family");
}

/// The sum of a metric's samples.
fn value(page: &str, metric: &metric_docs::MetricDoc) -> Option<f64> {
    let sample = match metric.kind {
        MetricKind::Counter => format!("{}_total", metric.name),
        MetricKind::Gauge => metric.name.to_owned(),
        MetricKind::Histogram => format!("{}_count", metric.name),
    };
    let values: Vec<f64> = page
        .lines()
        .filter(|line| line.split(['{', ' ']).next() == Some(&sample))
        .filter_map(|line| line.rsplit(' ').next()?.parse().ok())
        .collect();
    (!values.is_empty()).then(|| values.iter().sum())
}

fn assert_has_labels(page: &str, metric: &metric_docs::MetricDoc) {
    let documented = metric.labels.iter().map(|label| (*label).to_owned()).collect();
    assert_eq!(labels(page, metric.name), documented, "{}", metric.name);
}

/// Checks that a page has all documented metrics whose names begin like this, with their labels.
#[cfg(feature = "kube")]
pub(in crate::node) fn assert_served(page: &str, prefix: &str) {
    let metrics: Vec<_> = DOCUMENTED.iter().filter(|metric| metric.name.starts_with(prefix)).collect();
    assert!(!metrics.is_empty(), "{prefix}");
    for metric in metrics {
        assert!(value(page, metric).is_some(), "{} is not served:\n{page}", metric.name);
        assert_has_labels(page, metric);
    }
}

#[test]
fn counters_that_alerts_are_about_begin_with_a_sample_of_0() {
    let metrics = NodeMetrics::default();
    metrics.providers_configured("sha256:0", ["ecr"].into_iter());
    metrics.runtime_configured();
    let (mut registry, mut page) = (Registry::default(), String::new());
    metrics.register(&mut registry);
    prometheus_client::encoding::text::encode(&mut page, &registry).unwrap();
    for sample in [
        "larder_pull_failures_total{reason=\"no_space\"} 0\n",
        "larder_events_total{event_type=\"Warning\",reason=\"FreeDiskSpaceFailed\"} 0\n",
        "larder_gc_promised_bytes_total{reason=\"space\"} 0\n",
        "larder_gc_freed_bytes_total{reason=\"space\"} 0\n",
        "kubelet_credential_provider_plugin_errors_total{plugin_name=\"ecr\"} 0\n",
        "kubelet_runtime_operations_total{operation_type=\"list_images\"} 0\n",
        "kubelet_runtime_operations_errors_total{operation_type=\"list_images\"} 0\n",
    ] {
        assert!(page.contains(sample), "{sample}{page}");
    }
}

#[tokio::test(start_paused = true)]
async fn each_documented_metric_is_served_and_changes() {
    let (backend, dir) = (FakeBackend::new(), tempfile::tempdir().unwrap());
    let node = Arc::new(node(&backend, &dir));
    let connections = Connections::default();
    backend.on_pull_of("a:1", ScriptedPull::ok("sha256:1", 100));
    backend.on_pull_of("b:1", ScriptedPull::fails("no route"));
    backend.on_pull_of("c:1", ScriptedPull::ok("sha256:3", 100).after(Duration::from_secs(3600)));
    let ensure = async |image: &str| {
        let request = EnsureRequest {
            target: Some(larder::pod::ObjectRef::node("node")),
            ..EnsureRequest::new(image, PullPolicy::Always, Pod::default())
        };
        node.pulls.manager().ensure(&request).await.map(drop)
    };
    assert!(ensure("a:1").await.is_ok());
    assert!(ensure("b:1").await.is_err());
    assert!(ensure("r.example/private:1").await.is_err());
    let request = EnsureRequest::new("a:1", PullPolicy::IfNotPresent, Pod::default());
    node.pulls.manager().ensure(&request).await.unwrap();
    // The simulated clock does not wait for the thread that writes intents: this one is there before it moves.
    node.pulls.records().unwrap().record_pull_intent(&"d:1".into()).await.unwrap();
    node.observability.metrics().cri_called("PullImage", "OK");
    node.observability.metrics().pod_pulled(Duration::from_secs(3));
    node.observability.metrics().operation_finished("pull_image", Duration::from_secs(3), true);
    backend.add_image("old:1", image("sha256:9", 50));
    let collector = node.collection.unchecked_collector();
    let swept = collector.round(GcGoal::AllUnused, &collector.policy()).await;
    assert_eq!(swept.report.swept.len(), 1, "{swept:?}");
    backend.add_image("hidden:1", image("sha256:7", 50));
    let page = tokio::select! {
        () = node.run() => unreachable!("the node runs until dropped"),
        _ = ensure("c:1") => unreachable!("this pull takes an hour"),
        page = async {
            while node.pulls.manager().pulls().is_empty() {
                tokio::task::yield_now().await; // the clock stands still
            }
            tokio::time::sleep(Duration::from_secs(60)).await;
            let disks = node.collection.filesystems().await;
            exposition(&node, &connections, &disks, ExpositionFormat::OpenMetrics).unwrap()
        } => page,
    };
    assert!(page.ends_with("# EOF\n"), "{page}");
    // There are no connections, all rounds succeed, and the fake backend reports no bytes.
    let zero = [
        "larder_connections",
        "larder_inflight_calls",
        "larder_gc_consecutive_failures",
        "larder_pull_fetched_bytes",
        "kubelet_imagemanager_inmemory_pulledrecords_usage_percent", // of 128 MiB
        "kubelet_imagemanager_inmemory_pullintents_usage_percent",
    ];
    let elsewhere = |name: &str| CHECKED_ELSEWHERE.iter().any(|prefix| name.starts_with(prefix));
    for metric in DOCUMENTED.iter().filter(|metric| !elsewhere(metric.name)) {
        let found = value(&page, metric).unwrap_or_else(|| panic!("{} is not served:\n{page}", metric.name));
        assert!(found > 0.0 || zero.contains(&metric.name), "{} does not change:\n{page}", metric.name);
        assert_has_labels(&page, metric);
    }
    assert_kubelet_families(&page);
    for name in page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()) {
        assert!(DOCUMENTED.iter().any(|metric| metric.name == name), "{name} is not documented");
    }
}

#[test]
fn buckets_have_the_trace_of_a_pull_in_open_metrics_only() {
    let metrics = NodeMetrics {
        current_trace: || Some("4bf92f3577b34da6a3ce929d0e0e4736".to_owned()),
        ..NodeMetrics::default()
    };
    metrics.image_pulled(1, Duration::from_secs(3));
    let (mut registry, mut page) = (Registry::default(), String::new());
    metrics.register(&mut registry);
    prometheus_client::encoding::text::encode(&mut page, &registry).unwrap();
    let bucket = "kubelet_image_pull_duration_seconds_bucket{le=\"5.0\",image_size_in_bytes=\"0-10MB\"} 1";
    let exemplar = format!("{bucket} # {{trace_id=\"4bf92f3577b34da6a3ce929d0e0e4736\"}} 3.0 ");
    assert!(page.contains(&exemplar), "{page}");
    let text = ExpositionFormat::Text.of_open_metrics(page);
    assert!(text.contains(&format!("{bucket}\n")) && !text.contains("trace_id"), "{text}");
}

#[test]
fn unknown_policies_share_one_series() {
    let metrics = NodeMetrics::default();
    for policy in ["always", "sometimes", "1", "2"] {
        metrics.ensure_requested(&EnsureLabels {
            pull_policy: policy.into(),
            present_locally: TriState::Unknown,
            pull_required: TriState::True,
        });
    }
    let (mut registry, mut page) = (Registry::default(), String::new());
    metrics.register(&mut registry);
    prometheus_client::encoding::text::encode(&mut page, &registry).unwrap();
    assert_eq!(page.matches("pull_policy=").count(), 2, "{page}");
    assert!(page.contains("pull_policy=\"other\""), "{page}");
}

#[test]
fn docs_metrics_md_is_generated_from_the_list() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.md");
    if std::env::var_os("LARDER_WRITE_DOCS").is_some() {
        fs_err::write(path, metric_docs::page()).unwrap();
    }
    let page = fs_err::read_to_string(path).unwrap();
    assert!(
        page == metric_docs::page(),
        "docs/metrics.md is outdated: run this test once with LARDER_WRITE_DOCS=1"
    );
}
