//! Space beside images, which is reclaimed before any image is removed.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use larder::backend::BackendError;
use larder::gc::{
    Collector, DiskSpace, GcError, GcGoal, GcIntervals, GcLoops, GcPolicy, GcRoundResult, GcStrategy,
    ReclaimOutcome, ReclaimTrigger, ReclaimableSpace, SpaceReclaimer,
};

use crate::world::{FakeNode, OwnPolicy as _, failure};

/// Downloads on the disk, all that is not images; some of them have expired.
struct FakeDownloads {
    world: FakeNode,
    expired: u64,
    fails: bool,
}

impl FakeDownloads {
    fn space(&self, trigger: ReclaimTrigger) -> ReclaimableSpace {
        let all = self.world.state().other;
        let bytes = if trigger == ReclaimTrigger::Schedule { all.min(self.expired) } else { all };
        ReclaimableSpace { downloads: DiskSpace { bytes, inodes: 0 }, ..ReclaimableSpace::default() }
    }
}

#[async_trait]
impl SpaceReclaimer for FakeDownloads {
    async fn reclaimable(&self, trigger: ReclaimTrigger) -> Result<ReclaimableSpace, BackendError> {
        Ok(self.space(trigger))
    }

    async fn reclaim(&self, trigger: ReclaimTrigger) -> ReclaimOutcome {
        let mut freed = self.space(trigger);
        if self.fails {
            freed.downloads.bytes = 50;
        }
        self.world.state().other -= freed.total().bytes;
        ReclaimOutcome { freed, error: self.fails.then(|| failure("the disk is read-only")) }
    }
}

/// A disk of 1000 with an unused image of 500 and downloads, of which some have expired.
struct FullNode {
    world: FakeNode,
    collector: Collector,
}

impl FullNode {
    async fn new(downloads: u64, expired: u64, policy: GcPolicy) -> FullNode {
        FullNode::with(downloads, expired, policy, false).await
    }

    async fn with(downloads: u64, expired: u64, policy: GcPolicy, fails: bool) -> FullNode {
        let world = FakeNode::new(1000);
        world.state().other = downloads;
        world.have("a", &[("l", 500)]);
        let reclaimer = FakeDownloads { world: world.clone(), expired, fails };
        let collector = world.collector().policy(policy).reclaimer(Arc::new(reclaimer)).build();
        collector.snapshot(&collector.policy()).await.expect("nothing fails here");
        world.advance(3_600_000);
        FullNode { world, collector }
    }

    /// The number of removed images, and the bytes of downloads that are left.
    fn state(&self) -> (usize, u64) {
        (self.world.removals().len(), self.world.state().other)
    }
}

fn without_margin(strategy: GcStrategy) -> GcPolicy {
    GcPolicy { free_margin_percent: 0, strategy, ..GcPolicy::default() }
}

#[tokio::test(start_paused = true)]
async fn downloads_go_before_images_and_all_of_them_only_when_space_is_needed() {
    let full = FullNode::new(400, 0, GcPolicy::default()).await;
    let report = full.collector.collect().await.expect("enough is free then");
    assert_eq!(full.state(), (0, 0));
    assert_eq!(report.reclaimed.downloads.bytes, 400);
    assert_eq!(report.before.map(|disk| disk.available), Some(100), "as it was before");
    assert_eq!(report.after.map(|disk| disk.available), Some(500));

    let spacious = FullNode::new(300, 120, GcPolicy::default()).await;
    spacious.collector.collect().await.expect("nothing is due");
    assert_eq!(spacious.state(), (0, 180), "those that can be resumed are retained");
}

#[tokio::test(start_paused = true)]
async fn a_reclaim_that_fails_does_not_end_the_round() {
    let broken = FullNode::with(400, 0, GcPolicy::default(), true).await;
    let round = broken.collector.round_for(GcGoal::Thresholds).await;
    assert_eq!(round.error, None, "the image frees enough");
    assert_eq!(broken.state(), (1, 350));
    assert_eq!(round.report.reclaimed.downloads.bytes, 50, "what was freed before the failure");
    let round = broken.collector.round_for(GcGoal::FailedPulls).await;
    assert!(matches!(round.error, Some(GcError::Reclaim(_))), "{:?}", round.error);
    assert_eq!((round.report.reclaimed.downloads.bytes, broken.state().1), (50, 300));
}

