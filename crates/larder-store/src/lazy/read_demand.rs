//! When the fill in the background gives way to reads that wait for data.
//!
//! Both share the link to the registry. While a read waits, and for a moment after, the background fetches nothing: a
//! program that starts reads one file after another. Under reads without end it gets a share of the time.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{self, Instant};

use super::fill_activity::{FetchPurpose, FillObserver, ReadEnd};

/// Time without a read that waits, until the background goes on.
const QUIET: Duration = Duration::from_millis(250);
/// Time from the end of a pull until a container of the image reads.
const START: Duration = Duration::from_millis(500);
/// Time for which the background gives way, at most.
const LONGEST_PAUSE: Duration = Duration::from_secs(3);
/// Time for which it then goes on whatever waits.
const SHARE: Duration = Duration::from_secs(1);

/// The reads that wait for data of a store's layers.
#[derive(Debug, Default)]
pub(crate) struct ReadDemand {
    state: Mutex<DemandState>,
    begun: Notify,
    /// The end of a pull has come.
    ended: Notify,
    observer: OnceLock<Arc<dyn FillObserver>>,
}

#[derive(Debug, Default)]
struct DemandState {
    waiting: usize,
    /// Pulls that wait until layers are complete.
    completing: usize,
    /// Until then, a read may follow the last one.
    quiet: Option<Instant>,
    /// Since when the background gives way.
    paused: Option<Instant>,
}

impl DemandState {
    /// Time for which the background has to pause before it asks again; `None` if it may go on.
    fn pause(&mut self, now: Instant) -> Option<Duration> {
        let expected = self.quiet.filter(|_| self.completing == 0);
        let quiet = if self.waiting > 0 { Some(now + QUIET) } else { expected };
        let Some(quiet) = quiet.filter(|quiet| *quiet > now) else {
            self.paused = None;
            return None;
        };
        let mut since = *self.paused.get_or_insert(now);
        if now.duration_since(since) >= LONGEST_PAUSE + SHARE {
            since = now;
            self.paused = Some(now);
        }
        let longest = (since + LONGEST_PAUSE).checked_duration_since(now).filter(|left| !left.is_zero());
        longest.map(|left| left.min(quiet - now))
    }
}

impl ReadDemand {
    /// A read waits until what is returned is dropped.
    pub(crate) fn begin(self: &Arc<Self>) -> DemandedRead {
        self.state.lock().waiting += 1;
        self.begun.notify_waiters();
        DemandedRead(Arc::clone(self))
    }

    /// An image has become startable: its pull ends soon.
    pub(crate) fn expect_end_of_pull(&self, now: Instant) {
        self.state.lock().quiet = Some(now + LONGEST_PAUSE);
    }

    /// A pull has ended: a container is about to start.
    pub(crate) fn expect_start(&self, now: Instant) {
        self.state.lock().quiet = Some(now + START);
        self.ended.notify_waiters();
    }

    /// A pull waits until layers are complete, as long as what is returned lives: the background gives way to reads
    /// that wait, but not to those that may follow.
    pub(crate) fn complete(self: &Arc<Self>) -> CompletionDemand {
        self.state.lock().completing += 1;
        self.ended.notify_waiters();
        CompletionDemand(Arc::clone(self))
    }

    /// Has everything counted from now on.
    pub(crate) fn observe_with(&self, observer: Arc<dyn FillObserver>) {
        let _ = self.observer.set(observer);
    }

    /// Counts a request for a range.
    pub(crate) fn note_request(&self, purpose: FetchPurpose) {
        if let Some(observer) = self.observer.get() {
            observer.range_requested(purpose);
        }
    }

    /// Counts bytes of ranges.
    pub(crate) fn note_bytes(&self, purpose: FetchPurpose, bytes: u64) {
        if let Some(observer) = self.observer.get() {
            observer.bytes_received(purpose, bytes);
        }
    }

    /// Counts the wait of a read.
    pub(crate) fn note_wait(&self, waited: Duration, end: ReadEnd) {
        if let Some(observer) = self.observer.get() {
            observer.read_waited(waited, end);
        }
    }

