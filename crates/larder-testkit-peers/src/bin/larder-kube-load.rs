//! Measures the load of a fleet of agents on an API server.
//!
//! ```text
//! [LARDER_KUBE_APISERVER=PATH] larder-kube-load [AGENTS [MINUTES]]
//! ```
//!
//! Every agent is a real client with connections of its own that follows image sets and the pods of its node; only
//! pulls are simulated. All bytes pass a proxy that counts them. Three parts: the start of all agents, an `ImageSet` of
//! ten images until it is ready on all nodes, and so many minutes without any change. A signal to end stops the API
//! server, too.

#![allow(clippy::disallowed_macros, reason = "a tool for developers")]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use larder::reference::{ImageId, ImageName};
use larder_kube::image_sets::{ImageSetOptions, SetImages, WantedImage, definitions, run_image_sets};
use larder_kube::{Cluster, ClusterOptions, watch_bound_pods};
use larder_testkit::kube_api::{ADMINISTRATOR, KubeApi};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::{self, Instant};
use tokio_stream::StreamExt as _;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

const SET: &str = "/apis/images.larder.dev/v1alpha1/imagesets/load";
/// The agents of a fleet do not start at once: the update of a `DaemonSet` takes minutes.
const START_WITHIN: Duration = Duration::from_secs(30);
/// A set that takes longer will never be ready.
const READY_WITHIN: Duration = Duration::from_secs(300);

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let mut arguments = std::env::args().skip(1);
    let agents: usize = arguments.next().map_or(Ok(1000), |text| text.parse())?;
    let minutes: u64 = arguments.next().map_or(Ok(5), |text| text.parse())?;
    let api = KubeApi::start();
    let mut terminated = signal(SignalKind::terminate())?;
    // Leaving this function stops the API server.
    tokio::select! {
        outcome = measure(&api, agents, minutes) => outcome,
        _ = terminated.recv() => Err("terminated".into()),
        _ = tokio::signal::ctrl_c() => Err("interrupted".into()),
    }
}

async fn measure(api: &KubeApi, agents: usize, minutes: u64) -> Result<(), BoxError> {
    for definition in definitions() {
        let path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
        api.create(path, &serde_json::to_value(definition)?);
    }
    let mut fleet = Fleet::start(api).await?;
    println!("API server: {}", server_memory());
    let part = Measurement::begin(&fleet);
    for index in 0..agents {
        let name = format!("node-{index:04}");
        api.create("/api/v1/nodes", &json!({ "metadata": { "name": name } }));
        fleet.add(name);
        time::sleep(START_WITHIN / u32::try_from(agents)?).await;
    }
    time::sleep(Duration::from_secs(30)).await;
    part.print("start, without any ImageSet", agents);
    let part = Measurement::begin(&fleet);
    create_set(api);
    let started = Instant::now();
    while api.get(SET)["status"]["ready"] != json!(agents) {
        if started.elapsed() > READY_WITHIN {
            return Err(format!("the set is not ready everywhere: {}", api.get(SET)["status"]).into());
        }
        time::sleep(Duration::from_millis(250)).await;
    }
    println!("ImageSet of 10 images ready on {agents} nodes after {:.1}s", started.elapsed().as_secs_f64());
    time::sleep(Duration::from_secs(30)).await;
    part.print("ImageSet, from its creation until 30s after it was ready", agents);
    let part = Measurement::begin(&fleet);
    time::sleep(Duration::from_secs(60 * minutes)).await;
    part.print("steady state", agents);
    Ok(())
}

fn create_set(api: &KubeApi) {
    let images: Vec<_> =
        (0..10).map(|index| json!({ "image": format!("registry.example/app:{index}") })).collect();
    let set = json!({
        "apiVersion": "images.larder.dev/v1alpha1", "kind": "ImageSet",
        "metadata": { "name": "load" }, "spec": { "images": images },
    });
    api.create("/apis/images.larder.dev/v1alpha1/imagesets", &set);
}

/// Bytes and connections of all agents.
#[derive(Default)]
struct Traffic {
    sent: AtomicU64,
    received: AtomicU64,
    open: AtomicU64,
}

/// Agents, and the proxy that they connect to.
struct Fleet {
    kubeconfig: PathBuf,
    traffic: Arc<Traffic>,
    clusters: Arc<Mutex<Vec<Cluster>>>,
    agents: JoinSet<()>,
    _directory: tempfile::TempDir,
}

impl Fleet {
    async fn start(api: &KubeApi) -> Result<Fleet, BoxError> {
        let mut config: Value =
            serde_json::from_str(&fs_err::read_to_string(api.kubeconfig(ADMINISTRATOR))?)?;
        let url = config["clusters"][0]["cluster"]["server"].as_str().unwrap_or_default().to_owned();
        let (scheme, _) = url.split_once("://").ok_or("a server without a URL")?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let proxy = listener.local_addr()?;
        config["clusters"][0]["cluster"]["server"] = json!(format!("{scheme}://{proxy}"));
        let directory = tempfile::tempdir()?;
        let kubeconfig = directory.path().join("kubeconfig");
        fs_err::write(&kubeconfig, config.to_string())?;
        let traffic = Arc::<Traffic>::default();
        tokio::spawn(proxy_connections(listener, api.backend(), Arc::clone(&traffic)));
        let (clusters, agents) = (Arc::default(), JoinSet::new());
        Ok(Fleet { kubeconfig, traffic, clusters, agents, _directory: directory })
    }

