//! Makes the files of a snapshot durable before it is committed.

use std::io;
use std::path::Path;

use crate::disk::{Disk, FileOpenMode};
use crate::store::OpenStore;

/// Above this number of files, one sync of the filesystem takes less time than a sync of each file, also if other processes
/// have written much.
const SYNCED_EACH: u64 = 4096;

impl OpenStore {
    /// containerd waits with its database locked, so what other processes have written is left to them if it can be.
    pub(super) fn sync_snapshot(&self, id: u64, files: u64) -> io::Result<()> {
        let whole = || self.disk.open_sync(self.layout.root())?.sync();
        if files > SYNCED_EACH {
            return whole();
        }
        match sync_tree(&*self.disk, &self.layout.snapshot_fs(id)) {
            // A file with the attribute `immutable` cannot be opened for a sync.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => whole(),
            synced => synced,
        }?;
        self.disk.sync_dir(&self.layout.snapshot(id))?;
        self.disk.sync_dir(&self.layout.snapshots())
    }
}

/// Syncs regular files and directories; the others are entries of directories only.
fn sync_tree(disk: &dyn Disk, dir: &Path) -> io::Result<()> {
    for entry in fs_err::read_dir(dir)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            sync_tree(disk, &entry.path())?;
        } else if kind.is_file() {
            disk.open(&entry.path(), FileOpenMode::Existing)?.sync_all()?;
        }
    }
    disk.sync_dir(dir)
}
