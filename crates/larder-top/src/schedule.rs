//! When the node is asked. Pure. Every call is made at most once at a time, and a status at most once a second.

use std::time::Duration;

use larder_api::v1::StatusResponse;
use tokio::time::Instant;

use crate::calls::Call;

/// Between two statuses while pulls or a GC round run.
const ACTIVE: Duration = Duration::from_secs(1);
/// Between two statuses otherwise.
const IDLE: Duration = Duration::from_secs(2);
/// The longest time between two tries of a connection.
const RETRY: Duration = Duration::from_secs(5);
/// Images are listed again at the earliest after this, when some were pulled or removed.
const AFTER_CHANGE: Duration = Duration::from_secs(2);
/// Images are listed again after this, for uses that no status shows.
const LIST: Duration = Duration::from_secs(60);
/// A list of images takes at most this part of the time: one that took a second is not repeated for 20.
const SHARE: u32 = 20;

/// Times and outcomes of the last calls.
#[derive(Debug, Default)]
pub(crate) struct Schedule {
    status: Task,
    images: Task,
    history: Task,
    /// Statuses that failed in a row.
    failures: u32,
    active: bool,
    /// State that an image list depends on, as of the last status.
    basis: Option<ListBasis>,
    images_changed: bool,
    history_changed: bool,
}

#[derive(Debug, Default)]
struct Task {
    /// When the running call began.
    running: Option<Instant>,
    ended: Option<Instant>,
    took: Duration,
}

/// If any of this changes, images did.
#[derive(Debug, PartialEq, Eq)]
struct ListBasis {
    pid: i32,
    images_bytes: u64,
    rounds: u64,
    removed: u32,
    events: u64,
}

impl Task {
    fn begin(&mut self, now: Instant) {
        self.running = Some(now);
    }

    fn end(&mut self, now: Instant) {
        let began = self.running.take().unwrap_or(now);
        (self.ended, self.took) = (Some(now), now.saturating_duration_since(began));
    }

    /// When it may begin, `after` the last one; `None` while it runs.
    fn due(&self, now: Instant, after: Duration) -> Option<Instant> {
        match (self.running, self.ended) {
            (Some(_), _) => None,
            (None, None) => Some(now),
            (None, Some(ended)) => Some(ended + after),
        }
    }
}

impl Schedule {
    /// The calls that are due, which count as begun. `history` is whether removals are in view.
    pub(crate) fn take_due(&mut self, now: Instant, history: bool) -> Vec<Call> {
        let mut calls = Vec::new();
        if self.status_due(now).is_some_and(|due| due <= now) {
            self.status.begin(now);
            calls.push(Call::Status);
        }
        if !self.is_connected() {
            return calls; // nothing can be asked before the first status
        }
        if self.images_due(now).is_some_and(|due| due <= now) {
            self.images.begin(now);
            self.images_changed = false;
            calls.push(Call::Images);
        }
        let unread = self.history.ended.is_none() || self.history_changed;
        if history && unread && self.history.due(now, AFTER_CHANGE).is_some_and(|due| due <= now) {
            self.history.begin(now);
            self.history_changed = false;
            calls.push(Call::History);
        }
        calls
    }

    /// When to look again.
    pub(crate) fn next(&self, now: Instant) -> Instant {
        // Without a status, no list is asked for, however long one is due.
        let images = if self.is_connected() { self.images_due(now) } else { None };
        let due = [self.status_due(now), images];
        due.into_iter().flatten().min().unwrap_or(now + IDLE).max(now + Duration::from_millis(100))
    }

    /// Notes the end of a call, if it is one of these.
    pub(crate) fn ended(&mut self, call: &Call, now: Instant) {
        match call {
            Call::Status => self.status.end(now),
            Call::Images => self.images.end(now),
            Call::History => self.history.end(now),
            Call::Remove { .. } | Call::ToggleKeep { .. } => self.images_changed = true,
            Call::Explain { .. } => {}
        }
    }

    /// Notes a status.
    pub(crate) fn received(&mut self, status: &StatusResponse) {
        let gc = status.gc.as_ref();
        let round = gc.and_then(|gc| gc.round.as_ref());
        self.failures = 0;
        self.active = !status.pulls.is_empty() || round.is_some() || gc.is_some_and(|gc| gc.running);
        let basis = ListBasis {
            pid: status.pid,
            images_bytes: status.images_bytes,
            rounds: gc.map_or(0, |gc| gc.rounds),
            removed: round.map_or(0, |round| round.removed_images),
            events: status.next_event,
        };
        let is_changed = self.basis.as_ref().is_some_and(|before| *before != basis);
        self.images_changed |= is_changed;
        self.history_changed |= is_changed;
        self.basis = Some(basis);
    }

    /// Notes that a status failed.
    pub(crate) fn failed(&mut self) {
        self.failures += 1;
    }

