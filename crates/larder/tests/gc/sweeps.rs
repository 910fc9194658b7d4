//! Sweeps: the execution of plans.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use larder::events::RingSink;
use larder::gc::{
    Collector, DiskSpace, FsStatsProvider, GcError, GcGoal, GcPolicy, ReclaimWait, RemovalHistory,
    RemovalHistoryEntry,
};
use larder::image_service::{FilesystemError, FsStats};
use larder::reference::ImageId;
use larder::retention::{
    KeepRule, Lease, LeasePurpose, RemovalGate, Retention, RetentionError, RetentionPurpose, RetentionSource,
    Selector,
};
use tokio::time::Instant;

use crate::world::{FakeNode, OwnPolicy as _, id};

fn policy() -> GcPolicy {
    GcPolicy { minimum_age: Duration::ZERO, ..GcPolicy::default() }
}

/// Ten images of 90 on a disk of 1000, none of them in use; the low threshold is at 800, so two must be removed.
fn ten() -> FakeNode {
    let world = FakeNode::new(1000);
    for n in 0..10 {
        let layer = format!("l{n}");
        world.have(&format!("i{n}"), &[(layer.as_str(), 90)]);
    }
    world
}

#[tokio::test(start_paused = true)]
async fn space_that_is_freed_late_is_waited_for() {
    let world = ten();
    world.frees_after(Duration::from_millis(700));
    let collector = world.collector().policy(policy()).build();
    world.advance(1000);
    let start = Instant::now();
    let report = collector.collect().await.unwrap();
    assert_eq!(world.removals(), ["i0", "i1"]);
    assert!((1400..1600).contains(&start.elapsed().as_millis()), "{:?}", start.elapsed());
    let freed: Vec<_> = report.swept[0].removed.iter().map(|done| done.freed.unwrap().bytes).collect();
    assert_eq!(freed, [90, 90]);
}

