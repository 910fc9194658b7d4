//! Readings of the node that take a while: one for all pages that ask within a few seconds.

use std::sync::Arc;
use std::time::Duration;

use larder::detached::SharedCall;
use parking_lot::Mutex;
use tokio::time::{self, Instant};
use tonic::Status;

/// How old a reading may be, at least, and how long a failure is kept. A reading that took long is used for longer.
const FRESH: Duration = Duration::from_secs(5);
/// How many times as long as it took.
const FRESH_FACTOR: u32 = 5;
/// How long a request waits for one.
const READING_TIMEOUT: Duration = Duration::from_secs(8);
/// How long one is kept that nothing asks for.
const UNUSED_TTL: Duration = Duration::from_secs(60);

/// The last reading, and the running one. Requests that come while one runs wait for it.
pub(super) struct ReadingCache<T: Clone> {
    last: Mutex<Option<CachedReading<T>>>,
    running: SharedCall<Result<T, Status>>,
}

struct CachedReading<T> {
    result: Result<T, Status>,
    fresh_until: Instant,
    used: Instant,
}

impl<T: Clone> Default for ReadingCache<T> {
    fn default() -> Self {
        ReadingCache { last: Mutex::default(), running: SharedCall::default() }
    }
}

impl<T: Clone + Send + Sync + 'static> ReadingCache<T> {
    /// A result that is fresh enough, else that of `reading`. One that takes long continues after this has given up,
    /// for the next request.
    pub(super) async fn get_or_read(
        self: &Arc<Self>,
        reading: impl Future<Output = Result<T, Status>> + Send + 'static,
    ) -> Result<T, Status> {
        if let Some(fresh) = self.fresh(Instant::now()) {
            return fresh;
        }
        let cache = Arc::clone(self);
        let reading = self.running.join(async move { cache.refresh(reading).await });
        time::timeout(READING_TIMEOUT, reading)
            .await
            .unwrap_or_else(|_| Err(Status::unavailable("the backend is slow; try again in a few seconds")))
    }

    /// The cached result if it is fresh. Frees one that is not: two listings would take twice the memory.
    fn fresh(&self, now: Instant) -> Option<Result<T, Status>> {
        let mut last = self.last.lock();
        last.take_if(|last| last.fresh_until <= now);
        let last = last.as_mut()?;
        last.used = now;
        Some(last.result.clone())
    }

    async fn refresh(&self, reading: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
        let began = Instant::now();
        let result = reading.await;
        let now = Instant::now();
        let fresh_for = if result.is_ok() { FRESH.max((now - began) * FRESH_FACTOR) } else { FRESH };
        *self.last.lock() =
            Some(CachedReading { result: result.clone(), fresh_until: now + fresh_for, used: now });
        result
    }

    /// Frees what nothing has asked for since a while.
    pub(super) fn drop_unused(&self, now: Instant) {
        self.last.lock().take_if(|last| now.saturating_duration_since(last.used) > UNUSED_TTL);
    }
}

#[cfg(test)]
mod tests {
    use std::future;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::runtime::Handle;
    use tonic::Code;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_reading_that_hangs_runs_once_however_many_requests_give_up() {
        let cache = Arc::new(ReadingCache::<()>::default());
        let tasks = || Handle::current().metrics().num_alive_tasks();
        let before = tasks();
        for _ in 0..20 {
            let given_up = cache.get_or_read(future::pending()).await.unwrap_err();
            assert_eq!(given_up.code(), Code::Unavailable, "{given_up}");
        }
        assert_eq!(tasks() - before, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_is_kept_for_a_while() {
        let cache = Arc::new(ReadingCache::default());
        let reads = Arc::new(AtomicUsize::new(0));
        let read = |result: Result<u64, Status>| {
            let reads = Arc::clone(&reads);
            cache.get_or_read(async move {
                reads.fetch_add(1, Ordering::Relaxed);
                result
            })
        };
        for _ in 0..5 {
            let failed = read(Err(Status::unavailable("connection refused"))).await.unwrap_err();
            assert_eq!(failed.message(), "connection refused");
        }
        assert_eq!(reads.load(Ordering::Relaxed), 1);
        time::advance(FRESH).await;
        assert_eq!(read(Ok(1)).await.unwrap(), 1);
        assert_eq!(reads.load(Ordering::Relaxed), 2);
    }
}
