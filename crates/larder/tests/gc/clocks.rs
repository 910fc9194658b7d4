//! Steps of the wall clock neither cause nor prevent removals.

use std::sync::Arc;
use std::time::Duration;

use larder::gc::{GcPolicy, VolatileUsageRecords};

use crate::world::{FakeNode, OwnPolicy as _};

const HOUR: i64 = 3_600_000;
const DAY: i64 = 24 * HOUR;

fn world() -> FakeNode {
    let world = FakeNode::new(1000);
    world.state().wall = 400 * DAY;
    world.state().since_boot = 5 * DAY;
    world.have("a", &[("l", 100)]);
    world
}

/// Removes images unused for more than 10 days, with the goal to free everything.
fn policy() -> GcPolicy {
    GcPolicy { maximum_age: Duration::from_secs(10 * 86400), ..GcPolicy::default() }
}

#[tokio::test(start_paused = true)]
async fn a_step_forward_makes_nothing_old() {
    let world = world();
    let collector = world.collector().policy(policy()).build();
    collector.detect().await.unwrap();
    world.state().wall += 300 * DAY;
    world.advance(60_000);
    collector.collect().await.unwrap();
    collector.delete_unused().await.unwrap();
    assert!(world.removals().is_empty(), "a minute is less than the minimum age");
    world.advance(11 * DAY);
    collector.collect().await.unwrap();
    assert_eq!(world.removals(), ["a"], "now it is old");
}

#[tokio::test(start_paused = true)]
async fn a_step_back_keeps_nothing_young() {
    let world = world();
    let collector = world.collector().policy(policy()).build();
    collector.detect().await.unwrap();
    world.advance(9 * DAY);
    collector.detect().await.unwrap();
    world.state().wall -= 300 * DAY;
    world.advance(60_000);
    collector.detect().await.unwrap();
    world.advance(DAY);
    collector.collect().await.unwrap();
    assert_eq!(world.removals(), ["a"]);
}

#[tokio::test(start_paused = true)]
async fn a_step_between_two_processes_of_one_boot_is_seen() {
    let world = world();
    let store = Arc::new(VolatileUsageRecords::default());
    world.collector().policy(policy()).records(store.clone()).build().detect().await.unwrap();
    world.state().wall += 300 * DAY;
    world.advance(HOUR);
    let collector = world.collector().policy(policy()).records(store).build();
    collector.collect().await.unwrap();
    assert!(world.removals().is_empty());
    let records = collector.records();
    assert_eq!(records.iter().next().unwrap().first_seen.0, 700 * DAY);
}

#[tokio::test(start_paused = true)]
async fn a_boot_with_a_clock_in_the_past_keeps_ages() {
    let world = world();
    let store = Arc::new(VolatileUsageRecords::default());
    let collector = world.collector().policy(policy()).records(store.clone()).build();
    collector.detect().await.unwrap();
    world.advance(HOUR);
    collector.detect().await.unwrap();
    {
        let mut state = world.state();
        (state.wall, state.since_boot, state.boot) = (0, 100, 1);
    }
    let collector = world.collector().policy(policy()).records(store).build();
    collector.detect().await.unwrap();
    let records = collector.records();
    assert_eq!(records.iter().next().unwrap().first_seen.0, -HOUR - 100, "this boot is 100 ms old");
    collector.delete_unused().await.unwrap();
    assert_eq!(world.removals(), ["a"], "it is an hour old, whatever the clock says");
}

#[tokio::test(start_paused = true)]
async fn a_boot_far_in_the_future_counts_as_a_day() {
    let world = world();
    let store = Arc::new(VolatileUsageRecords::default());
    world.collector().policy(policy()).records(store.clone()).build().detect().await.unwrap();
    {
        let mut state = world.state();
        (state.wall, state.since_boot, state.boot) = (9000 * DAY, 100, 1);
    }
    let collector = world.collector().policy(policy()).records(store).build();
    collector.collect().await.unwrap();
    assert!(world.removals().is_empty());
    assert_eq!(collector.records().iter().next().unwrap().first_seen.0, 8999 * DAY - 100);
}
