//! How many pulls may start per second: a token bucket that waits or refuses when it is empty.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::config::{PullConfig, RateLimitAction};

/// A token bucket. Pure: time is an argument. It starts full.
#[derive(Debug, Clone)]
struct TokenBucket {
    per_second: f64,
    burst: f64,
    tokens: f64,
    filled: Instant,
}

impl TokenBucket {
    /// A full bucket of `burst` tokens that refills at `qps` tokens per second. A burst of 0 refuses everything.
    fn new(qps: u32, burst: u32, now: Instant) -> Self {
        let burst = f64::from(burst);
        TokenBucket { per_second: f64::from(qps), burst, tokens: burst, filled: now }
    }

    /// Takes a token, or returns the time until one is available.
    fn try_take(&mut self, now: Instant) -> Result<(), Duration> {
        let elapsed = now.saturating_duration_since(self.filled).as_secs_f64();
        self.tokens = (self.tokens + elapsed * self.per_second).min(self.burst);
        self.filled = self.filled.max(now);
        if self.tokens >= 1.0 {
            self.tokens -= 1.0;
            return Ok(());
        }
        let missing = (1.0 - self.tokens) / self.per_second;
        // Rounded up, so that the token is available after this wait.
        let wait = Duration::try_from_secs_f64(missing).unwrap_or(Duration::MAX);
        Err(wait.saturating_add(Duration::from_nanos(1)))
    }
}

/// The gate before the runtime's pull call.
#[derive(Debug)]
pub(super) struct Throttle {
    bucket: Mutex<TokenBucket>,
    over_rate: RateLimitAction,
    /// Held while waiting for a token, for first in, first out order.
    queue: tokio::sync::Mutex<()>,
}

impl Throttle {
    /// `None` when the rate is unlimited.
    pub(super) fn new(config: &PullConfig, now: Instant) -> Option<Self> {
        if config.registry_pull_qps == 0 {
            return None;
        }
        let burst = match config.over_rate {
            RateLimitAction::Wait => config.registry_burst.max(1),
            RateLimitAction::Refuse => config.registry_burst,
        };
        Some(Throttle {
            bucket: Mutex::new(TokenBucket::new(config.registry_pull_qps, burst, now)),
            over_rate: config.over_rate,
            queue: tokio::sync::Mutex::new(()),
        })
    }

    /// Takes a token. Over the rate it fails, or waits after having called `waiting`, as configured.
    pub(super) async fn pass(&self, waiting: impl FnOnce()) -> Result<(), RateExceeded> {
        match self.over_rate {
            RateLimitAction::Refuse => self.try_take().map_err(|_| RateExceeded),
            RateLimitAction::Wait => {
                let Ok(place) = self.queue.try_lock() else {
                    waiting();
                    let place = self.queue.lock().await;
                    self.wait_for_token().await;
                    drop(place);
                    return Ok(());
                };
                if self.try_take().is_err() {
                    waiting();
                    self.wait_for_token().await;
                }
                drop(place);
                Ok(())
            }
        }
    }

    async fn wait_for_token(&self) {
        while let Err(wait) = self.try_take() {
            tokio::time::sleep(wait).await;
        }
    }

    fn try_take(&self) -> Result<(), Duration> {
        self.bucket.lock().try_take(Instant::now())
    }
}

/// A pull was refused because too many were started lately.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("pull QPS exceeded")]
pub(super) struct RateExceeded;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_for_the_returned_time_finds_a_token() {
        let mut now = Instant::now();
        for qps in [1, 3, 7, 1000] {
            let mut bucket = TokenBucket::new(qps, 1, now);
            assert_eq!(bucket.try_take(now), Ok(()));
            for _ in 0..100 {
                let wait = bucket.try_take(now).expect_err("the bucket is empty");
                now += wait;
                assert_eq!(bucket.try_take(now), Ok(()), "at {qps} per second");
            }
        }
    }

    #[test]
    fn a_bucket_that_never_refills_returns_an_endless_wait() {
        let now = Instant::now();
        let mut bucket = TokenBucket::new(0, 1, now);
        assert_eq!(bucket.try_take(now), Ok(()));
        assert_eq!(bucket.try_take(now), Err(Duration::MAX));
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_pulls_start_at_the_configured_rate() {
        let config = PullConfig { registry_pull_qps: 2, registry_burst: 1, ..PullConfig::default() };
        let start = Instant::now();
        let throttle = Throttle::new(&config, start).expect("a rate is set");
        let started = futures_util::future::join_all((0..5).map(async |_| {
            throttle.pass(|| {}).await.expect("waiting pulls are not refused");
            start.elapsed().as_millis()
        }))
        .await;
        // The clock of a paused runtime has steps of a millisecond, and a wait is never cut short.
        for (started, due) in started.into_iter().zip([0, 500, 1000, 1500, 2000]) {
            assert!((due..due + 5).contains(&started), "started at {started} ms, due at {due} ms");
        }
    }
}
