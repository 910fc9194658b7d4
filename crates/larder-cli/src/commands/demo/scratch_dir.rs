//! The demo's folder. A demo that was killed leaves its folder behind; the next one takes it away.
//!
//! A demo holds the lock of a file in its folder as long as it lives, and the kernel lets go of it whatever happens.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::fd::OwnedFd;
use rustix::fs::{FlockOperation, Mode, OFlags};
use tempfile::TempDir;

/// What the names of all demos' folders begin with.
const PREFIX: &str = "larder-demo-";
/// The file that is locked while the demo lives; a folder that is kept has none.
const LOCK: &str = "demo.lock";

/// A folder in the system's place for such, and its lock.
pub(super) struct ScratchDir {
    folder: TempDir,
    _lock: OwnedFd,
}

impl ScratchDir {
    /// A new one.
    pub(super) fn new() -> io::Result<ScratchDir> {
        let folder = tempfile::Builder::new().prefix(PREFIX).tempdir()?;
        // It has its name only when it is locked: a file that nobody locks is that of a dead demo.
        let new = folder.path().join("new.lock");
        fs_err::write(&new, "")?;
        let lock = locked(&new)?;
        fs_err::rename(&new, folder.path().join(LOCK))?;
        Ok(ScratchDir { folder, _lock: lock })
    }

    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Leaves the folder for good.
    pub(super) fn keep(self) -> io::Result<std::path::PathBuf> {
        fs_err::remove_file(self.folder.path().join(LOCK))?;
        Ok(self.folder.keep())
    }

    /// Removes the folder.
    pub(super) fn close(self) -> io::Result<()> {
        self.folder.close()
    }
}

/// Removes what dead demos of this user left in `place`; the number of their folders.
pub(super) fn remove_dead(place: &Path) -> usize {
    let Ok(entries) = fs_err::read_dir(place) else { return 0 };
    let ours = entries.flatten().filter(|entry| {
        let named = entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes());
        let me = rustix::process::geteuid().as_raw();
        named && entry.metadata().is_ok_and(|found| found.is_dir() && found.uid() == me)
    });
    let dead = |folder: &Path| locked(&folder.join(LOCK)).is_ok() && fs_err::remove_dir_all(folder).is_ok();
    ours.filter(|entry| dead(&entry.path())).count()
}

/// Locks a file that is there. An error where somebody else has the lock.
fn locked(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_dead_demos_left_is_removed() {
        let place = tempfile::tempdir().unwrap();
        let make = |name: &str, lock: bool| {
            let folder = place.path().join(name);
            fs_err::create_dir(&folder).unwrap();
            fs_err::write(folder.join("file"), "").unwrap();
            if lock {
                fs_err::write(folder.join(LOCK), "").unwrap();
            }
            folder
        };
        let dead = make("larder-demo-dead", true);
        let alive = make("larder-demo-alive", true);
        let kept = make("larder-demo-kept", false);
        let other = make("something-else", true);
        let lock = locked(&alive.join(LOCK)).unwrap();
        assert_eq!(remove_dead(place.path()), 1);
        assert!(!dead.exists() && alive.exists() && kept.exists() && other.exists());
        drop(lock);
        assert_eq!(remove_dead(place.path()), 1, "it died");
    }
}
