//! Opens paths below a directory without ever following a link.
//!
//! For paths that must not have links in them, because this module made their directories. A link there is damage or
//! an attack, and an error (`ELOOP` or `ENOTDIR`).

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use rustix::fs::{Mode, OFlags, ResolveFlags, openat, openat2};
use rustix::io::Errno;

/// The path of bytes from an archive.
pub(super) fn path_of(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

/// How directories are opened to work in them.
pub(super) const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Opens `path`, relative and without `.` or `..`; empty is the root itself.
pub(super) fn open(root: BorrowedFd<'_>, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    if path.is_empty() {
        return openat(root, ".", flags, Mode::empty());
    }
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    match openat2(root, path_of(path), flags, Mode::empty(), resolve) {
        // Before Linux 5.6, or forbidden by a seccomp filter that does not know it.
        Err(Errno::NOSYS | Errno::PERM) => walk(root, path, flags),
        opened => opened,
    }
}

/// One step for each part of the path.
fn walk(root: BorrowedFd<'_>, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
    let (parent, name) = split(path);
    let mut at = openat(root, ".", DIRECTORY, Mode::empty())?;
    for part in parts(parent) {
        at = openat(at.as_fd(), path_of(part), DIRECTORY, Mode::empty())?;
    }
    openat(at.as_fd(), path_of(name), flags, Mode::empty())
}

/// The path of the directory, and the name in it.
pub(super) fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (b"", path),
    }
}

/// The parts of a path that mean something: not the empty ones, not `.`.
pub(super) fn parts(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|byte| *byte == b'/').filter(|part| !matches!(*part, b"" | b"."))
}

/// The path without `.`, `..` and doubled slashes, relative to the root, above which it never gets.
pub(super) fn clean(path: &[u8]) -> Vec<u8> {
    let mut clean: Vec<&[u8]> = Vec::new();
    for part in parts(path) {
        if part == b".." {
            clean.pop();
        } else {
            clean.push(part);
        }
    }
    clean.join(&b'/')
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;

    #[test]
    fn both_ways_open_files_and_refuse_links_on_the_way() {
        let dir = tempfile::tempdir().unwrap();
        fs_err::create_dir_all(dir.path().join("a/b")).unwrap();
        fs_err::write(dir.path().join("a/b/file"), "x").unwrap();
        fs_err::os::unix::fs::symlink("b", dir.path().join("a/link")).unwrap();
        fs_err::os::unix::fs::symlink("/etc/passwd", dir.path().join("a/b/out")).unwrap();
        let root = fs_err::File::open(dir.path()).unwrap();
        for open in [open, walk] {
            let mut text = String::new();
            let file = open(root.as_fd(), b"a/b/file", OFlags::RDONLY | OFlags::NOFOLLOW).unwrap();
            std::fs::File::from(file).read_to_string(&mut text).unwrap();
            assert_eq!(text, "x");
            for bad in [&b"a/link/file"[..], b"a/b/out", b"a/b/file/more"] {
                let refused =
                    open(root.as_fd(), bad, OFlags::RDONLY | OFlags::NOFOLLOW).expect_err("refused");
                assert!(matches!(refused, Errno::LOOP | Errno::NOTDIR), "{refused}");
            }
        }
    }
}
