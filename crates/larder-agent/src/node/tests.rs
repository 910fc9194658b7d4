//! Background tasks of a node, on a full disk in simulated time.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use larder::gc::{FsStatsProvider, GcGoal, GcPolicy, OtherFilesystem};
use larder::image_service::{FilesystemError, FsStats};
use larder::pod::Pod;
use larder::pull::{EnsureRequest, PullPolicy};
use larder::records::{PullRecordStore, Verification};
use larder_testkit::fake_backend::{FakeBackend, ScriptedPull, image};
use tokio::time::{self, Instant};

use super::collection::MEASURE_WITHIN;
use super::*;
use crate::config::{PrefetchItem, PrefetchRetention, PrefetchSchedule};
use crate::node::testing;

/// Never answers; counts its measurements.
#[derive(Default)]
struct HangingFsStats(AtomicUsize);

#[async_trait]
impl FsStatsProvider for HangingFsStats {
    async fn measure(&self) -> Result<FsStats, FilesystemError> {
        self.0.fetch_add(1, Ordering::Relaxed);
        std::future::pending().await
    }

    async fn measure_others(&self) -> Result<Vec<OtherFilesystem>, FilesystemError> {
        self.0.fetch_add(1000, Ordering::Relaxed);
        std::future::pending().await
    }
}

/// Always too full.
struct FullFsStats;

#[async_trait]
impl FsStatsProvider for FullFsStats {
    async fn measure(&self) -> Result<FsStats, FilesystemError> {
        Ok(FsStats { capacity: 1000, available: 1, inodes: 1000, inodes_free: 1000, reserved: 0 })
    }
}

#[tokio::test(start_paused = true)]
async fn the_first_round_retains_images_of_static_pods_and_the_prefetch_list() {
    let (backend, dir) = (FakeBackend::new(), tempfile::tempdir().unwrap());
    for name in ["static:1", "prefetched:1", "unused:1"] {
        backend.add_image(name, image(format!("sha256:{name}"), 1));
    }
    let pod = "{apiVersion: v1, kind: Pod, metadata: {name: a}, spec: {containers: [{name: a, image: 'static:1'}]}}";
    fs_err::write(dir.path().join("pod.yaml"), pod).unwrap();
    let state = tempfile::tempdir().unwrap();
    let node = testing::node(&backend, state.path(), Some(Arc::new(FullFsStats)), |config| {
        config.static_pod_path = Some(dir.path().to_owned());
        let (when, jitter, hold) = (PrefetchSchedule::Start, Duration::ZERO, PrefetchRetention::Keep);
        config.prefetch = vec![PrefetchItem { image: "prefetched:1".into(), when, jitter, hold }];
    });
    let node = Arc::new(node);
    let mut status = node.collection.status();
    tokio::select! {
        () = node.run() => unreachable!("the node runs until dropped"),
        ended = status.wait_for(|status| status.rounds > 0) => drop(ended.unwrap()),
    }
    let mut left: Vec<_> = backend.images().into_iter().map(|image| image.id).collect();
    left.sort();
    assert_eq!(left, ["sha256:prefetched:1", "sha256:static:1"]);
}

/// A node with a static pod and a prefetch list.
fn node_that_pulls(dir: &tempfile::TempDir, records: bool) -> (FakeBackend, Arc<Node>) {
    let backend = FakeBackend::new();
    for name in WANTED {
        backend.offer(name, image(format!("sha256:{name}"), 1));
    }
    let pods = dir.path().join("pods");
    fs_err::create_dir(&pods).unwrap();
    let pod = "{apiVersion: v1, kind: Pod, metadata: {name: a}, spec: {containers: [{name: a, image: 'static:1'}]}}";
    fs_err::write(pods.join("pod.yaml"), pod).unwrap();
    let mut parts = testing::parts(&backend, dir.path(), None, |config| {
        config.static_pod_path = Some(pods);
        let (when, jitter, hold) = (PrefetchSchedule::Start, Duration::ZERO, PrefetchRetention::Nothing);
        config.prefetch = vec![PrefetchItem { image: "prefetched:1".into(), when, jitter, hold }];
    });
    parts.access.records = records.then(|| {
        let verification = Verification::of_unconfigured_kubelet();
        Arc::new(PullRecordStore::open(&dir.path().join("records"), verification).unwrap())
    });
    (backend, Arc::new(Node::build(parts)))
}

const WANTED: [&str; 2] = ["static:1", "prefetched:1"];

#[tokio::test(start_paused = true)]
async fn images_pulled_for_static_pods_and_by_prefetch_are_first_seen_at_their_pull() {
    let dir = tempfile::tempdir().unwrap();
    let (backend, node) = node_that_pulls(&dir, false);
    for name in WANTED {
        backend
            .on_pull_of(name, ScriptedPull::ok(format!("sha256:{name}"), 1).after(Duration::from_secs(20)));
    }
    tokio::select! {
        () = node.run() => unreachable!("the node runs until dropped"),
        () = async {
            backend.until(|counts| counts.succeeded == 2).await;
            time::sleep(Duration::from_secs(1)).await;
        } => {}
    }
    assert_eq!(node.collection.status().borrow().rounds, 1, "no round after the pulls");
    for name in WANTED {
        assert!(
            node.collection
                .unchecked_collector()
                .records()
                .get(&format!("sha256:{name}").into(), "")
                .is_some(),
            "{name}"
        );
    }
}

