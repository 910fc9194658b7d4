//! Files in the directory, and other processes that write there.

use std::os::unix::fs::PermissionsExt as _;

use larder::backend::Image;
use larder::records::{
    ImagePullCredentials, ImagePullIntent, ImagePulledRecord, MustPullCheckResult, PullRecordStore,
    PullRecords as _, RecordDirStep, Rfc3339Time, Verification, file_name,
};
use larder::reference::ImageName;
use larder_testkit::fake_backend::FakeBackend;

use crate::world::{ID, IMAGE, PodWithSecret, dying_after, id, image, may_use, open, secret};

const NOW: Rfc3339Time = Rfc3339Time(1_800_000_000);

#[tokio::test]
async fn two_processes_that_share_a_directory_see_each_others_records() {
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (open(dir.path()), open(dir.path()));
    one.pulled(&image(), &id(), Some(secret("a")), NOW).await.unwrap();
    assert!(may_use(&other, "a").await && !may_use(&other, "b").await);
    // Now in memory of the other store; then another record is added.
    one.pulled(&image(), &id(), Some(secret("b")), NOW).await.unwrap();
    assert!(may_use(&other, "b").await);
    other.pulled(&image(), &id(), Some(secret("c")), NOW).await.unwrap();
    one.pulled(&image(), &id(), Some(secret("d")), NOW).await.unwrap();
    for holder in ["a", "b", "c", "d"] {
        assert!(may_use(&open(dir.path()), holder).await, "{holder} was lost");
    }
}

#[tokio::test]
async fn an_image_without_a_record_is_for_every_pod_unless_larder_may_have_pulled_it() {
    let dir = tempfile::tempdir().unwrap();
    let records = PullRecordStore::open(dir.path(), Verification::of_unconfigured_kubelet()).unwrap();
    assert!(records.allows_unrecorded(&image(), &id()).await);
    records.record_pull_intent(&image()).await.unwrap();
    assert!(!records.allows_unrecorded(&image(), &id()).await, "a pull of it runs");
    let other = tempfile::tempdir().unwrap();
    let always = Verification::parse("AlwaysVerify", []).unwrap();
    let strict = PullRecordStore::open(other.path(), always).unwrap();
    assert!(!strict.allows_unrecorded(&image(), &id()).await);
}

#[tokio::test]
async fn a_failed_pull_of_one_process_leaves_the_intent_of_another() {
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (open(dir.path()), open(dir.path()));
    one.record_pull_intent(&image()).await.unwrap();
    other.record_pull_intent(&image()).await.unwrap();
    other.record_image_pull_failed(&image());
    other.flush().await.unwrap();
    assert_eq!(one.on_disk().unwrap().0, 1);
    let backend = FakeBackend::new();
    backend.set_images(vec![Image { id: ID.into(), repo_tags: vec![IMAGE.into()], ..Image::default() }]);
    open(dir.path()).recover(&backend).await;
    assert_eq!(one.on_disk().unwrap(), (1, 0), "it is not dead");
    one.record_image_pull_failed(&image());
    one.flush().await.unwrap();
    assert_eq!(one.on_disk().unwrap().0, 0);
}

#[tokio::test]
async fn many_intents_share_a_sync_and_one_image_has_one_file() {
    let dir = tempfile::tempdir().unwrap();
    let (witness, steps) = dying_after(usize::MAX);
    let records =
        PullRecordStore::watched(dir.path(), Verification::of_unconfigured_kubelet(), Some(witness)).unwrap();
    let images: Vec<_> =
        (0..200).map(|n| ImageName::from(format!("registry.example/{}:v1", n % 100))).collect();
    let intents = images.iter().map(|image| records.record_pull_intent(image));
    let all: Result<Vec<_>, _> = futures_util::future::join_all(intents).await.into_iter().collect();
    all.unwrap();
    let count = |wanted| steps.lock().unwrap().iter().filter(|step| **step == wanted).count();
    assert_eq!(count(RecordDirStep::Write), 100, "a file for each image");
    assert!(count(RecordDirStep::Sync) <= 10, "{} syncs for 200 containers", count(RecordDirStep::Sync));
    assert_eq!(records.on_disk().unwrap().0, 100);
}

