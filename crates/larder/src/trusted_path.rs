//! Paths that nobody but root and this user can change: directories of state, below which larder writes and removes as
//! root, and programs that it runs.
//!
//! All directories on the path must be root's or this user's, and not writable by others. One that only leads there may
//! be sticky, such as `/tmp`: there others can add names, and change only their own. Entries of a directory of state
//! must be no links and have the same owners: they may be older than its mode. After these checks only larder makes
//! entries.

use std::ffi::OsString;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _};
use std::path::{Component, Path, PathBuf};

/// Links in a path that are followed, as in the kernel.
const MAX_LINKS: usize = 40;
const STICKY: u32 = 0o1000;
const GROUP_WRITES: u32 = 0o020;
const OTHERS_WRITE: u32 = 0o002;

/// Why a path is not used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PathError {
    /// It does not exist or cannot be inspected.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Others can change it.
    #[error(
        "{} is writable by users other than root and this user (mode {mode:o}, owner {owner})",
        .path.display()
    )]
    Writable {
        /// The file or directory.
        path: PathBuf,
        /// Its permission bits; 0 of a link.
        mode: u32,
        /// The uid of its owner.
        owner: u32,
    },
    /// A directory of state has a link.
    #[error("{} is a symbolic link", .0.display())]
    Link(PathBuf),
}

impl From<PathError> for io::Error {
    /// With the next step, as an error of the system has no other place for it.
    fn from(error: PathError) -> io::Error {
        let next = match error {
            PathError::Io(error) => return error,
            PathError::Writable { .. } => "restrict it to its owner (chmod go-w), or use another directory",
            PathError::Link(_) => "remove it if it is not yours, or use another directory",
        };
        io::Error::new(io::ErrorKind::PermissionDenied, format!("{error}; {next}"))
    }
}

/// Creates a directory of state if it is missing, with those above it, all of mode 0755 less the umask, and checks it.
/// Returns its path without links. May block.
pub fn create_dir(path: &Path) -> Result<PathBuf, PathError> {
    let walk = PathWalk { create: true, holder: EntryRole::Above, caller: &Caller::current() };
    walk.dir(path)
}

/// Checks a directory of state. Returns its path without links. May block.
pub fn check_dir(path: &Path) -> Result<PathBuf, PathError> {
    let walk = PathWalk { create: false, holder: EntryRole::Above, caller: &Caller::current() };
    walk.dir(path)
}

/// Checks a file that only root and this user can replace or change: no directory that holds it, or a link that is the
/// last part of its path, may be sticky. Returns its path without links. May block.
pub fn check_file(path: &Path) -> Result<PathBuf, PathError> {
    // Others may be in the groups of this user.
    let caller = &Caller { groups: Vec::new(), ..Caller::current() };
    let real = PathWalk { create: false, holder: EntryRole::Directory, caller }.resolve(path)?;
    check_entry(&real, &std::fs::symlink_metadata(&real)?, EntryRole::Entry, caller)?;
    Ok(real)
}

/// Returns true if root or this user owns the entry of this name, and it is no link and not writable by others.
pub fn is_trusted_entry(path: &Path) -> bool {
    let found = fs_err::symlink_metadata(path);
    found.is_ok_and(|found| check_entry(path, &found, EntryRole::Entry, &Caller::current()).is_ok())
}

/// Place of an entry in a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EntryRole {
    /// A directory that leads to the trusted one.
    Above,
    /// A link in the path.
    Link,
    /// The trusted directory.
    Directory,
    /// An entry of it.
    Entry,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct EntryFacts {
    is_link: bool,
    is_socket: bool,
    owner: u32,
    group: u32,
    mode: u32,
}

impl From<&Metadata> for EntryFacts {
    fn from(found: &Metadata) -> EntryFacts {
        EntryFacts {
            is_link: found.is_symlink(),
            is_socket: found.file_type().is_socket(),
            owner: found.uid(),
            group: found.gid(),
            mode: found.mode() & 0o7777,
        }
    }
}

/// The user and groups of this process.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Caller {
    user: u32,
    groups: Vec<u32>,
    /// The owner that a user namespace shows for all users outside of it: that of the host's directories.
    unmapped: Option<u32>,
}

