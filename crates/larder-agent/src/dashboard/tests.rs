//! The dashboard over TCP, as a browser or an attacker would ask it.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::StreamExt as _;
use larder::backend::{Container, ContainerInventory, FilesystemUsage, Filesystems, Image};
use larder::retention::{KeepRule, LeasePurpose, Selector};
use larder_api::convert;
use larder_api::v1 as api;
use larder_api::v1::control_server::Control as _;
use larder_registry::{Proxy, RegistryClient, RegistryConfig};
use larder_store::backend::StoreBackend;
use larder_store::pull::{StorePullConfig, StorePuller};
use larder_store::store::{Store, StoreConfig};
use larder_testkit::fake_backend::{BackendCall, FakeBackend, image};
use larder_testkit::fault_registry::{FaultRegistry, FaultRegistryAuth, FaultTrigger, ResponseFault};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tonic::Request;

use larder_cri::server::CriImages as _;

use super::{Dashboard, stream};
use crate::backend::BackendHandle;
use crate::config::{Config, DashboardServing};
use crate::control::{ControlApi, DaemonAddresses, ServingProcess};
use crate::node::cri_images::NodeCriImages;
use crate::node::pods::desired::DesiredKey;
use crate::node::{Node, NodeDependencies, Storage, testing};
use crate::serve::connections::Connections;
use crate::serve::http_handler::HttpHandler;

/// A daemon with a dashboard.
struct Served {
    address: SocketAddr,
    backend: FakeBackend,
    control: ControlApi,
    node: Arc<Node>,
    server: JoinHandle<()>,
    _stop: watch::Sender<bool>,
    dir: TempDir,
}

impl Drop for Served {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn serve(change: impl FnOnce(&mut Config)) -> Served {
    serve_node(|backend, dir| testing::parts(backend, dir, None, change)).await
}

async fn serve_node(parts: impl FnOnce(&FakeBackend, &Path) -> NodeDependencies) -> Served {
    let (backend, dir) = (FakeBackend::new(), tempfile::tempdir().unwrap());
    let node = Arc::new(Node::build(parts(&backend, dir.path())));
    let (stop, stopped) = watch::channel(false);
    let connections = Connections::default();
    let process = ServingProcess::Daemon(DaemonAddresses::default());
    let control = ControlApi::new(Arc::clone(&node), process, connections.clone(), stopped);
    let dashboard = Dashboard::of(&node.settings.now(), &control);
    let handler = HttpHandler::new(Arc::clone(&node), connections).with_dashboard(dashboard);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tokio::spawn(async move { handler.serve(Some(listener)).await });
    Served { address, backend, control, node, server, _stop: stop, dir }
}

impl Served {
    async fn send(&self, request: &str) -> TcpStream {
        let mut client = TcpStream::connect(self.address).await.unwrap();
        client.write_all(request.as_bytes()).await.unwrap();
        client
    }

    /// The whole response to this request line, under this host.
    async fn ask(&self, line: &str, host: &str, more: &str) -> String {
        let mut client = self.send(&format!("{line} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n")).await;
        let mut response = Vec::new();
        timeout(Duration::from_secs(20), client.read_to_end(&mut response)).await.unwrap().unwrap();
        String::from_utf8(response).unwrap()
    }

    async fn get(&self, path: &str) -> String {
        self.ask(&format!("GET {path}"), "localhost:9464", "").await
    }

    async fn json(&self, path: &str) -> Value {
        let response = self.get(&format!("/dashboard/api/{path}")).await;
        assert!(response.starts_with("HTTP/1.1 200"), "{path}: {response}");
        serde_json::from_str(body(&response)).unwrap()
    }