#[tokio::test]
async fn images_pulled_for_static_pods_and_by_prefetch_have_pull_records() {
    let dir = tempfile::tempdir().unwrap();
    let (_backend, node) = node_that_pulls(&dir, true);
    let records = node.pulls.records().unwrap();
    let recorded = async |name: &str| loop {
        match records.record(&format!("sha256:{name}").into()).await.unwrap() {
            Some(record) => return record,
            None => time::sleep(Duration::from_millis(20)).await,
        }
    };
    let both = async { tokio::join!(recorded(WANTED[0]), recorded(WANTED[1])) };
    let (one, other) = tokio::select! {
        () = node.run() => unreachable!("the node runs until dropped"),
        records = time::timeout(Duration::from_secs(60), both) => records.unwrap(),
    };
    for record in [one, other] {
        assert!(
            record.names.len() == 1 && record.names.values().all(|access| access.node_pods),
            "{record:?}"
        );
    }
}

#[tokio::test]
async fn images_ensured_by_an_earlier_process_are_leased_as_configured() {
    let (backend, dir) = (FakeBackend::new(), tempfile::tempdir().unwrap());
    backend.add_image("a:1", image("sha256:a", 1));
    let node = |lease| testing::node(&backend, dir.path(), None, |config| config.ensured_lease = lease);
    let first = node(Duration::from_secs(60));
    let request = EnsureRequest::new("a:1", PullPolicy::IfNotPresent, Pod::default());
    first.pulls.manager().ensure(&request).await.unwrap();
    first.collection.note_ensured(&"sha256:a".into(), false).await;
    drop(first);
    for (lease, uses) in [(Duration::from_secs(60), 1), (Duration::ZERO, 0)] {
        let node = node(lease);
        let collector = node.collection.collector().unwrap();
        let snapshot = collector.snapshot(&GcPolicy::default()).await.unwrap();
        assert_eq!(snapshot.images[0].retained_by.len(), uses, "{lease:?}");
    }
}

#[tokio::test]
async fn an_image_that_was_pulled_is_first_seen_at_its_pull() {
    let (backend, dir) = (FakeBackend::new(), tempfile::tempdir().unwrap());
    let node = testing::node(&backend, dir.path(), None, |_| ());
    node.collection.note_ensured(&"sha256:present".into(), false).await;
    node.collection.note_ensured(&"sha256:pulled".into(), true).await;
    let records = node.collection.collector().unwrap().records();
    assert!(records.get(&"sha256:pulled".into(), "").is_some());
    assert!(records.get(&"sha256:present".into(), "").is_none(), "it may be older than larder");
}

#[tokio::test(start_paused = true)]
async fn a_filesystem_that_hangs_takes_one_measurement_however_many_ask() {
    let (backend, dir) = (FakeBackend::new(), tempfile::tempdir().unwrap());
    let disk = Arc::new(HangingFsStats::default());
    let node =
        testing::node(&backend, dir.path(), Some(Arc::clone(&disk) as Arc<dyn FsStatsProvider>), |_| ());
    let (asked, policy) = (Instant::now(), GcPolicy::default());
    for _ in 0..3 {
        let (found, _, plan) = tokio::join!(
            node.collection.filesystems(),
            node.collection.filesystems(),
            time::timeout(
                MEASURE_WITHIN,
                node.collection.unchecked_collector().dry_run(GcGoal::Thresholds, &policy, &[])
            ),
        );
        assert!(found.image.is_none() && found.others.is_empty() && plan.is_err());
    }
    assert_eq!(asked.elapsed(), 3 * MEASURE_WITHIN);
    assert_eq!(disk.0.load(Ordering::Relaxed), 1001);
}

#[tokio::test(start_paused = true)]
async fn settings_that_change_before_the_first_look_at_their_files_are_read() {
    let (backend, dir) = (FakeBackend::new(), tempfile::tempdir().unwrap());
    let node = Arc::new(testing::node(&backend, dir.path(), None, |config| {
        config.degraded = Some("config.yaml: broken".into());
        config.gc = config.gc.clone().disabled();
    }));
    assert!(node.settings.degraded().is_some());
    let fixed =
        "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\nimageGCHighThresholdPercent: 90\n";
    fs_err::write(dir.path().join("config.yaml"), fixed).unwrap();
    tokio::select! {
        () = node.run() => unreachable!("the node runs until dropped"),
        () = time::sleep(Duration::from_secs(60)) => {}
    }
    assert_eq!((node.settings.degraded(), node.settings.now().gc.high_threshold_percent), (None, 90));
}

#[tokio::test]
async fn settings_that_turn_verification_off_end_the_denial_of_a_degraded_start() {
    let (backend, dir) = (FakeBackend::new(), tempfile::tempdir().unwrap());
    let mut parts = testing::parts(&backend, dir.path(), None, |config| {
        config.degraded = Some("config.yaml: broken".into());
    });
    let everyone = Verification::always_verify();
    parts.access.records =
        Some(Arc::new(PullRecordStore::open(&dir.path().join("records"), everyone).unwrap()));
    let node = Node::build(parts);
    let records = node.pulls.records().unwrap();
    assert!(!records.allows_unrecorded(&"a:1".into(), &"sha256:1".into()).await, "unreadable settings deny");
    let off = "apiVersion: larder.dev/v1alpha1\nkind: LarderConfiguration\nfeatureGates: {KubeletEnsureSecretPulledImages: false}\n";
    fs_err::write(dir.path().join("config.yaml"), off).unwrap();
    node.reload().unwrap();
    assert!(records.allows_unrecorded(&"a:1".into(), &"sha256:1".into()).await);
}
