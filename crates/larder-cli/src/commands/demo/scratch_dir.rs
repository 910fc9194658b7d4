//! The demo's directory. A demo that was killed leaves its directory behind; the next one takes it away.
//!
//! A demo holds the lock of a file in its directory as long as it lives, and the kernel lets go of it whatever happens.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::fd::OwnedFd;
use rustix::fs::{FlockOperation, Mode, OFlags};
use tempfile::TempDir;

/// Prefix of the names of all demos' directories.
const PREFIX: &str = "larder-demo-";
/// The file that is locked while the demo lives; a directory that is kept has none.
const LOCK: &str = "demo.lock";

/// A directory in the system's place for such, and its lock.
pub(super) struct ScratchDir {
    dir: TempDir,
    _lock: OwnedFd,
}

impl ScratchDir {
    /// A new one.
    pub(super) fn new() -> io::Result<ScratchDir> {
        let dir = tempfile::Builder::new().prefix(PREFIX).tempdir()?;
        // It has its name only when it is locked: an unlocked file belongs to a dead demo.
        let new = dir.path().join("new.lock");
        fs_err::write(&new, "")?;
        let lock = locked(&new)?;
        fs_err::rename(&new, dir.path().join(LOCK))?;
        Ok(ScratchDir { dir, _lock: lock })
    }

    pub(super) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Leaves the directory for good.
    pub(super) fn keep(self) -> io::Result<std::path::PathBuf> {
        fs_err::remove_file(self.dir.path().join(LOCK))?;
        Ok(self.dir.keep())
    }

    /// Removes the directory.
    pub(super) fn close(self) -> io::Result<()> {
        self.dir.close()
    }
}

/// Removes what dead demos of this user left in `place`; the number of their directories.
pub(super) fn remove_dead(place: &Path) -> usize {
    let Ok(entries) = fs_err::read_dir(place) else { return 0 };
    let ours = entries.flatten().filter(|entry| {
        let named = entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes());
        let me = rustix::process::geteuid().as_raw();
        named && entry.metadata().is_ok_and(|found| found.is_dir() && found.uid() == me)
    });
    let dead = |dir: &Path| locked(&dir.join(LOCK)).is_ok() && fs_err::remove_dir_all(dir).is_ok();
    ours.filter(|entry| dead(&entry.path())).count()
}

/// Locks a file that is there. Fails if another process has the lock.
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
            let dir = place.path().join(name);
            fs_err::create_dir(&dir).unwrap();
            fs_err::write(dir.join("file"), "").unwrap();
            if lock {
                fs_err::write(dir.join(LOCK), "").unwrap();
            }
            dir
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