impl Caller {
    fn current() -> Caller {
        let groups = rustix::process::getgroups().unwrap_or_default();
        let groups = groups.into_iter().chain([rustix::process::getegid()]).map(rustix::fs::Gid::as_raw);
        let map = fs_err::read_to_string("/proc/self/uid_map").unwrap_or_default();
        let is_whole = map.is_empty() || map.split_whitespace().eq(["0", "0", "4294967295"]);
        let overflow = || fs_err::read_to_string("/proc/sys/kernel/overflowuid").ok()?.trim().parse().ok();
        Caller {
            user: rustix::process::geteuid().as_raw(),
            groups: groups.collect(),
            unmapped: if is_whole { None } else { overflow() },
        }
    }
}

/// Whether only root and the caller can change an entry. A link has no mode of its own, and who may connect to a socket
/// is the choice of a setting. Pure.
fn is_trusted(found: &EntryFacts, role: EntryRole, caller: &Caller) -> bool {
    let EntryFacts { is_link, is_socket, owner, group, mode } = *found;
    let is_of_host = role == EntryRole::Above && Some(owner) == caller.unmapped;
    let is_own_group = group == 0 || caller.groups.contains(&group);
    let is_writable = mode & OTHERS_WRITE != 0 || (mode & GROUP_WRITES != 0 && !is_own_group);
    let leads_only = role == EntryRole::Above && mode & STICKY != 0;
    (owner == 0 || owner == caller.user || is_of_host) && (!is_writable || leads_only || is_link || is_socket)
}

fn check_entry(path: &Path, found: &Metadata, role: EntryRole, caller: &Caller) -> Result<(), PathError> {
    let found = EntryFacts::from(found);
    if !is_trusted(&found, role, caller) {
        let mode = if found.is_link { 0 } else { found.mode };
        return Err(PathError::Writable { path: path.to_owned(), mode, owner: found.owner });
    }
    if found.is_link && role != EntryRole::Link {
        return Err(PathError::Link(path.to_owned()));
    }
    Ok(())
}

/// A look at each directory and link of a path, one after the other.
struct PathWalk<'a> {
    /// Creates missing directories.
    create: bool,
    /// Role of the directory that holds the last part.
    holder: EntryRole,
    caller: &'a Caller,
}

impl PathWalk<'_> {
    fn dir(&self, path: &Path) -> Result<PathBuf, PathError> {
        let dir = self.resolve(path)?;
        self.check(&dir, EntryRole::Directory)?;
        for entry in fs_err::read_dir(&dir)? {
            match self.check(&entry?.path(), EntryRole::Entry) {
                // Another process of ours has removed it.
                Err(PathError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {}
                checked => checked?,
            }
        }
        Ok(dir)
    }

    fn check(&self, path: &Path, role: EntryRole) -> Result<(), PathError> {
        check_entry(path, &std::fs::symlink_metadata(path)?, role, self.caller)
    }

    /// Returns a path without links, all directories above which were checked.
    fn resolve(&self, path: &Path) -> Result<PathBuf, PathError> {
        let mut rest = names(&std::path::absolute(path)?);
        let (mut at, mut links) = (PathBuf::from("/"), 0);
        while let Some(name) = rest.pop() {
            self.check(&at, if rest.is_empty() { self.holder } else { EntryRole::Above })?;
            if name == ".." {
                at.pop();
                continue;
            }
            let next = at.join(name);
            let found = match std::fs::symlink_metadata(&next) {
                Err(error) if self.create && error.kind() == io::ErrorKind::NotFound => {
                    make_dir(&next)?;
                    std::fs::symlink_metadata(&next)?
                }
                found => found?,
            };
            if !found.is_symlink() {
                at = next;
                continue;
            }
            check_entry(&next, &found, EntryRole::Link, self.caller)?;
            links += 1;
            if links > MAX_LINKS {
                return Err(PathError::Io(rustix::io::Errno::LOOP.into()));
            }
            let target = std::fs::read_link(&next)?;
            if target.is_absolute() {
                at = PathBuf::from("/");
            }
            rest.extend(names(&target));
        }
        Ok(at)
    }
}

