//! A removal or a disk that hangs: only the next round waits for it, and an abandoned round loses no state.

use std::future::poll_fn;
use std::path::Path;
use std::pin::pin;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use larder::gc::{
    Collector, GcGoal, GcPolicy, HistoryFile, ImageUsageRecords, LoadedUsageRecords, UsageRecordFileStore,
    UsageRecordSaveError, UsageRecordStore,
};
use larder::retention::{KeepRule, RemovalGate, Selector};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep};

use crate::world::{FakeNode, OwnPolicy as _, SeededRandom};

const SLOW: Duration = Duration::from_secs(3600);

fn policy() -> GcPolicy {
    GcPolicy { minimum_age: Duration::ZERO, ..GcPolicy::default() }
}

/// Three unused images.
fn world() -> FakeNode {
    let world = FakeNode::new(100);
    for (name, layer) in [("a:1", "l"), ("b:1", "m"), ("c:1", "n")] {
        world.have(name, &[(layer, 10)]);
    }
    world
}

fn collector(world: &FakeNode, dir: &Path) -> Collector {
    let builder = world.collector().policy(policy()).gate(Arc::new(RemovalGate::default()));
    let builder = builder.records(Arc::new(UsageRecordFileStore::new(dir.join("images.json"))));
    builder.history(Arc::new(HistoryFile::new(dir.join("history")))).build()
}

#[tokio::test(start_paused = true)]
async fn a_removal_that_hangs_keeps_nothing_waiting_but_the_next_round() {
    let (world, dir) = (world(), tempfile::tempdir().unwrap());
    let collector = Arc::new(collector(&world, dir.path()));
    world.advance(1000);
    world.removes_slowly(SLOW);
    let began = Instant::now();
    let rounds = [(); 2].map(|()| {
        let collector = Arc::clone(&collector);
        tokio::spawn(async move { collector.delete_unused().await })
    });
    while !world.state().removing {
        yield_now().await;
    }
    assert_eq!(collector.snapshot(&collector.policy()).await.unwrap().images.len(), 3);
    assert!(collector.measure_filesystem().await.is_ok());
    assert_eq!(collector.plan(GcGoal::AllUnused).await.unwrap().removals.len(), 3);
    assert!(collector.plan_round().await.unwrap().removals.is_empty());
    collector.snapshot(&collector.policy()).await.unwrap();
    collector.flush().await;
    assert_eq!(collector.records().iter().count(), 3);
    assert_eq!(collector.counts().space, 0);
    let keep = vec![KeepRule::new(Selector::Name("b:1".into()))];
    collector.set_policy(GcPolicy { keep, ..policy() });
    assert_eq!(began.elapsed(), Duration::ZERO);
    assert!(rounds.iter().all(|round| !round.is_finished()));
    for round in rounds {
        let report = round.await.unwrap().unwrap();
        assert_eq!(report.swept[0].skipped.len(), 1, "by the rule that came since it was asked for");
        assert_eq!(began.elapsed(), SLOW, "the second waited for the first");
    }
    assert_eq!(world.removals(), ["a:1", "c:1"]);
}

/// Polls this for this many turns, and drops it then unless it has ended.
async fn abandon_after<T>(turns: usize, work: impl Future<Output = T>) -> Option<T> {
    let (mut work, mut taken) = (pin!(work), 0);
    poll_fn(|context| {
        taken += 1;
        if taken > turns { Poll::Ready(None) } else { work.as_mut().poll(context).map(Some) }
    })
    .await
}

#[tokio::test(start_paused = true)]
async fn whenever_a_round_is_abandoned_records_and_journal_agree_with_what_is_there() {
    for turns in 0.. {
        let (world, dir) = (world(), tempfile::tempdir().unwrap());
        let first = collector(&world, dir.path());
        first.detect().await.unwrap();
        let seen = first.records();
        world.advance(60_000);
        world.frees_after(Duration::from_secs(1));
        world.interleaved(SeededRandom::new(turns as u64));
        let ended = abandon_after(turns, first.delete_unused()).await.is_some();
        // A removal that has begun continues.
        sleep(Duration::from_secs(1)).await;
        drop(first);
        let again = collector(&world, dir.path());
        assert_eq!(again.notice(), None);
        again.detect().await.unwrap();
        for known in again.records().iter() {
            let before = seen.get(&known.id, "").unwrap();
            assert_eq!(known.first_seen, before.first_seen, "{turns}: the age is what it was");
        }
        assert_eq!(again.records().iter().count(), world.state().present.len(), "{turns}");
        let (entries, unreadable) = HistoryFile::new(dir.path().join("history")).entries().unwrap();
        let removed: Vec<_> = entries.iter().map(|entry| entry.names[0].clone()).collect();
        assert_eq!((removed, unreadable), (world.removals(), 0), "{turns}: each once, and no other");
        if ended {
            assert_eq!(world.removals().len(), 3);
            return;
        }
    }
}

/// A disk on which nothing can be saved before the test drops the other end.
struct HangingRecordStore(Mutex<Receiver<()>>);

impl UsageRecordStore for HangingRecordStore {
    fn load(&self) -> LoadedUsageRecords {
        LoadedUsageRecords::default()
    }

    fn save(&self, _: &ImageUsageRecords) -> Result<(), UsageRecordSaveError> {
        let _released = self.0.lock().unwrap_or_else(PoisonError::into_inner).recv();
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_hangs_blocks_only_callers_that_need_it() {
    let (release, hangs) = channel();
    let collector =
        world().collector().policy(policy()).records(Arc::new(HangingRecordStore(Mutex::new(hangs)))).build();
    for _ in 0..3 {
        assert_eq!(collector.snapshot(&collector.policy()).await.unwrap().images.len(), 3);
    }
    assert_eq!(collector.records().iter().count(), 3);
    let mut durable = pin!(collector.flush());
    poll_fn(|context| {
        assert!(durable.as_mut().poll(context).is_pending(), "nothing is on disk yet");
        Poll::Ready(())
    })
    .await;
    drop(release);
    durable.await;
}
