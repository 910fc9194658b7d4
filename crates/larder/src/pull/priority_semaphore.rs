//! A semaphore with a priority queue that is fair to registries.
//!
//! Promises: never more permits than places; urgent waiters get permits before all others, then those of the registry, and
//! of the repository, with the fewest permits, then in order of arrival; the next waiter gets the permit of a dropped one.
//! With recalls, a registry does not hold several permits while another one has none, and a slow repository none while
//! a fast one waits: a permit is recalled. A recalled pull never takes its permit back from the one that got it.

use std::collections::{HashSet, VecDeque};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, oneshot};

use crate::reference::{ImageName, Reference};

/// How many slow repositories are remembered.
const MAX_SLOW: usize = 10_000;

/// Whether a pull is queued before prefetches. Clones share it, and it may be raised while the pull is queued.
#[derive(Debug, Clone)]
pub(super) struct QueuePriority(Arc<AtomicBool>);

impl QueuePriority {
    pub(super) fn new(urgent: bool) -> QueuePriority {
        QueuePriority(Arc::new(AtomicBool::new(urgent)))
    }

    pub(super) fn is_urgent(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Raises this priority to the other, if that is higher.
    pub(super) fn raise_to(&self, other: &QueuePriority) {
        self.0.fetch_or(other.is_urgent(), Ordering::Relaxed);
    }
}

/// A pull in the queue or at work.
/// Names are hashed: thousands of pulls may wait, and each permit compares all of them.
#[derive(Debug, Clone)]
pub(super) struct QueuedPull {
    registry: u64,
    /// With the registry.
    repository: u64,
    urgency: QueuePriority,
}

impl QueuedPull {
    /// The pull of this image. Names without a registry, such as IDs, share one.
    pub(super) fn new(image: &ImageName, urgency: &QueuePriority) -> QueuedPull {
        let name = Reference::parse(image.as_str()).ok();
        let registry = hash(name.as_ref().map_or("", Reference::registry));
        let repository = hash(name.as_ref().map_or("", Reference::name));
        QueuedPull { registry, repository, urgency: urgency.clone() }
    }

    /// A pull whose place in a queue depends on nothing but its priority.
    pub(super) fn in_order(urgency: &QueuePriority) -> QueuedPull {
        QueuedPull { registry: 0, repository: 0, urgency: urgency.clone() }
    }

    /// Whether this pull may take a permit from the other.
    fn may_displace(&self, other: &QueuedPull) -> bool {
        self.repository != other.repository && (self.urgency.is_urgent() || !other.urgency.is_urgent())
    }
}

fn hash(name: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}

/// The semaphore.
#[derive(Debug)]
pub(super) struct PrioritySemaphore(Mutex<PermitQueue>);

#[derive(Debug)]
struct PermitQueue {
    places: usize,
    recalls: bool,
    next_id: u64,
    /// In order of arrival.
    waiting: VecDeque<PermitWaiter>,
    /// In the order in which the permits were given.
    held: Vec<HeldPermit>,
    /// The repositories whose last pull was slow.
    slow: HashSet<u64>,
}

#[derive(Debug)]
struct PermitWaiter {
    id: u64,
    pull: QueuedPull,
    recall: Arc<Notify>,
    called: oneshot::Sender<()>,
}

#[derive(Debug)]
struct HeldPermit {
    id: u64,
    pull: QueuedPull,
    recall: Arc<Notify>,
    is_recalled: bool,
}

impl PrioritySemaphore {
    /// A semaphore with this many permits, which recalls none.
    pub(super) fn new(places: usize) -> PrioritySemaphore {
        let (waiting, held, slow) = Default::default();
        PrioritySemaphore(Mutex::new(PermitQueue { places, recalls: false, next_id: 0, waiting, held, slow }))
    }

    /// Also recalls permits.
    pub(super) fn with_recalls(places: usize) -> PrioritySemaphore {
        let semaphore = PrioritySemaphore::new(places);
        semaphore.state().recalls = true;
        semaphore
    }

