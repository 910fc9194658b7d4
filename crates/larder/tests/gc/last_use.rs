//! The time of the last use: only a use changes it, and the reasons that name it are true.

use std::time::Duration;

use larder::gc::{GcDecision, GcGoal, GcPlan, GcPolicy, RemovalReason};

use crate::world::{FakeNode, OwnPolicy as _, id};

fn policy() -> GcPolicy {
    GcPolicy { minimum_age: Duration::ZERO, ..GcPolicy::default() }
}

fn reason(plan: &GcPlan, image: &str) -> String {
    let decision = plan.decisions.iter().find(|decision| decision.id == id(image)).expect("it is present");
    decision.decision.to_string()
}

#[tokio::test(start_paused = true)]
async fn looking_does_not_change_when_an_image_was_last_used() {
    let world = FakeNode::new(1000);
    world.have("a", &[("a", 100)]);
    world.have("b", &[("b", 100)]);
    let collector = world.collector().policy(policy()).build();
    world.state().containers.insert("c".into(), "a".into());
    collector.detect().await.unwrap();
    let recorded = || collector.records().get(&id("a"), "").unwrap().last_used;
    let at_first = recorded();
    assert!(at_first.is_some());
    world.advance(8000);
    for goal in [GcGoal::Thresholds, GcGoal::Free { bytes: 1 }, GcGoal::AllUnused] {
        let planned = collector.plan(goal).await.unwrap();
        let seen = planned.decisions[0].last_used;
        assert_ne!(seen, at_first, "the answer says that it is used now");
        assert_eq!(recorded(), at_first);
    }
    collector.plan_round().await.unwrap();
    collector.snapshot(&collector.policy()).await.unwrap();
    assert_eq!(recorded(), at_first);
    collector.detect().await.unwrap();
    assert_ne!(recorded(), at_first, "a round records it");
}

#[tokio::test(start_paused = true)]
async fn an_image_that_was_never_used_is_as_old_as_its_first_sight() {
    let world = FakeNode::new(1000);
    world.have("used", &[("used", 100)]);
    let collector = world.collector().policy(policy()).build();
    world.state().containers.insert("c".into(), "used".into());
    collector.detect().await.unwrap();
    world.state().containers.clear();
    world.advance(8000);
    world.have("new", &[("new", 100)]);
    collector.detect().await.unwrap();
    let planned = collector.plan(GcGoal::Free { bytes: 1 }).await.unwrap();
    assert_eq!(reason(&planned, "used"), "remove: unused for 8s, least recently used");
    assert_eq!(reason(&planned, "new"), "retain: unused, removal not needed");
}

#[tokio::test(start_paused = true)]
async fn a_reason_names_images_that_are_unused_for_longer_and_stay() {
    let world = FakeNode::new(1000);
    world.have("old", &[("base", 100)]);
    let collector = world.collector().policy(policy()).build();
    collector.detect().await.unwrap();
    world.advance(8000);
    world.have("new", &[("base", 100), ("new", 50)]);
    let planned = collector.plan(GcGoal::Free { bytes: 10 }).await.unwrap();
    assert_eq!(reason(&planned, "new"), "remove: unused for 0s; 1 older image frees too little alone");
    assert_eq!(reason(&planned, "old"), "retain: unused, removal not needed");
}

#[tokio::test(start_paused = true)]
async fn an_untagged_image_goes_first_and_that_is_its_reason() {
    let world = FakeNode::new(1000);
    world.have("old", &[("old", 100)]);
    let collector = world.collector().policy(policy()).build();
    collector.detect().await.unwrap();
    world.advance(8000);
    world.have("untagged", &[("untagged", 100)]);
    world.state().nameless.insert("untagged".into());
    let planned = collector.plan(GcGoal::Free { bytes: 10 }).await.unwrap();
    let decision = planned.decisions.iter().find(|decision| decision.id == id("untagged")).unwrap();
    let because = RemovalReason::Untagged { unused_for: Duration::ZERO };
    assert_eq!(decision.decision, GcDecision::Remove(because));
}
