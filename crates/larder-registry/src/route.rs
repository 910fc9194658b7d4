//! Which host gets the next request, and after which back-off. Pure; the random number is an argument.
//!
//! Hosts are tried in order. Temporary errors of a host are retried with growing back-off; errors that a retry cannot
//! change, or that persist, lead to the next host. Digests make hosts interchangeable, so a fetch that changes its host
//! resumes at the byte reached.

use std::time::Duration;

use super::config::RegistryConfig;
use super::error::FetchErrorKind;

/// Next step after a failure.
#[derive(Debug)]
pub(crate) enum RetryDecision {
    /// Retry at the same host after this time.
    Retry(Duration),
    /// Continue with the next host.
    NextHost,
    /// No host is left.
    GiveUp(FetchErrorKind),
}

/// The progress of one request through its hosts.
#[derive(Debug)]
pub(crate) struct HostRoute {
    hosts: usize,
    at: usize,
    tries: u32,
    /// Whether these are the first requests to the hosts, which also show whether the address is right.
    is_first_contact: bool,
    policy: RetryPolicy,
}

#[derive(Debug, Clone)]
struct RetryPolicy {
    tries: u32,
    tries_of_mirror: u32,
    initial: Duration,
    max: Duration,
    longest_hold: Duration,
}

impl HostRoute {
    /// A route through `hosts` hosts that begins at index `start`.
    pub(crate) fn new(config: &RegistryConfig, hosts: usize, start: usize) -> HostRoute {
        let policy = RetryPolicy {
            tries: config.tries.max(1),
            tries_of_mirror: config.tries_of_mirror.max(1),
            initial: config.retry_initial,
            max: config.retry_max,
            longest_hold: config.longest_hold,
        };
        HostRoute { hosts, at: start.min(hosts.saturating_sub(1)), tries: 0, is_first_contact: false, policy }
    }

    /// For the first requests of a pull: a wrong address is not retried. Later, a refused connection is an interruption.
    pub(crate) fn at_first_contact(self) -> HostRoute {
        HostRoute { is_first_contact: true, ..self }
    }

    /// The index of the host to use; valid until the route gives up.
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    /// Whether other hosts are left.
    pub(crate) fn has_fallback(&self) -> bool {
        self.at + 1 < self.hosts
    }

    /// Skips the present host if another is left.
    pub(crate) fn pass_over(&mut self) -> bool {
        let fallback = self.has_fallback();
        if fallback {
            self.at += 1;
            self.tries = 0;
        }
        fallback
    }

    /// Records progress, which resets the count of failures.
    pub(crate) fn progressed(&mut self) {
        self.tries = 0;
    }

    /// The decision after a failure. `dice` is any number; the back-off is drawn from it.
    pub(crate) fn failed(&mut self, failure: FetchErrorKind, dice: u64) -> RetryDecision {
        self.tries += 1;
        let fallback = self.has_fallback();
        let again = match &failure {
            failure if !failure.is_passing() => None,
            failure if self.is_first_contact && failure.is_wrong_address() => None,
            // Another host answers before this one recovers.
            FetchErrorKind::RateLimited { .. }
            | FetchErrorKind::Unreachable(_)
            | FetchErrorKind::NoAnswer(_)
                if fallback =>
            {
                None
            }
            FetchErrorKind::RateLimited { after: Some(after), .. } => {
                // The budget makes all requests wait.
                (*after <= self.policy.longest_hold).then_some(Duration::ZERO)
            }
            _ => Some(self.wait(dice)),
        };
        let limit = if fallback { self.policy.tries_of_mirror } else { self.policy.tries };
        match again {
            Some(wait) if self.tries < limit => RetryDecision::Retry(wait),
            _ => self.leave(failure),
        }
    }

    /// The decision after a failure that was retried already.
    pub(crate) fn leave(&mut self, failure: FetchErrorKind) -> RetryDecision {
        if self.pass_over() { RetryDecision::NextHost } else { RetryDecision::GiveUp(failure) }
    }

    /// Between half and all of a back-off that doubles with each attempt.
    fn wait(&self, dice: u64) -> Duration {
        let doublings = self.tries.saturating_sub(1).min(20);
        let full = self.policy.initial.saturating_mul(1 << doublings).min(self.policy.max);
        let jitter = u32::try_from(dice % 1024).unwrap_or(0);
        full / 2 + full / 2 * jitter / 1024
    }
}

