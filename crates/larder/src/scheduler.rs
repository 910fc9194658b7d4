//! Bounds concurrent work and shares the slots fairly: pulls of images, and fetches of layers.
//!
//! Promises: never more work than slots, in all and of one registry; a free slot is for urgent work first, then for work
//! that is not slow, then for the registry, and the repository, with the fewest slots, then in order of arrival. Where
//! slots are recalled ([`SlotRecall`]), slow work gives its slot to other work, and never takes it back from work that is
//! faster.

use std::collections::{HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, oneshot};
use tokio::time::{self, Instant, MissedTickBehavior};

use crate::backend::MinimumRate;

/// How many slow repositories are remembered.
const MAX_SLOW: usize = 10_000;

/// How often the rate of work is checked: ten times in its window, within these limits.
const RATE_CHECKS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));

/// Whether work is scheduled before prefetches. Clones share it, and it may be raised while the work waits.
#[derive(Debug, Clone)]
pub(crate) struct QueuePriority(Arc<AtomicBool>);

impl QueuePriority {
    pub(crate) fn new(urgent: bool) -> QueuePriority {
        QueuePriority(Arc::new(AtomicBool::new(urgent)))
    }

    pub(crate) fn is_urgent(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Raises this priority to the other, if that is higher.
    pub(crate) fn raise_to(&self, other: &QueuePriority) {
        self.0.fetch_or(other.is_urgent(), Ordering::Relaxed);
    }
}

/// Work that waits for a slot or has one. Clones are the same work.
///
/// Names are hashed: thousands of pulls may wait, and each grant compares all of them.
#[derive(Debug, Clone)]
pub struct ScheduledWork {
    registry: u64,
    /// With the registry.
    repository: u64,
    priority: QueuePriority,
    /// Whether this work was slow when it had its last slot; `None`: its repository is remembered as slow instead.
    is_slow: Option<Arc<AtomicBool>>,
}

impl ScheduledWork {
    /// A pull from a repository, which is named with its registry. A slow pull makes the next pulls of its repository slow
    /// until one of them is fast.
    pub(crate) fn pull(registry: &str, repository: &str, priority: &QueuePriority) -> ScheduledWork {
        let (registry, repository) = (hash(registry), hash(repository));
        ScheduledWork { registry, repository, priority: priority.clone(), is_slow: None }
    }

    /// The fetch of a layer from a repository, which is named with its registry. A slow layer does not make others slow, and
    /// is measured anew in its next slot.
    pub fn layer(registry: &str, repository: &str) -> ScheduledWork {
        let work = ScheduledWork::pull(registry, repository, &QueuePriority::new(true));
        ScheduledWork { is_slow: Some(Arc::default()), ..work }
    }

    /// Returns true if this work may take a slot from the other.
    fn may_displace(&self, other: &ScheduledWork) -> bool {
        self.repository != other.repository && (self.priority.is_urgent() || !other.priority.is_urgent())
    }
}

fn hash(name: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

/// When work loses its slot to other work, by [`WorkSlot::gives_way`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotRecall {
    /// When it is slow and other work waits. Slow work waits in order of arrival.
    OwnRate,
    /// When it is slow and faster work waits: work that was slow once keeps its slot from other slow work.
    SlowerThanWaiter,
    /// When it is slow and other work waits, or when its registry has several slots and that of waiting work has none; in
    /// the same way among the repositories of a registry.
    LargestShare,
}

/// A scheduler. Clones share its slots.
#[derive(Debug, Clone)]
pub struct Scheduler(Arc<Mutex<SchedulerState>>);

#[derive(Debug)]
struct SchedulerState {
    slots: usize,
    slots_of_registry: usize,
    recall: SlotRecall,
    next_id: u64,
    /// In order of arrival.
    waiting: VecDeque<WaitingWork>,
    /// In the order in which the slots were granted.
    running: Vec<RunningWork>,
    /// The repositories whose last pull was slow.
    slow: HashSet<u64>,
}

#[derive(Debug)]
struct WaitingWork {
    id: u64,
    work: ScheduledWork,
    recall: Arc<Notify>,
    granted: oneshot::Sender<()>,
}

#[derive(Debug)]
struct RunningWork {
    id: u64,
    work: ScheduledWork,
    recall: Arc<Notify>,
    is_recalled: bool,
}

impl Scheduler {
    /// A scheduler of this many slots, any number of which one registry may have.
    pub fn new(slots: usize, recall: SlotRecall) -> Scheduler {
        let (waiting, running, slow) = Default::default();
        let slots_of_registry = slots;
        let state = SchedulerState { slots, slots_of_registry, recall, next_id: 0, waiting, running, slow };
        Scheduler(Arc::new(Mutex::new(state)))
    }

