//! The loops: when rounds run, and their events.

use std::sync::Arc;
use std::time::Duration;

use larder::events::{EventReason, RingSink};
use larder::gc::{Collector, GcGoal, GcIntervals, GcLoops, GcPolicy, GcStatus, GcStrategy};
use larder::reference::ImageId;
use larder_testkit::fake_backend::{FakeBackend, image};
use tokio::time::{Instant, sleep};

use crate::world::{FakeNode, OwnPolicy as _};

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// Four images on a disk that is two thirds full.
fn world() -> FakeNode {
    let world = FakeNode::new(900);
    for n in 0..4 {
        let layer = format!("l{n}");
        world.have(&format!("i{n}"), &[(layer.as_str(), 100 + n)]);
    }
    world.state().other = 200;
    world
}

fn policy() -> GcPolicy {
    GcPolicy { minimum_age: Duration::ZERO, ..GcPolicy::default() }
}

fn running(collector: Collector, periods: GcIntervals) -> (Arc<GcLoops>, tokio::task::JoinHandle<()>) {
    let loops = Arc::new(GcLoops::new(Arc::new(collector), periods));
    let run = loops.clone();
    (loops, tokio::spawn(async move { run.run().await }))
}

fn succeeded(status: &GcStatus) -> bool {
    status.last.as_ref().is_some_and(|round| round.error.is_none())
}

