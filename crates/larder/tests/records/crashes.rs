//! A process that dies between intent, pull and record, at every step that it takes on the disk.

use larder::backend::Image;
use larder::records::{PullRecordStore, PullRecords as _, Rfc3339Time, Verification};
use larder_testkit::fake_backend::FakeBackend;

use crate::world::{ID, IMAGE, dying_after, id, image, may_use, open, secret};

fn present() -> FakeBackend {
    let backend = FakeBackend::new();
    backend.set_images(vec![Image { id: ID.into(), repo_tags: vec![IMAGE.into()], ..Image::default() }]);
    backend
}

#[tokio::test]
async fn after_any_crash_access_requires_authentication() {
    let mut died = 0;
    for steps in 0.. {
        let dir = tempfile::tempdir().unwrap();
        let (witness, _) = dying_after(steps);
        let records =
            PullRecordStore::watched(dir.path(), Verification::of_unconfigured_kubelet(), Some(witness))
                .unwrap();
        let began = records.record_pull_intent(&image()).await.is_ok();
        // The pull starts only after the intent is recorded.
        let backend = if began { present() } else { FakeBackend::new() };
        let recorded = began
            && records.pulled(&image(), &id(), Some(secret("a")), Rfc3339Time(1_800_000_000)).await.is_ok();
        let dead = !recorded || records.flush().await.is_err() || records.on_disk().unwrap().0 > 0;
        drop(records);

        let again = open(dir.path());
        again.recover(&backend).await;
        if began {
            // Also if the caller never got the answer: pod a did authenticate.
            assert!(!recorded || may_use(&again, "a").await, "step {steps}: a is forgotten");
            assert!(!may_use(&again, "b").await, "step {steps}: b never showed anything");
            assert!(!may_use(&again, "").await, "step {steps}");
        }
        died += usize::from(dead);
        if !dead {
            break;
        }
    }
    assert!(died >= 8, "only {died} places to die at");
}

#[tokio::test]
async fn a_pull_that_was_cut_off_is_remembered_without_a_restart_too() {
    let dir = tempfile::tempdir().unwrap();
    let records = open(dir.path());
    assert!(may_use(&records, "").await, "larder did not pull it");
    records.record_pull_intent(&image()).await.unwrap();
    assert!(!may_use(&records, "").await);
    records.record_image_pull_failed(&image());
    records.flush().await.unwrap();
    assert!(may_use(&records, "").await, "the pull did not start");
}

#[tokio::test]
async fn a_pull_that_its_caller_gave_up_leaves_no_intent() {
    let dir = tempfile::tempdir().unwrap();
    let (records, image) = (open(dir.path()), image());
    tokio::select! {
        biased;
        written = records.record_pull_intent(&image) => {
            // The write was faster than the cancellation.
            written.unwrap();
            records.record_image_pull_failed(&image);
        }
        () = std::future::ready(()) => {}
    }
    records.flush().await.unwrap();
    assert_eq!((records.in_flight(&image), records.on_disk().unwrap().0), (0, 0));
}

#[tokio::test]
async fn an_intent_is_recovered_also_by_a_short_name() {
    let dir = tempfile::tempdir().unwrap();
    let records = open(dir.path());
    records.record_pull_intent(&"busybox".into()).await.unwrap();
    drop(records);
    let backend = FakeBackend::new();
    let tag = "docker.io/library/busybox:latest".to_owned();
    backend.set_images(vec![Image { id: ID.into(), repo_tags: vec![tag], ..Image::default() }]);
    let again = open(dir.path());
    again.recover(&backend).await;
    assert_eq!(again.on_disk().unwrap(), (0, 1));
}
