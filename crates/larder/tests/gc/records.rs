//! Usage records on disk: ages and order survive a restart, and broken files do no harm.

use std::sync::{Arc, Mutex, PoisonError};

use larder::gc::{Collector, GcPolicy, PostImageGcHook, UnixMillis, UsageRecordFileStore};
use larder::reference::ImageId;

use crate::world::{FakeNode, OwnPolicy as _};

fn world() -> FakeNode {
    let world = FakeNode::new(1000);
    world.state().wall = 1_000_000;
    world.have("a", &[("l", 900)]);
    world
}

fn collector(world: &FakeNode, path: &std::path::Path) -> Collector {
    world.collector().records(Arc::new(UsageRecordFileStore::new(path))).build()
}

#[tokio::test(start_paused = true)]
async fn a_restart_keeps_ages_and_order() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("images.json");
    let world = world();
    let first = collector(&world, &path);
    world.state().containers.insert("c".into(), "a".into());
    first.detect().await.unwrap();
    world.advance(60_000);
    world.have("b", &[("m", 1)]);
    first.detect().await.unwrap();
    world.state().containers.clear();
    world.advance(60_000);
    first.detect().await.unwrap();
    let before = first.records();
    // The process is killed without a shutdown, and a partial save remains.
    fs_err::write(dir.path().join("images.json.new"), "{\"version\":1,\"ima").unwrap();
    let again = collector(&world, &path);
    assert_eq!(again.notice(), None);
    assert_eq!(again.records(), before);
    again.detect().await.unwrap();
    assert_eq!(again.records(), before);
    let a = before.get(&"sha256:a".into(), "").unwrap();
    assert_eq!((a.first_seen, a.last_used), (UnixMillis(1_000_000), Some(UnixMillis(1_060_000))));
    assert_eq!(before.get(&"sha256:b".into(), "").unwrap().last_used, None);
}

#[tokio::test(start_paused = true)]
async fn records_that_cannot_be_read_are_set_aside_and_remove_nothing() {
    let long_ago =
        r#"{"version":1,"images":[{"id":"sha256:a","handler":"","first_seen":0,"size":1,"pinned":false}]}"#;
    let broken = [
        "",
        "{",
        "null",
        "\u{0}\u{0}\u{0}",
        r#"{"version":2,"images":[]}"#,
        r#"{"version":1,"images":[{"id":7}]}"#,
        &long_ago[..long_ago.len() - 1],
    ];
    for (n, text) in broken.iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("images.json");
        fs_err::write(&path, text).unwrap();
        let world = world();
        let first = collector(&world, &path);
        let notice = first.notice().expect("it is said").to_owned();
        let aside = dir.path().join("images.json.broken-1");
        assert!(notice.contains(aside.to_str().unwrap()), "{n}: {notice}");
        assert_eq!(fs_err::read_to_string(&aside).unwrap(), *text);
        let _not_enough = first.collect().await.unwrap_err();
        assert!(world.removals().is_empty(), "{n}: first seen now, so too young to go");
        // It is reported once, and rebuilt.
        let second = collector(&world, &path);
        assert_eq!(second.notice(), None);
        assert_eq!(second.records().iter().count(), 1);
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("images.json");
    fs_err::write(&path, long_ago).unwrap();
    let world = world();
    let sound = collector(&world, &path);
    sound.collect().await.unwrap();
    assert_eq!(world.removals(), ["a"], "the same image goes when its record is sound");
}

#[tokio::test(start_paused = true)]
async fn an_unwritable_directory_does_not_stop_rounds() {
    let dir = tempfile::tempdir().unwrap();
    let world = world();
    let collector = collector(&world, &dir.path().join("missing/images.json"));
    collector.detect().await.unwrap();
    assert_eq!(collector.records().iter().count(), 1);
}

/// Calls of each round for the images that it retains.
#[derive(Default)]
struct HookCalls(Mutex<Vec<Vec<ImageId>>>);

impl PostImageGcHook for HookCalls {
    fn collected(&self, kept: &[ImageId], _started: UnixMillis) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(kept.to_vec());
    }
}

#[tokio::test(start_paused = true)]
async fn every_round_reports_retained_images_and_kubelets_only_after_a_space_pass() {
    for (policy, reports) in [(GcPolicy::default(), 1), (GcPolicy::kubelet(), 0)] {
        let (world, hook) = (world(), Arc::new(HookCalls::default()));
        world.state().capacity = 10_000;
        let collector = world.collector().policy(policy).hook(hook.clone()).build();
        collector.collect().await.unwrap();
        let rounds = hook.0.lock().unwrap().clone();
        assert_eq!(rounds, vec![vec![ImageId::from("sha256:a")]; reports]);
    }
}
