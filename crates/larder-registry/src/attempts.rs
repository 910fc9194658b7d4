//! Attempts of requests: which failures are worth another one at the same host, and after which wait.

use std::fmt;
use std::time::Duration;

use larder::retry::{RetryAdvice, RetryClock, RetryPolicy};
use tokio::time::{self, Instant};

use super::config::RegistryConfig;
use super::error::FetchErrorKind;
use super::fetch_notice::{FetchNotice, FetchWait, FetchWatcher};

/// The retries of requests to one host; fewer where other hosts are left.
pub(crate) fn retry_policy(config: &RegistryConfig, has_fallback: bool) -> RetryPolicy {
    let attempts = if has_fallback { config.tries_of_mirror } else { config.tries };
    let (initial, max) = (config.retry_initial, config.retry_max);
    RetryPolicy { attempts: Some(attempts.max(1)), initial, max, spread: true }
}

/// The facts that decide whether a failed request to a host is worth another attempt.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttemptContext {
    /// Whether other hosts are left.
    pub(crate) has_fallback: bool,
    /// Whether this is the first request to the host, which also shows whether its address is right. Later, a refused
    /// connection is an interruption.
    pub(crate) is_first_contact: bool,
    /// Longest wait that a registry may request.
    pub(crate) longest_hold: Duration,
}

impl AttemptContext {
    /// Whether another attempt at the same host is worth it after this failure.
    pub(crate) fn advice(&self, failure: &FetchErrorKind, progressed: bool) -> RetryAdvice {
        match failure {
            failure if !failure.is_passing() => RetryAdvice::GiveUp,
            failure if self.is_first_contact && failure.is_wrong_address() => RetryAdvice::GiveUp,
            // Another host answers before this one recovers.
            FetchErrorKind::RateLimited { .. }
            | FetchErrorKind::Unreachable(_)
            | FetchErrorKind::NoAnswer(_)
                if self.has_fallback =>
            {
                RetryAdvice::GiveUp
            }
            FetchErrorKind::RateLimited { after: Some(after), .. } if *after <= self.longest_hold => {
                RetryAdvice::After(*after)
            }
            FetchErrorKind::RateLimited { after: Some(_), .. } => RetryAdvice::GiveUp,
            _ if progressed => RetryAdvice::Restart,
            _ => RetryAdvice::Backoff,
        }
    }
}

/// Sleeps, and notifies the observer of the fetch.
#[derive(Debug)]
pub(crate) struct NoticeClock<'a> {
    pub(crate) watcher: &'a FetchWatcher,
    /// The host that is retried.
    pub(crate) host: String,
}

impl<E: fmt::Display + Sync> RetryClock<E> for NoticeClock<'_> {
    async fn wait(&self, wait: Duration, failure: &E) {
        let (host, until, reason) = (self.host.clone(), Instant::now() + wait, failure.to_string());
        self.watcher.notify(FetchNotice::Waiting(FetchWait::Retry { host, until, reason }));
        time::sleep_until(until).await;
        self.watcher.notify(FetchNotice::Resumed);
    }
}

#[cfg(test)]
mod tests {
    use RetryAdvice::{After, Backoff, GiveUp, Restart};

    use super::*;
    use crate::error::ErrorResponse;
    use crate::tls::TlsProblem;

    const MINUTE: Duration = Duration::from_secs(60);
    const LAST: AttemptContext =
        AttemptContext { has_fallback: false, is_first_contact: false, longest_hold: MINUTE };
    const MIRROR: AttemptContext = AttemptContext { has_fallback: true, ..LAST };

    fn failing() -> FetchErrorKind {
        FetchErrorKind::Failing(ErrorResponse::new(500, ""))
    }

    fn rate_limited(after: Option<Duration>) -> FetchErrorKind {
        FetchErrorKind::RateLimited { answer: ErrorResponse::new(429, ""), after }
    }

    #[test]
    fn permanent_errors_are_not_retried() {
        let answer = || ErrorResponse::new(404, "");
        for failure in [
            FetchErrorKind::NotFound(answer()),
            FetchErrorKind::Denied(answer()),
            FetchErrorKind::Refused(answer()),
            FetchErrorKind::BadReply("x".into()),
            FetchErrorKind::Tls(TlsProblem::PlainHttp),
            FetchErrorKind::TooLarge { limit: 1 },
        ] {
            assert_eq!(LAST.advice(&failure, true), GiveUp, "{failure}");
        }
        assert_eq!(LAST.advice(&failing(), false), Backoff);
        assert_eq!(LAST.advice(&failing(), true), Restart);
    }

    #[test]
    fn a_mirror_has_fewer_attempts_and_none_when_unreachable_or_busy() {
        let config = RegistryConfig::default();
        assert_eq!([true, false].map(|mirror| retry_policy(&config, mirror).attempts), [Some(2), Some(5)]);
        assert_eq!(MIRROR.advice(&failing(), false), Backoff);
        assert_eq!(MIRROR.advice(&rate_limited(None), false), GiveUp);
        assert_eq!(MIRROR.advice(&FetchErrorKind::Unreachable("gone".into()), false), GiveUp);
    }

    #[test]
    fn a_wrong_address_is_retried_only_after_the_first_contact() {
        let first = AttemptContext { is_first_contact: true, ..LAST };
        for text in
            ["tcp connect error: Connection refused (os error 111)", "dns error: Name or service not known"]
        {
            let failure = FetchErrorKind::Unreachable(text.into());
            assert_eq!(first.advice(&failure, false), GiveUp, "{text}");
            assert_eq!(LAST.advice(&failure, false), Backoff, "a registry that restarts");
        }
        let passing = FetchErrorKind::Unreachable("dns error: Temporary failure in name resolution".into());
        assert_eq!(first.advice(&passing, false), Backoff);
    }

    #[test]
    fn a_requested_wait_is_obeyed_unless_it_is_too_long() {
        assert_eq!(LAST.advice(&rate_limited(Some(MINUTE)), false), After(MINUTE));
        let longer = MINUTE + Duration::from_secs(1);
        assert_eq!(LAST.advice(&rate_limited(Some(longer)), false), GiveUp);
        assert_eq!(LAST.advice(&rate_limited(None), false), Backoff);
    }
}
