//! Distinguishes slow connections from stalled ones: by bytes per window, not by total time. Pure.
//!
//! Only time spent waiting for the network counts: a slow reader is not the server's fault.

use std::time::Duration;

/// Watches one body.
#[derive(Debug, Clone)]
pub(crate) struct StallDetector {
    window: Duration,
    min_bytes: u64,
    waited: Duration,
    got: u64,
}

impl StallDetector {
    /// A body is stalled if it delivers fewer than `min_bytes` during `window` of waiting.
    pub(crate) fn new(window: Duration, min_bytes: u64) -> StallDetector {
        StallDetector { window, min_bytes, waited: Duration::ZERO, got: 0 }
    }

    /// How long the next wait may last before [`count`](Self::count) must be called.
    pub(crate) fn remaining(&self) -> Duration {
        self.window.saturating_sub(self.waited)
    }

    /// Records a wait and its bytes; returns whether the body is stalled.
    pub(crate) fn count(&mut self, waited: Duration, bytes: u64) -> bool {
        self.waited += waited;
        self.got += bytes;
        if self.waited < self.window {
            return false;
        }
        let stuck = self.got < self.min_bytes;
        self.waited = Duration::ZERO;
        self.got = 0;
        stuck
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_trickle_is_stalled_and_a_slow_stream_is_not() {
        let stuck_after = |bytes_per_second| {
            let mut watchdog = StallDetector::new(30 * SECOND, 1000);
            (1..=100).find(|_| watchdog.count(SECOND, bytes_per_second))
        };
        assert_eq!(stuck_after(1), Some(30));
        assert_eq!(stuck_after(0), Some(30));
        assert_eq!(stuck_after(40), None);
    }

    #[test]
    fn silence_is_noticed_when_the_window_ends() {
        let mut watchdog = StallDetector::new(30 * SECOND, 1000);
        assert!(!watchdog.count(10 * SECOND, 5000));
        assert_eq!(watchdog.remaining(), 20 * SECOND);
        assert!(!watchdog.count(20 * SECOND, 0), "this window had its bytes");
        assert!(watchdog.count(30 * SECOND, 0));
    }

    #[test]
    fn a_slow_reader_does_not_count_as_a_stall() {
        let mut watchdog = StallDetector::new(30 * SECOND, 1000);
        for _ in 0..1000 {
            assert!(!watchdog.count(Duration::ZERO, 1), "no time was spent on the network");
        }
    }
}
