//! Wall-clock times in milliseconds.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// A moment by the wall clock, in milliseconds since 1970. May be negative, since clocks may be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UnixMillis(pub i64);

impl UnixMillis {
    /// Milliseconds from `earlier` to this moment; negative when it is before.
    pub(crate) fn millis_since(self, earlier: UnixMillis) -> i64 {
        self.0.saturating_sub(earlier.0)
    }

    /// Time from `earlier` to this moment; zero when it is before.
    pub fn since(self, earlier: UnixMillis) -> Duration {
        Duration::from_millis(u64::try_from(self.millis_since(earlier)).unwrap_or_default())
    }

    /// This moment moved by so many milliseconds.
    #[must_use]
    pub(super) fn moved(self, millis: i64) -> UnixMillis {
        UnixMillis(self.0.saturating_add(millis))
    }
}

impl From<SystemTime> for UnixMillis {
    fn from(time: SystemTime) -> UnixMillis {
        match time.duration_since(UNIX_EPOCH) {
            Ok(after) => UnixMillis(millis(after)),
            Err(before) => UnixMillis(-millis(before.duration())),
        }
    }
}

impl From<UnixMillis> for SystemTime {
    fn from(time: UnixMillis) -> SystemTime {
        let distance = Duration::from_millis(time.0.unsigned_abs());
        let moved =
            if time.0 < 0 { UNIX_EPOCH.checked_sub(distance) } else { UNIX_EPOCH.checked_add(distance) };
        moved.unwrap_or(UNIX_EPOCH)
    }
}

/// A duration in whole milliseconds.
pub(crate) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
