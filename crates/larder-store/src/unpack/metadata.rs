//! Sets extended attributes and times of files.

use std::fmt::Write as _;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::path::PathBuf;

use larder_erofs::ErofsTime;
use rustix::fs::{Timespec, Timestamps, XattrFlags, fsetxattr, lsetxattr};
use rustix::io::Errno;

use super::beneath::path_of;

/// Both times of a file: what was read last is not known, and an old access time saves a write at the next one.
pub(super) fn timestamps(mtime: ErofsTime) -> Timestamps {
    let time = Timespec { tv_sec: mtime.seconds, tv_nsec: mtime.nanos.into() };
    Timestamps { last_access: time, last_modification: time }
}

/// Attributes that steer overlay mounts: an image must not say what its layers hide, or where else they are looked for.
pub(super) fn steers_overlay(name: &[u8]) -> bool {
    name.starts_with(b"trusted.overlay.") || name.starts_with(b"user.overlay.")
}

/// Extended attributes: names and values.
pub(super) type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

/// Object with attributes: an open file, or a name in an open directory that cannot be opened itself.
#[derive(Clone, Copy)]
pub(super) enum XattrTarget<'a> {
    /// A file or directory.
    Open(BorrowedFd<'a>),
    /// A link, pipe or device.
    Named(BorrowedFd<'a>, &'a [u8]),
}

impl XattrTarget<'_> {
    /// A path that the system understands, without following a link at its end.
    fn path(self) -> PathBuf {
        let mut path = String::from("/proc/self/fd/");
        match self {
            // The dot makes it the directory itself, not the magic link to it.
            XattrTarget::Open(fd) => {
                let _ = write!(path, "{}", fd.as_raw_fd());
                PathBuf::from(path)
            }
            XattrTarget::Named(dir, name) => {
                let _ = write!(path, "{}", dir.as_raw_fd());
                PathBuf::from(path).join(path_of(name))
            }
        }
    }
}

/// Sets one attribute. `false` when this process or this filesystem cannot have it.
pub(super) fn set_xattr(on: XattrTarget<'_>, name: &[u8], value: &[u8]) -> Result<bool, Errno> {
    let set = match on {
        XattrTarget::Open(fd) => fsetxattr(fd, path_of(name), value, XattrFlags::empty()),
        XattrTarget::Named(..) => lsetxattr(on.path(), path_of(name), value, XattrFlags::empty()),
    };
    match set {
        Ok(()) => Ok(true),
        Err(Errno::PERM | Errno::ACCESS | Errno::OPNOTSUPP) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Sets `xattrs` on a file that was just made. Returns how many this process or this filesystem may not set. Those of
/// overlays are left out.
pub(super) fn apply_xattrs(on: XattrTarget<'_>, xattrs: &[(Vec<u8>, Vec<u8>)]) -> Result<u64, Errno> {
    let mut skipped = 0;
    for (name, value) in xattrs.iter().filter(|(name, _)| !steers_overlay(name)) {
        let is_set = !name.is_empty() && !name.contains(&0) && set_xattr(on, name, value)?;
        skipped += u64::from(!is_set);
    }
    Ok(skipped)
}