    /// A stream of which the first state was read.
    async fn stream(&self) -> TcpStream {
        let mut client = self.send("GET /dashboard/api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
        read_until(&mut client, "data: {").await;
        client
    }
}

async fn read_until(client: &mut TcpStream, text: &str) -> String {
    let mut read = String::new();
    while !read.contains(text) {
        let mut piece = [0; 4096];
        let count = timeout(Duration::from_secs(10), client.read(&mut piece)).await.expect(text).unwrap();
        assert!(count > 0, "ended before {text}: {read}");
        read.push_str(&String::from_utf8_lossy(&piece[..count]));
    }
    read
}

fn status(response: &str) -> &str {
    response.get(9..12).unwrap_or_default()
}

fn body(response: &str) -> &str {
    response.split_once("\r\n\r\n").map_or("", |(_, body)| body)
}

fn header<'a>(response: &'a str, name: &str) -> &'a str {
    let lines = response.split_once("\r\n\r\n").map_or(response, |(head, _)| head).lines();
    let mut values = lines.filter_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
    values.next().unwrap_or_default()
}

const DOCUMENTS: [&str; 6] = ["status", "disk", "images", "layers", "history", "events"];

#[tokio::test]
async fn the_page_runs_nothing_but_its_own_script() {
    let served = serve(|_| {}).await;
    let page = served.get("/dashboard/").await;
    let policy = header(&page, "content-security-policy");
    for part in [
        "default-src 'none';",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "script-src 'sha256-",
        "style-src 'sha256-",
    ] {
        assert!(policy.contains(part), "{part}: {policy}");
    }
    assert!(!policy.contains("unsafe") && !policy.contains('*') && !policy.contains("http"), "{policy}");
    assert_eq!(header(&page, "content-type"), "text/html; charset=utf-8");
    assert!(page.contains("<h1>larder"));
    for document in DOCUMENTS {
        let response = served.get(&format!("/dashboard/api/{document}")).await;
        let policy = header(&response, "content-security-policy");
        assert_eq!(policy, "default-src 'none'; frame-ancestors 'none'", "{document}");
        assert_eq!(header(&response, "content-type"), "application/json", "{document}");
        for (name, value) in [
            ("x-content-type-options", "nosniff"),
            ("referrer-policy", "no-referrer"),
            ("cache-control", "no-store"),
            ("cross-origin-resource-policy", "same-origin"),
            ("access-control-allow-origin", ""),
        ] {
            assert_eq!(header(&response, name), value, "{document}: {name}");
        }
    }
    for path in ["/", "/dashboard"] {
        let response = served.get(path).await;
        assert_eq!((status(&response), header(&response, "location")), ("302", "/dashboard/"), "{path}");
    }
}

#[tokio::test]
async fn other_hosts_methods_and_origins_are_refused_and_metrics_are_not() {
    let served = serve(|config| config.dashboard.hosts = vec!["node-1".into()]).await;
    for path in
        ["/", "/dashboard", "/dashboard/", "/dashboard/api/images", "/dashboard/api/stream", "/dashboard/x"]
    {
        let response = served.ask(&format!("GET {path}"), "evil.example:9464", "").await;
        assert_eq!(status(&response), "421", "{path}");
        assert!(!response.contains("<script"), "{path}");
        for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"] {
            let response = served.ask(&format!("{method} {path}"), "localhost", "").await;
            assert_eq!(
                (status(&response), header(&response, "allow")),
                ("405", "GET, HEAD"),
                "{method} {path}"
            );
        }
    }
    let other = "Origin: http://evil.example\r\n";
    assert_eq!(status(&served.ask("GET /dashboard/api/images", "localhost", other).await), "403");
    let frame = "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: no-cors\r\n";
    assert_eq!(status(&served.ask("GET /dashboard/api/images", "localhost", frame).await), "403");
    let two = served.ask("GET /dashboard/", "localhost", "Host: evil.example\r\n").await;
    assert_eq!(status(&two), "421");
    let absolute = served.ask("GET http://evil.example/dashboard/", "localhost", "").await;
    assert_eq!(status(&absolute), "421");
    assert_eq!(status(&served.ask("GET /dashboard/", "node-1:9464", "").await), "200");
    // Prometheus and probes reach them by other names.
    for path in ["/metrics", "/healthz"] {
        assert_eq!(status(&served.ask(&format!("GET {path}"), "node-7.example", "").await), "200", "{path}");
    }
}