    /// Waits for a permit. Dropping the future leaves the queue.
    pub(super) async fn take(&self, pull: &QueuedPull) -> PullPermit<'_> {
        let (called, call) = oneshot::channel();
        let recall = Arc::new(Notify::new());
        let id = self.state().enqueue(pull.clone(), Arc::clone(&recall), called);
        let permit = PullPermit { turns: self, id, recall };
        // A waiter leaves the queue only when called or dropped.
        let _ = call.await;
        permit
    }

    fn state(&self) -> MutexGuard<'_, PermitQueue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PermitQueue {
    fn enqueue(&mut self, pull: QueuedPull, recall: Arc<Notify>, called: oneshot::Sender<()>) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.waiting.push_back(PermitWaiter { id, pull, recall, called });
        self.give();
        id
    }

    /// Removes a waiter or a permit.
    fn leave(&mut self, id: u64) {
        self.waiting.retain(|waiter| waiter.id != id);
        self.held.retain(|held| held.id != id);
        self.give();
    }

    /// Gives free permits to waiters, and recalls one if none is free.
    fn give(&mut self) {
        while self.held.len() < self.places {
            let Some(PermitWaiter { id, pull, recall, called }) =
                self.next().and_then(|next| self.waiting.remove(next))
            else {
                return;
            };
            // If the receiver is gone, its permit is dropped next.
            let _ = called.send(());
            self.held.push(HeldPermit { id, pull, recall, is_recalled: false });
        }
        if self.recalls
            && !self.held.iter().any(|held| held.is_recalled)
            && let Some(chosen) = self.waiting.iter().find_map(|waiter| self.displaced_by(&waiter.pull))
            && let Some(held) = self.held.get_mut(chosen)
        {
            held.is_recalled = true;
            held.recall.notify_one();
        }
    }

    /// The index of the waiter that is next.
    fn next(&self) -> Option<usize> {
        let order = |(at, waiter): &(usize, &PermitWaiter)| {
            let PermitWaiter { pull, .. } = waiter;
            // Its permit would be recalled at once.
            let is_behind = self.recalls && self.is_slow(pull);
            (!pull.urgency.is_urgent(), is_behind, self.of_registry(pull), self.of_repository(pull), *at)
        };
        self.waiting.iter().enumerate().min_by_key(order).map(|(at, _)| at)
    }

    /// The index of the permit that is to be recalled for this waiter: the latest of a slow repository, else the latest of
    /// a registry, or a repository of the same registry, with several, if that of the waiter has none. None that would be
    /// recalled from the waiter again.
    fn displaced_by(&self, waiter: &QueuedPull) -> Option<usize> {
        // The first of these displaces the second at any share.
        let precedes = |fast: &QueuedPull, slow: &QueuedPull| {
            !self.is_slow(fast) && self.is_slow(slow) && fast.may_displace(slow)
        };
        let share = |held: &QueuedPull| match self.of_registry(waiter) {
            0 => self.of_registry(held),
            _ if self.of_repository(waiter) == 0 && held.registry == waiter.registry => {
                self.of_repository(held)
            }
            _ => 0,
        };
        let order = |held: &QueuedPull| match share(held) {
            _ if precedes(waiter, held) => usize::MAX,
            _ if precedes(held, waiter) => 0,
            share => share,
        };
        let held = self.held.iter().enumerate().filter(|(_, held)| waiter.may_displace(&held.pull));
        let ordered = held.map(|(at, held)| (order(&held.pull), at));
        ordered.filter(|(order, _)| *order > 1).max().map(|(_, at)| at)
    }

    fn is_slow(&self, pull: &QueuedPull) -> bool {
        self.slow.contains(&pull.repository)
    }

    fn of_registry(&self, pull: &QueuedPull) -> usize {
        self.held.iter().filter(|held| held.pull.registry == pull.registry).count()
    }

    fn of_repository(&self, pull: &QueuedPull) -> usize {
        self.held.iter().filter(|held| held.pull.repository == pull.repository).count()
    }
}

