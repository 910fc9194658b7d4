//! Goals that removing all candidates does not reach, and removals that free less than planned.

use std::time::Duration;

use larder::gc::{
    GcDecision, GcError, GcGoal, GcPolicy, ReclaimWait, RemovalReason, RetainReason, SpaceHolder,
    WhenUnreachable,
};

use crate::world::{FakeNode, OwnPolicy as _, id};

fn policy(when_unreachable: WhenUnreachable) -> GcPolicy {
    GcPolicy { minimum_age: Duration::ZERO, when_unreachable, ..GcPolicy::default() }
}

/// Images of these sizes, the first one unused for longest, on a disk of 10000 with this much other data.
fn world(other: u64, sizes: &[u64]) -> FakeNode {
    let world = FakeNode::new(10_000);
    world.state().other = other;
    for (n, size) in sizes.iter().enumerate() {
        let name = format!("i{n:02}");
        world.have(&name, &[(name.as_str(), *size)]);
    }
    world.advance(1000);
    world
}

/// Returns the number of images that a round removes by each rule.
async fn removed(other: u64, sizes: &[u64], rule: WhenUnreachable) -> usize {
    let world = world(other, sizes);
    let collector = world.collector().policy(policy(rule)).build();
    let planned = collector.plan_round().await.expect("the node answers");
    assert!(!planned.reachable);
    let ended = collector.collect().await;
    let Err(GcError::Insufficient(text)) = ended else { panic!("{ended:?}") };
    let left = sizes.len() - planned.removals.len();
    assert_eq!(
        text.contains("(gc.whenUnreachable: ") && text.contains("Left unused images of "),
        left > 0,
        "{text}"
    );
    assert_eq!(text.contains("active images, logs"), left == 0, "{text}");
    assert_eq!(world.removals().len(), planned.removals.len(), "a round removes what its plan says");
    world.removals().len()
}

#[tokio::test(start_paused = true)]
async fn on_a_disk_full_of_other_data_images_stay() {
    // 9500 of 10000 are used, 1500 have to be freed, and images have 140.
    let sizes = [10; 14];
    assert_eq!(removed(9360, &sizes, WhenUnreachable::All).await, 14);
    assert_eq!(removed(9360, &sizes, WhenUnreachable::Worthwhile).await, 0);
    assert_eq!(removed(9360, &sizes, WhenUnreachable::Nothing).await, 0);
}

#[tokio::test(start_paused = true)]
async fn what_frees_a_tenth_of_what_is_missing_goes_and_the_rest_stays() {
    let mut sizes = [10; 14];
    sizes[7] = 150;
    let world = world(9220, &sizes);
    let collector = world.collector().policy(policy(WhenUnreachable::Worthwhile)).build();
    let planned = collector.plan_round().await.unwrap();
    assert_eq!((planned.need.bytes, planned.reclaimable.bytes), (1500, 280));
    assert_eq!(planned.when_unreachable, Some(WhenUnreachable::Worthwhile));
    collector.collect().await.unwrap_err();
    assert_eq!(world.removals(), ["i07"]);
    let why = |at: usize| planned.decisions[at].decision.clone();
    assert_eq!(why(0), GcDecision::Retain(RetainReason::Unreachable(WhenUnreachable::Worthwhile)));
    let GcDecision::Remove(RemovalReason::LeastRecentlyUsed { skipped_older, .. }) = why(7) else {
        panic!("{:?}", why(7))
    };
    assert_eq!(skipped_older, 0, "all are unused for as long");
}

#[tokio::test(start_paused = true)]
async fn many_small_images_that_free_half_of_it_go() {
    // 800 of 1500: below the high threshold it does not come.
    assert_eq!(removed(8700, &[8; 100], WhenUnreachable::Worthwhile).await, 100);
    assert_eq!(removed(8760, &[8; 92], WhenUnreachable::Worthwhile).await, 0, "736 of 1496 are not half");
}

#[tokio::test(start_paused = true)]
async fn where_the_low_threshold_is_out_of_reach_the_high_one_is_enough() {
    // 8700 of 10000 are used. 8450 are 84.5%, which counts as 85%, as in kubelet.
    let world = world(8300, &[50; 8]);
    let collector = world.collector().policy(policy(WhenUnreachable::Worthwhile)).build();
    collector.collect().await.unwrap_err();
    assert_eq!(world.removals().len(), 6, "8400");
    collector.collect().await.unwrap();
    assert_eq!(world.removals().len(), 6, "no threshold is exceeded any more");
}

#[tokio::test(start_paused = true)]
async fn the_most_recently_used_images_are_the_floor_of_a_round_for_space() {
    let world = world(0, &[1000; 9]);
    let policy = GcPolicy { keep_bytes: 8500, ..policy(WhenUnreachable::All) };
    let collector = world.collector().policy(policy).build();
    let planned = collector.plan(GcGoal::Thresholds).await.unwrap();
    assert_eq!(planned.decisions[8].decision, GcDecision::Retain(RetainReason::Recent { keep_bytes: 8500 }));
    collector.free(5000).await.unwrap_err();
    assert_eq!(world.removals(), ["i00"]);
    collector.delete_unused().await.unwrap();
    assert_eq!(world.removals().len(), 9, "it counts when space is needed, and not for all that is unused");
}

#[tokio::test(start_paused = true)]
async fn files_held_open_by_others_do_not_lead_to_removing_everything() {
    // 1900 of 2000 are used; five images have to go, but nothing comes free.
    let world = FakeNode::new(2000);
    for n in 0..20 {
        let name = format!("i{n:02}");
        world.have(&name, &[(name.as_str(), 60)]);
    }
    world.state().other = 700;
    let holders = vec![SpaceHolder { process: 7, command: "backup".into(), bytes: 480 }];
    world.state().space_holders.clone_from(&holders);
    world.advance(1000);
    world.frees_after(Duration::from_secs(3600));
    let wait = ReclaimWait { quiet: Duration::ZERO, ..ReclaimWait::default() };
    let collector = world.collector().policy(policy(WhenUnreachable::Worthwhile)).reclaim_wait(wait).build();
    let round = collector.round_for(GcGoal::Thresholds).await;
    assert!(matches!(round.error, Some(GcError::Insufficient(_))), "{:?}", round.error);
    assert_eq!(world.removals().len(), 8, "five, and half as many again");
    assert!(round.report.swept[0].lagging);
    assert_eq!(round.report.space_holders, holders, "the report names who holds the space");
    assert!(!round.report.swept[0].removed.iter().any(|done| done.removal.id == id("i19")));
}