#[tokio::test(start_paused = true)]
async fn downloads_count_towards_the_bytes_to_free_and_a_plan_says_so() {
    for strategy in [GcStrategy::Larder, GcStrategy::Kubelet] {
        for (bytes, need, removals) in [(150, 0, 0), (200, 0, 0), (300, 100, 1)] {
            let node = FullNode::new(200, 0, without_margin(strategy)).await;
            let goal = GcGoal::Free { bytes };
            let plan = node.collector.plan(goal).await.expect("a plan");
            let what = format!("{strategy:?}, {bytes} bytes");
            assert_eq!(
                (plan.need.bytes, plan.removals.len(), plan.reachable),
                (need, removals, true),
                "{what}"
            );
            let round = node.collector.round_for(goal).await;
            assert_eq!(round.error, None, "{what}");
            assert_eq!(node.state(), (removals, 0), "{what}");
            assert_eq!(round.report.reclaimed.total().bytes, 200, "{what}");
            assert_eq!(round.report.plans[0].need, plan.need, "{what}: as planned");
            let freed: i64 = round.report.swept.iter().map(|swept| swept.freed).sum();
            assert_eq!(freed, if removals == 0 { 0 } else { 500 }, "{what}: of images alone");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_dry_run_of_a_full_disk_plans_no_removal_that_downloads_make_needless() {
    let full = FullNode::new(400, 0, GcPolicy::default()).await;
    let plan = full.collector.plan_round().await.expect("a plan");
    assert!(plan.removals.is_empty() && plan.reachable, "{plan:?}");
    assert_eq!(full.state(), (0, 400), "nothing happened");
}

#[tokio::test(start_paused = true)]
async fn removing_all_unused_images_reclaims_downloads_too() {
    let node = FullNode::new(200, 0, GcPolicy::default()).await;
    node.collector.delete_unused().await.expect("nothing fails");
    assert_eq!(node.state(), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn downloads_alone_can_be_reclaimed_on_demand() {
    let node = FullNode::new(200, 0, GcPolicy::default()).await;
    let GcRoundResult { report, error } = node.collector.round_for(GcGoal::FailedPulls).await;
    assert!(error.is_none(), "{error:?}");
    assert_eq!(node.state(), (0, 0));
    assert_eq!((report.reclaimed.total().bytes, report.plans.len()), (200, 0));
    assert_eq!(report.before.zip(report.after).map(|(b, a)| a.available - b.available), Some(200));
}

#[tokio::test(start_paused = true)]
async fn the_timer_reclaims_what_has_expired_even_where_gc_of_images_is_off() {
    let off =
        GcPolicy { high_threshold_percent: 100, min_free_bytes: 0, inodes: None, ..GcPolicy::default() };
    assert!(!off.is_enabled());
    for policy in [off, GcPolicy::default()] {
        let FullNode { world, collector } = FullNode::new(200, 50, policy).await;
        let loops = GcLoops::new(Arc::new(collector), GcIntervals::default());
        let running = tokio::time::timeout(Duration::from_secs(1), loops.run());
        running.await.expect_err("it runs until dropped");
        assert_eq!((world.removals().len(), world.state().other), (0, 150));
    }
}

#[tokio::test(start_paused = true)]
async fn a_round_that_fails_after_a_reclaim_reports_what_that_freed() {
    let off =
        GcPolicy { high_threshold_percent: 100, min_free_bytes: 0, inodes: None, ..GcPolicy::default() };
    let FullNode { world, collector } = FullNode::new(200, 50, off).await;
    world.state().uses_fail = true;
    let round = collector.round_for(GcGoal::Detect).await;
    assert!(matches!(round.error, Some(GcError::Uses(_))), "{:?}", round.error);
    assert_eq!(round.report.reclaimed.downloads.bytes, 50);

    let FullNode { world, collector } = FullNode::new(400, 50, GcPolicy::default()).await;
    world.state().uses_fail = true;
    let loops = GcLoops::new(Arc::new(collector), GcIntervals::default());
    let running = tokio::time::timeout(Duration::from_secs(1), loops.run());
    running.await.expect_err("it runs until dropped");
    let last = loops.status().borrow().last.clone().expect("a round has ended");
    assert!(matches!(last.error, Some(GcError::Uses(_))), "{:?}", last.error);
    assert_eq!(last.report.reclaimed.downloads.bytes, 400);
}