/// A permit, or a place in the queue; dropping it passes it to the next waiter.
#[derive(Debug)]
pub(super) struct PullPermit<'a> {
    turns: &'a PrioritySemaphore,
    id: u64,
    recall: Arc<Notify>,
}

impl PullPermit<'_> {
    /// Ends when another registry or repository needs the permit more.
    pub(super) async fn recalled(&self) {
        self.recall.notified().await;
    }

    /// Notes whether the pull is slow, for this one and the next pulls of its repository.
    pub(super) fn set_slow(&self, is_slow: bool) {
        let mut state = self.turns.state();
        let own = state.held.iter().find(|held| held.id == self.id);
        let Some(repository) = own.map(|own| own.pull.repository) else { return };
        if !is_slow {
            state.slow.remove(&repository);
            return;
        }
        if state.slow.len() >= MAX_SLOW {
            state.slow.clear();
        }
        state.slow.insert(repository);
        state.give();
    }

    /// Whether a pull from another repository waits for a permit.
    pub(super) fn is_wanted(&self) -> bool {
        let state = self.turns.state();
        let own = state.held.iter().find(|held| held.id == self.id);
        own.is_some_and(|own| state.waiting.iter().any(|waiter| waiter.pull.may_displace(&own.pull)))
    }
}

impl Drop for PullPermit<'_> {
    fn drop(&mut self) {
        self.turns.state().leave(self.id);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn pull(image: &str, urgency: &QueuePriority) -> QueuedPull {
        QueuedPull::new(&ImageName::from(image), urgency)
    }

    #[test]
    fn urgent_requests_are_first_and_the_others_in_order_of_arrival() {
        let turns = PrioritySemaphore::new(1);
        let (urgent, idle) = (QueuePriority::new(true), QueuePriority::new(false));
        let first = turns.take(&pull("a", &idle)).now_or_never().expect("it is free");
        let later = QueuePriority::new(false);
        let pulls = [&idle, &later, &urgent, &urgent].map(|urgency| pull("a", urgency));
        let mut waiting = pulls.each_ref().map(|pull| Some(Box::pin(turns.take(pull))));
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
    fn a_slot_is_released_when_its_caller_disconnects() {
        let turns = PrioritySemaphore::new(1);
        let idle = pull("a", &QueuePriority::new(false));
        let place = turns.take(&idle).now_or_never().expect("it is free");
        let (mut one, mut two, mut three) =
            (Box::pin(turns.take(&idle)), Box::pin(turns.take(&idle)), Box::pin(turns.take(&idle)));
        for waiting in [&mut one, &mut two, &mut three] {
            assert!(waiting.now_or_never().is_none());
        }
        drop(one);
        assert_eq!(turns.state().waiting.len(), 2, "who leaves is forgotten at once");
        drop(place); // calls the second, which goes away before it hears of it
        drop(two);
        assert!(three.now_or_never().is_some());
        assert!(turns.take(&idle).now_or_never().is_some());
    }

    /// The images whose permits are recalled when a pull waits while these run.
    fn recalled(running: &[&str], waiting: (&str, bool)) -> Vec<String> {
        let turns = PrioritySemaphore::with_recalls(running.len());
        let urgent = QueuePriority::new(true);
        let take = |image: &&str| turns.take(&pull(image, &urgent)).now_or_never().expect("it is free");
        let held: Vec<_> = running.iter().map(take).collect();
        let late = pull(waiting.0, &QueuePriority::new(waiting.1));
        let mut late = Box::pin(turns.take(&late));
        assert!((&mut late).now_or_never().is_none());
        let recalled =
            running.iter().zip(&held).filter(|(_, permit)| permit.recalled().now_or_never().is_some());
        recalled.map(|(image, _)| (*image).to_owned()).collect()
    }

    #[test]
    fn a_registry_gives_one_of_its_permits_to_one_that_has_none() {
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
    fn a_slow_repository_gives_its_permit_to_others_until_it_is_fast() {
        let turns = PrioritySemaphore::with_recalls(1);
        let urgent = QueuePriority::new(true);
        let [slow, other] = ["slow.example/a", "other.example/a"].map(|name| pull(name, &urgent));
        let permit = turns.take(&slow).now_or_never().expect("it is free");
        permit.set_slow(true);
        drop(permit);
        let permit = turns.take(&slow).now_or_never().expect("it is free");
        let mut waiting = Box::pin(turns.take(&other));
        assert!((&mut waiting).now_or_never().is_none());
        assert!(permit.recalled().now_or_never().is_some(), "its last pull was slow");
        drop(permit);
        let permit = waiting.now_or_never().expect("it was given up");
        let mut waiting = Box::pin(turns.take(&slow));
        assert!((&mut waiting).now_or_never().is_none() && permit.recalled().now_or_never().is_none());
        drop(permit);
        let permit = waiting.now_or_never().expect("it is free");
        permit.set_slow(false);
        let mut waiting = Box::pin(turns.take(&other));
        assert!((&mut waiting).now_or_never().is_none() && permit.recalled().now_or_never().is_none());
    }

    #[test]
    fn a_slow_repository_waits_behind_others_where_permits_are_recalled() {
        for (turns, is_behind) in
            [(PrioritySemaphore::with_recalls(1), true), (PrioritySemaphore::new(1), false)]
        {
            let urgent = QueuePriority::new(true);
            let [slow, fast, other] =
                ["slow.example/a", "fast.example/a", "other.example/a"].map(|name| pull(name, &urgent));
            let permit = turns.take(&slow).now_or_never().expect("it is free");
            permit.set_slow(true);
            drop(permit);
            let permit = turns.take(&other).now_or_never().expect("it is free");
            let (mut slow, mut fast) = (Box::pin(turns.take(&slow)), Box::pin(turns.take(&fast)));
            assert!((&mut slow).now_or_never().is_none() && (&mut fast).now_or_never().is_none());
            drop(permit);
            assert_eq!(
                (slow.now_or_never().is_none(), fast.now_or_never().is_some()),
                (is_behind, is_behind)
            );
        }
    }

    #[test]
    fn a_slow_pull_takes_a_permit_from_a_fast_one_only_if_that_cannot_take_it_back() {
        for is_urgent in [true, false] {
            let turns = PrioritySemaphore::with_recalls(2);
            let (pod, held) = (QueuePriority::new(true), QueuePriority::new(is_urgent));
            let slow = pull("slow.example/a", &pod);
            let permit = turns.take(&slow).now_or_never().expect("it is free");
            permit.set_slow(true);
            drop(permit);
            let fast = ["fast.example/a", "fast.example/b"].map(|name| pull(name, &held));
            let permits = fast.each_ref().map(|pull| turns.take(pull).now_or_never().expect("it is free"));
            let mut slow = Box::pin(turns.take(&slow));
            assert!((&mut slow).now_or_never().is_none());
            let recalled = permits.each_ref().map(|permit| permit.recalled().now_or_never().is_some());
            assert_eq!(recalled, [false, !is_urgent]);
        }
    }

    #[test]
    fn a_free_permit_is_for_the_registry_with_the_fewest() {
        let turns = PrioritySemaphore::new(2);
        let urgent = QueuePriority::new(true);
        let pulls =
            ["a.example/a", "a.example/b", "a.example/c", "b.example/a"].map(|name| pull(name, &urgent));
        let mut taken = pulls.each_ref().map(|pull| Box::pin(turns.take(pull)));
        let [_first, second, third, other] = taken.each_mut().map(FutureExt::now_or_never);
        assert!(second.is_some() && third.is_none() && other.is_none());
        drop(second);
        let [_, _, third, other] = &mut taken;
        assert!(third.now_or_never().is_none());
        assert!(other.now_or_never().is_some());
    }
}
