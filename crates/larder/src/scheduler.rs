//! Bounds concurrent work and shares the slots fairly: pulls of images, and fetches of layers.
//!
//! Promises: never more work than slots, in all and of one registry; a free slot is for urgent work first, then for
//! work that is not slow, then for the caller, the registry and the repository with the fewest slots, then in order of
//! arrival. A caller is a namespace, which has one share whatever the names and rates of its registries. Where slots
//! are recalled ([`SlotRecall`]), slow work gives its slot to other work, and never takes it back from work that is
//! faster; other work gives its slot after a time slice, if its caller has more slots than that of waiting work.

use std::collections::{HashSet, VecDeque};
use std::future;
use std::hash::{DefaultHasher, Hash, Hasher as _};
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

/// Namespaces of the pods that work is for. Clones share them, and they may grow while the work waits.
#[derive(Debug, Clone)]
pub struct Callers(Arc<CallerSet>);

#[derive(Debug)]
struct CallerSet {
    /// Hash of the first caller's name; none for a part of other work.
    first: Option<u64>,
    /// The callers of the whole work, for a part of it.
    whole: Option<Callers>,
    /// Callers of work that waits for this. They may grow too.
    added: Mutex<Vec<Callers>>,
}

impl Callers {
    /// Pods of one namespace. Work without a pod (commands, prefetch lists) shares one caller, the empty namespace.
    pub fn new(namespace: &str) -> Callers {
        let first = Some(hash(namespace));
        Callers(Arc::new(CallerSet { first, whole: None, added: Mutex::default() }))
    }

    /// The callers of a part of this work, which may be added to for that part alone.
    #[must_use]
    pub fn of_part(&self) -> Callers {
        let whole = Some(self.clone());
        Callers(Arc::new(CallerSet { first: None, whole, added: Mutex::default() }))
    }

    /// Adds the callers of work that waits for this, also those that are added to it later; of a part, those of the
    /// whole. This work counts for the one with the fewest slots.
    pub fn add(&self, other: &Callers) {
        let other = other.0.whole.as_ref().unwrap_or(other);
        let mut added = self.0.added.lock();
        if !added.iter().any(|known| known.is_same(other)) {
            added.push(other.clone());
        }
    }

    /// Whether both are the callers of the same work, or one caller each, which is the same.
    fn is_same(&self, other: &Callers) -> bool {
        let one = |callers: &Callers| callers.0.first.filter(|_| callers.0.added.lock().is_empty());
        Arc::ptr_eq(&self.0, &other.0) || one(self).is_some_and(|caller| one(other) == Some(caller))
    }

    /// Each once, sorted.
    fn hashes(&self) -> Vec<u64> {
        let mut hashes = Vec::with_capacity(1);
        self.collect(&mut hashes);
        hashes.sort_unstable();
        hashes.dedup();
        hashes
    }

    fn collect(&self, hashes: &mut Vec<u64>) {
        hashes.extend(self.0.first);
        self.0.added.lock().iter().chain(&self.0.whole).for_each(|callers| callers.collect(hashes));
    }
}

/// Demand for work: whether it is scheduled before prefetches, and its callers. Clones share it, and it may grow while
/// the work waits.
#[derive(Debug, Clone)]
pub(crate) struct WorkDemand {
    is_urgent: Arc<AtomicBool>,
    callers: Callers,
}

impl WorkDemand {
    pub(crate) fn new(is_urgent: bool, callers: Callers) -> WorkDemand {
        WorkDemand { is_urgent: Arc::new(AtomicBool::new(is_urgent)), callers }
    }

    pub(crate) fn callers(&self) -> &Callers {
        &self.callers
    }

    fn is_urgent(&self) -> bool {
        self.is_urgent.load(Ordering::Relaxed)
    }

    /// Adds other demand for the same work.
    pub(crate) fn add(&self, other: &WorkDemand) {
        self.is_urgent.fetch_or(other.is_urgent(), Ordering::Relaxed);
        self.callers.add(&other.callers);
    }
}

