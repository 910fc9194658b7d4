//! Where the data of incomplete layers comes from, why it does not come, and how much was fetched for which purpose.

use std::fmt;
use std::time::Duration;

use larder::backend::FillProblem;
use larder_registry::{FetchNotice, FetchWait};
use parking_lot::Mutex;
use tokio::time::Instant;

/// Why bytes of an incomplete layer are fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FetchPurpose {
    /// A read waits for them.
    Read,
    /// A read is likely to follow.
    ReadAhead,
    /// The layer has to become complete.
    Fill,
}

impl FetchPurpose {
    /// All of them.
    pub const ALL: [FetchPurpose; 3] = [FetchPurpose::Read, FetchPurpose::ReadAhead, FetchPurpose::Fill];

    /// Its word in metrics.
    pub fn word(self) -> &'static str {
        match self {
            FetchPurpose::Read => "read",
            FetchPurpose::ReadAhead => "read_ahead",
            FetchPurpose::Fill => "fill",
        }
    }
}

/// How a read ended that has waited for data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadEnd {
    /// It got the data.
    Data,
    /// It failed.
    Error,
}

/// Counts what happens to incomplete layers. Must be quick.
pub trait FillObserver: fmt::Debug + Send + Sync {
    /// A registry was asked for a range.
    fn range_requested(&self, purpose: FetchPurpose);

    /// Bytes of ranges were received.
    fn bytes_received(&self, purpose: FetchPurpose, bytes: u64);

    /// A read that had to wait has ended.
    fn read_waited(&self, waited: Duration, end: ReadEnd);
}

/// The last that is known of the requests for a layer's data.
#[derive(Debug, Default)]
pub(crate) struct FillActivity(Mutex<ActivityState>);

#[derive(Debug, Default)]
struct ActivityState {
    /// The host that has sent data last.
    host: Option<String>,
    /// Why the request under way waits.
    wait: Option<FetchWait>,
    /// Why the last attempt failed, and when the next one begins. Unset once data comes.
    failure: Option<(String, Instant)>,
}

impl FillActivity {
    /// Records what a fetch in the background reports.
    pub(crate) fn note(&self, notice: &FetchNotice) {
        let mut state = self.0.lock();
        match notice {
            FetchNotice::Host(host) => state.host = Some(host.clone()),
            FetchNotice::Bytes(_) => state.failure = None,
            FetchNotice::Waiting(wait) => {
                state.wait = Some(wait.clone());
                return;
            }
            FetchNotice::Present(_) | FetchNotice::Resumed | FetchNotice::Warning(_) => {}
        }
        state.wait = None;
    }

    /// Records that data has come.
    pub(crate) fn note_data(&self) {
        let mut state = self.0.lock();
        (state.wait, state.failure) = (None, None);
    }

    /// Records a failure; the next attempt begins at `retry`.
    pub(crate) fn note_failure(&self, reason: String, retry: Instant) {
        self.0.lock().failure = Some((reason, retry));
    }

    /// The host that has sent data last.
    pub(crate) fn host(&self) -> Option<String> {
        self.0.lock().host.clone()
    }

    /// Why data does not come, as seen at `now`.
    pub(crate) fn problem(&self, now: Instant) -> Option<FillProblem> {
        let state = self.0.lock();
        let failure = state.failure.clone().map(|(reason, retry)| (reason, Some(retry)));
        let wait = || {
            let wait = state.wait.as_ref()?;
            let is_problem = matches!(wait, FetchWait::RateLimited { .. } | FetchWait::Retry { .. });
            is_problem.then(|| wait.to_pull_wait()).map(|wait| (wait.reason, wait.until))
        };
        let (reason, retry) = failure.or_else(wait)?;
        let retry_in = retry.map(|retry| retry.saturating_duration_since(now));
        // The next attempt has begun.
        Some(FillProblem { reason, retry_in: retry_in.filter(|wait| !wait.is_zero()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_problem_lasts_until_data_comes() {
        let (activity, now) = (FillActivity::default(), Instant::now());
        assert_eq!(activity.problem(now), None);
        let until = now + Duration::from_secs(9);
        let wait = |wait| activity.note(&FetchNotice::Waiting(wait));
        wait(FetchWait::Connection { host: "r.example".into() });
        assert_eq!(activity.problem(now), None, "it is busy");
        wait(FetchWait::RateLimited { host: "r.example".into(), until });
        let problem = |reason: &str, seconds| {
            let retry_in = Some(Duration::from_secs(seconds));
            Some(FillProblem { reason: reason.into(), retry_in })
        };
        assert_eq!(activity.problem(now), problem("rate limited by r.example", 9));
        activity.note(&FetchNotice::Resumed);
        assert_eq!(activity.problem(now), None);
        activity.note_failure("refused".into(), until);
        activity.note(&FetchNotice::Host("m.example".into()));
        assert_eq!(activity.problem(now + Duration::from_secs(2)), problem("refused", 7));
        let begun = FillProblem { reason: "refused".into(), retry_in: None };
        assert_eq!(activity.problem(until + Duration::from_secs(2)), Some(begun));
        activity.note(&FetchNotice::Bytes(1));
        assert_eq!((activity.problem(now), activity.host().as_deref()), (None, Some("m.example")));
    }
}