    fn add(&mut self, node: String) {
        let options = ClusterOptions { kubeconfig: Some(self.kubeconfig.clone()), node };
        let clusters = Arc::clone(&self.clusters);
        self.agents.spawn(async move {
            match Cluster::connect(&options).await {
                Ok(cluster) => {
                    clusters.lock().unwrap_or_else(PoisonError::into_inner).push(cluster.clone());
                    let images = Arc::new(SimulatedImages::default());
                    let mut pods = pin!(watch_bound_pods(&cluster));
                    let pods = async { while pods.next().await.is_some() {} };
                    tokio::join!(pods, run_image_sets(cluster, ImageSetOptions::new("default"), images));
                }
                Err(error) => println!("{}: {error}", options.node),
            }
        });
    }
}

/// Requests and bytes since the beginning of a part.
struct Measurement {
    traffic: Arc<Traffic>,
    clusters: Arc<Mutex<Vec<Cluster>>>,
    started: Instant,
    before: [u64; 4],
}

impl Measurement {
    fn begin(fleet: &Fleet) -> Measurement {
        let (traffic, clusters) = (Arc::clone(&fleet.traffic), Arc::clone(&fleet.clusters));
        let mut part = Measurement { traffic, clusters, started: Instant::now(), before: [0; 4] };
        part.before = part.totals();
        part
    }

    /// Requests, watches, bytes to and from the API server.
    fn totals(&self) -> [u64; 4] {
        let clusters = self.clusters.lock().unwrap_or_else(PoisonError::into_inner);
        let sum = |of: fn(&Cluster) -> u64| clusters.iter().map(of).sum();
        [
            sum(|cluster| cluster.requests().requests),
            sum(|cluster| cluster.requests().watches),
            self.traffic.sent.load(Ordering::Relaxed),
            self.traffic.received.load(Ordering::Relaxed),
        ]
    }

    #[expect(clippy::cast_precision_loss, reason = "figures for people")]
    fn print(&self, part: &str, agents: usize) {
        let (now, seconds) = (self.totals(), self.started.elapsed().as_secs_f64());
        let [requests, watches, sent, received] =
            [0, 1, 2, 3].map(|index| (now[index] - self.before[index]) as f64);
        let per_node_and_minute = requests * 60.0 / seconds / agents as f64;
        println!("{part} ({seconds:.0}s):");
        println!(
            "  {requests} requests, {watches} of them watches: {:.1}/s, {per_node_and_minute:.2} for each node and minute",
            requests / seconds
        );
        println!(
            "  to the API server {:.1} kB/s, from it {:.1} kB/s ({:.1} MB in all)",
            sent / seconds / 1e3,
            received / seconds / 1e3,
            (sent + received) / 1e6
        );
        println!(
            "  {} open connections, API server: {}",
            self.traffic.open.load(Ordering::Relaxed),
            server_memory()
        );
    }
}

async fn proxy_connections(listener: TcpListener, server: SocketAddr, traffic: Arc<Traffic>) {
    loop {
        let client = match listener.accept().await {
            Ok((client, _)) => client,
            Err(error) => {
                println!("a connection is lost: {error}");
                time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let traffic = Arc::clone(&traffic);
        tokio::spawn(async move {
            let upstream = match TcpStream::connect(server).await {
                Ok(upstream) => upstream,
                Err(error) => return println!("a connection to the API server is lost: {error}"),
            };
            let ((from_client, to_client), (from_server, to_server)) =
                (client.into_split(), upstream.into_split());
            traffic.open.fetch_add(1, Ordering::Relaxed);
            tokio::select! {
                () = copy(from_client, to_server, &traffic.sent) => {}
                () = copy(from_server, to_client, &traffic.received) => {}
            }
            traffic.open.fetch_sub(1, Ordering::Relaxed);
        });
    }
}

async fn copy(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, count: &AtomicU64) {
    let mut buffer = vec![0; 16 * 1024];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        count.fetch_add(read as u64, Ordering::Relaxed);
        if to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
}

/// Resident memory of a kube-apiserver that this process started; the server of the testkit is in this process.
fn server_memory() -> String {
    let own = std::process::id().to_string();
    let field = |process: &Path, name: &str| {
        let status = fs_err::read_to_string(process.join("status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix(name))?.trim().to_owned();
        Some(line)
    };
    let processes = fs_err::read_dir("/proc").into_iter().flatten().flatten().map(|entry| entry.path());
    let is_server = |process: &PathBuf| {
        field(process, "Name:").is_some_and(|name| name == "kube-apiserver")
            && field(process, "PPid:").is_some_and(|parent| parent == own)
    };
    match processes.into_iter().find(is_server).and_then(|process| field(&process, "VmRSS:")) {
        Some(memory) => format!("{memory} resident"),
        None => "in this process".to_owned(),
    }
}

/// The images of one node: a pull takes one to three seconds, by its name.
#[derive(Default)]
struct SimulatedImages {
    present: Mutex<BTreeMap<String, ImageId>>,
}

#[async_trait]
impl SetImages for SimulatedImages {
    async fn ensure(&self, image: &WantedImage) -> Result<ImageId, String> {
        if let Some(id) = self.find(image).await? {
            return Ok(id);
        }
        if image.image.as_str().contains("missing") {
            return Err(format!("{}: not found", image.image));
        }
        let length = image.image.as_str().bytes().map(u64::from).sum::<u64>() * 97 % 2000;
        time::sleep(Duration::from_millis(1000 + length)).await;
        let id = ImageId::from(image.image.as_str());
        self.present
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(image.image.to_string(), id.clone());
        Ok(id)
    }

    async fn find(&self, image: &WantedImage) -> Result<Option<ImageId>, String> {
        Ok(self.present.lock().unwrap_or_else(PoisonError::into_inner).get(image.image.as_str()).cloned())
    }

    fn retain(&self, _: &WantedImage, _: &ImageId) {}

    fn release(&self, _: &ImageName) {}
}