/// Work that waits for a slot or has one. Clones are the same work.
///
/// Names are hashed: thousands of layers may wait, and each grant compares them.
#[derive(Debug, Clone)]
pub struct ScheduledWork {
    registry: u64,
    /// With the registry.
    repository: u64,
    demand: WorkDemand,
    /// Whether this work was slow when it had its last slot; `None`: its repository is remembered as slow instead.
    is_slow: Option<Arc<AtomicBool>>,
}

impl ScheduledWork {
    /// A pull from a repository, which is named with its registry. A slow pull makes the next pulls of its repository
    /// slow until one of them is fast.
    pub(crate) fn pull(registry: &str, repository: &str, demand: &WorkDemand) -> ScheduledWork {
        let (registry, repository) = (hash(registry), hash(repository));
        ScheduledWork { registry, repository, demand: demand.clone(), is_slow: None }
    }

    /// The fetch of a layer from a repository, which is named with its registry. A slow layer does not make others
    /// slow, and is measured again in its next slot.
    pub fn layer(callers: &Callers, registry: &str, repository: &str) -> ScheduledWork {
        let work = ScheduledWork::pull(registry, repository, &WorkDemand::new(true, callers.clone()));
        ScheduledWork { is_slow: Some(Arc::default()), ..work }
    }

    /// Returns true if this work may take a slot from the other.
    fn may_displace(&self, other: &ScheduledWork) -> bool {
        self.demand.is_urgent() || !other.demand.is_urgent()
    }
}

/// Facts that decide about the slot of work, with the slots of all work of the same callers, registry and repository.
#[derive(Debug)]
struct WorkShares {
    callers: Vec<u64>,
    slots: SlotCounts,
    is_slow: bool,
}

/// Numbers of slots, in the order in which they decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct SlotCounts {
    /// Of the caller; of several, of the one with the fewest.
    caller: usize,
    registry: usize,
    repository: usize,
}

fn hash<T: Hash + ?Sized>(name: &T) -> u64 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

/// When work loses its slot to other work, by [`WorkSlot::gives_way`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotRecall {
    /// Never: work that stops would begin from its start.
    Never,
    /// When it is slow and faster work waits; and after its time slice, one window of its [`MinimumRate`], when the
    /// caller of waiting work has no slot, or at least two fewer. The second applies to the registries of a caller as
    /// well, and to the repositories of a registry.
    TimeSlice,
    /// As with time slices; also when it is slow and other slow work waits; and at once when its caller, registry or
    /// repository has several slots and that of waiting work has none.
    LargestShare,
}

/// The rate of work in its slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkRate {
    /// Its first window has not ended.
    Unmeasured,
    /// It was below the minimum rate in the last window.
    Slow,
    /// It was at that rate or faster in the last window.
    Fast,
    /// It has received all its bytes, and continues without its registry. It has no time slice, since it would begin to
    /// unpack from the start each time.
    Received,
}

impl WorkRate {
    /// The rate of work with this measurement in bytes per second; `otherwise` unless that is below the minimum.
    pub fn of(measured: Option<u64>, minimum: u64, otherwise: WorkRate) -> WorkRate {
        match measured {
            None => WorkRate::Unmeasured,
            Some(rate) if rate < minimum => WorkRate::Slow,
            Some(_) => otherwise,
        }
    }
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
    has_ended_slice: bool,
}

impl Scheduler {
    /// A scheduler of this many slots, any number of which one registry may have.
    pub fn new(slots: usize, recall: SlotRecall) -> Scheduler {
        let (waiting, running, slow) = Default::default();
        let slots_of_registry = slots;
        let state = SchedulerState { slots, slots_of_registry, recall, next_id: 0, waiting, running, slow };
        Scheduler(Arc::new(Mutex::new(state)))
    }

