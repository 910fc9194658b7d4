//! Interrupted and failed pulls: the backend's answer decides.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use larder::backend::Image;
use larder::pod::Pod;
use larder::pull::{EnsureRequest, ImageManager, PullPolicy};
use larder::records::{PullRecordStore, PullRecords as _, RecordedCredentials, Rfc3339Time};
use larder_testkit::fake_backend::FakeBackend;

use crate::world::{ID, IMAGE, id, image, may_use, open, secret};

const NOW: Rfc3339Time = Rfc3339Time(1_800_000_000);
const LONG: Duration = Duration::from_secs(3600);

fn asking(dir: &Path) -> (PullRecordStore, FakeBackend) {
    let (records, backend) = (open(dir), FakeBackend::new());
    records.resolve_interrupted_with(Arc::new(backend.clone()));
    (records, backend)
}

fn comes(backend: &FakeBackend, id: &str) {
    backend.set_images(vec![Image { id: id.into(), repo_tags: vec![IMAGE.into()], ..Image::default() }]);
}

async fn on_disk(records: &PullRecordStore) -> (usize, usize) {
    records.flush().await.unwrap();
    records.on_disk().unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_failed_pull_whose_image_is_present_gives_no_access() {
    let dir = tempfile::tempdir().unwrap();
    let (records, backend) = asking(dir.path());
    records.record_pull_intent(&image()).await.unwrap();
    comes(&backend, ID);
    assert!(records.record_image_pull_ended(&image()).await);
    assert_eq!(on_disk(&records).await, (0, 1));
    assert!(!may_use(&records, "").await && !may_use(&records, "a").await);
}

#[tokio::test(start_paused = true)]
async fn a_failed_pull_that_brought_nothing_leaves_a_preloaded_image_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let (records, backend) = asking(dir.path());
    for there in [false, true] {
        if there {
            comes(&backend, ID);
        }
        records.record_pull_intent(&image()).await.unwrap();
        assert!(records.record_image_pull_ended(&image()).await);
        assert_eq!((on_disk(&records).await, records.in_flight(&image())), ((0, 0), 0));
        assert!(may_use(&records, "").await);
    }
    // Another image has the name when it ends.
    records.record_pull_intent(&image()).await.unwrap();
    comes(&backend, "sha256:bbbb");
    records.record_image_pull_ended(&image()).await;
    assert_eq!(on_disk(&records).await, (0, 1));
}

