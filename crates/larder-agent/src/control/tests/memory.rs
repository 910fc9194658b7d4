//! The most memory that rounds and CRI's lists take with ten thousand images, as the kernel counts it. Each runs in a process of its
//! own: the other tests take memory too.

use std::process::Command;
use std::sync::Arc;

use larder::backend::{Backend as _, Image};
use larder::gc::{GcGoal, GcPolicy, InspectLayerSource};
use larder::retention::{KeepRule, Selector};
use larder_cri::{CriBackend, CriConfig, Endpoint};

use super::{DaemonAddresses, ServingProcess, TestDaemon, testing};

const IMAGES: usize = 10_000;
/// Bytes of labels of each config.
const LABELS: usize = 8 << 10;
const PEAK: u64 = 128 << 20;
/// The operation of a process of this test.
const OPERATION: &str = "LARDER_TEST_MEMORY_OF";

#[test]
fn ten_thousand_images_with_many_labels_and_long_names_take_little_memory() {
    if let Ok(operation) = std::env::var(OPERATION) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        return runtime.block_on(measure(&operation));
    }
    let name =
        "control::tests::memory::ten_thousand_images_with_many_labels_and_long_names_take_little_memory";
    for operation in ["round", "cri"] {
        let mut child = Command::new(std::env::current_exe().unwrap());
        let ended = child.args(["--exact", name, "--nocapture"]).env(OPERATION, operation).output().unwrap();
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

fn config() -> String {
    let labels = (0..LABELS / 1024).map(|n| format!(r#""label.{n}":"{}","#, "v".repeat(1000)));
    let labels: String = labels.collect();
    format!(
        r#"{{"config":{{"Labels":{{{labels}"keep":"no"}}}},"rootfs":{{"type":"layers","diff_ids":["sha256:a"]}}}}"#
    )
}

async fn measure(operation: &str) {
    let served = TestDaemon::on(ServingProcess::Daemon(DaemonAddresses::default()), |backend, dir| {
        let mut parts = testing::parts(backend, dir, None, |_| ());
        let layers = InspectLayerSource::new(Arc::new(backend.clone()));
        parts.collector = parts.collector.layers(Arc::new(layers));
        parts
    });
    served.backend.set_images((0..IMAGES).map(image).collect());
    served.backend.set_config(config());
    let keep = vec![KeepRule::new(Selector::Label("keep".into(), Some("yes".into())))];
    served.node.collection.set_policy(GcPolicy { keep, ..served.node.settings.now().policy(Vec::new()) });
    let socket = served.dir.path().join("s");
    let before = reset_peak();
    match operation {
        "round" => {
            let collector = served.node.collection.unchecked_collector();
            // The second round finds what the first one has cached.
            for _ in 0..2 {
                let dry = collector.dry_run(GcGoal::AllUnused, &collector.policy(), false).await.unwrap();
                assert_eq!(dry.report.plans[0].decisions.len(), IMAGES);
            }
        }
        "cri" => {
            let caller = CriBackend::new(Endpoint::at(socket), CriConfig::default());
            assert_eq!(caller.list().await.unwrap().len(), IMAGES);
        }
        other => unreachable!("{other}"),
    }
    let peak = peak() - before;
    assert!(peak < PEAK, "{operation}: {} MiB", peak >> 20);
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
