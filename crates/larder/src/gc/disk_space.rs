//! Disk space in bytes and inodes.

use std::fmt;
use std::ops::{Add, AddAssign};

use serde::{Deserialize, Serialize};

/// An amount of disk space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct DiskSpace {
    /// Bytes, as allocated: whole blocks, holes not counted.
    pub bytes: u64,
    /// Inodes: files, directories, links and devices; hard links count once.
    pub inodes: u64,
}

/// Bytes per inode assumed where inodes were not counted.
const BYTES_PER_INODE: u64 = 20 * 1024;

impl DiskSpace {
    /// Nothing.
    pub const ZERO: DiskSpace = DiskSpace { bytes: 0, inodes: 0 };

    /// The usual disk space for this many bytes of an image.
    pub fn estimate(bytes: u64) -> DiskSpace {
        DiskSpace { bytes, inodes: bytes.div_ceil(BYTES_PER_INODE) }
    }

    /// The amount by which this falls short of `wanted`.
    #[must_use]
    pub fn shortfall_to(self, wanted: DiskSpace) -> DiskSpace {
        DiskSpace {
            bytes: wanted.bytes.saturating_sub(self.bytes),
            inodes: wanted.inodes.saturating_sub(self.inodes),
        }
    }
}

impl Add for DiskSpace {
    type Output = DiskSpace;

    fn add(self, other: DiskSpace) -> DiskSpace {
        DiskSpace {
            bytes: self.bytes.saturating_add(other.bytes),
            inodes: self.inodes.saturating_add(other.inodes),
        }
    }
}

impl AddAssign for DiskSpace {
    fn add_assign(&mut self, other: DiskSpace) {
        *self = *self + other;
    }
}

impl std::iter::Sum for DiskSpace {
    fn sum<I: Iterator<Item = DiskSpace>>(amounts: I) -> DiskSpace {
        amounts.fold(DiskSpace::ZERO, Add::add)
    }
}

impl fmt::Display for DiskSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} and {} inodes", crate::go_format::bytes(self.bytes), self.inodes)
    }
}