#[tokio::test(start_paused = true)]
async fn an_image_pulled_after_its_caller_was_canceled_gives_no_access() {
    for delay in [0, 5, 100] {
        let dir = tempfile::tempdir().unwrap();
        let (records, backend) = asking(dir.path());
        records.record_pull_intent(&image()).await.unwrap();
        records.record_image_pull_interrupted(&image());
        tokio::time::sleep(Duration::from_secs(delay)).await;
        comes(&backend, ID);
        assert!(!may_use(&records, "").await, "not recorded yet");
        tokio::time::sleep(LONG).await;
        assert_eq!((on_disk(&records).await, records.in_flight(&image())), ((0, 1), 0), "after {delay} s");
        assert!(!may_use(&records, "").await);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_check_during_the_end_of_a_pull_gives_no_access() {
    let dir = tempfile::tempdir().unwrap();
    for _ in 0..200 {
        let records = Arc::new(open(&dir.path().join("records")));
        records.record_pull_intent(&image()).await.unwrap();
        let ending = tokio::spawn({
            let records = Arc::clone(&records);
            async move { records.record_image_pulled(&image(), &id(), &RecordedCredentials::NotRecorded).await }
        });
        while !ending.is_finished() {
            assert!(!may_use(&records, "").await);
        }
        ending.await.unwrap();
        drop(records);
        fs_err::remove_dir_all(dir.path().join("records")).unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn an_intent_is_removed_only_if_the_backend_has_no_new_image() {
    let dir = tempfile::tempdir().unwrap();
    let (records, backend) = asking(dir.path());
    records.record_pull_intent(&image()).await.unwrap();
    backend.set_down(Some(larder_testkit::fake_backend::error("the runtime is gone")));
    assert!(!records.record_image_pull_ended(&image()).await);
    records.record_image_pull_interrupted(&image());
    tokio::time::sleep(LONG).await;
    assert_eq!(on_disk(&records).await, (1, 0));
    backend.set_down(None);
    tokio::time::sleep(LONG).await;
    assert_eq!((on_disk(&records).await, records.in_flight(&image())), ((0, 0), 0));
}

#[tokio::test(start_paused = true)]
async fn repeated_cancellations_have_one_watcher() {
    let dir = tempfile::tempdir().unwrap();
    let (records, backend) = asking(dir.path());
    for _ in 0..5 {
        records.record_pull_intent(&image()).await.unwrap();
        records.record_image_pull_interrupted(&image());
        tokio::time::sleep(Duration::from_secs(600)).await;
        assert_eq!(records.in_flight(&image()), 1);
    }
    tokio::time::sleep(Duration::from_secs(60)).await;
    comes(&backend, ID);
    assert!(!may_use(&records, "").await);
    tokio::time::sleep(LONG).await;
    assert_eq!((on_disk(&records).await, records.in_flight(&image())), ((0, 1), 0));
}

#[tokio::test(start_paused = true)]
async fn a_concurrent_pull_that_succeeds_keeps_its_record() {
    let dir = tempfile::tempdir().unwrap();
    let (records, backend) = asking(dir.path());
    records.record_pull_intent(&image()).await.unwrap();
    records.record_pull_intent(&image()).await.unwrap();
    records.record_image_pull_interrupted(&image());
    comes(&backend, ID);
    records.pulled(&image(), &id(), Some(secret("a")), NOW).await.unwrap();
    tokio::time::sleep(LONG).await;
    assert_eq!(on_disk(&records).await, (0, 1));
    assert!(may_use(&records, "a").await && !may_use(&records, "b").await);
}

#[tokio::test(start_paused = true)]
async fn the_intent_of_a_dead_process_outlives_a_pull_that_did_not_start() {
    let dir = tempfile::tempdir().unwrap();
    open(dir.path()).record_pull_intent(&image()).await.unwrap();
    let (records, backend) = asking(dir.path());
    comes(&backend, ID);
    records.record_pull_intent(&image()).await.unwrap();
    records.record_image_pull_failed(&image());
    assert_eq!(on_disk(&records).await, (1, 0));
    assert!(!may_use(&records, "").await);
    // The failed pull is checked, and the present image may be from a dead process.
    records.record_pull_intent(&image()).await.unwrap();
    records.record_image_pull_ended(&image()).await;
    assert_eq!(on_disk(&records).await, (0, 1));
    assert!(!may_use(&records, "").await);
}

#[tokio::test]
async fn the_way_a_pod_spells_the_image_makes_no_difference_while_it_is_pulled() {
    let dir = tempfile::tempdir().unwrap();
    let records = open(dir.path());
    records.record_pull_intent(&"registry.example/team/app".into()).await.unwrap();
    let digest = format!("registry.example/team/app@sha256:{}", "a".repeat(64));
    let spellings = ["registry.example/team/app", "registry.example/team/app:latest", &digest];
    let ours = async |records: &PullRecordStore, image: &str| {
        records.check(&image.into(), &id(), &mut crate::world::PodWithSecret("")).await.0.unwrap().must_pull()
    };
    let again = open(dir.path());
    for spelling in spellings {
        assert!(ours(&records, spelling).await && ours(&again, spelling).await, "{spelling}");
    }
    for other in ["registry.example/team/app:v2", "registry.example/team/other"] {
        assert!(!ours(&records, other).await && !ours(&again, other).await, "{other}");
    }
}

#[tokio::test]
async fn before_recovery_images_without_a_record_give_no_access() {
    let dir = tempfile::tempdir().unwrap();
    open(dir.path()).record_pull_intent(&"registry.example/other:v1".into()).await.unwrap();
    let (records, backend) = asking(dir.path());
    assert!(may_use(&records, "").await, "preloaded, if there was nothing to recover");
    records.await_recovery();
    assert!(!may_use(&records, "").await);
    backend.set_down(Some(larder_testkit::fake_backend::error("the runtime is not up")));
    assert!(!records.recover(&backend).await);
    assert!(!may_use(&records, "").await);
    backend.set_down(None);
    assert!(records.recover(&backend).await);
    assert!(may_use(&records, "").await);
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_leaves_a_pull_leaves_its_intent() {
    let dir = tempfile::tempdir().unwrap();
    let (records, backend) = asking(dir.path());
    let records = Arc::new(records);
    let (pull, _never) = larder_testkit::fake_backend::ScriptedPull::ok(ID, 7).held();
    backend.on_pull_of(IMAGE, pull);
    let manager = ImageManager::new(Arc::new(backend.clone())).with_records(records.clone());
    let request = EnsureRequest::new(IMAGE, PullPolicy::IfNotPresent, Pod::default());
    tokio::select! {
        _ = manager.ensure(&request) => unreachable!("it is held"),
        () = async { while manager.pulls().is_empty() { tokio::task::yield_now().await } } => {}
    }
    comes(&backend, ID);
    tokio::time::sleep(LONG).await;
    assert_eq!(on_disk(&records).await, (0, 1));
    let never = EnsureRequest { policy: PullPolicy::Never, ..request };
    assert!(manager.ensure(&never).await.is_err());
}