    /// A scheduler of layers: at least one, and at most `of_registry` of one registry at once, and twice as many of
    /// all, so that a registry with all its slots leaves as many to others.
    pub fn for_layers(of_registry: usize) -> Scheduler {
        let of_registry = of_registry.max(1);
        let scheduler = Scheduler::new(of_registry.saturating_mul(2), SlotRecall::TimeSlice);
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

    /// Waits for a slot like [`acquire`](Self::acquire), at its old place in the queue: that of the dropped slot with
    /// this [arrival](WorkSlot::arrival).
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
        loop {
            let is_full = self.running.len() >= self.slots;
            let may_recall =
                self.recall != SlotRecall::Never && !self.running.iter().any(|running| running.is_recalled);
            if self.waiting.is_empty() || (is_full && !may_recall) {
                return;
            }
            let holders: Vec<_> =
                self.running.iter().map(|running| running.work.demand.callers.hashes()).collect();
            let candidates = self.candidates(&holders);
            let next = if is_full { None } else { self.next(&candidates) };
            if let Some(WaitingWork { id, work, recall, granted }) =
                next.and_then(|next| self.waiting.remove(next))
            {
                // If the receiver is gone, its slot is dropped next.
                let _ = granted.send(());
                if let Some(is_slow) = &work.is_slow {
                    is_slow.store(false, Ordering::Relaxed);
                }
                let (is_recalled, has_ended_slice) = (false, false);
                self.running.push(RunningWork { id, work, recall, is_recalled, has_ended_slice });
                continue;
            }
            let shares: Vec<_> =
                self.running.iter().map(|running| self.shares(&running.work, &holders)).collect();
            let displaced =
                |(at, own): &(usize, WorkShares)| self.displaced_by(&self.waiting[*at].work, own, &shares);
            let chosen = if may_recall { candidates.iter().find_map(displaced) } else { None };
            if let Some(running) = chosen.and_then(|chosen| self.running.get_mut(chosen)) {
                running.is_recalled = true;
                running.recall.notify_one();
            }
            return;
        }
    }

    /// The waiting work that a decision compares, by index in order of arrival: of work of the same urgency, rate,
    /// callers and repository, the first. `holders` are the callers of running work.
    fn candidates(&self, holders: &[Vec<u64>]) -> Vec<(usize, WorkShares)> {
        let mut seen = HashSet::new();
        let mut candidates = Vec::new();
        for (at, WaitingWork { work, .. }) in self.waiting.iter().enumerate() {
            let (callers, is_slow) = (work.demand.callers.hashes(), self.is_slow(work));
            if seen.insert((work.demand.is_urgent(), is_slow, hash(&callers), work.repository)) {
                candidates.push((at, self.shares_of(work, callers, is_slow, holders)));
            }
        }
        candidates
    }

    /// The index of the waiting work that gets a free slot now.
    fn next(&self, candidates: &[(usize, WorkShares)]) -> Option<usize> {
        let work = |at: usize| &self.waiting[at].work;
        let allowed = candidates.iter().filter(|(_, own)| !self.has_all_slots(own));
        let order = |(at, WorkShares { slots, is_slow, .. }): &&(usize, WorkShares)| {
            let is_slow = self.recall != SlotRecall::Never && *is_slow;
            // Its slot would be recalled at once, unless it is the only one of its caller.
            (!work(*at).demand.is_urgent(), is_slow && slots.caller > 0, slots.caller, is_slow, *slots, *at)
        };
        allowed.min_by_key(order).map(|(at, _)| *at)
    }

    /// The index of the slot that is recalled for this waiting work: of slow work, else of the largest share. Of
    /// several, it is the one whose slice has ended and which was granted first, else the latest. None that would be
    /// recalled from the waiting work again, nor one that its registry could not get. `shares` are those of running
    /// work.
    fn displaced_by(
        &self,
        waiting: &ScheduledWork,
        own: &WorkShares,
        shares: &[WorkShares],
    ) -> Option<usize> {
        let same_registry_only = self.has_all_slots(own);
        let candidates = self.running.iter().zip(shares).enumerate().filter(|(_, (running, _))| {
            waiting.may_displace(&running.work)
                && (!same_registry_only || running.work.registry == waiting.registry)
        });
        let ordered = candidates.filter_map(|(at, (running, shares))| {
            let rank = self.recall_rank(running, shares, waiting, own)?;
            let age = if running.has_ended_slice { usize::MAX - at } else { at };
            Some((rank, age, at))
        });
        ordered.max().map(|(.., at)| at)
    }

