//! Ends the wait for a fill of which nothing comes.

use std::time::Duration;

use larder::backend::FillProblem;
use tokio::time::Instant;

/// Time between two looks at a fill that a pull waits for.
pub(super) const FILL_CHECK: Duration = Duration::from_secs(1);
/// A pull waits no longer for a fill of which nothing has come for this time, because of an error.
const FILL_STALLED: Duration = Duration::from_secs(120);

/// Watches whether data comes of a layer that is being filled.
#[derive(Debug)]
pub(super) struct FillWatch {
    filled_bytes: u64,
    /// When that was first seen.
    since: Instant,
}

impl FillWatch {
    pub(super) fn new(now: Instant) -> FillWatch {
        FillWatch { filled_bytes: 0, since: now }
    }

    /// The error because of which nothing has come for long.
    pub(super) fn failed(
        &mut self,
        filled_bytes: u64,
        problem: Option<FillProblem>,
        now: Instant,
    ) -> Option<String> {
        if filled_bytes != self.filled_bytes {
            *self = FillWatch { filled_bytes, since: now };
        }
        let is_stalled = now.duration_since(self.since) >= FILL_STALLED;
        problem.filter(|_| is_stalled).map(|problem| problem.reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_for_a_fill_ends_once_nothing_has_come_for_long_because_of_an_error() {
        let begun = Instant::now();
        let refused = || Some(FillProblem { reason: "r.example: connection refused".into(), retry_in: None });
        let mut watch = FillWatch::new(begun);
        let at = |seconds| begun + Duration::from_secs(seconds);
        assert_eq!(watch.failed(0, refused(), at(119)), None);
        assert_eq!(watch.failed(10, refused(), at(119)), None, "data comes");
        assert_eq!(watch.failed(10, None, at(500)), None, "slow, but nothing fails");
        assert_eq!(watch.failed(10, refused(), at(238)), None);
        assert_eq!(watch.failed(10, refused(), at(239)).as_deref(), Some("r.example: connection refused"));
    }
}
