//! Metrics, alert rules and the dashboard, as Prometheus itself reads them.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use larder_testkit::kube_api::KubeApi;
use larder_testkit_peers::process::{PATIENCE, poll, wait_until};
use larder_testkit_peers::{Availability, ImageBuilder, Package, RegistryOptions, require};
use serde_json::{Value, json};

use crate::kube::{cluster_settings, create_cluster};
use crate::served::CriDaemon;
use crate::world::{RuntimeFixture, pod};

/// What `promtool` reports of names that are kubelet's.
const KUBELETS: [&str; 2] = [
    "inmemory_pullintents_usage_percent use base unit \"ratio\" instead of \"percent\"",
    "inmemory_pulledrecords_usage_percent use base unit \"ratio\" instead of \"percent\"",
];

fn packaged(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging").join(name)
}

/// Runs `promtool` with this input, and returns its output and whether it succeeded.
fn promtool(arguments: &[&str], input: &str) -> (bool, String) {
    let mut tool = Command::new("promtool")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    tool.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let done = tool.wait_with_output().unwrap();
    let text = [done.stdout, done.stderr].concat();
    (done.status.success(), String::from_utf8_lossy(&text).into_owned())
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A body over HTTP.
fn get(port: u16, path: &str, accept: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    // HTTP/1.0: the body is not in chunks.
    write!(stream, "GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\nAccept: {accept}\r\n\r\n").ok()?;
    let mut page = String::new();
    stream.read_to_string(&mut page).ok()?;
    Some(page.split_once("\r\n\r\n")?.1.to_owned())
}

/// A Prometheus that reads the metrics of daemons every second, with larder's rules.
struct PrometheusServer {
    process: Child,
    port: u16,
    _dir: tempfile::TempDir,
}

impl PrometheusServer {
    fn scraping(metrics: &[u16]) -> PrometheusServer {
        let dir = tempfile::tempdir().unwrap();
        let scrape = fs_err::read_to_string(packaged("prometheus/scrape.yml")).unwrap();
        let targets: Vec<_> = metrics.iter().map(|port| format!("127.0.0.1:{port}")).collect();
        assert!(scrape.contains("['127.0.0.1:9464']"), "{scrape}");
        let scrape = scrape.replace("['127.0.0.1:9464']", &format!("{targets:?}"));
        let config = format!("global: {{scrape_interval: 1s}}\n{scrape}");
        fs_err::write(dir.path().join("prometheus.yml"), config).unwrap();
        fs_err::copy(packaged("prometheus/larder_rules.yml"), dir.path().join("larder_rules.yml")).unwrap();
        let port = free_port();
        let process = Command::new("prometheus")
            .arg(format!("--config.file={}", dir.path().join("prometheus.yml").display()))
            .arg(format!("--storage.tsdb.path={}", dir.path().join("data").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        PrometheusServer { process, port, _dir: dir }
    }

    fn api(&self, path: &str) -> Option<Value> {
        serde_json::from_str(&get(self.port, &format!("/api/v1/{path}"), "*/*")?).ok()
    }

    /// The values of the series of an expression now.
    fn values(&self, expression: &str) -> Option<Vec<f64>> {
        let query: String = form_urlencoded::byte_serialize(expression.as_bytes()).collect();
        let answer = self.api(&format!("query?query={query}"))?;
        assert_eq!(answer["status"], "success", "{expression}: {answer}");
        let series = answer["data"]["result"].as_array()?.iter();
        Some(series.filter_map(|found| found["value"][1].as_str()?.parse().ok()).collect())
    }

    /// The last value of a metric without labels of its own.
    fn value(&self, metric: &str) -> Option<f64> {
        let answer = self.api(&format!("query?query={metric}"))?;
        answer["data"]["result"][0]["value"][1].as_str()?.parse().ok()
    }
}

impl Drop for PrometheusServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Whether Prometheus and its tool are installed; otherwise the reason is printed.
fn is_installed() -> bool {
    matches!(require(&[Package::Prometheus]), Availability::Available)
}

#[test]
fn the_alert_rules_are_valid_and_pass_their_tests() {
    if !is_installed() {
        return;
    }
    for (check, file) in [("check", "larder_rules.yml"), ("test", "larder_rules_test.yml")] {
        let file = packaged(&format!("prometheus/{file}"));
        let (passed, text) = promtool(&[check, "rules", &file.to_string_lossy()], "");
        assert!(passed, "{text}");
    }
}

/// The expressions of the panels of the dashboard, as Grafana completes them.
fn panels() -> Vec<(String, String)> {
    let dashboard = fs_err::read_to_string(packaged("grafana/larder.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    let mut expressions = Vec::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expression = target["expr"].as_str().unwrap();
            let expression = expression.replace("$__rate_interval", "1m").replace("$node", ".*");
            expressions.push((panel["title"].as_str().unwrap().to_owned(), expression));
        }
    }
    assert!(expressions.len() > 35, "{expressions:?}");
    expressions
}

/// Starts a daemon on the backend of this world, with a credential provider that fails.
fn start_daemon(world: &RuntimeFixture, port: u16, settings: &Value) -> CriDaemon {
    ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
    ImageBuilder::small(2, 50_000).push(&world.registry, "shop/db:1").unwrap();
    let version = "credentialprovider.kubelet.k8s.io/v1";
    let providers = json!({
        "kind": "CredentialProviderConfig", "apiVersion": "kubelet.config.k8s.io/v1",
        "providers": [{
            "name": "test", "matchImages": [world.registry.address()], "defaultCacheDuration": "0s", "apiVersion": version,
        }],
    });
    world.program("providers/test", "exit 1");
    let mut document = json!({
        "apiVersion": "larder.dev/v1alpha1", "kind": "LarderConfiguration",
        "imageCredentialProviderConfig": world.file("providers.json", &providers.to_string()),
        "imageCredentialProviderBinDir": world.path("providers"),
        "pull": { "ensuredLease": "0s" },
    });
    document.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
    let settings = world.file("config.yaml", &document.to_string());
    let address = format!("127.0.0.1:{port}");
    CriDaemon::with(world, &["--config", &settings, "--metrics-address", &address])
}

/// Has a daemon do what its users do: pull, fail, check access, remove, collect.
fn use_daemon(world: &RuntimeFixture, daemon: &CriDaemon) {
    let (web, db) = (world.registry.image("shop/web:1"), world.registry.image("shop/db:1"));
    daemon.pull(&db).unwrap();
    assert!(daemon.pull(&world.registry.image("shop/absent:1")).is_err());
    let manifest = world.file("pod.yaml", &pod("web", "IfNotPresent", &[&web]));
    let socket = daemon.socket.to_string_lossy().into_owned();
    for _ in 0..2 {
        world.larder(&["--daemon", &socket, "ensure", "-f", &manifest]).expect(0);
    }
    world.larder(&["--daemon", &socket, "rm", &db]).expect(0);
    let gc = ["--daemon", &socket, "gc", "--all-unused", "--minimum-image-ttl-duration", "0"];
    world.larder(&gc).expect(0);
}

#[test]
fn each_panel_of_the_dashboard_shows_what_daemons_do() {
    if !is_installed() {
        return;
    }
    let Some(store) = RuntimeFixture::with_store(RegistryOptions::default()) else { return };
    let Some(runtime) = RuntimeFixture::plain() else { return };
    let api = KubeApi::in_process();
    create_cluster(&api);
    let ports = [free_port(), free_port()];
    let daemons = [
        (&store, start_daemon(&store, ports[0], &json!({ "kubernetes": cluster_settings(&api) }))),
        (&runtime, start_daemon(&runtime, ports[1], &json!({}))),
    ];
    let server = PrometheusServer::scraping(&ports);
    let is_read = || (server.values("up == 1")?.len() == 2).then_some(());
    poll(PATIENCE, is_read).expect("Prometheus reads both daemons");
    // A counter that begins with its first value has its increase with the second.
    for _ in 0..2 {
        for (world, daemon) in &daemons {
            use_daemon(world, daemon);
        }
        let pulled = server.values("larder_pulled_image_bytes_total");
        let has_grown = || (server.values("larder_pulled_image_bytes_total") != pulled).then_some(());
        poll(PATIENCE, has_grown).expect("Prometheus has read what was done");
    }
    for (title, expression) in panels() {
        // No registry throttles here.
        let counts = expression.contains("rate(") || expression.contains("increase(");
        let counts = counts && !expression.contains("throttled");
        let is_shown = |values: &[f64]| {
            if counts { values.iter().any(|value| *value > 0.0) } else { !values.is_empty() }
        };
        let shown = poll(PATIENCE, || is_shown(&server.values(&expression)?).then_some(()));
        let values = server.values(&expression);
        assert!(shown.is_some(), "{title} shows {values:?}: {expression}\n{}", daemons[0].1.metrics());
    }
    for (_, daemon) in daemons {
        daemon.stop().expect(0);
    }
}

#[test]
fn prometheus_reads_the_metrics_of_a_daemon_that_pulls_and_collects() {
    if !is_installed() {
        return;
    }
    let Some(world) = RuntimeFixture::plain() else { return };
    ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
    let metrics = free_port();
    for kubelet_names in [true, false] {
        let settings = world.file("config.yaml", &format!("apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\nmetrics: {{kubeletNames: {kubelet_names}}}\n"));
        let address = format!("127.0.0.1:{metrics}");
        let daemon = CriDaemon::with(&world, &["--config", &settings, "--metrics-address", &address]);
        let image = world.registry.image("shop/web:1");
        daemon.pull(&image).unwrap();
        assert!(daemon.pull(&world.registry.image("shop/absent:1")).is_err());
        daemon.remove(&image);

        let page = get(metrics, "/metrics", "text/plain").unwrap();
        let (_, text) = promtool(&["check", "metrics"], &page);
        let found: BTreeSet<&str> = text.lines().filter(|line| !line.is_empty()).collect();
        let unexpected: Vec<_> =
            found.iter().filter(|line| !KUBELETS.iter().any(|known| line.ends_with(known))).collect();
        assert!(unexpected.is_empty(), "{unexpected:?}");
        let prefix = if kubelet_names { "kubelet" } else { "larder" };
        for operation in ["pull_image", "remove_image", "image_status", "version"] {
            let sample = format!("{prefix}_runtime_operations_total{{operation_type=\"{operation}\"}} ");
            assert!(page.contains(&sample), "{sample}:\n{page}");
        }

        let server = PrometheusServer::scraping(&[metrics]);
        let scraped = poll(PATIENCE, || {
            let target = server.api("targets")?["data"]["activeTargets"][0].clone();
            let has_failed = target["lastError"].as_str().is_some_and(|error| !error.is_empty());
            (target["health"] == "up" || has_failed).then_some(target)
        });
        let target = scraped.expect("Prometheus reads the metrics");
        assert_eq!((&target["health"], &target["lastError"]), (&"up".into(), &"".into()), "{target}");
        wait_until("the pull is counted", || server.value("larder_pulled_image_bytes_total") > Some(1000.0));
        let counted = server.value(&format!("{prefix}_image_pull_duration_seconds_count"));
        assert!(counted > Some(0.5), "{counted:?}");
        let rules = server.api("rules").unwrap();
        assert_eq!(rules["data"]["groups"].as_array().unwrap().len(), 4, "{rules}");
        daemon.stop().expect(0);
    }
}