    /// A scheduler of layers: at least one, and at most `of_registry` of one registry at once, and twice as many of all, so
    /// that a registry with all its slots leaves as many to others.
    pub fn for_layers(of_registry: usize) -> Scheduler {
        let of_registry = of_registry.max(1);
        let scheduler = Scheduler::new(of_registry.saturating_mul(2), SlotRecall::SlowerThanWaiter);
        scheduler.state().slots_of_registry = of_registry;
        scheduler
    }

    /// The number of slots.
    pub fn slots(&self) -> usize {
        self.state().slots
    }

    /// Waits for a slot. Dropping the future leaves the queue.
    pub async fn acquire(&self, work: &ScheduledWork) -> WorkSlot {
        self.acquire_from(work, None).await
    }

    /// Waits for a slot like [`acquire`](Self::acquire), at its old place in the queue: that of the dropped slot with this
    /// [arrival](WorkSlot::arrival).
    pub(crate) async fn acquire_from(&self, work: &ScheduledWork, arrival: Option<u64>) -> WorkSlot {
        let (granted, grant) = oneshot::channel();
        let recall = Arc::new(Notify::new());
        let id = self.state().enqueue(arrival, work.clone(), Arc::clone(&recall), granted);
        let slot = WorkSlot { scheduler: self.clone(), id, recall };
        // Waiting work leaves the queue only when it gets a slot or is dropped.
        let _ = grant.await;
        slot
    }

    fn state(&self) -> MutexGuard<'_, SchedulerState> {
        self.0.lock()
    }
}

impl SchedulerState {
    fn enqueue(
        &mut self,
        arrival: Option<u64>,
        work: ScheduledWork,
        recall: Arc<Notify>,
        granted: oneshot::Sender<()>,
    ) -> u64 {
        let id = arrival.unwrap_or(self.next_id);
        self.next_id = self.next_id.max(id + 1);
        let place = self.waiting.partition_point(|waiting| waiting.id < id);
        self.waiting.insert(place, WaitingWork { id, work, recall, granted });
        self.grant();
        id
    }

    /// Removes waiting or running work.
    fn remove(&mut self, id: u64) {
        self.waiting.retain(|waiting| waiting.id != id);
        self.running.retain(|running| running.id != id);
        self.grant();
    }

    /// Grants free slots to waiting work, and recalls one if none is free.
    fn grant(&mut self) {
        while let Some(next) = self.next() {
            let Some(WaitingWork { id, work, recall, granted }) = self.waiting.remove(next) else { return };
            // If the receiver is gone, its slot is dropped next.
            let _ = granted.send(());
            if let Some(is_slow) = &work.is_slow {
                is_slow.store(false, Ordering::Relaxed);
            }
            self.running.push(RunningWork { id, work, recall, is_recalled: false });
        }
        if !self.running.iter().any(|running| running.is_recalled)
            && let Some(chosen) = self.waiting.iter().find_map(|waiting| self.displaced_by(&waiting.work))
            && let Some(running) = self.running.get_mut(chosen)
        {
            running.is_recalled = true;
            running.recall.notify_one();
        }
    }

