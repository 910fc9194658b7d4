//! Sets extended attributes and times of files.

use std::fmt::Write as _;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::PathBuf;

use rustix::fs::{Timespec, Timestamps, XattrFlags, fsetxattr, lgetxattr, llistxattr, lsetxattr};
use rustix::io::Errno;

use super::layer_manifest::{FileTime, path_of, xattr_hash};

/// Takes effect on files that are made later, so directories get it last.
const DEFAULT_ACL: &[u8] = b"system.posix_acl_default";

/// Both times of a file: what was read last is not known, and an old access time saves a write at the next one.
pub(super) fn timestamps(mtime: FileTime) -> Timestamps {
    let time = Timespec { tv_sec: mtime.seconds, tv_nsec: mtime.nanos.into() };
    Timestamps { last_access: time, last_modification: time }
}

/// Attributes that steer overlay mounts: an image must not say what its layers hide, or where else they are looked for.
pub(super) fn steers_overlay(name: &[u8]) -> bool {
    name.starts_with(b"trusted.overlay.") || name.starts_with(b"user.overlay.")
}

/// Whether this one waits until a directory is complete.
pub(super) fn is_default_acl(name: &[u8]) -> bool {
    name == DEFAULT_ACL
}

/// Extended attributes: names and values.
pub(super) type Xattrs = Vec<(Vec<u8>, Vec<u8>)>;

/// What has attributes: an open file, or a name in an open directory that cannot be opened itself.
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

/// A file's attributes, without those of the overlay and of this machine's security labels, sorted by name.
pub(super) fn read_xattrs(on: XattrTarget<'_>) -> Result<Xattrs, Errno> {
    let mut found = Vec::new();
    for name in list(on)?.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        if !steers_overlay(name) && name != b"security.selinux" {
            found.push((name.to_vec(), get(on, name)?));
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// [`xattr_hash`] of what is on disk.
pub(super) fn hash_of(xattrs: &[(Vec<u8>, Vec<u8>)]) -> Option<u32> {
    xattr_hash(xattrs.iter().map(|(name, value)| (name.as_slice(), value.as_slice())))
}

/// Whether a file has this attribute.
pub(super) fn has_xattr(on: XattrTarget<'_>, name: &str) -> bool {
    list(on).is_ok_and(|names| names.split(|byte| *byte == 0).any(|found| found == name.as_bytes()))
}

fn list(on: XattrTarget<'_>) -> Result<Vec<u8>, Errno> {
    grow(|buffer| match on {
        XattrTarget::Open(fd) => rustix::fs::flistxattr(fd, buffer),
        XattrTarget::Named(..) => llistxattr(on.path(), buffer),
    })
}

/// One attribute's value.
pub(super) fn get(on: XattrTarget<'_>, name: &[u8]) -> Result<Vec<u8>, Errno> {
    grow(|buffer| match on {
        XattrTarget::Open(fd) => rustix::fs::fgetxattr(fd, path_of(name), buffer),
        XattrTarget::Named(..) => lgetxattr(on.path(), path_of(name), buffer),
    })
}

/// Reads into larger and larger buffers, up to what the kernel allows.
fn grow(read: impl Fn(&mut [u8]) -> Result<usize, Errno>) -> Result<Vec<u8>, Errno> {
    let mut buffer = vec![0; 1 << 10];
    loop {
        match read(&mut buffer) {
            Ok(length) => {
                buffer.truncate(length);
                return Ok(buffer);
            }
            Err(Errno::RANGE) if buffer.len() < 1 << 16 => buffer.resize(1 << 16, 0),
            Err(Errno::OPNOTSUPP) => return Ok(Vec::new()),
            Err(error) => return Err(error),
        }
    }
}

/// Sets attributes on what was just made; those that cannot be set are counted, not an error.
pub(super) struct XattrResult {
    /// [`xattr_hash`] of those that are there now.
    pub(super) hash: Option<u32>,
    pub(super) skipped: u64,
}

/// Sets `xattrs` on a file. The last of equal names wins.
pub(super) fn apply_xattrs(on: XattrTarget<'_>, xattrs: &[(Vec<u8>, Vec<u8>)]) -> Result<XattrResult, Errno> {
    if xattrs.is_empty() {
        return Ok(XattrResult { hash: None, skipped: 0 });
    }
    let (mut set, mut skipped) = (Vec::with_capacity(xattrs.len()), 0);
    for (name, value) in xattrs {
        if steers_overlay(name) {
            continue;
        }
        if name.is_empty() || name.contains(&0) || !set_xattr(on, name, value)? {
            skipped += 1;
            continue;
        }
        set.retain(|(other, _): &(&[u8], &[u8])| other != name);
        set.push((name, value));
    }
    Ok(XattrResult { hash: xattr_hash(set), skipped })
}

/// Removes the attributes that an earlier entry gave to a directory.
pub(super) fn clear_xattrs(fd: impl AsFd) -> Result<(), Errno> {
    for (name, _) in read_xattrs(XattrTarget::Open(fd.as_fd()))? {
        rustix::fs::fremovexattr(fd.as_fd(), path_of(&name))?;
    }
    Ok(())
}
