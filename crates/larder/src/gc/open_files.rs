//! Deleted files that processes still hold open: their space is free only when they are closed.

use std::collections::HashSet;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::timeout;

use crate::threads::blocking;

/// A process that holds deleted files of a filesystem open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpaceHolder {
    /// Its process ID.
    pub process: u32,
    /// The name of its program, as the system reports it.
    pub command: String,
    /// Bytes that are freed when it closes them. A file that several processes hold open counts for each of them.
    pub bytes: u64,
}

/// The longest search. A process that does not answer, as in an uninterruptible sleep, must not hold up the round.
const LONGEST_SEARCH: Duration = Duration::from_secs(10);

/// The processes that hold deleted files of this filesystem open, the largest first. Processes that this user may not
/// inspect, and files that were opened through an overlay mount, are missing; after 10 s, all are.
pub async fn deleted_open_files(mountpoint: PathBuf) -> Vec<SpaceHolder> {
    found_in_time(blocking(move || find(Path::new("/proc"), &mountpoint))).await
}

async fn found_in_time(search: impl Future<Output = io::Result<Vec<SpaceHolder>>>) -> Vec<SpaceHolder> {
    let found = timeout(LONGEST_SEARCH, search).await;
    found.unwrap_or_else(|elapsed| Err(elapsed.into())).unwrap_or_else(|error| {
        tracing::warn!("cannot list open files: {error}");
        Vec::new()
    })
}

fn find(proc: &Path, mountpoint: &Path) -> io::Result<Vec<SpaceHolder>> {
    let device = fs_err::metadata(mountpoint)?.dev();
    let mut holders = Vec::new();
    for entry in fs_err::read_dir(proc)? {
        let entry = entry?;
        let Some(process) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let mut seen = HashSet::new();
        // Open files, and files that are mapped, such as programs that run.
        for table in ["fd", "map_files"] {
            // A process may have ended, or be another user's.
            let Ok(files) = fs_err::read_dir(entry.path().join(table)) else { continue };
            for file in files.flatten() {
                // Only then its filesystem is asked: that of another file may hang.
                let is_deleted =
                    |target: PathBuf| target.as_os_str().as_encoded_bytes().ends_with(b" (deleted)");
                if fs_err::read_link(file.path()).is_ok_and(is_deleted)
                    && let Ok(found) = fs_err::metadata(file.path())
                    && found.dev() == device
                    && found.nlink() == 0
                {
                    seen.insert((found.ino(), found.blocks() * 512));
                }
            }
        }
        let bytes = seen.iter().map(|(_, bytes)| bytes).sum();
        if bytes > 0 {
            let command = fs_err::read_to_string(entry.path().join("comm")).unwrap_or_default();
            holders.push(SpaceHolder { process, command: command.trim_end().to_owned(), bytes });
        }
    }
    holders.sort_by(|a, b| (b.bytes, a.process).cmp(&(a.bytes, b.process)));
    Ok(holders)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_search_that_hangs_is_given_up() {
        let start = tokio::time::Instant::now();
        assert_eq!(found_in_time(std::future::pending()).await, []);
        assert_eq!(start.elapsed(), LONGEST_SEARCH);
    }

    #[test]
    fn this_process_holds_a_file_that_it_deleted_until_it_closes_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("layer");
        let mut file = fs_err::File::create(&path).unwrap();
        file.write_all(&vec![7; 1 << 20]).unwrap();
        file.sync_all().unwrap();
        let own = || {
            let holders = find(Path::new("/proc"), dir.path()).unwrap();
            holders.into_iter().find(|holder| holder.process == std::process::id()).map_or(0, |own| own.bytes)
        };
        let before = own();
        fs_err::remove_file(&path).unwrap();
        let deleted = own();
        assert!(deleted >= before + (1 << 20), "{before} {deleted}");
        drop(file);
        assert!(own() <= deleted - (1 << 20));
    }
}
