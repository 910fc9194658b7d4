//! One process at a time: an exclusive lock on the file `lock`, which the kernel releases when the process ends.

use fs_err::os::unix::fs::OpenOptionsExt as _;
use std::io::{self, Write as _};
use std::path::Path;

use rustix::fs::FlockOperation;

/// The lock, held until dropped.
#[derive(Debug)]
pub(crate) struct StoreLock {
    file: fs_err::File,
}

/// Why there is no lock.
pub(crate) enum StoreLockError {
    /// Another process holds it.
    Held(String),
    Io(io::Error),
}

impl StoreLock {
    pub(crate) fn acquire(path: &Path) -> Result<StoreLock, StoreLockError> {
        let mut options = fs_err::OpenOptions::new();
        // Who can open it can hold it.
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let mut file = options.open(path).map_err(StoreLockError::Io)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(StoreLockError::Held(holder(path))),
            Err(error) => return Err(StoreLockError::Io(error.into())),
        }
        // For the error message of others; the lock itself is the kernel's.
        let noted = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
        noted.map_err(StoreLockError::Io)?;
        Ok(StoreLock { file })
    }
}

impl Drop for StoreLock {
    /// Without this the lock would be released with the last copy of its descriptor, and a process that was forked just
    /// now has one until it executes its program.
    fn drop(&mut self) {
        if let Err(error) = rustix::fs::flock(&self.file, FlockOperation::Unlock) {
            tracing::debug!(%error, "cannot unlock the store");
        }
    }
}

/// The process that holds the lock, if known.
fn holder(path: &Path) -> String {
    let noted = fs_err::read_to_string(path).unwrap_or_default();
    let Ok(pid) = noted.trim().parse::<u32>() else {
        return "another process".to_owned();
    };
    match fs_err::read_to_string(format!("/proc/{pid}/comm")) {
        Ok(name) => format!("process {pid} ({})", name.trim()),
        Err(_) => format!("process {pid}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_of_the_descriptor_in_another_process_does_not_keep_the_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let Ok(lock) = StoreLock::acquire(&path) else { panic!("nothing has it") };
        let forked = lock.file.file().try_clone().unwrap();
        assert!(matches!(StoreLock::acquire(&path), Err(StoreLockError::Held(_))));
        drop(lock);
        assert!(StoreLock::acquire(&path).is_ok());
        drop(forked);
    }
}