    /// The rank of running work among those that waiting work displaces; `None` if it does not. Slow work is first,
    /// then work of other callers, of other registries, and of other repositories, by its share. Whatever its rate, a
    /// caller keeps a slot while another one has more.
    fn recall_rank(
        &self,
        running: &RunningWork,
        shares: &WorkShares,
        waiting: &ScheduledWork,
        own: &WorkShares,
    ) -> Option<(usize, usize)> {
        // The same repository would be as slow.
        let is_elsewhere = running.work.repository != waiting.repository;
        let is_slow = is_elsewhere && shares.is_slow;
        let waits_slow = is_elsewhere && own.is_slow;
        let is_other_caller = shares.callers != own.callers;
        let (rank, share, own) = if is_other_caller {
            (3, shares.slots.caller, own.slots.caller)
        } else if running.work.registry != waiting.registry {
            (2, shares.slots.registry, own.slots.registry)
        } else {
            (1, shares.slots.repository, own.slots.repository)
        };
        let gives_way = is_slow && (!is_other_caller || share > own);
        if gives_way && !waits_slow {
            return Some((usize::MAX, 0));
        }
        // Slow work takes a slot from faster work only as the first of its caller, and none that is the other's last.
        let is_first = is_other_caller && own == 0 && share > 1;
        if waits_slow && !is_slow && !is_first && running.work.may_displace(waiting) {
            return None;
        }
        let at_once = self.recall == SlotRecall::LargestShare;
        let is_displaced = if running.has_ended_slice {
            // With one slot less, the two would only change places.
            share >= own + 2 || (is_other_caller && own == 0) || (at_once && gives_way)
        } else {
            at_once && own == 0 && share > 1
        };
        is_displaced.then_some((rank, share))
    }

    fn is_slow(&self, work: &ScheduledWork) -> bool {
        match &work.is_slow {
            Some(is_slow) => is_slow.load(Ordering::Relaxed),
            None => self.slow.contains(&work.repository),
        }
    }

    fn note_slow(&mut self, work: &ScheduledWork, is_slow: bool) {
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
    }

    /// Returns true if the registry of work with these shares has as many slots as one registry may have.
    fn has_all_slots(&self, own: &WorkShares) -> bool {
        own.slots.registry >= self.slots_of_registry
    }

    fn shares(&self, work: &ScheduledWork, holders: &[Vec<u64>]) -> WorkShares {
        self.shares_of(work, work.demand.callers.hashes(), self.is_slow(work), holders)
    }

    fn shares_of(
        &self,
        work: &ScheduledWork,
        callers: Vec<u64>,
        is_slow: bool,
        holders: &[Vec<u64>],
    ) -> WorkShares {
        let of_caller =
            callers.iter().map(|caller| holders.iter().filter(|held| held.contains(caller)).count());
        let slots = SlotCounts {
            caller: of_caller.min().unwrap_or_default(),
            registry: self.count(|running| running.registry == work.registry),
            repository: self.count(|running| running.repository == work.repository),
        };
        WorkShares { callers, slots, is_slow }
    }

    fn count(&self, is_counted: impl Fn(&ScheduledWork) -> bool) -> usize {
        self.running.iter().filter(|running| is_counted(&running.work)).count()
    }