/// An unpredictable number, to spread retries.
pub(crate) fn jitter() -> u64 {
    use std::hash::{BuildHasher as _, Hasher as _};
    std::hash::RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorResponse;

    fn route(hosts: usize) -> HostRoute {
        HostRoute::new(&RegistryConfig::default(), hosts, 0)
    }

    fn failing() -> FetchErrorKind {
        FetchErrorKind::Failing(ErrorResponse::new(500, ""))
    }

    #[test]
    fn waits_double_up_to_a_maximum_and_are_spread() {
        let config = RegistryConfig { tries: 20, ..RegistryConfig::default() };
        let mut route = HostRoute::new(&config, 1, 0);
        let mut waits = Vec::new();
        while let RetryDecision::Retry(wait) = route.failed(failing(), 0) {
            waits.push(wait.as_millis());
        }
        assert_eq!(waits[..8], [125, 250, 500, 1000, 2000, 4000, 5000, 5000]);
        assert_eq!(waits.len(), 19);
        let spread = |dice| HostRoute { tries: 1, ..HostRoute::new(&config, 1, 0) }.wait(dice);
        assert!(spread(0) < spread(500) && spread(500) < spread(1023));
        assert!(spread(1023) <= config.retry_initial);
    }

    #[test]
    fn permanent_errors_are_not_retried() {
        let answer = || ErrorResponse::new(404, "");
        for failure in [
            FetchErrorKind::NotFound(answer()),
            FetchErrorKind::Denied(answer()),
            FetchErrorKind::Refused(answer()),
            FetchErrorKind::BadReply("x".into()),
            FetchErrorKind::Tls("x".into()),
            FetchErrorKind::TooLarge { limit: 1 },
        ] {
            assert!(matches!(route(1).failed(failure, 0), RetryDecision::GiveUp(_)));
        }
        assert!(matches!(route(2).failed(FetchErrorKind::NotFound(answer()), 0), RetryDecision::NextHost));
    }

    #[test]
    fn a_mirror_has_fewer_attempts_and_none_when_unreachable_or_busy() {
        let mut through = route(2);
        assert!(matches!(through.failed(failing(), 0), RetryDecision::Retry(_)));
        assert!(matches!(through.failed(failing(), 0), RetryDecision::NextHost));
        assert_eq!(through.at(), 1);
        assert!(matches!(through.failed(failing(), 0), RetryDecision::Retry(_)));

        let busy = FetchErrorKind::RateLimited { answer: ErrorResponse::new(429, ""), after: None };
        assert!(matches!(route(2).failed(busy, 0), RetryDecision::NextHost));
        assert!(matches!(
            route(2).failed(FetchErrorKind::Unreachable("gone".into()), 0),
            RetryDecision::NextHost
        ));
    }

    #[test]
    fn a_wrong_address_is_retried_only_after_the_first_contact() {
        for text in
            ["tcp connect error: Connection refused (os error 111)", "dns error: Name or service not known"]
        {
            let failure = || FetchErrorKind::Unreachable(text.into());
            let first = route(1).at_first_contact().failed(failure(), 0);
            assert!(matches!(first, RetryDecision::GiveUp(_)), "{text}");
            assert!(
                matches!(route(1).failed(failure(), 0), RetryDecision::Retry(_)),
                "a registry that restarts"
            );
        }
        let passing = FetchErrorKind::Unreachable("dns error: Temporary failure in name resolution".into());
        assert!(matches!(route(1).at_first_contact().failed(passing, 0), RetryDecision::Retry(_)));
    }

    #[test]
    fn a_requested_wait_is_obeyed_unless_it_is_too_long() {
        let busy = |seconds| FetchErrorKind::RateLimited {
            answer: ErrorResponse::new(429, ""),
            after: Some(Duration::from_secs(seconds)),
        };
        assert!(matches!(route(1).failed(busy(60), 0), RetryDecision::Retry(Duration::ZERO)));
        assert!(matches!(route(1).failed(busy(61), 0), RetryDecision::GiveUp(_)));
    }

    #[test]
    fn progress_buys_new_tries() {
        let mut route = route(1);
        for _ in 0..100 {
            assert!(matches!(route.failed(failing(), 0), RetryDecision::Retry(_)));
            route.progressed();
        }
        let tries =
            (0..99).take_while(|_| matches!(route.failed(failing(), 0), RetryDecision::Retry(_))).count();
        assert_eq!(tries, 4);
    }
}
