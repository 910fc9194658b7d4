//! Whether the size of a file is what its removal frees.
//!
//! ext4 counts the blocks of a file as it is written. XFS adds blocks that it reserves behind the end of an open file,
//! and gives most of them back later. Others, such as btrfs, compress or share blocks: what a removal frees can only be
//! estimated there, and the best estimate is that of files that are closed and synced.

use std::io;
use std::path::Path;

/// Accuracy of a filesystem's report of a file's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SizeAccuracy {
    /// The reported size is freed by a removal, also while the file is written.
    WhileWritten,
    /// The reported size is freed by a removal, once the file is closed and synced.
    AfterSync,
    /// An estimate of it.
    Estimated,
}

impl SizeAccuracy {
    /// Returns the accuracy of the filesystem which holds `path`.
    pub(crate) fn of(path: &Path) -> io::Result<SizeAccuracy> {
        const EXT4: i64 = 0xef53;
        const TMPFS: i64 = 0x0102_1994;
        const XFS: i64 = 0x5846_5342;
        Ok(match rustix::fs::statfs(path)?.f_type {
            EXT4 | TMPFS => SizeAccuracy::WhileWritten,
            XFS => SizeAccuracy::AfterSync,
            _ => SizeAccuracy::Estimated,
        })
    }
}
