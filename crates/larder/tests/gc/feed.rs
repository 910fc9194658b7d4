//! Image activity between two observations, from a backend with events.

use std::sync::Arc;
use std::time::Duration;

use larder::gc::{ActivityKind, GcGoal, GcPolicy, ImageActivity, UnixMillis, UsageRecordFileStore};

use crate::world::{FakeNode, OwnPolicy as _, id};

const DAY: i64 = 24 * 3_600_000;

fn world() -> FakeNode {
    let world = FakeNode::new(1000);
    world.state().wall = 400 * DAY;
    world.have("a", &[("l", 100)]);
    world
}

fn sighting(name: &str, at: i64, what: ActivityKind) -> ImageActivity {
    ImageActivity { image: id(name), at: UnixMillis(at), what }
}

#[tokio::test(start_paused = true)]
async fn a_use_between_two_looks_counts_and_an_older_one_takes_nothing_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("images.json");
    let world = world();
    let collector = || world.collector().records(Arc::new(UsageRecordFileStore::new(&path))).build();
    let used =
        |at| Some(vec![sighting("a", at, ActivityKind::Used), sighting("gone", at, ActivityKind::Used)]);
    for (reported, known) in [(390 * DAY, 390 * DAY), (395 * DAY, 395 * DAY), (392 * DAY, 395 * DAY)] {
        world.state().sightings = used(reported);
        // Each time by another process.
        let collector = collector();
        collector.detect().await.unwrap();
        let records = collector.records();
        assert_eq!(records.get(&id("a"), "").unwrap().last_used, Some(UnixMillis(known)));
        assert_eq!(records.iter().count(), 1, "what is gone stays forgotten");
    }
    world.state().sightings = used(500 * DAY);
    let collector = collector();
    collector.detect().await.unwrap();
    let records = collector.records();
    assert_eq!(
        records.get(&id("a"), "").unwrap().last_used,
        Some(UnixMillis(400 * DAY)),
        "never later than now"
    );
}

#[tokio::test(start_paused = true)]
async fn the_first_detection_time_of_an_image_does_not_change() {
    let world = world();
    let collector = world.collector().build();
    let first_seen = async || {
        collector.detect().await.unwrap();
        collector.records().get(&id("a"), "").unwrap().first_seen
    };
    world.state().sightings = Some(vec![sighting("a", 300 * DAY, ActivityKind::Added)]);
    assert_eq!(first_seen().await, UnixMillis(300 * DAY));
    world.advance(1000);
    world.state().sightings = Some(vec![sighting("a", 200 * DAY, ActivityKind::Added)]);
    assert_eq!(first_seen().await, UnixMillis(300 * DAY));
}

#[tokio::test(start_paused = true)]
async fn nothing_is_too_old_before_it_was_observed_for_that_long() {
    let world = world();
    world.state().sightings = Some(vec![sighting("a", 300 * DAY, ActivityKind::Added)]);
    let maximum_age = Duration::from_secs(10 * 86_400);
    let collector = world.collector().policy(GcPolicy { maximum_age, ..GcPolicy::default() }).build();
    collector.collect().await.unwrap();
    assert!(world.removals().is_empty(), "it may have been used yesterday");
    world.advance(9 * DAY);
    collector.collect().await.unwrap();
    assert!(world.removals().is_empty());
    world.advance(2 * DAY);
    collector.collect().await.unwrap();
    assert_eq!(world.removals(), ["a"]);
}

#[tokio::test(start_paused = true)]
async fn a_feed_that_fails_keeps_nothing_from_being_collected() {
    let world = world();
    let collector = world.collector().build();
    collector.detect().await.unwrap();
    world.advance(DAY);
    assert_eq!(collector.plan(GcGoal::AllUnused).await.unwrap().removals.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn images_without_a_name_are_removed_first_at_any_age() {
    let world = world();
    let collector = world.collector().build();
    collector.detect().await.unwrap();
    world.advance(DAY);
    world.have("b", &[("m", 100)]);
    world.state().nameless.insert("b".into());
    collector.detect().await.unwrap();
    world.advance(DAY);
    let plan = collector.plan(GcGoal::AllUnused).await.unwrap();
    let order: Vec<&str> = plan.removals.iter().map(|removal| removal.id.as_str()).collect();
    assert_eq!(order, ["sha256:b", "sha256:a"]);
}