#[tokio::test]
async fn broken_foreign_and_future_records_give_no_access_and_are_replaced_by_a_pull() {
    let right = ImagePulledRecord {
        last_updated: Some(NOW),
        image_ref: ID.into(),
        names: [("registry.example/team/app".to_owned(), ImagePullCredentials::node())].into(),
    };
    let text = right.encode();
    for broken in [
        text[..text.len() / 2].to_owned(),
        String::new(),
        text.replace("v1beta1", "v2"),
        text.replace(ID, "sha256:another"),
        ImagePullIntent { image: IMAGE.into() }.encode(),
        format!("{text}{text}"),
        "\u{0}".repeat(5000),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let always = Verification::parse("AlwaysVerify", []).unwrap();
        let records = PullRecordStore::open(dir.path(), always).unwrap();
        let file = dir.path().join("pulled").join(file_name(ID));
        fs_err::write(&file, &broken).unwrap();
        assert!(!may_use(&records, "a").await, "{broken}");
        records.recover(&FakeBackend::new()).await;
        assert_eq!(fs_err::read_to_string(&file).unwrap(), broken, "left for a person to look at");
        records.pulled(&image(), &id(), Some(secret("a")), NOW).await.unwrap();
        assert!(may_use(&records, "a").await && !may_use(&records, "b").await);
    }
}

#[tokio::test]
async fn only_regular_files_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let records = open(dir.path());
    let file = dir.path().join("pulled").join(file_name(ID));
    rustix::fs::mkfifoat(rustix::fs::CWD, &file, rustix::fs::Mode::from_raw_mode(0o600)).unwrap();
    let (result, _) = records.check(&image(), &id(), &mut PodWithSecret("a")).await;
    assert_eq!(result, Some(MustPullCheckResult::Error));
    assert_eq!(records.checks(MustPullCheckResult::Error), 1);
}

#[tokio::test]
async fn the_directory_is_private_and_an_unusable_path_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("image_manager");
    fs_err::create_dir_all(root.join("pulled")).unwrap();
    let records = open(&root);
    records.pulled(&image(), &id(), None, NOW).await.unwrap();
    let mode = |path: &std::path::Path| fs_err::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!([mode(&root), mode(&root.join("pulled")), mode(&root.join("pulling"))], [0o700; 3]);
    assert_eq!(mode(&root.join("pulled").join(file_name(ID))), 0o600);

    let taken = dir.path().join("file");
    fs_err::write(&taken, "").unwrap();
    let error = PullRecordStore::open(&taken, Verification::of_unconfigured_kubelet()).err().unwrap();
    assert!(error.to_string().contains(&taken.display().to_string()), "{error}");
}

#[tokio::test]
async fn records_are_removed_with_their_images_and_recent_ones_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let records = open(dir.path());
    for (id, time) in [(ID, 100), ("sha256:old", 100), ("sha256:new", 300)] {
        records.pulled(&image(), &id.into(), Some(secret("a")), Rfc3339Time(time)).await.unwrap();
    }
    records.prune([id()], Rfc3339Time(200)).await.unwrap();
    assert_eq!(records.on_disk().unwrap().1, 2);
    let (old, _) = records.check(&image(), &"sha256:old".into(), &mut PodWithSecret("a")).await;
    assert_eq!(old, Some(MustPullCheckResult::PolicyAllowed), "as an image that was never pulled here");
    assert!(may_use(&records, "a").await);
}

#[tokio::test]
async fn an_image_that_was_pulled_again_during_a_round_keeps_its_record() {
    let dir = tempfile::tempdir().unwrap();
    let records = open(dir.path());
    let pulled =
        async |time| records.pulled(&image(), &id(), Some(secret("a")), Rfc3339Time(time)).await.unwrap();
    pulled(100).await;
    // The round began at 200, when the image was absent; no access was added, so its record does not change.
    pulled(200).await;
    records.prune([], Rfc3339Time(200)).await.unwrap();
    assert!(may_use(&records, "a").await && !may_use(&records, "").await);
    records.prune([], Rfc3339Time(201)).await.unwrap();
    assert_eq!(records.on_disk().unwrap().1, 0);
}

#[tokio::test]
async fn an_intent_of_another_process_is_written_again() {
    // Its write may have failed, and the error may have gone to that process.
    let dir = tempfile::tempdir().unwrap();
    open(dir.path()).record_pull_intent(&image()).await.unwrap();
    let (witness, steps) = dying_after(usize::MAX);
    let records =
        PullRecordStore::watched(dir.path(), Verification::of_unconfigured_kubelet(), Some(witness)).unwrap();
    records.record_pull_intent(&image()).await.unwrap();
    let steps = steps.lock().unwrap().clone();
    assert_eq!(
        steps,
        [RecordDirStep::Write, RecordDirStep::Sync, RecordDirStep::Move, RecordDirStep::SyncDir]
    );
    assert_eq!(records.on_disk().unwrap().0, 1);
}
