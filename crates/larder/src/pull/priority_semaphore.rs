//! A semaphore with a priority queue.
//!
//! Promises: waiters get permits in order of arrival, urgent ones before all others; a permit for a dropped waiter goes
//! to the next; a new waiter never overtakes one with the same urgency.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

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

/// The semaphore.
#[derive(Debug)]
pub(super) struct PrioritySemaphore(Mutex<PermitQueue>);

#[derive(Debug)]
struct PermitQueue {
    free: usize,
    waiting: VecDeque<PermitWaiter>,
}

#[derive(Debug)]
struct PermitWaiter {
    urgency: QueuePriority,
    called: oneshot::Sender<()>,
}

impl PrioritySemaphore {
    /// A semaphore with this many permits.
    pub(super) fn new(places: usize) -> PrioritySemaphore {
        PrioritySemaphore(Mutex::new(PermitQueue { free: places, waiting: VecDeque::new() }))
    }

    /// Waits for a permit. Dropping the future leaves the queue.
    pub(super) async fn take(&self, urgency: &QueuePriority) -> PullPermit<'_> {
        let (called, call) = oneshot::channel();
        {
            let mut state = self.state();
            state.waiting.push_back(PermitWaiter { urgency: urgency.clone(), called });
            state.call();
        }
        let mut waiting = PermitRequest { turns: self, call, is_called: false };
        // A waiter leaves the queue only when called or dropped.
        let _ = (&mut waiting.call).await;
        waiting.is_called = true;
        PullPermit(self)
    }

    fn state(&self) -> MutexGuard<'_, PermitQueue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PermitQueue {
    /// Removes waiters that were dropped.
    fn leave(&mut self) {
        self.waiting.retain(|waiter| !waiter.called.is_closed());
    }

    /// Calls waiters while permits are free.
    fn call(&mut self) {
        while self.free > 0 {
            let urgent = self.waiting.iter().position(|waiter| waiter.urgency.is_urgent());
            let Some(next) = self.waiting.remove(urgent.unwrap_or(0)) else { return };
            if next.called.send(()).is_ok() {
                self.free -= 1;
            }
        }
    }
}

/// A waiter, which may be dropped even at the moment in which it is called.
struct PermitRequest<'a> {
    turns: &'a PrioritySemaphore,
    call: oneshot::Receiver<()>,
    is_called: bool,
}

impl Drop for PermitRequest<'_> {
    fn drop(&mut self) {
        if self.is_called {
            return;
        }
        let mut state = self.turns.state();
        self.call.close();
        if self.call.try_recv().is_ok() {
            state.free += 1;
            state.call();
        } else {
            state.leave();
        }
    }
}

/// A permit; dropping it passes it to the next waiter.
#[derive(Debug)]
pub(super) struct PullPermit<'a>(&'a PrioritySemaphore);

impl Drop for PullPermit<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.free += 1;
        state.call();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn urgent_requests_are_first_and_the_others_in_order_of_arrival() {
        let turns = PrioritySemaphore::new(1);
        let (urgent, idle) = (QueuePriority::new(true), QueuePriority::new(false));
        let first = turns.take(&idle).now_or_never().expect("it is free");
        let later = QueuePriority::new(false);
        let mut waiting =
            [&idle, &later, &urgent, &urgent].map(|urgency| Some(Box::pin(turns.take(urgency))));
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
        let idle = QueuePriority::new(false);
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
}