#[tokio::test]
async fn a_head_request_has_no_body() {
    let served = serve(|_| {}).await;
    for path in ["/dashboard/", "/dashboard/api/status", "/dashboard/api/stream"] {
        let response = served.ask(&format!("HEAD {path}"), "localhost", "").await;
        assert!(body(&response).is_empty(), "{path}: {response}");
    }
}

#[tokio::test]
async fn paths_lead_nowhere_else() {
    let served = serve(|_| {}).await;
    let paths = [
        "/dashboard/../metrics",
        "/dashboard/..%2f..%2fetc/passwd",
        "/dashboard/api/../../etc/passwd",
        "/dashboard//",
        "/dashboard/assets/page.js",
        "/dashboard/api",
        "/dashboard/api/",
        "/dashboard/api/config",
        "/dashboard/%2e%2e/",
        "/dashboard/api/inspect?image=a",
        "/dashboard/api/status/",
        "/dashboard\\..\\x",
    ];
    for path in paths {
        let response = served.get(path).await;
        assert_eq!(status(&response), "404", "{path}: {response}");
    }
    let response = served.get("/dashboard/api/explain?image=../../etc/passwd").await;
    assert!(matches!(status(&response), "400" | "404"), "{response}");
}

#[tokio::test]
async fn a_dashboard_that_is_off_is_not_there() {
    for (what, serving, address) in [
        ("never", DashboardServing::Never, "127.0.0.1:9464"),
        ("reachable from other machines", DashboardServing::Loopback, "0.0.0.0:9464"),
        ("reachable from other machines", DashboardServing::Loopback, "[::]:9464"),
    ] {
        let served = serve(|config| {
            config.dashboard.serve = serving;
            config.metrics.address = Some(address.parse().unwrap());
        })
        .await;
        for path in ["/", "/dashboard/", "/dashboard/api/status"] {
            assert_eq!(status(&served.get(path).await), "404", "{what}: {path}");
        }
        assert_eq!(status(&served.get("/healthz").await), "200");
    }
    let served = serve(|config| {
        config.dashboard.serve = DashboardServing::Always;
        config.metrics.address = Some("0.0.0.0:9464".parse().unwrap());
    })
    .await;
    assert_eq!(status(&served.get("/dashboard/").await), "200");
}

#[tokio::test]
async fn markup_and_control_characters_stay_text() {
    let served = serve(|_| {}).await;
    let evil = "r.example/<img src=x onerror=alert(1)>\u{1b}[31m\u{202e}\n\r\0\"'&</script>:1";
    served.backend.add_image(evil, Image { pinned: true, ..image("sha256:1", 500) });
    let response = served.get("/dashboard/api/images").await;
    let raw = body(&response);
    assert!(!raw.bytes().any(|byte| byte < 0x20), "control characters are escaped: {raw}");
    let images: Value = serde_json::from_str(raw).unwrap();
    assert_eq!(images["rows"][0]["name"], evil, "JSON keeps the text");
    let explained = served.json("explain?image=sha256:1").await;
    assert!(explained["decision"]["why"].as_str().unwrap().contains("pinned"), "{explained}");
    let mut stream = served.stream().await;
    let page = served.get("/dashboard/").await;
    assert!(!page.contains("onerror"), "the page has no data in it");
    let state = read_until(&mut stream, "\n\n").await;
    assert!(!state.contains('\u{1b}'));
}