#[tokio::test(start_paused = true)]
async fn rounds_run_at_the_start_and_every_five_minutes() {
    let (loops, task) = running(world().collector().policy(policy()).build(), GcIntervals::kubelet());
    sleep(secs(1)).await;
    let status = loops.status();
    assert_eq!(status.borrow().rounds, 1);
    sleep(secs(301)).await;
    assert_eq!(status.borrow().rounds, 2);
    assert!(succeeded(&status.borrow()) && !status.borrow().running);
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn pressure_starts_a_round_within_seconds() {
    let world = world();
    let (_loops, task) = running(world.collector().policy(policy()).build(), GcIntervals::default());
    sleep(secs(60)).await;
    assert!(world.removals().is_empty());
    world.advance(60_000);
    world.state().other = 420;
    sleep(secs(6)).await;
    assert_eq!(world.removals(), ["i0", "i1"]);
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn pressure_that_cannot_be_helped_starts_no_storm_of_rounds() {
    let world = world();
    world.state().other = 900;
    for n in 0..4 {
        world.state().containers.insert(format!("c{n}"), format!("i{n}"));
    }
    let events = Arc::new(RingSink::new(100));
    let collector = world.collector().policy(policy()).events(events.clone(), "node").build();
    let (loops, task) = running(collector, GcIntervals::default());
    sleep(secs(3600)).await;
    let rounds = loops.status().borrow().rounds;
    assert!((12..=13).contains(&rounds), "{rounds}");
    let failed = events.snapshot().iter().filter(|event| event.reason.to_string() == "ImageGCFailed").count();
    assert_eq!(failed as u64, rounds - 1, "each failure but the first");
    let counts = |status: &GcStatus| (status.failures, status.errors);
    assert_eq!(counts(&loops.status().borrow()), (rounds, 0), "too little to remove is no error of GC");
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn pressure_is_relieved_as_soon_as_images_reach_the_minimum_age_or_lose_their_container() {
    for (case, minimum_age) in [("minimum age", secs(120)), ("containers", Duration::ZERO)] {
        let world = world();
        world.state().other = 420;
        if minimum_age.is_zero() {
            for n in 0..4 {
                world.state().containers.insert(format!("c{n}"), format!("i{n}"));
            }
        }
        let policy = GcPolicy { minimum_age, ..GcPolicy::default() };
        let (loops, task) = running(world.collector().policy(policy).build(), GcIntervals::default());
        sleep(secs(1)).await;
        assert_eq!(loops.status().borrow().failures, 1, "{case}");
        world.advance(120_000);
        world.state().containers.clear();
        sleep(secs(128)).await;
        assert_eq!(world.removals(), ["i0", "i1"], "{case}: long before the timer");
        task.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn another_policy_ends_the_wait_under_pressure() {
    let world = world();
    world.state().other = 420;
    let patient = GcPolicy { minimum_age: secs(3600), ..GcPolicy::default() };
    let collector = Arc::new(world.collector().policy(patient).build());
    let loops = Arc::new(GcLoops::new(Arc::clone(&collector), GcIntervals::default()));
    let run = Arc::clone(&loops);
    let task = tokio::spawn(async move { run.run().await });
    sleep(secs(20)).await;
    assert_eq!((loops.status().borrow().failures, world.removals().len()), (1, 0));
    world.advance(20_000);
    collector.set_policy(policy());
    sleep(secs(10)).await;
    assert_eq!(world.removals(), ["i0", "i1"], "long before the timer");
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn an_invalid_image_id_is_reported_by_rounds_only() {
    let backend = FakeBackend::new();
    backend.add_image("no-id:1", image("", 100));
    let events = Arc::new(RingSink::new(100));
    let collector =
        Collector::builder(Arc::new(backend)).policy(policy()).events(events.clone(), "node").build();
    let reported =
        || events.snapshot().iter().filter(|event| event.reason == EventReason::InvalidImageId).count();
    collector.snapshot(&collector.policy()).await.unwrap();
    collector.detect().await.unwrap();
    assert_eq!(reported(), 0, "lists and explanations raise no event");
    collector.round_for(GcGoal::AllUnused).await;
    assert_eq!(reported(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_round_starts_over_when_another_collector_is_done() {
    let world = world();
    world.removes_slowly(secs(1));
    let (loops, task) = running(world.collector().policy(policy()).build(), GcIntervals::default());
    sleep(secs(60)).await;
    world.advance(60_000);
    world.state().other = 420;
    while !world.state().removing {
        sleep(Duration::from_millis(100)).await;
    }
    // Together with the removal that runs this is enough, but the space is freed later.
    world.removed_by_another("i3", secs(4));
    loops.removed_by_another();
    sleep(secs(60)).await;
    assert_eq!(world.removals(), ["i0"], "two rounds for one shortage would free it twice");
    let status = loops.status().borrow().clone();
    assert!(succeeded(&status) && status.failures == 0, "{status:?}");
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn a_collector_that_never_stops_puts_no_round_off_for_good() {
    let world = world();
    let (loops, task) = running(world.collector().policy(policy()).build(), GcIntervals::default());
    sleep(secs(60)).await;
    world.advance(60_000);
    world.state().other = 420;
    for _ in 0..300 {
        loops.removed_by_another();
        sleep(secs(1)).await;
    }
    assert_eq!(world.removals(), ["i0", "i1"]);
    task.abort();
}

fn kubelet() -> GcPolicy {
    GcPolicy { strategy: GcStrategy::Kubelet, ..policy() }
}

#[tokio::test(start_paused = true)]
async fn pressure_starts_a_round_by_kubelets_sums_too() {
    let world = world();
    let (loops, task) = running(world.collector().policy(kubelet()).build(), GcIntervals::default());
    sleep(secs(302)).await;
    assert_eq!(loops.status().borrow().rounds, 2, "there was nothing to do");
    world.advance(302_000);
    for (other, removed) in [(420, vec!["i0", "i1"]), (620, vec!["i0", "i1", "i2", "i3"])] {
        world.state().other = other;
        sleep(secs(6)).await;
        assert_eq!(world.removals(), removed);
    }
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn sums_that_free_nothing_start_no_storm_of_rounds() {
    let world = FakeNode::new(900);
    for n in 0..40 {
        world.have(&format!("i{n:02}"), &[("shared", 100)]);
    }
    world.state().other = 700;
    let (loops, task) = running(world.collector().policy(kubelet()).build(), GcIntervals::default());
    world.advance(1000);
    sleep(secs(1790)).await;
    assert_eq!(loops.status().borrow().failures, 0, "by its sums each did what it should");
    let rounds = loops.status().borrow().rounds;
    assert!((6..=12).contains(&rounds), "each of the timer's, and one beside it: {rounds}");
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn a_round_that_could_not_ask_the_runtime_does_not_put_off_the_next_for_long() {
    let world = world();
    world.state().other = 420;
    world.state().uses_fail = true;
    let (loops, task) = running(world.collector().policy(policy()).build(), GcIntervals::default());
    sleep(secs(2)).await;
    assert_eq!((loops.status().borrow().failures, loops.status().borrow().errors), (1, 1));
    world.advance(2000);
    world.state().uses_fail = false;
    sleep(secs(40)).await;
    assert_eq!(world.removals(), ["i0", "i1"]);
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn a_full_disk_without_candidates_is_reported_once_at_the_start() {
    let world = world();
    world.state().other = 900;
    let events = Arc::new(RingSink::new(100));
    for n in 0..4 {
        world.state().containers.insert(format!("c{n}"), format!("i{n}"));
    }
    let collector = world.collector().policy(policy()).events(events.clone(), "node").build();
    let (loops, task) = running(collector, GcIntervals::default());
    sleep(secs(290)).await;
    let reasons: Vec<_> = events.snapshot().iter().map(|event| event.reason.to_string()).collect();
    assert_eq!((reasons, loops.status().borrow().rounds), (vec!["FreeDiskSpaceFailed".to_owned()], 1));
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn the_list_is_kept_when_listing_fails_and_is_sorted() {
    let world = world();
    let (loops, task) = running(world.collector().policy(policy()).build(), GcIntervals::default());
    sleep(secs(1)).await;
    let images = loops.images();
    let ids: Vec<ImageId> = images.borrow().images.iter().map(|image| image.id.clone()).collect();
    assert_eq!(ids, ["sha256:i3", "sha256:i2", "sha256:i1", "sha256:i0"]);
    world.have("i9", &[("l9", 1)]);
    sleep(secs(31)).await;
    assert_eq!(images.borrow().images.len(), 5);
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn nothing_is_collected_when_no_limit_can_be_passed() {
    let world = world();
    world.state().other = 900;
    let never = GcPolicy { high_threshold_percent: 100, ..GcPolicy::kubelet() };
    assert!(!never.is_enabled());
    let (loops, task) = running(world.collector().policy(never).build(), GcIntervals::default());
    sleep(secs(3600)).await;
    assert!(world.removals().is_empty() && loops.status().borrow().rounds > 10);
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn one_round_runs_at_a_time() {
    let world = world();
    world.frees_after(secs(1));
    world.state().other = 500;
    let collector = Arc::new(world.collector().policy(policy()).build());
    world.advance(1000);
    let start = Instant::now();
    let (a, b) = tokio::join!(collector.collect(), collector.collect());
    assert!(a.is_ok() && b.is_ok());
    assert_eq!(world.removals(), ["i0", "i1"], "the second finds nothing left to do");
    assert!(start.elapsed() >= secs(2));
}
