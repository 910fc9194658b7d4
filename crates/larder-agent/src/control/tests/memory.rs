//! The most memory that rounds and lists take with ten thousand images, as the kernel counts it. Each runs in a process
//! of its own: the other tests take memory too.

use std::process::{Command, Stdio};
use std::sync::Arc;

use larder::backend::{Backend as _, Image};
use larder::gc::{GcGoal, GcPolicy, InspectLayerSource};
use larder::reference::ImageId;
use larder::retention::{KeepRule, Selector};
use larder_cri::{CriBackend, CriConfig, Endpoint};

use super::{DaemonAddresses, ServingProcess, TestDaemon, api, testing};
use crate::config::{Config, DashboardServing};

const IMAGES: usize = 10_000;
/// Bytes of labels of each config.
const LABELS: usize = 8 << 10;
/// Most layers of an image.
const LAYERS: u64 = 20;
/// Layers that images share.
const SHARED_LAYERS: u64 = 1000;
const PEAK: u64 = 128 << 20;
/// The operation of a process of this test.
const OPERATION: &str = "LARDER_TEST_MEMORY_OF";

#[test]
fn ten_thousand_images_with_many_labels_and_long_names_take_little_memory() {
    if let Ok(operation) = std::env::var(OPERATION) {
        // A list leaves out what takes seconds.
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().start_paused(true).build().unwrap();
        return runtime.block_on(measure(&operation));
    }
    let name =
        "control::tests::memory::ten_thousand_images_with_many_labels_and_long_names_take_little_memory";
    let dashboard = cfg!(feature = "dashboard").then_some("dashboard");
    let start = |operation: &'static str| {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", name, "--nocapture"]).env(OPERATION, operation);
        (operation, child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    };
    let started: Vec<_> = ["round", "list", "lists", "cri"].into_iter().chain(dashboard).map(start).collect();
    for (operation, child) in started {
        let ended = child.wait_with_output().unwrap();
        let text = [ended.stdout, ended.stderr].concat();
        assert!(ended.status.success(), "{operation}: {}", String::from_utf8_lossy(&text));
    }
}

/// An image with four names of 400 bytes: all of them do not fit one message.
fn image(number: usize) -> Image {
    let name = |end: &str| format!("registry.example/{}{number:05}{end}", "n".repeat(230));
    Image {
        id: format!("sha256:{number:064}").into(),
        repo_tags: (0..2).map(|tag| name(&format!(":{}{tag}", "t".repeat(127)))).collect(),
        repo_digests: vec![name(&format!("@sha256:{number:064}")), name(&format!("b@sha256:{number:064}"))],
        size: 1 << 20,
        ..Image::default()
    }
}

/// A config with labels, and with layers of which every other one is the image's own.
fn config(id: &ImageId) -> String {
    let number: u64 = id.as_str().trim_start_matches("sha256:").parse().unwrap();
    let mut random = number;
    let mut below = |end: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % end
    };
    let labels = (0..LABELS / 1024).map(|n| format!(r#""label.{n}":"{}","#, "v".repeat(1000)));
    let labels: String = labels.collect();
    let layers = (0..=below(LAYERS)).map(|at| match at % 2 {
        0 => below(SHARED_LAYERS),
        _ => SHARED_LAYERS + number * LAYERS + at,
    });
    let layers: Vec<_> = layers.map(|layer| format!(r#""sha256:{layer:064x}""#)).collect();
    format!(
        r#"{{"created":"2026-01-02T03:04:05.123456789Z","config":{{"Labels":{{{labels}"keep":"no"}}}},"rootfs":{{"type":"layers","diff_ids":[{}]}}}}"#,
        layers.join(",")
    )
}

async fn measure(operation: &str) {
    let served = TestDaemon::on(ServingProcess::Daemon(DaemonAddresses::default()), |backend, dir| {
        let always = |config: &mut Config| config.dashboard.serve = DashboardServing::Always;
        let mut parts = testing::parts(backend, dir, None, always);
        let layers = InspectLayerSource::new(Arc::new(backend.clone()));
        parts.collector = parts.collector.layers(Arc::new(layers));
        parts
    });
    served.backend.set_images((0..IMAGES).map(image).collect());
    served.backend.set_configs(config);
    served.backend.stop_recording();
    let keep = vec![KeepRule::new(Selector::Label("keep".into(), Some("yes".into())))];
    served.node.collection.set_policy(GcPolicy { keep, ..served.node.settings.now().policy(Vec::new()) });
    let socket = served.dir.path().join("s");
    let before = reset_peak();
    match operation {
        "round" => {
            let collector = served.node.collection.unchecked_collector();
            // The second round finds what the first one has cached.
            for _ in 0..2 {
                let dry = collector.dry_run(GcGoal::AllUnused, &collector.policy(), &[]).await.unwrap();
                assert_eq!(dry.report.plans[0].decisions.len(), IMAGES);
            }
        }
        // The caller, which has a process of its own, keeps no part.
        "list" => list(&served).await,
        "lists" => {
            let lists = (0..8).map(|_| list(&served));
            futures_util::future::join_all(lists).await;
        }
        #[cfg(feature = "dashboard")]
        "dashboard" => dashboard(&served).await,
        "cri" => {
            for list_streaming in [false, true] {
                let config = CriConfig { list_streaming, ..CriConfig::default() };
                let caller = CriBackend::new(Endpoint::at(socket.clone()), config);
                assert_eq!(caller.list().await.unwrap().len(), IMAGES);
            }
        }
        other => unreachable!("{other}"),
    }
    let peak = peak() - before;
    assert!(peak < PEAK, "{operation}: {} MiB", peak >> 20);
}

async fn list(served: &TestDaemon) {
    let label_keys = vec!["keep".to_owned()];
    let request = api::ImagesRequest { details: true, label_keys, ..Default::default() };
    let mut parts = served.client().images(request).await.unwrap().into_inner();
    let mut listed = 0;
    while let Some(part) = parts.message().await.unwrap() {
        assert_eq!(part.warnings, [""; 0]);
        listed += part.images.len();
    }
    assert_eq!(listed, IMAGES);
}

#[cfg(feature = "dashboard")]
async fn dashboard(served: &TestDaemon) {
    use tonic::codegen::http::{Request, StatusCode};

    use super::{Connections, ControlApi, watch};
    use crate::dashboard::Dashboard;

    let process = ServingProcess::Daemon(DaemonAddresses::default());
    let (_stop, stopped) = watch::channel(false);
    let control = ControlApi::new(Arc::clone(&served.node), process, Connections::default(), stopped);
    let dashboard = Dashboard::of(&served.node.settings.now(), &control).unwrap();
    for document in ["images", "layers"] {
        let request = Request::get(format!("/dashboard/api/{document}")).header("host", "localhost");
        let answer = dashboard.answer(&request.body(()).unwrap(), [127, 0, 0, 1].into()).await;
        assert_eq!(answer.status(), StatusCode::OK, "{document}");
    }
}

/// Makes the peak begin at the memory in use, and returns it.
fn reset_peak() -> u64 {
    fs_err::write("/proc/self/clear_refs", "5").unwrap();
    peak()
}

/// The most memory since the last reset, in bytes.
fn peak() -> u64 {
    let status = fs_err::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}