    /// Waits until the background may fetch.
    pub(crate) async fn quiet(&self) {
        loop {
            let ended = self.ended.notified();
            let Some(pause) = self.state.lock().pause(Instant::now()) else { return };
            let _ = time::timeout(pause, ended).await;
        }
    }

    /// Waits until the background has to give way.
    pub(crate) async fn wanted(&self) {
        loop {
            let begun = self.begun.notified();
            if self.state.lock().pause(Instant::now()).is_some() {
                return;
            }
            let _ = time::timeout(SHARE, begun).await;
        }
    }
}

/// A read that waits.
#[derive(Debug)]
pub(crate) struct DemandedRead(Arc<ReadDemand>);

impl Drop for DemandedRead {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.waiting -= 1;
        state.quiet = state.quiet.max(Some(Instant::now() + QUIET));
    }
}

/// A pull that waits until layers are complete.
#[derive(Debug)]
pub(crate) struct CompletionDemand(Arc<ReadDemand>);

impl Drop for CompletionDemand {
    fn drop(&mut self) {
        self.0.state.lock().completing -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOMENT: Duration = Duration::from_millis(1);

    #[tokio::test(start_paused = true)]
    async fn the_background_waits_for_reads_and_a_moment_after_them() {
        let demand = Arc::new(ReadDemand::default());
        let began = Instant::now();
        demand.quiet().await;
        assert_eq!(began.elapsed(), Duration::ZERO);
        let read = demand.begin();
        demand.wanted().await;
        time::sleep(QUIET * 3).await;
        drop(read);
        let ended = Instant::now();
        demand.quiet().await;
        assert!((QUIET..QUIET + MOMENT * 2).contains(&ended.elapsed()));
        assert!(time::timeout(SHARE * 5, demand.wanted()).await.is_err(), "nothing reads");
    }

    #[tokio::test(start_paused = true)]
    async fn the_background_waits_for_the_start_of_a_container() {
        let demand = Arc::new(ReadDemand::default());
        demand.expect_end_of_pull(Instant::now());
        demand.wanted().await;
        let ended = Instant::now() + MOMENT;
        let end = async {
            time::sleep_until(ended).await;
            demand.expect_start(ended);
            drop(demand.begin());
        };
        tokio::join!(demand.quiet(), end);
        assert!((START..START + MOMENT * 2).contains(&ended.elapsed()));
    }

    #[tokio::test(start_paused = true)]
    async fn for_a_pull_that_waits_the_background_gives_way_only_to_reads_that_wait() {
        let demand = Arc::new(ReadDemand::default());
        let began = Instant::now();
        demand.expect_start(began);
        let complete = async {
            time::sleep(MOMENT).await;
            demand.complete()
        };
        let ((), completing) = tokio::join!(demand.quiet(), complete);
        assert!(began.elapsed() < MOMENT * 3, "a start is no longer waited for");
        let read = demand.begin();
        demand.wanted().await;
        assert!(time::timeout(QUIET * 2, demand.quiet()).await.is_err());
        drop(read);
        demand.quiet().await;
        drop(completing);
        drop(demand.begin());
        assert!(time::timeout(QUIET / 2, demand.quiet()).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_read_stops_the_background_at_once() {
        let demand = Arc::new(ReadDemand::default());
        let (wanting, began) = (Arc::clone(&demand), Instant::now());
        let wanted = tokio::spawn(async move { wanting.wanted().await });
        time::sleep(MOMENT).await;
        let _read = demand.begin();
        wanted.await.unwrap();
        assert!(began.elapsed() <= MOMENT * 3);
    }

    #[tokio::test(start_paused = true)]
    async fn reads_without_end_leave_the_background_a_share() {
        let demand = Arc::new(ReadDemand::default());
        let _read = demand.begin();
        let (mut paused, mut ran) = (Duration::ZERO, Duration::ZERO);
        for _ in 0..10 {
            let at = Instant::now();
            demand.quiet().await;
            paused += at.elapsed();
            let at = Instant::now();
            demand.wanted().await;
            ran += at.elapsed();
        }
        let share = ran.as_secs_f64() / (ran + paused).as_secs_f64();
        assert!((0.2..0.4).contains(&share), "{share}");
    }
}