    /// Lists images again soon.
    pub(crate) fn refresh(&mut self) {
        (self.images_changed, self.history_changed) = (true, true);
    }

    /// Whether the last status was answered.
    fn is_connected(&self) -> bool {
        self.basis.is_some() && self.failures == 0
    }

    fn status_due(&self, now: Instant) -> Option<Instant> {
        let after = match self.failures {
            0 if self.active => ACTIVE,
            0 => IDLE,
            failures => (ACTIVE * failures).min(RETRY),
        };
        self.status.due(now, after)
    }

    fn images_due(&self, now: Instant) -> Option<Instant> {
        let after = if self.images_changed { AFTER_CHANGE } else { LIST };
        self.images.due(now, after.max(self.images.took * SHARE))
    }
}

#[cfg(test)]
mod tests {
    use larder_api::v1::{GcStatus, Pull};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn idle() -> StatusResponse {
        StatusResponse { gc: Some(GcStatus::default()), ..StatusResponse::default() }
    }

    #[test]
    fn an_idle_node_is_asked_every_two_seconds_and_its_images_once_a_minute() {
        let (mut schedule, start) = (Schedule::default(), Instant::now());
        let (mut statuses, mut lists, mut now) = (0, 0, start);
        while now < start + 600 * SECOND {
            for call in schedule.take_due(now, false) {
                match call {
                    Call::Status => {
                        statuses += 1;
                        schedule.received(&idle());
                    }
                    Call::Images => lists += 1,
                    other => panic!("{other:?}"),
                }
                schedule.ended(&call, now);
            }
            now = schedule.next(now);
        }
        assert!((290..=301).contains(&statuses) && (9..=11).contains(&lists), "{statuses} {lists}");
    }

    #[test]
    fn pulls_are_watched_each_second_and_changed_images_are_listed() {
        let (mut schedule, start) = (Schedule::default(), Instant::now());
        assert_eq!(schedule.take_due(start, true), [Call::Status]);
        assert_eq!(schedule.take_due(start + 60 * SECOND, true), [], "one at a time");
        schedule.ended(&Call::Status, start);
        schedule.received(&StatusResponse { pulls: vec![Pull::default()], ..idle() });
        assert_eq!(schedule.take_due(start, true), [Call::Images, Call::History]);
        schedule.ended(&Call::Images, start);
        schedule.ended(&Call::History, start);
        assert_eq!(schedule.take_due(start + SECOND, true), [Call::Status]);
        schedule.ended(&Call::Status, start + SECOND);
        schedule.received(&StatusResponse { images_bytes: 7, ..idle() });
        let due = schedule.take_due(start + 2 * SECOND, true);
        assert_eq!(due, [Call::Images, Call::History], "the pull has ended");
    }

    #[test]
    fn a_list_that_takes_long_is_repeated_rarely() {
        let (mut schedule, start) = (Schedule::default(), Instant::now());
        schedule.take_due(start, false);
        schedule.ended(&Call::Status, start);
        schedule.received(&idle());
        assert_eq!(schedule.take_due(start, false), [Call::Images]);
        schedule.ended(&Call::Images, start + 5 * SECOND);
        schedule.refresh();
        assert!(!schedule.take_due(start + 104 * SECOND, false).contains(&Call::Images));
        assert!(schedule.take_due(start + 105 * SECOND, false).contains(&Call::Images));
    }

    #[test]
    fn a_lost_connection_is_tried_again_at_growing_intervals() {
        let (mut schedule, start) = (Schedule::default(), Instant::now());
        let (mut now, mut tries, mut wakeups) = (start, 0, 0);
        // It was connected, and a list of images was due since.
        schedule.take_due(now, true);
        schedule.ended(&Call::Status, now);
        schedule.received(&idle());
        schedule.failed();
        while now < start + 60 * SECOND {
            wakeups += 1;
            for call in schedule.take_due(now, true) {
                assert_eq!(call, Call::Status);
                tries += 1;
                schedule.ended(&call, now);
                schedule.failed();
            }
            now = schedule.next(now);
        }
        assert!((12..=16).contains(&tries), "{tries}");
        assert!(wakeups <= tries + 1, "{wakeups} wake-ups for {tries} tries");
    }

    #[test]
    fn a_status_that_failed_slowly_is_tried_again_as_soon_as_one_that_failed_at_once() {
        let (mut schedule, start) = (Schedule::default(), Instant::now());
        let (mut now, mut began) = (start, Vec::new());
        while now < start + 300 * SECOND {
            for call in schedule.take_due(now, true) {
                assert_eq!(call, Call::Status);
                began.push(now - start);
                now += 20 * SECOND; // no answer
                schedule.ended(&call, now);
                schedule.failed();
            }
            now = schedule.next(now);
        }
        assert_eq!(began[..3], [0, 21, 43].map(Duration::from_secs));
        let longest = began.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).max();
        assert_eq!(longest, Some(25 * SECOND), "{began:?}");
    }
}
