//! Locks of running pulls: each pull locks one byte of a shared file. All locks of a process need one open file, and
//! the kernel releases them when the process ends.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fs_err::os::unix::fs::OpenOptionsExt as _;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};

/// The lock file, opened once per process; it remains empty.
#[derive(Debug)]
pub(super) struct PullLockFile {
    path: PathBuf,
    file: Mutex<Option<Arc<fs_err::File>>>,
}

/// The lock of a pull of this process; released when dropped.
#[derive(Debug)]
pub(super) struct PullLock {
    file: Arc<fs_err::File>,
    byte: i64,
}

impl PullLockFile {
    pub(super) fn new(path: PathBuf) -> PullLockFile {
        PullLockFile { path, file: Mutex::default() }
    }

    /// Locks the pull of an image, named as requested.
    pub(super) fn hold(&self, image: &str) -> io::Result<PullLock> {
        let (file, byte) = (self.file()?, byte_of(image));
        fcntl(&*file, FcntlArg::F_OFD_SETLK(&lock(libc::F_RDLCK, byte)))?;
        Ok(PullLock { file, byte })
    }

    /// Whether another process has locked it.
    pub(super) fn is_locked_by_other_process(&self, image: &str) -> io::Result<bool> {
        let mut found = lock(libc::F_WRLCK, byte_of(image));
        fcntl(&*self.file()?, FcntlArg::F_OFD_GETLK(&mut found))?;
        Ok(libc::c_int::from(found.l_type) != libc::F_UNLCK)
    }

    /// Reopened if it was removed or replaced, because other processes do not see locks in the old file.
    fn file(&self) -> io::Result<Arc<fs_err::File>> {
        let mut opened = self.file.lock();
        if let Some(file) = opened.as_ref()
            && is_still(file, &self.path)
        {
            return Ok(file.clone());
        }
        let mut options = fs_err::OpenOptions::new();
        let file =
            options.mode(0o600).create(true).truncate(false).read(true).write(true).open(&self.path)?;
        Ok(opened.insert(Arc::new(file)).clone())
    }
}

fn is_still(file: &fs_err::File, path: &Path) -> bool {
    let of = |found: &std::fs::Metadata| (found.dev(), found.ino());
    fs_err::metadata(path).is_ok_and(|there| file.metadata().is_ok_and(|own| of(&own) == of(&there)))
}

impl Drop for PullLock {
    fn drop(&mut self) {
        // A lock that cannot be released is released when the process ends.
        let _ = fcntl(&*self.file, FcntlArg::F_OFD_SETLK(&lock(libc::F_UNLCK, self.byte)));
    }
}

/// One of 2^56, so collisions are negligible.
fn byte_of(image: &str) -> i64 {
    Sha256::digest(image).iter().take(7).fold(0, |byte, next| byte << 8 | i64::from(*next))
}

#[expect(clippy::cast_possible_truncation, reason = "the kernel's constants are small")]
fn lock(kind: libc::c_int, byte: i64) -> libc::flock {
    libc::flock { l_type: kind as i16, l_whence: libc::SEEK_SET as i16, l_start: byte, l_len: 1, l_pid: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> (tempfile::TempDir, PullLockFile, PullLockFile) {
        let dir = tempfile::tempdir().unwrap();
        let holds = || PullLockFile::new(dir.path().join("alive"));
        let (one, other) = (holds(), holds());
        (dir, one, other)
    }

    #[test]
    fn a_lock_is_visible_to_other_processes_until_it_is_dropped() {
        let (_dir, one, other) = two();
        let held = one.hold("a/b:1").unwrap();
        assert!(other.is_locked_by_other_process("a/b:1").unwrap());
        assert!(!other.is_locked_by_other_process("a/b:2").unwrap());
        assert!(!one.is_locked_by_other_process("a/b:1").unwrap());
        drop(held);
        assert!(!other.is_locked_by_other_process("a/b:1").unwrap());
    }

    #[test]
    fn several_may_hold_the_same() {
        let (_dir, one, other) = two();
        let (mine, _theirs) = (one.hold("a/b:1").unwrap(), other.hold("a/b:1").unwrap());
        assert!(one.is_locked_by_other_process("a/b:1").unwrap());
        drop(mine);
        assert!(one.is_locked_by_other_process("a/b:1").unwrap());
    }

    #[test]
    fn a_deleted_file_that_is_open_is_found() {
        let (dir, one, other) = two();
        let before = one.hold("a/b:1").unwrap();
        fs_err::remove_file(dir.path().join("alive")).unwrap();
        let after = one.hold("a/b:2").unwrap();
        assert!(other.is_locked_by_other_process("a/b:2").unwrap());
        drop(before);
        assert!(other.is_locked_by_other_process("a/b:2").unwrap());
        drop(after);
        assert!(!other.is_locked_by_other_process("a/b:2").unwrap());
    }

    #[test]
    fn a_thousand_take_one_open_file() {
        let (_dir, one, other) = two();
        let names: Vec<_> = (0..1000).map(|number| format!("a/b:{number}")).collect();
        let held: Vec<_> = names.iter().map(|name| one.hold(name).unwrap()).collect();
        assert!(names.iter().all(|name| other.is_locked_by_other_process(name).unwrap()));
        assert!(held.iter().all(|hold| Arc::ptr_eq(&hold.file, &held[0].file)));
    }
}
