//! Moments and sizes as collection counts them.

use std::fmt;
use std::ops::{Add, AddAssign};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// A moment by the wall clock, in milliseconds since 1970. May be negative, since clocks may be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Stamp(pub i64);

impl Stamp {
    /// Milliseconds from `earlier` to this moment; negative when it is before.
    pub fn millis_since(self, earlier: Stamp) -> i64 {
        self.0.saturating_sub(earlier.0)
    }

    /// Time from `earlier` to this moment; zero when it is before.
    pub fn since(self, earlier: Stamp) -> Duration {
        Duration::from_millis(u64::try_from(self.millis_since(earlier)).unwrap_or_default())
    }

    /// This moment moved by so many milliseconds.
    #[must_use]
    pub fn moved(self, millis: i64) -> Stamp {
        Stamp(self.0.saturating_add(millis))
    }
}

impl From<SystemTime> for Stamp {
    fn from(time: SystemTime) -> Stamp {
        match time.duration_since(UNIX_EPOCH) {
            Ok(after) => Stamp(millis(after)),
            Err(before) => Stamp(-millis(before.duration())),
        }
    }
}

/// A duration in whole milliseconds.
pub(super) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// Room on a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Amount {
    /// Bytes.
    pub bytes: u64,
    /// Inodes: files and folders.
    pub inodes: u64,
}

/// Bytes per inode assumed for what was not counted.
const BYTES_PER_INODE: u64 = 20 * 1024;

impl Amount {
    /// Nothing.
    pub const ZERO: Amount = Amount { bytes: 0, inodes: 0 };

    /// What so many bytes of an image usually take.
    pub fn estimate(bytes: u64) -> Amount {
        Amount { bytes, inodes: bytes.div_ceil(BYTES_PER_INODE) }
    }

    /// What is missing of `wanted`.
    #[must_use]
    pub fn short_of(self, wanted: Amount) -> Amount {
        Amount {
            bytes: wanted.bytes.saturating_sub(self.bytes),
            inodes: wanted.inodes.saturating_sub(self.inodes),
        }
    }
}

impl Add for Amount {
    type Output = Amount;

    fn add(self, other: Amount) -> Amount {
        Amount {
            bytes: self.bytes.saturating_add(other.bytes),
            inodes: self.inodes.saturating_add(other.inodes),
        }
    }
}

impl AddAssign for Amount {
    fn add_assign(&mut self, other: Amount) {
        *self = *self + other;
    }
}

impl std::iter::Sum for Amount {
    fn sum<I: Iterator<Item = Amount>>(amounts: I) -> Amount {
        amounts.fold(Amount::ZERO, Add::add)
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = super::disk::size_text(i64::try_from(self.bytes).unwrap_or(i64::MAX));
        write!(f, "{bytes} and {} inodes", self.inodes)
    }
}