/// A store whose pulls fail with secrets in what they were given: the URL of a redirect, a pull secret, and the URL of
/// a proxy.
fn store_behind_a_proxy(backend: &FakeBackend, dir: &Path, proxy: String) -> NodeDependencies {
    let registry = RegistryConfig {
        proxy: Proxy::Fixed { url: proxy, except: String::new() },
        tries: 1,
        ..RegistryConfig::default()
    };
    let store = Store::open(&dir.join("store"), StoreConfig::default()).unwrap();
    let client = RegistryClient::new(registry);
    let store = StoreBackend::new(StorePuller::new(store, client, StorePullConfig::default()));
    let parts = testing::parts(backend, dir, None, |_| ());
    let handle = BackendHandle::Store(store);
    let (storage, _) = Storage::build(&parts.settings.now(), handle, false, None, &parts.observability);
    NodeDependencies { storage, ..parts }
}

#[tokio::test]
async fn no_document_has_secrets_or_paths() {
    const SECRET: &str = "hunter2";
    let registry = FaultRegistry::start();
    registry.require(FaultRegistryAuth::Basic { user: "user".into(), password: SECRET.into() });
    let moved = format!("http://user:{SECRET}@127.0.0.1:1/?signature={SECRET}");
    registry.fault(FaultTrigger::path("/v2/moved"), ResponseFault::Redirect(moved));
    let denied = json!({"errors": [{"code": "DENIED", "message": format!("no access with {SECRET}")}]});
    registry
        .fault(FaultTrigger::path("/v2/denied"), ResponseFault::Status(403, Vec::new(), denied.to_string()));
    let proxy = format!("http://user:{SECRET}@127.0.0.1:1");
    let served = serve_node(|backend, dir| store_behind_a_proxy(backend, dir, proxy)).await;
    let auths = json!({"auths": {registry.address(): {"username": "user", "password": SECRET}}});
    let secret = api::PullSecret {
        name: "login".into(),
        r#type: "kubernetes.io/dockerconfigjson".into(),
        document: auths.to_string().into(),
        ..Default::default()
    };
    let images = [registry.image("moved:1"), registry.image("denied:1"), "registry.example/proxied:1".into()];
    let wanted = images.map(|image| api::WantedImage { image, ..Default::default() });
    let wanted = api::EnsureRequest { images: wanted.into(), secrets: vec![secret], ..Default::default() };
    let updates = served.control.ensure(Request::new(wanted)).await.unwrap().into_inner();
    updates.collect::<Vec<_>>().await;
    let events = served.json("events").await.to_string();
    for cause in ["redirected to 127.0.0.1:1", "403 Forbidden (DENIED)", "registry.example/proxied"] {
        assert!(events.contains(cause), "the pull failed for another reason than {cause}: {events}");
    }
    for document in DOCUMENTS {
        let response = served.get(&format!("/dashboard/api/{document}")).await;
        let text = body(&response);
        assert!(!text.contains(SECRET), "{document}: {text}");
        for key in
            ["configuration", "socket", "secrets", "serviceAccounts", "pulledRecords", "settings", "origin"]
        {
            assert!(!text.contains(&format!("\"{key}\"")), "{document}: {key}: {text}");
        }
        assert!(!text.contains(served.dir.path().to_str().unwrap()), "{document}: {text}");
    }
}

#[tokio::test]
async fn the_status_has_the_time_of_the_daemon() {
    let served = serve(|_| {}).await;
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let began = now();
    let at = served.json("status").await["at"].as_u64().unwrap();
    assert!((began..=now()).contains(&at), "{at}");
}