    /// The index of the waiting work that gets a slot now.
    fn next(&self) -> Option<usize> {
        if self.running.len() >= self.slots {
            return None;
        }
        let waiting = self.waiting.iter().enumerate();
        let allowed = waiting.filter(|(_, waiting)| !self.has_all_slots(&waiting.work));
        let order = |(at, waiting): &(usize, &WaitingWork)| {
            let work = &waiting.work;
            // Its slot would be recalled at once.
            let waits_behind = self.recall != SlotRecall::OwnRate && self.is_slow(work);
            (!work.priority.is_urgent(), waits_behind, self.of_registry(work), self.of_repository(work), *at)
        };
        allowed.min_by_key(order).map(|(at, _)| at)
    }

    /// The index of the slot that is recalled for this waiting work: the latest of slow work, else the latest of a registry,
    /// or a repository of the same registry, with several, if that of the waiting work has none. None that would be
    /// recalled from the waiting work again, nor one that its registry could not get.
    fn displaced_by(&self, waiting: &ScheduledWork) -> Option<usize> {
        if self.recall == SlotRecall::OwnRate {
            return None;
        }
        // The first of these displaces the second at any share.
        let precedes = |fast: &ScheduledWork, slow: &ScheduledWork| {
            !self.is_slow(fast) && self.is_slow(slow) && fast.may_displace(slow)
        };
        let share = |running: &ScheduledWork| match self.of_registry(waiting) {
            _ if self.recall == SlotRecall::SlowerThanWaiter => 0,
            0 => self.of_registry(running),
            _ if self.of_repository(waiting) == 0 && running.registry == waiting.registry => {
                self.of_repository(running)
            }
            _ => 0,
        };
        let order = |running: &ScheduledWork| match share(running) {
            _ if precedes(waiting, running) => usize::MAX,
            _ if precedes(running, waiting) => 0,
            share => share,
        };
        let same_registry_only = self.has_all_slots(waiting);
        let candidates = self.running.iter().enumerate().filter(|(_, running)| {
            waiting.may_displace(&running.work)
                && (!same_registry_only || running.work.registry == waiting.registry)
        });
        let ordered = candidates.map(|(at, running)| (order(&running.work), at));
        ordered.filter(|(order, _)| *order > 1).max().map(|(_, at)| at)
    }

    fn is_slow(&self, work: &ScheduledWork) -> bool {
        match &work.is_slow {
            Some(is_slow) => is_slow.load(Ordering::Relaxed),
            None => self.slow.contains(&work.repository),
        }
    }

    fn set_slow(&mut self, work: &ScheduledWork, is_slow: bool) {
        match &work.is_slow {
            Some(flag) => flag.store(is_slow, Ordering::Relaxed),
            None if !is_slow => drop(self.slow.remove(&work.repository)),
            None => {
                if self.slow.len() >= MAX_SLOW {
                    self.slow.clear();
                }
                self.slow.insert(work.repository);
            }
        }
        if is_slow {
            self.grant();
        }
    }

    /// Returns true if the registry of this work has as many slots as one registry may have.
    fn has_all_slots(&self, work: &ScheduledWork) -> bool {
        self.of_registry(work) >= self.slots_of_registry
    }

    fn of_registry(&self, work: &ScheduledWork) -> usize {
        self.running.iter().filter(|running| running.work.registry == work.registry).count()
    }

    fn of_repository(&self, work: &ScheduledWork) -> usize {
        self.running.iter().filter(|running| running.work.repository == work.repository).count()
    }
}

/// A slot, or a place in the queue. Dropping it passes the slot to the next waiting work.
#[derive(Debug)]
#[must_use]
pub struct WorkSlot {
    scheduler: Scheduler,
    id: u64,
    recall: Arc<Notify>,
}

impl WorkSlot {
    /// The number of the work in order of arrival, for [`Scheduler::acquire_from`].
    pub(crate) fn arrival(&self) -> u64 {
        self.id
    }