    /// Records the rate of running work.
    fn observe(&mut self, id: u64, rate: WorkRate) {
        let Some(at) = self.running.iter().position(|running| running.id == id) else { return };
        let running = &mut self.running[at];
        let is_measured = matches!(rate, WorkRate::Slow | WorkRate::Fast);
        let ends_slice = is_measured && !running.has_ended_slice;
        running.has_ended_slice = is_measured;
        let work = running.work.clone();
        let is_slow = rate == WorkRate::Slow;
        if rate != WorkRate::Unmeasured {
            self.note_slow(&work, is_slow);
        }
        // Callers may have been added to waiting work since: one of the slots checks that.
        if is_slow || ends_slice || at == 0 {
            self.grant();
        }
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

    /// Ends when other work needs the slot more. `rate` is called several times in each window of `minimum`. Never ends
    /// with a minimum of 0.
    pub async fn gives_way(&self, minimum: MinimumRate, mut rate: impl FnMut(Instant) -> WorkRate) {
        if minimum.bytes_per_second == 0 {
            return future::pending().await;
        }
        let mut checks = time::interval((minimum.window / 10).clamp(RATE_CHECKS.0, RATE_CHECKS.1));
        checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = self.recall.notified() => return,
                _ = checks.tick() => {
                    let rate = rate(Instant::now());
                    self.scheduler.state().observe(self.id, rate);
                }
            }
        }
    }

    /// Records whether the work is slow, for this work or the next pulls of its repository.
    pub fn set_slow(&self, is_slow: bool) {
        let mut state = self.scheduler.state();
        if let Some(work) = state.work(self.id) {
            state.note_slow(&work, is_slow);
            state.grant();
        }
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

    fn pull(image: &str, demand: &WorkDemand) -> ScheduledWork {
        let registry = image.split('/').next().unwrap_or_default();
        ScheduledWork::pull(registry, image.split(':').next().unwrap_or_default(), demand)
    }

    /// Demand of commands.
    fn demand(is_urgent: bool) -> WorkDemand {
        WorkDemand::new(is_urgent, Callers::new(""))
    }

    fn is_recalled(slot: &WorkSlot) -> bool {
        slot.recall.notified().now_or_never().is_some()
    }

    #[test]
    fn a_caller_that_joins_waiting_work_is_one_of_what_that_waits_for() {
        let [first, second] = ["first", "second"].map(Callers::new);
        let layer = first.of_part();
        layer.add(&second.of_part());
        let joined = Callers::new("joined");
        second.add(&joined);
        second.add(&Callers::new("joined"));
        assert_eq!(second.0.added.lock().len(), 1, "many calls of one caller");
        assert!(layer.hashes().contains(&hash("joined")) && layer.hashes().len() == 3);
        assert_eq!(first.hashes().len(), 1, "its other layers are not theirs");
    }

    #[test]
    fn urgent_requests_are_first_and_the_others_in_order_of_arrival() {
        let scheduler = Scheduler::new(1, SlotRecall::Never);
        let (urgent, idle) = (demand(true), demand(false));
        let first = scheduler.acquire(&pull("a", &idle)).now_or_never().expect("it is free");
        let later = demand(false);
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
        later.add(&urgent);
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
        let scheduler = Scheduler::new(1, SlotRecall::Never);
        let work = pull("a", &demand(false));
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
        let scheduler = Scheduler::new(1, SlotRecall::Never);
        let idle = pull("a", &demand(false));
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
        let urgent = demand(true);
        let take =
            |image: &&str| scheduler.acquire(&pull(image, &urgent)).now_or_never().expect("it is free");
        let held: Vec<_> = running.iter().map(take).collect();
        let late = pull(waiting.0, &demand(waiting.1));
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
        let urgent = demand(true);
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
            (Scheduler::new(1, SlotRecall::Never), false),
        ] {
            let urgent = demand(true);
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
            let (pod, held) = (demand(true), demand(is_urgent));
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
        let scheduler = Scheduler::new(2, SlotRecall::Never);
        let urgent = demand(true);
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
        layer_of("", repository)
    }

    fn layer_of(namespace: &str, repository: &str) -> ScheduledWork {
        ScheduledWork::layer(
            &Callers::new(namespace),
            repository.split('/').next().unwrap_or_default(),
            repository,
        )
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
        let mut rate = |now| window.observe(now, received(now));
        granted
            .gives_way(minimum, |now| WorkRate::of(rate(now), minimum.bytes_per_second, WorkRate::Fast))
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

    #[tokio::test(start_paused = true)]
    async fn the_only_slot_of_a_slow_caller_is_not_for_one_that_has_another() {
        let scheduler = Scheduler::new(2, SlotRecall::LargestShare);
        let [slow, fast] = ["slow", "fast"].map(|namespace| WorkDemand::new(true, Callers::new(namespace)));
        let only = scheduler.acquire(&pull("slow.example/a", &slow)).await;
        let _other = scheduler.acquire(&pull("a.example/a", &fast)).await;
        let next = pull("b.example/a", &fast);
        let waiting = time::timeout(Duration::from_secs(60), scheduler.acquire(&next));
        tokio::select! {
            outcome = waiting => assert!(outcome.is_err()),
            () = gives_way_at(&only, 0) => panic!("the two would stop each other without end"),
        }
    }

    #[test]
    fn a_caller_with_many_registries_has_one_share() {
        let scheduler = Scheduler::new(2, SlotRecall::Never);
        let hostile = ["a.example/a", "b.example/a", "c.example/a"].map(|name| layer_of("hostile", name));
        let honest = layer_of("honest", "d.example/a");
        let mut taken = hostile.each_ref().map(|work| Box::pin(scheduler.acquire(work)));
        let [first, _second, third] = taken.each_mut().map(FutureExt::now_or_never);
        let mut waiting = Box::pin(scheduler.acquire(&honest));
        assert!(first.is_some() && third.is_none() && (&mut waiting).now_or_never().is_none());
        drop(first);
        assert!(waiting.now_or_never().is_some(), "the other caller has a slot");
    }

    #[test]
    fn a_pull_of_several_callers_counts_for_the_one_with_the_fewest_slots() {
        let scheduler = Scheduler::new(2, SlotRecall::Never);
        let hostile = WorkDemand::new(true, Callers::new("hostile"));
        let joined = WorkDemand::new(true, Callers::new("hostile"));
        let [one, two, three] =
            ["a.example/a", "b.example/a", "c.example/a"].map(|name| pull(name, &hostile));
        let (first, _second) = (
            scheduler.acquire(&one).now_or_never().expect("it is free"),
            scheduler.acquire(&two).now_or_never().expect("it is free"),
        );
        let both = pull("d.example/a", &joined);
        let (mut three, mut both) = (Box::pin(scheduler.acquire(&three)), Box::pin(scheduler.acquire(&both)));
        assert!((&mut three).now_or_never().is_none() && (&mut both).now_or_never().is_none());
        joined.add(&WorkDemand::new(true, Callers::new("honest")));
        drop(first);
        assert!(three.now_or_never().is_none());
        assert!(both.now_or_never().is_some());
    }

    #[test]
    fn callers_of_a_pull_are_those_of_its_layers_and_a_layer_has_others_as_well() {
        let pull = Callers::new("hostile");
        let [wanted, other] = [pull.of_part(), pull.of_part()];
        wanted.add(&Callers::new("waits for this layer"));
        pull.add(&Callers::new("joins the pull"));
        assert_eq!([&pull, &wanted, &other].map(|callers| callers.hashes().len()), [2, 3, 2]);
        let callers = other.hashes();
        assert!(
            callers.contains(&hash("joins the pull")) && !callers.contains(&hash("waits for this layer"))
        );
    }

    /// The running work that is recalled when layers of these callers run and one of `honest` waits.
    fn recalled_for_honest(running: &[&str], rate: WorkRate) -> Vec<bool> {
        let scheduler = Scheduler::new(running.len(), SlotRecall::TimeSlice);
        let name = |at: usize| format!("r{at}.example/a");
        let take = |(at, namespace): (usize, &&str)| {
            scheduler.acquire(&layer_of(namespace, &name(at))).now_or_never().expect("it is free")
        };
        let slots: Vec<_> = running.iter().enumerate().map(take).collect();
        let waiting = layer_of("honest", "honest.example/a");
        let mut waiting = Box::pin(scheduler.acquire(&waiting));
        assert!((&mut waiting).now_or_never().is_none());
        assert!(!slots.iter().any(is_recalled), "no slice has ended");
        for slot in &slots {
            scheduler.state().observe(slot.id, rate);
        }
        slots.iter().map(is_recalled).collect()
    }

    #[test]
    fn a_slot_is_recalled_after_its_slice_for_a_caller_with_a_smaller_share() {
        use WorkRate::{Fast, Received, Unmeasured};
        assert_eq!(recalled_for_honest(&["hostile"; 2], Fast), [true, false], "whatever its rate");
        assert_eq!(recalled_for_honest(&["hostile"; 2], Unmeasured), [false; 2]);
        assert_eq!(recalled_for_honest(&["hostile"; 2], Received), [false; 2], "all of it is unpacked again");
        assert_eq!(recalled_for_honest(&["hostile", "other"], Fast), [true, false], "it has no slot");
        let hostile = ["honest", "hostile", "hostile"];
        assert_eq!(recalled_for_honest(&hostile, Fast), [false; 3], "the two would change places");
        let hostile = ["honest", "hostile", "hostile", "hostile"];
        assert_eq!(recalled_for_honest(&hostile, Fast), [false, true, false, false]);
        assert_eq!(recalled_for_honest(&["honest"; 2], Fast), [false; 2]);
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
