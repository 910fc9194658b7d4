//! The lock between processes. The wait for a stopped lock owner is bounded, and the error names it.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

const FIRST_WAIT: Duration = Duration::from_millis(1);
const LONGEST_WAIT: Duration = Duration::from_millis(50);
/// Wait after which the lock owner is reported.
const REPORT_AFTER: Duration = Duration::from_secs(5);
/// Wait after which locking fails.
const GIVE_UP: Duration = Duration::from_secs(60);

/// Locks a file, for as long as it is open. Fails after a minute.
pub(super) fn lock_exclusive(file: &File, path: &Path, mut sleep: impl FnMut(Duration)) -> io::Result<()> {
    let (mut waited, mut wait, mut reported) = (Duration::ZERO, FIRST_WAIT, false);
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK | Errno::INTR) => {}
            taken => return Ok(taken?),
        }
        if waited >= GIVE_UP {
            let message = format!(
                "{}: locked by {} for more than {} s; resume (kill -CONT) or stop it",
                path.display(),
                holder(file),
                GIVE_UP.as_secs()
            );
            return Err(io::Error::new(io::ErrorKind::TimedOut, message));
        }
        if waited >= REPORT_AFTER && !reported {
            tracing::warn!("{}: waiting for {} to release the lock", path.display(), holder(file));
            reported = true;
        }
        sleep(wait);
        waited += wait;
        wait = (wait * 2).min(LONGEST_WAIT);
    }
}

fn holder(file: &File) -> String {
    let found = || {
        let locks = fs_err::read_to_string("/proc/locks").ok()?;
        let found = file.metadata().ok()?;
        let device = (rustix::fs::major(found.dev()), rustix::fs::minor(found.dev()));
        holder_in(&locks, device, found.ino())
    };
    found().map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"))
}

/// The process that locks a file, from the text of `/proc/locks`: `1: FLOCK ADVISORY WRITE 4711 08:01:42 0 EOF`. `None`
/// if the kernel cannot name it in this namespace.
fn holder_in(locks: &str, (major, minor): (u32, u32), inode: u64) -> Option<u32> {
    let place = format!("{major:02x}:{minor:02x}:{inode}");
    let holds = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        let [_, "FLOCK", _, "WRITE", pid, at, ..] = words[..] else { return None };
        pid.parse().ok().filter(|pid| *pid != 0 && at == place)
    };
    locks.lines().find_map(holds)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn create(path: &Path) -> File {
        fs_err::File::create(path).unwrap().into_parts().0
    }

    #[test]
    fn waiting_for_a_lock_ends_after_a_minute_and_names_its_owner() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let (held, ours) = (create(&path), create(&path));
        flock(&held, FlockOperation::LockExclusive).unwrap();
        let mut slept = Duration::ZERO;
        let error = lock_exclusive(&ours, &path, |wait| slept += wait).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(slept >= GIVE_UP && slept < GIVE_UP + LONGEST_WAIT * 2, "{slept:?}");
        let text = error.to_string();
        assert!(text.contains(&path.display().to_string()), "{text}");
        assert!(text.contains("process"), "{text}");
    }

    #[test]
    fn a_lock_that_is_released_is_acquired() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let (held, ours) = (create(&path), create(&path));
        flock(&held, FlockOperation::LockExclusive).unwrap();
        let (mut held, mut waits) = (Some(held), 0);
        let sleep = |_| {
            waits += 1;
            if waits == 300 {
                held = None;
            }
        };
        lock_exclusive(&ours, &path, sleep).unwrap();
        assert_eq!(waits, 300);
    }

    #[test]
    fn the_lock_owner_is_read_from_proc_locks() {
        let locks = "1: POSIX  ADVISORY  WRITE 7 08:01:42 0 EOF\n2: -> FLOCK  ADVISORY  WRITE 8 08:01:42 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 9 08:01:43 0 EOF\n4: FLOCK  ADVISORY  WRITE 0 08:01:42 0 EOF\n\
                     5: FLOCK  ADVISORY  WRITE 10 08:01:42 0 EOF\nrubbish";
        assert_eq!(holder_in(locks, (8, 1), 42), Some(10));
        assert_eq!(holder_in(locks, (8, 2), 42), None);
    }
}