#[tokio::test(start_paused = true)]
async fn waiting_and_further_removals_are_bounded() {
    let world = ten();
    world.frees_after(Duration::from_secs(3600));
    let wait =
        ReclaimWait { sweep: Duration::from_secs(3), tolerance: DiskSpace::ZERO, ..ReclaimWait::default() };
    let collector = world.collector().policy(policy()).reclaim_wait(wait).build();
    world.advance(1000);
    let start = Instant::now();
    let error = collector.collect().await.unwrap_err();
    assert!(matches!(error, GcError::Insufficient(_)), "{error}");
    assert_eq!(world.removals(), ["i0", "i1"], "half as much again as was missing");
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_new_policy_applies_from_the_next_round_and_a_round_policy_only_to_its_round() {
    let world = ten();
    let collector = world.collector().policy(GcPolicy { high_threshold_percent: 100, ..policy() }).build();
    world.advance(1000);
    collector.collect().await.unwrap();
    assert_eq!(world.removals(), [""; 0]);
    let round = collector.round(GcGoal::Thresholds, &policy()).await;
    assert!(round.error.is_none());
    assert_eq!(world.removals(), ["i0", "i1"]);
    let low = GcPolicy { high_threshold_percent: 60, low_threshold_percent: 60, ..policy() };
    collector.collect().await.unwrap();
    assert_eq!(world.removals().len(), 2);
    collector.set_policy(low);
    collector.collect().await.unwrap();
    assert_eq!(world.removals().len(), 4);
}

#[tokio::test(start_paused = true)]
async fn where_inodes_are_short_they_are_waited_for() {
    let world = ten();
    world.state().capacity = 100_000;
    world.state().inodes = 1000;
    world.state().frees_inodes_after = Duration::from_millis(700);
    let collector = world.collector().policy(policy()).build();
    world.advance(1000);
    let start = Instant::now();
    let report = collector.collect().await.unwrap();
    assert_eq!(world.removals(), ["i0"], "85% of the inodes are the low mark");
    assert!((700..800).contains(&start.elapsed().as_millis()), "{:?}", start.elapsed());
    assert_eq!(report.swept[0].removed[0].freed, Some(DiskSpace { bytes: 90, inodes: 90 }));
}

#[tokio::test(start_paused = true)]
async fn inodes_outside_of_the_goal_are_not_waited_for() {
    let world = ten();
    world.state().inodes = 10_000;
    world.state().frees_inodes_after = Duration::from_secs(60);
    let collector = world.collector().policy(policy()).build();
    world.advance(1000);
    let start = Instant::now();
    collector.collect().await.unwrap();
    assert_eq!(world.removals(), ["i0", "i1"]);
    assert!(start.elapsed().is_zero(), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_goal_in_bytes_counts_removed_files_while_another_process_writes() {
    let world = ten();
    world.state().counts_files = true;
    world.state().written_during_removal = 60;
    let (free_margin_percent, wait) =
        (0, ReclaimWait { tolerance: DiskSpace::ZERO, ..ReclaimWait::default() });
    let collector = world.collector().reclaim_wait(wait).build();
    world.advance(1000);
    let start = Instant::now();
    let policy = GcPolicy { free_margin_percent, ..policy() };
    let round = collector.round(GcGoal::Free { bytes: 250 }, &policy).await;
    assert!(round.error.is_none(), "{:?}", round.error);
    assert_eq!(world.removals(), ["i0", "i1", "i2"]);
    let swept = &round.report.swept[0];
    let freed: Vec<_> = swept.removed.iter().map(|done| done.freed.unwrap().bytes).collect();
    assert_eq!((freed, swept.freed, swept.available_change), (vec![90; 3], 270, Some(270 - 3 * 60)));
    assert!(
        start.elapsed() <= Duration::from_secs(1),
        "a busy disk is waited for once: {:?}",
        start.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn a_goal_in_bytes_is_not_reached_by_what_another_process_deletes() {
    let world = ten();
    world.state().counts_files = true;
    world.state().other = 50;
    let collector = world.collector().build();
    world.advance(1000);
    let policy = GcPolicy { free_margin_percent: 0, ..policy() };
    world.state().deleted_during_removal = true;
    let round = collector.round(GcGoal::Free { bytes: 100 }, &policy).await;
    assert!(round.error.is_none(), "{:?}", round.error);
    assert_eq!(world.removals(), ["i0", "i1"]);
    let swept = &round.report.swept[0];
    assert_eq!((swept.freed, swept.available_change), (180, Some(230)));
}

#[tokio::test(start_paused = true)]
async fn a_shortfall_from_other_writers_is_not_waited_for() {
    let world = ten();
    world.frees_after(Duration::from_secs(60));
    let wait = ReclaimWait { tolerance: DiskSpace { bytes: 90, inodes: 0 }, ..ReclaimWait::default() };
    let collector = world.collector().policy(policy()).reclaim_wait(wait).build();
    world.advance(1000);
    let start = Instant::now();
    assert!(collector.collect().await.is_err(), "nothing came free");
    assert!(start.elapsed().is_zero(), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn it_stops_as_soon_as_enough_is_really_free() {
    let world = ten();
    let freeing = Arc::new(ConcurrentDeletion(world.clone()));
    let collector = world.collector().policy(policy()).history(freeing).build();
    world.state().other = 95;
    world.advance(1000);
    assert_eq!(collector.plan_round().await.unwrap().removals.len(), 3);
    collector.collect().await.unwrap();
    assert_eq!(world.removals().len(), 2, "another process freed the rest");
}

/// After the first removal another process deletes the other data on the disk.
struct ConcurrentDeletion(FakeNode);

impl RemovalHistory for ConcurrentDeletion {
    fn record(&self, _: &RemovalHistoryEntry) -> io::Result<()> {
        self.0.state().other = 0;
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn failed_removals_do_not_stop_a_round_and_are_replaced_by_others() {
    let world = ten();
    let collector = world.collector().policy(policy()).build();
    world.state().remove_fails.insert("i0".into(), "device busy".into());
    world.state().remove_fails.insert("i2".into(), "device busy".into());
    world.advance(1000);
    let error = collector.collect().await.unwrap_err();
    assert_eq!(world.removals(), ["i1", "i3"]);
    assert_eq!(
        error.to_string(),
        "wanted to free 100 bytes, but freed 180 bytes space with errors in image deletion: device busy"
    );
}

/// Reports an image as used from the second query on.
struct LateUseSource(&'static str, Mutex<usize>);

#[async_trait]
impl RetentionSource for LateUseSource {
    async fn retentions(&self) -> Result<Vec<Retention>, RetentionError> {
        let mut asked = self.1.lock().expect("no thread panicked");
        *asked += 1;
        let lease = Lease { purpose: LeasePurpose::Request, left: Duration::from_secs(60) };
        let found = Retention::new(id(self.0), RetentionPurpose::Lease(lease));
        Ok(if *asked > 1 { vec![found] } else { Vec::new() })
    }
}

#[tokio::test(start_paused = true)]
async fn an_image_used_since_the_plan_is_retained_and_another_is_removed() {
    let world = ten();
    let user = Arc::new(LateUseSource("i0", Mutex::default()));
    let collector = world.collector().policy(policy()).retention_source(user).build();
    world.advance(1000);
    let report = collector.collect().await.unwrap();
    assert_eq!(world.removals(), ["i1", "i2"]);
    assert_eq!(report.swept[0].skipped, ["sha256:i0"]);
}

#[tokio::test(start_paused = true)]
async fn space_of_images_removed_by_other_processes_is_waited_for() {
    let world = ten();
    let other = world.clone();
    let act = move || other.removed_by_another("i0", Duration::from_millis(700));
    let disk = RunOnFirstMeasure { world: world.clone(), before: false, act: Mutex::new(Some(act)) };
    let collector = world.collector().disk(Arc::new(disk)).policy(policy()).build();
    world.advance(1000);
    let start = Instant::now();
    let report = collector.collect().await.unwrap();
    assert_eq!((world.removals(), start.elapsed().as_millis()), (vec!["i1".to_owned()], 700));
    let swept = &report.swept[0];
    assert_eq!(
        (swept.already_removed.clone(), swept.freed),
        (vec![id("i0")], 90),
        "180 came free, and 90 are its own"
    );
}

#[tokio::test(start_paused = true)]
async fn space_free_before_the_first_measure_is_not_counted_as_freed() {
    let world = ten();
    let other = world.clone();
    // Between the observation of the images and the first measurement.
    let act = move || other.removed_by_another("i0", Duration::ZERO);
    let disk = RunOnFirstMeasure { world: world.clone(), before: true, act: Mutex::new(Some(act)) };
    let collector = world.collector().disk(Arc::new(disk)).policy(policy()).build();
    world.state().other = 90;
    world.advance(1000);
    let report = collector.collect().await.unwrap();
    let swept = &report.swept[0];
    assert_eq!(
        (swept.already_removed.clone(), world.removals()),
        (vec![id("i0")], vec!["i1".into(), "i2".into()])
    );
    assert_eq!(swept.freed, 180);
}

#[tokio::test(start_paused = true)]
async fn images_removed_by_other_processes_do_not_count_as_removed_or_freed_by_the_round() {
    let world = ten();
    let other = world.clone();
    let act = move || assert!(other.state().present.remove("i1"));
    let disk = RunOnSecondMeasure(world.clone(), Mutex::new((0, Some(act))));
    let written = Arc::new(RemovalLog::default());
    let collector = world.collector().disk(Arc::new(disk)).policy(policy()).history(written.clone()).build();
    world.state().other = 100;
    world.advance(1000);
    let report = collector.collect().await.unwrap();
    assert_eq!(report.plans[0].removals.len(), 3);
    assert_eq!(world.removals(), ["i0", "i2"]);
    let swept = &report.swept[0];
    let done: Vec<_> = swept.removed.iter().map(|done| done.removal.id.clone()).collect();
    assert_eq!((done, swept.already_removed.clone()), (vec![id("i0"), id("i2")], vec![id("i1")]));
    assert_eq!(swept.freed, 180, "270 came free, and 90 of them are not its own");
    assert_eq!(collector.counts().space, 2);
    assert_eq!(written.0.lock().unwrap().as_slice(), [id("i0"), id("i2")]);
}

/// IDs of the images reported as removed.
#[derive(Default)]
struct RemovalLog(Mutex<Vec<ImageId>>);

impl RemovalHistory for RemovalLog {
    fn record(&self, entry: &RemovalHistoryEntry) -> io::Result<()> {
        self.0.lock().expect("no thread panicked").push(entry.id.clone());
        Ok(())
    }
}

/// Answers once, and then hangs.
struct FailingUseSource(Mutex<usize>);

#[async_trait]
impl RetentionSource for FailingUseSource {
    async fn retentions(&self) -> Result<Vec<Retention>, RetentionError> {
        let mut asked = self.0.lock().expect("no thread panicked");
        *asked += 1;
        if *asked > 1 { Err(RetentionError::other("gone")) } else { Ok(Vec::new()) }
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_is_removed_while_uses_are_unknown() {
    let world = ten();
    let collector = world
        .collector()
        .policy(policy())
        .retention_source(Arc::new(FailingUseSource(Mutex::default())))
        .build();
    world.advance(1000);
    let error = collector.collect().await.unwrap_err();
    assert!(world.removals().is_empty());
    assert!(error.to_string().ends_with("in image deletion: gone"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_leased_image_is_in_use_until_the_lease_ends() {
    let world = ten();
    let gate = Arc::new(RemovalGate::default());
    let collector = world.collector().policy(policy()).gate(gate.clone()).build();
    assert!(
        gate.begin_presence_check().lease("sha256:i0", LeasePurpose::Ensure, Duration::from_secs(60)).await
    );
    world.advance(1000);
    collector.collect().await.unwrap();
    assert_eq!(world.removals(), ["i1", "i2"]);
    tokio::time::advance(Duration::from_secs(61)).await;
    world.advance(61_000);
    collector.delete_unused().await.unwrap();
    assert!(world.removals().contains(&"i0".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn an_insufficient_round_is_reported_with_an_event() {
    let world = ten();
    world.state().capacity = 9200;
    world.state().other = 8200;
    let events = Arc::new(RingSink::new(10));
    let collector = world.collector().policy(policy()).events(events.clone(), "node-1").build();
    world.advance(1000);
    let error = collector.collect().await.unwrap_err();
    let event = &events.snapshot()[0];
    assert_eq!(
        (event.reason.to_string(), event.object.to_string()),
        ("FreeDiskSpaceFailed".into(), "node/node-1".into())
    );
    assert_eq!(event.message, error.to_string());
    assert!(event.message.contains("(freed 900 bytes)"), "{}", event.message);
}

/// A disk that runs a callback at its first measurement, before or after it is measured.
struct RunOnFirstMeasure<F> {
    world: FakeNode,
    before: bool,
    act: Mutex<Option<F>>,
}

#[async_trait]
impl<F: FnOnce() + Send> FsStatsProvider for RunOnFirstMeasure<F> {
    async fn measure(&self) -> Result<FsStats, FilesystemError> {
        let act = self.act.lock().expect("no thread panicked").take();
        let measured = self.world.measure().await;
        let Some(act) = act else { return measured };
        act();
        if self.before { self.world.measure().await } else { measured }
    }
}

/// A disk that runs a callback at its second measurement: after the first removal.
struct RunOnSecondMeasure<F>(FakeNode, Mutex<(usize, Option<F>)>);

#[async_trait]
impl<F: FnOnce() + Send> FsStatsProvider for RunOnSecondMeasure<F> {
    async fn measure(&self) -> Result<FsStats, FilesystemError> {
        let act = {
            let mut looked = self.1.lock().expect("no thread panicked");
            looked.0 += 1;
            (looked.0 == 2).then(|| looked.1.take()).flatten()
        };
        if let Some(act) = act {
            act();
        }
        self.0.measure().await
    }
}

#[tokio::test(start_paused = true)]
async fn a_keep_rule_added_during_a_round_is_honoured_by_it() {
    let world = ten();
    let keeping = Arc::new(std::sync::OnceLock::<Arc<Collector>>::new());
    let late = Arc::clone(&keeping);
    let rules = move || {
        let collector = late.get().unwrap();
        let rules = [
            Selector::Name("i1".into()),
            Selector::Newest { repository: "i3".into(), count: 1 },
            Selector::Name("nothing".into()),
        ];
        collector.set_policy(GcPolicy { keep: rules.map(KeepRule::new).into(), ..policy() });
    };
    let disk = RunOnSecondMeasure(world.clone(), Mutex::new((0, Some(rules))));
    let collector = Arc::new(world.collector().disk(Arc::new(disk)).policy(policy()).build());
    assert!(keeping.set(Arc::clone(&collector)).is_ok());
    world.state().other = 100;
    world.advance(1000);
    let report = collector.collect().await.unwrap();
    assert_eq!(world.removals(), ["i0", "i2", "i4"], "in their place others go");
    assert_eq!(report.swept[0].skipped, [id("i1"), id("i3")]);
}