    /// Ends when other work needs the slot more. `is_slow` is called several times in each window of `minimum`, and returns
    /// whether the last whole window was below that rate; `None` before the end of the first one.
    pub async fn gives_way(&self, minimum: MinimumRate, mut is_slow: impl FnMut(Instant) -> Option<bool>) {
        let mut checks = time::interval((minimum.window / 10).clamp(RATE_CHECKS.0, RATE_CHECKS.1));
        checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = self.recall.notified() => return,
                _ = checks.tick() => if let Some(is_slow) = is_slow(Instant::now()) {
                    self.set_slow(is_slow);
                    if is_slow && self.is_wanted() {
                        return;
                    }
                }
            }
        }
    }

    /// Records whether the work is slow, for this work or the next pulls of its repository.
    pub fn set_slow(&self, is_slow: bool) {
        let mut state = self.scheduler.state();
        if let Some(work) = state.work(self.id) {
            state.set_slow(&work, is_slow);
        }
    }

    /// Returns true if slow work in this slot must give it to other slow work as well.
    fn is_wanted(&self) -> bool {
        let state = self.scheduler.state();
        let work = state.work(self.id).filter(|_| state.recall != SlotRecall::SlowerThanWaiter);
        work.is_some_and(|work| state.waiting.iter().any(|waiting| waiting.work.may_displace(&work)))
    }
}

impl SchedulerState {
    fn work(&self, id: u64) -> Option<ScheduledWork> {
        self.running.iter().find(|running| running.id == id).map(|running| running.work.clone())
    }
}

