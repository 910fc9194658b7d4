//! Three images, each one layer more than the last: what nominal sizes get wrong.

use std::sync::Arc;
use std::time::Duration;

use larder::gc::{GcGoal, GcPolicy};
use larder::retention::{KeepRule, Selector};

use crate::world::{FakeNode, OwnPolicy as _};

/// 100 of 1000 bytes are other data; the stack takes 850 and counts as 300 + 600 + 850.
fn stack() -> FakeNode {
    let world = FakeNode::new(1000);
    world.state().other = 100;
    world.have("a", &[("l1", 300)]);
    world.have("b", &[("l1", 300), ("l2", 300)]);
    world.have("c", &[("l1", 300), ("l2", 300), ("l3", 250)]);
    world
}

fn no_minimum_age(policy: GcPolicy) -> GcPolicy {
    GcPolicy { minimum_age: Duration::ZERO, ..policy }
}

#[tokio::test(start_paused = true)]
async fn kubelet_removes_the_oldest_frees_nothing_and_calls_it_success() {
    let world = stack();
    let collector = world.collector().policy(no_minimum_age(GcPolicy::kubelet())).build();
    world.advance(1000);
    collector.collect().await.unwrap();
    assert_eq!(world.removals(), ["a"]);
    assert_eq!(world.state().used(), 950);
}

#[tokio::test(start_paused = true)]
async fn exact_accounting_removes_only_what_frees_space() {
    let world = stack();
    let collector = world.collector().policy(no_minimum_age(GcPolicy::default())).build();
    world.advance(1000);
    let planned = collector.plan_round().await.unwrap();
    let report = collector.collect().await.unwrap();
    assert_eq!(world.removals(), ["c"]);
    assert_eq!(world.state().used(), 700);
    assert_eq!(planned.removals, report.plans[0].removals);
    assert_eq!(planned.expected_freed.bytes, 250);
    assert_eq!(report.swept[0].removed[0].freed.unwrap().bytes, 250);
}

#[tokio::test(start_paused = true)]
async fn a_shared_layer_is_reclaimed_with_all_its_images_when_needed() {
    let world = stack();
    let collector = world.collector().policy(no_minimum_age(GcPolicy::default())).build();
    world.advance(1000);
    collector.free(251).await.unwrap();
    assert_eq!(world.removals(), ["c", "b"]);
    assert_eq!(world.state().used(), 400);
}

#[tokio::test(start_paused = true)]
async fn a_kept_image_keeps_its_layers() {
    let world = stack();
    let keep = vec![KeepRule::new(Selector::Name("b".into()))];
    let collector =
        world.collector().policy(GcPolicy { keep, ..no_minimum_age(GcPolicy::default()) }).build();
    world.advance(1000);
    let plan = collector.plan(GcGoal::AllUnused).await.unwrap();
    let frees: Vec<_> =
        plan.removals.iter().map(|removal| (removal.id.as_str(), removal.frees.bytes)).collect();
    assert_eq!(frees, [("sha256:a", 0), ("sha256:c", 250)]);
}

#[tokio::test(start_paused = true)]
async fn a_source_of_use_that_fails_ends_the_round() {
    let world = stack();
    let collector = world.collector().policy(no_minimum_age(GcPolicy::default())).build();
    world.state().uses_fail = true;
    let error = collector.collect().await.unwrap_err();
    assert_eq!(error.to_string(), "the runtime is down");
    assert_eq!(collector.delete_unused().await.unwrap_err().to_string(), "the runtime is down");
    assert!(world.removals().is_empty());
}

#[tokio::test(start_paused = true)]
async fn detection_costs_the_same_calls_however_many_containers_there_are() {
    let world = stack();
    let collector = Arc::new(world.collector().build());
    let mut costs = Vec::new();
    for containers in [1, 100, 5000] {
        for n in 0..containers {
            world.state().containers.insert(format!("c{n}"), "a".into());
        }
        let before = world.state().calls;
        collector.detect().await.unwrap();
        costs.push(world.state().calls - before);
    }
    assert_eq!(costs, [2, 2, 2]);
}
