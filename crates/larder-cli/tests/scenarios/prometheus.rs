//! Metrics, alert rules and the dashboard, as Prometheus itself reads them.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use larder_testkit::free_address;
use larder_testkit_peers::process::{WAIT_LIMIT, poll, wait_until};
use larder_testkit_peers::{Availability, ImageBuilder, Package, require};
use serde_json::Value;

use crate::served::CriDaemon;
use crate::world::RuntimeFixture;

/// Names of kubelet's metrics that `promtool` reports.
const KUBELETS: [&str; 2] = [
    "inmemory_pullintents_usage_percent use base unit \"ratio\" instead of \"percent\"",
    "inmemory_pulledrecords_usage_percent use base unit \"ratio\" instead of \"percent\"",
];

pub(crate) fn packaged(name: &str) -> PathBuf {
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
pub(crate) struct PrometheusServer {
    process: Child,
    port: u16,
    _dir: tempfile::TempDir,
}

impl PrometheusServer {
    pub(crate) fn scraping(metrics: &[u16]) -> PrometheusServer {
        let dir = tempfile::tempdir().unwrap();
        let scrape = fs_err::read_to_string(packaged("prometheus/scrape.yml")).unwrap();
        let targets: Vec<_> = metrics.iter().map(|port| format!("127.0.0.1:{port}")).collect();
        assert!(scrape.contains("['127.0.0.1:9464']"), "{scrape}");
        let scrape = scrape.replace("['127.0.0.1:9464']", &format!("{targets:?}"));
        let config = format!("global: {{scrape_interval: 1s}}\n{scrape}");
        fs_err::write(dir.path().join("prometheus.yml"), config).unwrap();
        fs_err::copy(packaged("prometheus/larder_rules.yml"), dir.path().join("larder_rules.yml")).unwrap();
        let port = free_address().port();
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

    pub(crate) fn api(&self, path: &str) -> Option<Value> {
        serde_json::from_str(&get(self.port, &format!("/api/v1/{path}"), "*/*")?).ok()
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
pub(crate) fn is_installed() -> bool {
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

#[test]
fn prometheus_reads_the_metrics_of_a_daemon_that_pulls_and_collects() {
    if !is_installed() {
        return;
    }
    let Some(world) = RuntimeFixture::plain() else { return };
    ImageBuilder::small(1, 50_000).push(&world.registry, "shop/web:1").unwrap();
    let metrics = free_address().port();
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
        let scraped = poll(WAIT_LIMIT, || {
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