impl Drop for WorkSlot {
    fn drop(&mut self) {
        self.scheduler.state().remove(self.id);
    }
}
#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::backend::RateWindow;

    fn pull(image: &str, urgency: &QueuePriority) -> ScheduledWork {
        let registry = image.split('/').next().unwrap_or_default();
        ScheduledWork::pull(registry, image.split(':').next().unwrap_or_default(), urgency)
    }

    fn is_recalled(slot: &WorkSlot) -> bool {
        slot.recall.notified().now_or_never().is_some()
    }

    #[test]
    fn urgent_requests_are_first_and_the_others_in_order_of_arrival() {
        let scheduler = Scheduler::new(1, SlotRecall::OwnRate);
        let (urgent, idle) = (QueuePriority::new(true), QueuePriority::new(false));
        let first = scheduler.acquire(&pull("a", &idle)).now_or_never().expect("it is free");
        let later = QueuePriority::new(false);
        let pulls = [&idle, &later, &urgent, &urgent].map(|urgency| pull("a", urgency));
        let mut waiting = pulls.each_ref().map(|pull| Some(Box::pin(scheduler.acquire(pull))));
        let mut called = |index: usize| {
            let future: &mut Option<_> = &mut waiting[index];
            let place = future.as_mut().and_then(FutureExt::now_or_never);
            if place.is_some() {
                *future = None;
            }
            place
        };
        for index in 0..4 {
            assert!(called(index).is_none(), "{index}");
        }
        drop(first);
        let place = called(2).expect("urgent, and the first of those");
        assert!(called(3).is_none());
        later.raise_to(&urgent);
        drop(place);
        let place = called(1).expect("it came before the other that is urgent");
        drop(place);
        let place = called(3).expect("urgent");
        assert!(called(0).is_none());
        drop(place);
        assert!(called(0).is_some());
    }

    #[test]
    fn work_that_gave_its_slot_back_returns_to_its_place() {
        let scheduler = Scheduler::new(1, SlotRecall::OwnRate);
        let work = pull("a", &QueuePriority::new(false));
        let first = scheduler.acquire(&work).now_or_never().expect("it is free");
        let mut waiting = [Box::pin(scheduler.acquire(&work)), Box::pin(scheduler.acquire(&work))];
        assert!(waiting.iter_mut().all(|waiting| waiting.now_or_never().is_none()));
        let arrival = first.arrival();
        drop(first);
        let second = (&mut waiting[0]).now_or_never().expect("it is the next");
        let mut again = Box::pin(scheduler.acquire_from(&work, Some(arrival)));
        assert!((&mut again).now_or_never().is_none());
        drop(second);
        assert!((&mut waiting[1]).now_or_never().is_none(), "it came later");
        assert_eq!(again.now_or_never().expect("it came first").arrival(), arrival);
        assert!((&mut waiting[1]).now_or_never().is_some());
    }

    #[test]
    fn a_slot_is_released_when_its_caller_disconnects() {
        let scheduler = Scheduler::new(1, SlotRecall::OwnRate);
        let idle = pull("a", &QueuePriority::new(false));
        let place = scheduler.acquire(&idle).now_or_never().expect("it is free");
        let (mut one, mut two, mut three) = (
            Box::pin(scheduler.acquire(&idle)),
            Box::pin(scheduler.acquire(&idle)),
            Box::pin(scheduler.acquire(&idle)),
        );
        for waiting in [&mut one, &mut two, &mut three] {
            assert!(waiting.now_or_never().is_none());
        }
        drop(one);
        assert_eq!(scheduler.state().waiting.len(), 2, "who leaves is forgotten at once");
        drop(place); // calls the second, which goes away before it hears of it
        drop(two);
        assert!(three.now_or_never().is_some());
        assert!(scheduler.acquire(&idle).now_or_never().is_some());
    }

    /// The images whose slots are recalled when a pull waits while these run.
    fn recalled(running: &[&str], waiting: (&str, bool)) -> Vec<String> {
        let scheduler = Scheduler::new(running.len(), SlotRecall::LargestShare);
        let urgent = QueuePriority::new(true);
        let take =
            |image: &&str| scheduler.acquire(&pull(image, &urgent)).now_or_never().expect("it is free");
        let held: Vec<_> = running.iter().map(take).collect();
        let late = pull(waiting.0, &QueuePriority::new(waiting.1));
        let mut late = Box::pin(scheduler.acquire(&late));
        assert!((&mut late).now_or_never().is_none());
        let recalled = running.iter().zip(&held).filter(|(_, slot)| is_recalled(slot));
        recalled.map(|(image, _)| (*image).to_owned()).collect()
    }

    #[test]
    fn a_registry_gives_one_of_its_slots_to_one_that_has_none() {
        let slow = ["slow.example/a", "slow.example/b", "slow.example/c"];
        assert_eq!(recalled(&slow, ("other.example/a", true)), ["slow.example/c"]);
        assert_eq!(recalled(&slow, ("other.example/a", false)), [""; 0], "a prefetch takes none from a pod");
        assert_eq!(recalled(&slow, ("slow.example/d", true)), [""; 0]);
        assert_eq!(recalled(&["a.example/a", "b.example/a"], ("c.example/a", true)), [""; 0]);
        let tags = ["r.example/a:1", "r.example/a:2", "s.example/a"];
        assert_eq!(recalled(&tags, ("r.example/b", true)), ["r.example/a:2"]);
        assert_eq!(recalled(&tags, ("r.example/a:3", true)), [""; 0]);
    }

    #[test]
    fn a_slow_repository_gives_its_slot_to_others_until_it_is_fast() {
        let scheduler = Scheduler::new(1, SlotRecall::LargestShare);
        let urgent = QueuePriority::new(true);
        let [slow, other] = ["slow.example/a", "other.example/a"].map(|name| pull(name, &urgent));
        let granted = scheduler.acquire(&slow).now_or_never().expect("it is free");
        granted.set_slow(true);
        drop(granted);
        let granted = scheduler.acquire(&slow).now_or_never().expect("it is free");
        let mut waiting = Box::pin(scheduler.acquire(&other));
        assert!((&mut waiting).now_or_never().is_none());
        assert!(is_recalled(&granted), "its last pull was slow");
        drop(granted);
        let granted = waiting.now_or_never().expect("it was given up");
        let mut waiting = Box::pin(scheduler.acquire(&slow));
        assert!((&mut waiting).now_or_never().is_none() && !is_recalled(&granted));
        drop(granted);
        let granted = waiting.now_or_never().expect("it is free");
        granted.set_slow(false);
        let mut waiting = Box::pin(scheduler.acquire(&other));
        assert!((&mut waiting).now_or_never().is_none() && !is_recalled(&granted));
    }

    #[test]
    fn a_slow_repository_waits_behind_others_where_slots_are_recalled() {
        for (scheduler, is_behind) in [
            (Scheduler::new(1, SlotRecall::LargestShare), true),
            (Scheduler::new(1, SlotRecall::OwnRate), false),
        ] {
            let urgent = QueuePriority::new(true);
            let [slow, fast, other] =
                ["slow.example/a", "fast.example/a", "other.example/a"].map(|name| pull(name, &urgent));
            let granted = scheduler.acquire(&slow).now_or_never().expect("it is free");
            granted.set_slow(true);
            drop(granted);
            let granted = scheduler.acquire(&other).now_or_never().expect("it is free");
            let (mut slow, mut fast) =
                (Box::pin(scheduler.acquire(&slow)), Box::pin(scheduler.acquire(&fast)));
            assert!((&mut slow).now_or_never().is_none() && (&mut fast).now_or_never().is_none());
            drop(granted);
            assert_eq!(
                (slow.now_or_never().is_none(), fast.now_or_never().is_some()),
                (is_behind, is_behind)
            );
        }
    }

    #[test]
    fn a_slow_pull_takes_a_slot_from_a_fast_one_only_if_that_cannot_take_it_back() {
        for is_urgent in [true, false] {
            let scheduler = Scheduler::new(2, SlotRecall::LargestShare);
            let (pod, held) = (QueuePriority::new(true), QueuePriority::new(is_urgent));
            let slow = pull("slow.example/a", &pod);
            let granted = scheduler.acquire(&slow).now_or_never().expect("it is free");
            granted.set_slow(true);
            drop(granted);
            let fast = ["fast.example/a", "fast.example/b"].map(|name| pull(name, &held));
            let slots =
                fast.each_ref().map(|pull| scheduler.acquire(pull).now_or_never().expect("it is free"));
            let mut slow = Box::pin(scheduler.acquire(&slow));
            assert!((&mut slow).now_or_never().is_none());
            let recalled = slots.each_ref().map(is_recalled);
            assert_eq!(recalled, [false, !is_urgent]);
        }
    }

    #[test]
    fn a_free_slot_is_for_the_registry_with_the_fewest() {
        let scheduler = Scheduler::new(2, SlotRecall::OwnRate);
        let urgent = QueuePriority::new(true);
        let pulls =
            ["a.example/a", "a.example/b", "a.example/c", "b.example/a"].map(|name| pull(name, &urgent));
        let mut taken = pulls.each_ref().map(|pull| Box::pin(scheduler.acquire(pull)));
        let [_first, second, third, other] = taken.each_mut().map(FutureExt::now_or_never);
        assert!(second.is_some() && third.is_none() && other.is_none());
        drop(second);
        let [_, _, third, other] = &mut taken;
        assert!(third.now_or_never().is_none());
        assert!(other.now_or_never().is_some());
    }

    fn layer(repository: &str) -> ScheduledWork {
        ScheduledWork::layer(repository.split('/').next().unwrap_or_default(), repository)
    }

    fn now_or_never(scheduler: &Scheduler, repository: &str) -> Option<WorkSlot> {
        scheduler.acquire(&layer(repository)).now_or_never()
    }

    #[test]
    fn one_registry_does_not_get_the_slots_of_all_layers() {
        let scheduler = Scheduler::for_layers(4);
        let slow: Vec<_> = (0..10).filter_map(|_| now_or_never(&scheduler, "slow.example/app")).collect();
        assert_eq!(slow.len(), 4);
        let others: Vec<_> = (0..10).filter_map(|_| now_or_never(&scheduler, "fast.example/app")).collect();
        assert_eq!(others.len(), 4);
        assert!(now_or_never(&scheduler, "third.example/app").is_none(), "memory is bounded");
    }

    #[test]
    fn a_free_slot_is_for_the_repository_with_the_fewest_layers_in_work() {
        let scheduler = Scheduler::for_layers(2);
        let [first, _second] =
            ["a.example/large"; 2].map(|large| now_or_never(&scheduler, large).expect("it is free"));
        let (large, small) = (layer("a.example/large"), layer("a.example/small"));
        let (mut third, mut fourth) =
            (Box::pin(scheduler.acquire(&large)), Box::pin(scheduler.acquire(&small)));
        assert!((&mut third).now_or_never().is_none() && (&mut fourth).now_or_never().is_none());
        drop(first);
        assert!((&mut third).now_or_never().is_none());
        assert!(fourth.now_or_never().is_some(), "the image with many layers has one in work");
    }

    /// Ends when the work gives way that receives this many bytes per second.
    async fn gives_way_at(granted: &WorkSlot, bytes_per_second: u64) {
        let (minimum, start) = (MinimumRate::default(), Instant::now());
        let mut window = RateWindow::new(minimum.window);
        let received = move |now: Instant| (now - start).as_secs() * bytes_per_second;
        granted
            .gives_way(minimum, |now| {
                window.observe(now, received(now)).map(|rate| rate < minimum.bytes_per_second)
            })
            .await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_layer_gives_way_to_other_repositories_and_a_fast_one_does_not() {
        let scheduler = Scheduler::for_layers(1);
        let [slow, fast] = ["slow.example/app", "fast.example/app"].map(layer);
        let (slow_slot, fast_slot) = (scheduler.acquire(&slow).await, scheduler.acquire(&fast).await);
        let start = Instant::now();
        let give_way = async {
            gives_way_at(&slow_slot, 100).await;
            drop(slow_slot);
            scheduler.acquire(&slow).await
        };
        let waiting = layer("other.example/app");
        let other = async {
            let granted = scheduler.acquire(&waiting).await;
            time::sleep(Duration::from_secs(30)).await;
            assert!(!is_recalled(&granted), "slow work takes no slot from work that may be faster");
            start.elapsed()
        };
        tokio::select! {
            _never = give_way => panic!("the slot is in use by the other layer"),
            () = gives_way_at(&fast_slot, 1 << 20) => panic!("it is fast"),
            elapsed = other => {
                let waited = elapsed.as_secs() - 30;
                assert!((10..13).contains(&waited), "{waited} s");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_layer_does_not_take_slots_of_its_own_repository() {
        let scheduler = Scheduler::for_layers(1);
        let granted = now_or_never(&scheduler, "slow.example/app").expect("it is free");
        let next = layer("slow.example/app");
        let waiting = time::timeout(Duration::from_secs(60), scheduler.acquire(&next));
        tokio::select! {
            outcome = waiting => assert!(outcome.is_err()),
            () = gives_way_at(&granted, 0) => panic!("it would be as slow"),
        }
    }

    #[test]
    fn a_slot_is_recalled_only_for_a_registry_that_can_get_it() {
        let scheduler = Scheduler::for_layers(1);
        let slots = ["a.example/app", "b.example/app"]
            .map(|repository| now_or_never(&scheduler, repository).expect("it is free"));
        slots[0].set_slow(true);
        let waiting = layer("b.example/other");
        let mut waiting = Box::pin(scheduler.acquire(&waiting));
        assert!((&mut waiting).now_or_never().is_none());
        assert_eq!(slots.each_ref().map(is_recalled), [false, false]);
        slots[1].set_slow(true);
        assert_eq!(slots.each_ref().map(is_recalled), [false, true]);
    }

    #[test]
    fn dropped_work_leaves_the_queue() {
        let scheduler = Scheduler::for_layers(1);
        let granted = now_or_never(&scheduler, "a.example/app").expect("it is free");
        assert!(now_or_never(&scheduler, "a.example/app").is_none());
        drop(granted);
        assert!(now_or_never(&scheduler, "a.example/app").is_some());
        assert!(scheduler.state().running.is_empty() && scheduler.state().waiting.is_empty());
    }
}
