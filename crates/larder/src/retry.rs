//! Retries of operations whose failures may pass: one policy, and one loop.
//!
//! The back-off of a pod's failed pulls is another thing: kubelet's, and part of [`pull`](crate::pull).

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::time::Duration;

use tokio::time;

/// How often an operation is attempted, and the back-off in between.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryPolicy {
    /// Attempts in a row, with the first one; `None`: no limit.
    pub attempts: Option<u32>,
    /// Back-off after the first failure; each further one doubles it.
    pub initial: Duration,
    /// Longest back-off.
    pub max: Duration,
    /// Whether the back-off is between half and all of its time, so that many clients do not retry at once.
    pub spread: bool,
}

impl RetryPolicy {
    /// A policy without a limit of attempts, whose back-off is not spread.
    pub const fn unlimited(initial: Duration, max: Duration) -> RetryPolicy {
        RetryPolicy { attempts: None, initial, max, spread: false }
    }

    /// A policy of a number of attempts with the same wait in between.
    pub const fn fixed(attempts: u32, wait: Duration) -> RetryPolicy {
        RetryPolicy { attempts: Some(attempts), initial: wait, max: wait, spread: false }
    }

    /// The back-off after so many failures in a row, drawn by any number.
    fn backoff(&self, failures: u32, random: u64) -> Duration {
        let doublings = failures.saturating_sub(1).min(20);
        let full = self.initial.saturating_mul(1 << doublings).min(self.max);
        if !self.spread {
            return full;
        }
        full / 2 + full / 2 * u32::try_from(random % 1024).unwrap_or(0) / 1024
    }
}

/// Whether a failure is worth another attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetryAdvice {
    /// Another attempt would fail in the same way.
    GiveUp,
    /// After the back-off.
    Backoff,
    /// After the back-off; the failed attempt made progress, so attempts are counted from here.
    Restart,
    /// After this time.
    After(Duration),
}

/// The clock of retries, which may show their waits. Waiting for `()` sleeps.
pub trait RetryClock<E>: Sync {
    /// Waits for this time, because of this failure.
    fn wait(&self, time: Duration, failure: &E) -> impl Future<Output = ()> + Send;

    /// An unpredictable number, which spreads the back-off.
    fn random(&self) -> u64 {
        RandomState::new().build_hasher().finish()
    }
}

impl<E> RetryClock<E> for () {
    fn wait(&self, time: Duration, _failure: &E) -> impl Future<Output = ()> + Send {
        time::sleep(time)
    }
}

/// Attempts an operation until it succeeds, its failure is not worth another attempt, or the policy has no attempt
/// left. Returns the last failure.
pub async fn retry<T, E, F>(
    policy: &RetryPolicy,
    clock: &impl RetryClock<E>,
    advice: impl Fn(&E) -> RetryAdvice,
    mut operation: impl FnMut() -> F,
) -> Result<T, E>
where
    F: Future<Output = Result<T, E>>,
{
    let mut failures = 0;
    loop {
        let failure = match operation().await {
            Ok(done) => return Ok(done),
            Err(failure) => failure,
        };
        let advice = advice(&failure);
        failures = if advice == RetryAdvice::Restart { 1 } else { failures + 1 };
        if policy.attempts.is_some_and(|attempts| failures >= attempts) {
            return Err(failure);
        }
        let wait = match advice {
            RetryAdvice::GiveUp => return Err(failure),
            RetryAdvice::Backoff | RetryAdvice::Restart => policy.backoff(failures, clock.random()),
            RetryAdvice::After(wait) => wait,
        };
        if !wait.is_zero() {
            clock.wait(wait, &failure).await;
        }
    }
}

/// Attempts an operation until it returns true, with this first and longest back-off.
pub async fn retry_until<F: Future<Output = bool>>(
    (initial, max): (Duration, Duration),
    operation: impl Fn() -> F,
) {
    let attempt = || async { operation().await.then_some(()).ok_or(()) };
    // It ends with a success.
    let _ = retry(&RetryPolicy::unlimited(initial, max), &(), |()| RetryAdvice::Backoff, attempt).await;
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use futures_util::FutureExt as _;

    use super::*;

    /// Records the waits, and draws the same number each time.
    struct FakeClock(Mutex<Vec<u128>>, u64);

    impl RetryClock<RetryAdvice> for FakeClock {
        async fn wait(&self, time: Duration, _failure: &RetryAdvice) {
            self.0.lock().push(time.as_millis());
        }

        fn random(&self) -> u64 {
            self.1
        }
    }

    /// The waits of an operation that fails with these failures in turn, the last one for ever.
    fn waits(policy: &RetryPolicy, random: u64, failures: &[RetryAdvice]) -> Vec<u128> {
        let clock = FakeClock(Mutex::default(), random);
        let mut failures = failures.iter();
        let mut last = RetryAdvice::GiveUp;
        let operation = || {
            last = failures.next().copied().unwrap_or(last);
            std::future::ready(Err::<(), _>(last))
        };
        let ended = retry(policy, &clock, |failure| *failure, operation).now_or_never();
        assert!(ended.is_some_and(|ended| ended.is_err()));
        clock.0.into_inner()
    }

    const POLICY: RetryPolicy = RetryPolicy {
        attempts: Some(9),
        initial: Duration::from_millis(250),
        max: Duration::from_secs(10),
        spread: true,
    };

    #[test]
    fn the_backoff_doubles_up_to_a_maximum_and_is_spread() {
        use RetryAdvice::Backoff;
        assert_eq!(waits(&POLICY, 0, &[Backoff]), [125, 250, 500, 1000, 2000, 4000, 5000, 5000]);
        let first = |random| waits(&POLICY, random, &[Backoff])[0];
        assert!(first(0) < first(500) && first(500) < first(1023) && first(1023) <= 250);
        assert_eq!(waits(&RetryPolicy::fixed(3, Duration::from_secs(1)), 5, &[Backoff]), [1000, 1000]);
    }

    #[test]
    fn a_failure_decides_whether_and_when_it_is_retried() {
        use RetryAdvice::{After, Backoff, GiveUp};
        assert_eq!(waits(&POLICY, 0, &[GiveUp]), [0_u128; 0]);
        assert_eq!(waits(&POLICY, 0, &[Backoff, After(Duration::from_secs(7)), GiveUp]), [125, 7000]);
        assert_eq!(waits(&POLICY, 0, &[After(Duration::ZERO), GiveUp]), [0_u128; 0]);
    }

    #[test]
    fn progress_begins_the_count_of_attempts_and_the_backoff() {
        use RetryAdvice::{Backoff, Restart};
        let failures = [[Restart; 100].as_slice(), [Backoff].as_slice()].concat();
        let waits = waits(&POLICY, 0, &failures);
        assert_eq!(waits[..100], [125; 100]);
        assert_eq!(waits[100..], [250, 500, 1000, 2000, 4000, 5000, 5000]);
    }

    #[tokio::test(start_paused = true)]
    async fn an_operation_that_succeeds_is_not_repeated() {
        let mut attempts = 0;
        let policy = RetryPolicy::unlimited(Duration::from_secs(1), Duration::from_secs(3));
        let start = time::Instant::now();
        let operation = || {
            attempts += 1;
            std::future::ready(if attempts < 5 { Err(()) } else { Ok(attempts) })
        };
        assert_eq!(retry(&policy, &(), |()| RetryAdvice::Backoff, operation).await, Ok(5));
        assert_eq!(start.elapsed().as_secs(), 1 + 2 + 3 + 3);
    }
}
