//! Room on a file system, in bytes and inodes.

use std::fmt;
use std::ops::{Add, AddAssign};

use serde::{Deserialize, Serialize};

/// Room on a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct Amount {
    /// Bytes, as allocated: whole blocks, holes not counted.
    pub bytes: u64,
    /// Inodes: files, folders, links and devices, one hard-linked file counted once.
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
        write!(f, "{} and {} inodes", crate::gotext::bytes(self.bytes), self.inodes)
    }
}