/// The names of a path, the last one first; `..` is one.
fn names(path: &Path) -> Vec<OsString> {
    let name = |component| match component {
        Component::Normal(name) => Some(OsString::from(name)),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    };
    path.components().rev().filter_map(name).collect()
}

fn make_dir(path: &Path) -> io::Result<()> {
    match std::fs::DirBuilder::new().mode(0o755).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(io::Error::new(error.kind(), format!("{}: {error}", path.display())))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn what_others_own_or_can_change_is_not_trusted() {
        use EntryRole::{Above, Directory, Entry, Link};

        let caller = Caller { user: 1000, groups: vec![1000], unmapped: Some(65534) };
        for (owner, group, mode, trusted) in [
            (0, 0, 0o755, &[Above, Directory, Entry][..]),
            (1000, 1000, 0o700, &[Above, Directory, Entry]),
            (1000, 1000, 0o775, &[Above, Directory, Entry]),
            (0, 0, 0o775, &[Above, Directory, Entry]),
            (1000, 50, 0o775, &[]),
            (1000, 1000, 0o777, &[]),
            (0, 0, 0o1777, &[Above]),
            (0, 50, 0o1775, &[Above]),
            (1001, 1001, 0o755, &[]),
            (1001, 0, 0o1777, &[]),
            (65534, 65534, 0o755, &[Above]),
            (65534, 65534, 0o777, &[]),
        ] {
            for role in [Above, Directory, Entry] {
                let found = EntryFacts { is_link: false, is_socket: false, owner, group, mode };
                assert_eq!(
                    is_trusted(&found, role, &caller),
                    trusted.contains(&role),
                    "{found:?} as {role:?}"
                );
            }
        }
        for (owner, trusted) in [(0, true), (1000, true), (1001, false)] {
            let found = EntryFacts { is_link: true, is_socket: false, owner, group: 0, mode: 0o777 };
            assert_eq!(is_trusted(&found, Link, &caller), trusted, "a link of {owner}");
        }
        let socket = EntryFacts { is_link: false, is_socket: true, owner: 0, group: 50, mode: 0o666 };
        assert!(is_trusted(&socket, Entry, &caller));
    }

    #[test]
    fn a_directory_is_created_through_trusted_links_and_refused_with_what_is_wrong() {
        let scratch = tempfile::tempdir().unwrap();
        let dir = scratch.path().canonicalize().unwrap();
        symlink("real", dir.join("link")).unwrap();
        fs_err::create_dir(dir.join("real")).unwrap();
        let root = create_dir(&dir.join("real/../link/a/b")).unwrap();
        assert_eq!(root, dir.join("real/a/b"));
        assert_eq!(fs_err::metadata(&root).unwrap().mode() & 0o022, 0);
        assert_eq!(check_dir(&dir.join("link/a/b")).unwrap(), root);
        let refused = |path: &Path, text: &str| {
            let error = io::Error::from(check_dir(path).unwrap_err());
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
            assert!(error.to_string().contains(text), "{error}");
        };
        symlink("/", root.join("trash")).unwrap();
        refused(&root, "real/a/b/trash is a symbolic link; remove it");
        fs_err::remove_file(root.join("trash")).unwrap();
        let mode = |path: &str, mode| {
            fs_err::set_permissions(dir.join(path), PermissionsExt::from_mode(mode)).unwrap();
        };
        for (path, place) in [("real/a", "real/a is writable"), ("real/a/b", "real/a/b is writable")] {
            mode(path, 0o777);
            refused(&root, place);
            mode(path, 0o755);
        }
        mode("real/a", 0o1777);
        assert_eq!(check_dir(&root).unwrap(), root, "as below /tmp");
        mode("real/a", 0o755);
        symlink("loop", dir.join("loop")).unwrap();
        let error = |name: &str| io::Error::from(check_dir(&dir.join(name)).unwrap_err());
        assert_eq!(error("loop").raw_os_error(), Some(rustix::io::Errno::LOOP.raw_os_error()));
        assert_eq!(error("none").kind(), io::ErrorKind::NotFound);
    }
}
