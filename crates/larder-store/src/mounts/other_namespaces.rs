//! Whether a mount that is not in this mount namespace, or no longer, still exists in another one.
//!
//! The kernel shows the mounts of a namespace only through a process in it, so all processes and their threads are
//! inspected. A namespace without a process exists as long as a bind mount or an open file refers to it. It cannot be
//! inspected, so the mount counts as present. The same applies where not all processes are visible: without root, or
//! inside a PID namespace.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};

use super::table::MountTable;

/// The first process namespace of a machine; the kernel gives it this number.
const ALL_PROCESSES: &str = "pid:[4026531836]";

/// Where a mount still exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MountLocation {
    /// Nowhere.
    Nowhere,
    /// In the mount namespace of this process.
    Process(u32),
    /// Unknown: not all processes can be inspected.
    Unknown,
}

/// Looks for the overlay with this directory in all mount namespaces. With `is_own`, it was mounted in this one: the
/// others that have it were cloned from this one, by processes that this one can inspect.
pub(super) fn find_mount(dir: &Path, is_own: bool) -> MountLocation {
    let all = fs_err::read_link("/proc/self/ns/pid").is_ok_and(|link| link == Path::new(ALL_PROCESSES));
    if !all && !is_own {
        return MountLocation::Unknown;
    }
    search(dir, is_own).unwrap_or(MountLocation::Unknown)
}

fn search(dir: &Path, is_own: bool) -> io::Result<MountLocation> {
    // Namespaces that a process is in, and those that something holds open.
    let (mut seen, mut held) = (HashSet::new(), HashSet::new());
    let mut blind = false;
    for (pid, process) in numbered(Path::new("/proc"))? {
        for (_, task) in alive(numbered(&process.join("task")), &mut blind)?.unwrap_or_default() {
            let Some(namespace) = alive(fs_err::read_link(task.join("ns/mnt")), &mut blind)? else {
                continue;
            };
            if !seen.contains(&namespace) {
                // A task that ends here has left an empty table; another one may be in the same namespace.
                let Some(table) = alive(fs_err::read(task.join("mountinfo")), &mut blind)? else { continue };
                if MountTable::parse(&table).has_dir(dir) {
                    return Ok(MountLocation::Process(pid));
                }
                held.extend(pinned(&table));
                if !table.is_empty() {
                    seen.insert(namespace);
                }
            }
        }
        for (_, file) in alive(numbered(&process.join("fd")), &mut blind)?.unwrap_or_default() {
            held.extend(alive(fs_err::read_link(file), &mut blind)?.filter(|link| is_mount_namespace(link)));
        }
    }
    Ok(if (!blind || is_own) && held.is_subset(&seen) {
        MountLocation::Nowhere
    } else {
        MountLocation::Unknown
    })
}

/// The entries of a directory whose names are numbers.
fn numbered(dir: &Path) -> io::Result<Vec<(u32, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs_err::read_dir(dir)? {
        let entry = entry?;
        if let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) {
            found.push((number, entry.path()));
        }
    }
    Ok(found)
}

/// `None` if the process has ended or cannot be inspected; in the second case `blind` is set.
fn alive<T>(read: io::Result<T>, blind: &mut bool) -> io::Result<Option<T>> {
    const ESRCH: i32 = 3;
    const EINVAL: i32 = 22; // what the mount table of a task says that is about to end
    match read {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) if matches!(error.raw_os_error(), Some(ESRCH | EINVAL)) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            *blind = true;
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Mount namespaces that a mount table holds open: bind mounts of `/proc/PID/ns/mnt`.
fn pinned(table: &[u8]) -> impl Iterator<Item = PathBuf> {
    let text = String::from_utf8_lossy(table).into_owned();
    let roots: Vec<PathBuf> = text
        .lines()
        .filter_map(|line| line.split(' ').nth(3))
        .filter(|root| root.starts_with("mnt:["))
        .map(PathBuf::from)
        .collect();
    roots.into_iter()
}

/// Whether the link of an open file leads to a mount namespace.
fn is_mount_namespace(link: &Path) -> bool {
    link.as_os_str().as_encoded_bytes().starts_with(b"mnt:[")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bind_mounts_of_namespaces_are_found() {
        let table = b"22 1 254:0 / / rw - ext4 /dev/vda rw\n\
            40 22 0:4 mnt:[4026532199] /run/ns/build rw shared:1 - nsfs nsfs rw\n\
            41 22 0:4 net:[4026532200] /run/netns/a rw - nsfs nsfs rw\n";
        assert_eq!(pinned(table).collect::<Vec<_>>(), [PathBuf::from("mnt:[4026532199]")]);
    }
}