#[tokio::test]
async fn streams_are_bounded_and_leave_room_for_metrics() {
    let served = serve(|_| {}).await;
    let mut streams = Vec::new();
    for _ in 0..stream::AT_ONCE {
        streams.push(served.stream().await);
    }
    let refused = served.get("/dashboard/api/stream").await;
    assert_eq!(status(&refused), "503", "{refused}");
    assert_eq!(status(&served.get("/metrics").await), "200");
    // A page that is closed makes room for another one.
    streams.pop();
    let mut next = loop {
        let mut client = served.send("GET /dashboard/api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
        if read_until(&mut client, "\r\n").await.contains("200") {
            break client;
        }
    };
    read_until(&mut next, "data: {").await;
}

#[tokio::test(start_paused = true)]
async fn a_stream_outlives_other_requests_and_ends_by_itself() {
    let served = serve(|_| {}).await;
    let mut client = served.stream().await;
    let began = tokio::time::Instant::now();
    let mut rest = Vec::new();
    timeout(Duration::from_secs(3600), client.read_to_end(&mut rest)).await.unwrap().unwrap();
    let lasted = began.elapsed().as_secs();
    assert!((290..=320).contains(&lasted), "{lasted}s");
    let states = String::from_utf8_lossy(&rest).matches("data: {").count();
    assert!(states > 200, "{states} states");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_images_are_served_in_pages() {
    let served = serve(|_| {}).await;
    let images = (0..10_000_u64).map(|number| Image {
        repo_tags: vec![format!("r.example/app-{number:05}:1")],
        ..image(format!("sha256:{number:064}"), number)
    });
    served.backend.set_images(images.collect());
    let page = served.json("images?sort=name&ascending=true&offset=9990&limit=50").await;
    assert_eq!((page["total"].as_u64(), page["rows"].as_array().map(Vec::len)), (Some(10_000), Some(10)));
    assert_eq!(page["rows"][9]["name"], "r.example/app-09999:1");
    for document in DOCUMENTS {
        let response = served.get(&format!("/dashboard/api/{document}")).await;
        assert!(response.len() < 200_000, "{document}: {} bytes", response.len());
    }
}

/// One image for each source of retention, by its name, with the word that all surfaces show.
const RETAINED: [(&str, &str); 7] = [
    ("container:1", "in use"),
    ("desired:1", "in use"),
    ("pinned:1", "pinned"),
    ("kept:1", "kept"),
    ("leased:1", "leased"),
    ("ensured:1", "leased"),
    ("unused:1", "unused"),
];

#[tokio::test]
async fn every_surface_shows_the_same_reason_for_which_an_image_is_retained() {
    let served = serve(|config| config.gc.minimum_age = Duration::ZERO).await;
    for (name, word) in RETAINED {
        let pinned = word == "pinned";
        served.backend.add_image(name, Image { pinned, ..image(format!("sha256:{name}"), 100) });
    }
    let container =
        Container { id: "c".into(), image_id: "sha256:container:1".into(), ..Container::default() };
    served
        .backend
        .set_in_use(ContainerInventory { containers: vec![container], ..ContainerInventory::default() });
    let key = DesiredKey {
        owner: "static pod default/web".into(),
        part: "app".into(),
        image: "desired:1".into(),
        policy: "IfNotPresent".into(),
        is_pinned: true,
    };
    served.node.workloads.uses().keep(key, "sha256:desired:1".into());
    let rules = vec![KeepRule::new(Selector::Name("kept:*".into()))];
    served.node.collection.set_policy(served.node.settings.now().policy(rules));
    let lease = api::LeaseRequest { image: "leased:1".into(), seconds: 60 };
    served.control.lease(Request::new(lease)).await.unwrap();
    let check = served.node.collection.gate().begin_presence_check();
    assert!(check.lease("sha256:ensured:1", LeasePurpose::Ensure, Duration::from_secs(60)).await);

    let request = api::ImagesRequest { details: true, ..Default::default() };
    let listed = served.control.list_images(&request).await.unwrap().images;
    let page = served.json("images").await;
    let rows = page["rows"].as_array().unwrap();
    let cri = NodeCriImages::of(&served.node).list().await.unwrap();
    for (name, word) in RETAINED {
        let listed = listed.iter().find(|image| image.repo_tags == [name]).unwrap();
        assert_eq!(convert::image_state(listed.details.as_ref().unwrap()), word, "{name} in the list");
        let row = rows.iter().find(|row| row["name"] == name).unwrap();
        assert_eq!(row["state"], word, "{name} on the dashboard");
        let request = api::ExplainRequest { image: name.into(), ..Default::default() };
        let explained = served.control.explain(Request::new(request)).await.unwrap().into_inner();
        let reason = explained.decision.unwrap().reason();
        assert_eq!(convert::retention_class(reason).unwrap().as_str(), word, "{name} explained");
        let is_pinned = cri.iter().find(|image| image.repo_tags == [name]).unwrap().pinned;
        let pins = ["pinned:1", "kept:1", "desired:1"];
        assert_eq!(is_pinned, pins.contains(&name), "{name} over CRI");
    }
    let mountpoint = served.dir.path().to_owned();
    let disk = FilesystemUsage { mountpoint, timestamp_ns: 1, used_bytes: Some(700), inodes_used: Some(7) };
    served.backend.set_filesystems(Filesystems { image: vec![disk], container: Vec::new() });
    let usage = served.control.usage(Request::new(api::UsageRequest::default())).await.unwrap().into_inner();
    let by_state = usage.usage_by_state.unwrap();
    for (word, total) in [
        ("in use", by_state.in_use),
        ("pinned", by_state.pinned),
        ("kept", by_state.kept),
        ("leased", by_state.leased),
        ("unused", by_state.unused),
    ] {
        let count = RETAINED.iter().filter(|(_, state)| *state == word).count() as u64;
        assert_eq!(total.unwrap().count, count, "{word} in df");
    }
}

#[tokio::test]
async fn the_reclaimable_bytes_are_measured_once_for_requests_within_seconds() {
    let served = serve(|_| ()).await;
    served.backend.add_image("a:1", image("sha256:1", 100));
    let lists = || served.backend.calls().iter().filter(|call| **call == BackendCall::List).count();
    served.json("disk").await;
    let first = lists();
    assert!(first > 0);
    for _ in 0..3 {
        served.json("disk").await;
    }
    assert_eq!(lists(), first);
}

#[tokio::test]
async fn a_requested_round_is_the_last_one_and_an_event() {
    let served = serve(|config| config.gc.minimum_age = Duration::ZERO).await;
    served.backend.add_image("a:1", image("sha256:1", 100));
    let mountpoint = served.dir.path().to_owned();
    let disk = FilesystemUsage { mountpoint, timestamp_ns: 1, used_bytes: Some(700), inodes_used: Some(7) };
    served.backend.set_filesystems(Filesystems { image: vec![disk], container: Vec::new() });
    let usage = served.control.usage(Request::new(api::UsageRequest::default())).await.unwrap().into_inner();
    assert!(usage.reclaimable_bytes.is_some());
    assert_eq!(served.json("disk").await["reclaimableBytes"].as_u64(), usage.reclaimable_bytes);
    let goal = Some(api::collect_request::Goal::AllUnused(true));
    let round = api::CollectRequest { goal, ..Default::default() };
    served.control.collect(Request::new(round)).await.unwrap();
    let gc = served.json("status").await["gc"].clone();
    assert!(
        gc["result"].as_str().is_some_and(|did| did.starts_with("removed 1 image"))
            && gc["ended"].is_string(),
        "{gc}"
    );
    let events = served.json("events").await["events"].clone();
    let collected = events.as_array().unwrap().iter().find(|event| event["reason"] == "Collected").unwrap();
    assert!(
        collected["message"].as_str().unwrap().contains("requested a round: removed 1 image"),
        "{collected}"
    );
    let same = api::Event { name: "web".into(), object_kind: "image".into(), ..api::Event::default() };
    assert_eq!(same.object(), "image/web", "as larder events shows it");
    assert!(events.as_array().unwrap().iter().all(|event| event["object"].is_string()), "{events}");
}
