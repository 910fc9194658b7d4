//! The panels of the Grafana dashboard, with the metrics of daemons as Prometheus has them.

use std::time::SystemTime;

use larder_testkit::free_address;
use larder_testkit::kube_api::KubeApi;
use larder_testkit_peers::process::{WAIT_LIMIT, poll, wait_until};
use larder_testkit_peers::{ImageBuilder, RegistryOptions};
use serde_json::{Value, json};

use crate::kube::{cluster_settings, create_cluster};
use crate::prometheus::{PrometheusServer, is_installed, packaged};
use crate::served::CriDaemon;
use crate::world::{RuntimeFixture, pod};

/// The values of the series of an expression now.
fn values(server: &PrometheusServer, expression: &str) -> Option<Vec<f64>> {
    let query: String = form_urlencoded::byte_serialize(expression.as_bytes()).collect();
    let answer = server.api(&format!("query?query={query}"))?;
    assert_eq!(answer["status"], "success", "{expression}: {answer}");
    let series = answer["data"]["result"].as_array()?.iter();
    Some(series.filter_map(|found| found["value"][1].as_str()?.parse().ok()).collect())
}

/// The expressions of the panels of the dashboard, as Grafana completes them.
fn panels() -> Vec<(String, String)> {
    let dashboard = fs_err::read_to_string(packaged("grafana/larder.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    let mut expressions = Vec::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expression = target["expr"].as_str().unwrap();
            let expression = expression.replace("$__rate_interval", "10m").replace("$node", ".*");
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
    let gc = ["--daemon", &socket, "gc", "--all-unused", "--force", "--minimum-image-ttl-duration", "0"];
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
    let ports = [free_address().port(), free_address().port()];
    let daemons = [
        (&store, start_daemon(&store, ports[0], &json!({ "kubernetes": cluster_settings(&api) }))),
        (&runtime, start_daemon(&runtime, ports[1], &json!({}))),
    ];
    let server = PrometheusServer::scraping(&ports);
    wait_until("Prometheus reads both daemons", || {
        values(&server, "up == 1").is_some_and(|daemons| daemons.len() == 2)
    });
    // A counter that begins with its first value has its increase with the second.
    for _ in 0..2 {
        for (world, daemon) in &daemons {
            use_daemon(world, daemon);
        }
        let used = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
        // One of them may be read earlier than the other: each has to be.
        let read_later = format!("timestamp(up) > {used}");
        wait_until("Prometheus has read what each daemon did", || {
            values(&server, &read_later).is_some_and(|daemons| daemons.len() == 2)
        });
    }
    for (title, expression) in panels() {
        // No registry throttles here, and no image is pulled lazily.
        let counts = expression.contains("rate(") || expression.contains("increase(");
        let counts = counts && !["throttled", "larder_lazy_"].iter().any(|word| expression.contains(word));
        let is_shown = |values: &[f64]| {
            if counts { values.iter().any(|value| *value > 0.0) } else { !values.is_empty() }
        };
        let shown = poll(WAIT_LIMIT, || is_shown(&values(&server, &expression)?).then_some(()));
        let found = values(&server, &expression);
        assert!(shown.is_some(), "{title} shows {found:?}: {expression}\n{}", daemons[0].1.metrics());
    }
    for (_, daemon) in daemons {
        daemon.stop().expect(0);
    }
}
