//! About what the directories take in which layers are unpacked: to count tens of thousands of new files takes longer than
//! a reader may wait.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::disk::DiskSpace;
use crate::unpack::UnpackProgress;

/// Directories in which layers are unpacked now.
#[derive(Debug, Default)]
pub(crate) struct UnpackingDirs(Mutex<HashMap<PathBuf, Arc<UnpackProgress>>>);

impl UnpackingDirs {
    fn dirs(&self) -> MutexGuard<'_, HashMap<PathBuf, Arc<UnpackProgress>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, dir: &Path, progress: &Arc<UnpackProgress>) {
        self.dirs().insert(dir.to_owned(), progress.clone());
    }

    pub(super) fn remove(&self, dir: &Path) {
        self.dirs().remove(dir);
    }

    /// About what is in the directory; `None` if no layer is unpacked there.
    pub(super) fn usage_of(&self, dir: &Path) -> Option<DiskSpace> {
        let (plain, entries) =
            self.dirs().get(dir).map(|progress| (progress.plain_bytes(), progress.entries()))?;
        Some(estimate(plain, entries))
    }
}

/// What an archive takes on disk. A file takes half a block more than its content; its header in the archive, which counts
/// as plain bytes, takes nothing.
fn estimate(plain: u64, entries: u64) -> DiskSpace {
    const BLOCK: u64 = 4096;
    const HEADER: u64 = 512;
    DiskSpace { bytes: plain.saturating_add(entries.saturating_mul(BLOCK / 2 - HEADER)), inodes: entries }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_counts_as_what_was_unpacked_into_it() {
        let (dirs, progress) = (UnpackingDirs::default(), Arc::new(UnpackProgress::default()));
        let dir = Path::new("/store/staging/1");
        assert_eq!(dirs.usage_of(dir), None);
        dirs.add(dir, &progress);
        assert_eq!(dirs.usage_of(dir), Some(DiskSpace::ZERO));
        dirs.remove(dir);
        assert_eq!(dirs.usage_of(dir), None);
        // A thousand files of 10,000 bytes: three blocks each, and 10.5 kB in the archive.
        let found = estimate(1_000 * 10_752, 1_000);
        assert_eq!((found.inodes, found.bytes.abs_diff(1_000 * 12_288) < 10_000), (1_000, true));
    }
}
