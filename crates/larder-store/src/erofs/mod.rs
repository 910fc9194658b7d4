//! Mounts EROFS layers, and hashes their files.
//!
//! The kernel mounts a layer straight from its file (Linux 6.12), or through a loop device. A mount begins detached: it
//! has no place in the file tree, and ends with the last descriptor of it, however the process ends.

pub(crate) mod digest;
mod loop_device;

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use larder_erofs::{ErofsOptions, ErofsWriter};
use rustix::fd::{AsFd, AsRawFd as _, BorrowedFd};
use rustix::fs::{CWD, Mode, OFlags, open};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount, unmount,
};

pub use digest::ErofsFile;
use loop_device::LoopDevice;

/// How a layer becomes a lower directory of overlays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerMountKind {
    /// It is mounted from its file.
    File,
    /// It is mounted through a loop device of its own, which ends with the mount.
    LoopDevice,
    /// It is extracted into a directory: this kernel has no EROFS, or this process may not mount it.
    Extracted,
}

/// A mount that has no place in the file tree yet.
#[derive(Debug)]
pub(crate) struct DetachedMount(OwnedFd);

impl DetachedMount {
    /// Mounts a layer read-only.
    pub(crate) fn of(layer: &Path, kind: LayerMountKind) -> io::Result<DetachedMount> {
        let file = open(layer, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        match kind {
            LayerMountKind::File => {
                let path = layer.to_str().filter(|path| layer.is_absolute() && path.len() <= MAX_SOURCE);
                mount(path.unwrap_or(&descriptor_path(file.as_fd())))
            }
            LayerMountKind::LoopDevice => {
                let device = LoopDevice::for_file(file.as_fd(), layer)?;
                mount(device.path()) // afterwards the mount alone keeps the device
            }
            LayerMountKind::Extracted => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Gives it a place: a directory on which nothing is mounted.
    pub(crate) fn attach(&self, target: &Path) -> io::Result<()> {
        Ok(move_mount(&self.0, "", CWD, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
    }
}

/// Bytes of the source of a mount, at most. Other programs look it up, too: `mkfs.btrfs` took a descriptor for its own.
const MAX_SOURCE: usize = 255;

/// A source for a path that is longer.
fn descriptor_path(file: BorrowedFd<'_>) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

fn mount(source: &str) -> io::Result<DetachedMount> {
    let fs = fsopen("erofs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&fs, "source", source)?;
    fsconfig_set_flag(&fs, "ro")?;
    fsconfig_create(&fs)?;
    // An overlay of it decides about set-user-ID bits and devices on its own.
    let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV;
    Ok(DetachedMount(fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?))
}

/// Removes the mount at `target` from the file tree; succeeds if there is none. What still uses it keeps it.
pub(crate) fn detach(target: &Path) -> io::Result<()> {
    match unmount(target, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        Ok(()) | Err(Errno::INVAL | Errno::NOENT) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Finds out how this process can mount layers, by mounting an empty one, which is written to the unused path
/// `scratch`.
pub(crate) fn probe(scratch: &Path) -> io::Result<LayerMountKind> {
    let empty = ErofsWriter::new(Vec::new(), ErofsOptions::default()).and_then(ErofsWriter::finish);
    let (layer, _) = empty.map_err(io::Error::other)?;
    let found = fs_err::write(scratch, layer).and_then(|()| mount_somehow(scratch)).map(|(kind, _)| kind);
    match fs_err::remove_file(scratch) {
        Err(error) if found.is_ok() => Err(error),
        _ => found,
    }
}

/// Mounts a layer in the first way that this process can.
pub(crate) fn mount_somehow(layer: &Path) -> io::Result<(LayerMountKind, DetachedMount)> {
    let mount = |kind| DetachedMount::of(layer, kind).map(|mount| (kind, mount));
    match mount(LayerMountKind::File) {
        Err(error) if !is_shortage(&error) => {
            // Older kernels want a block device. Of two failures, that of the loop device is the one that can be
            // remedied.
            mount(LayerMountKind::LoopDevice)
        }
        mounted_or_short => mounted_or_short,
    }
}

/// Says nothing about what the kernel supports.
fn is_shortage(error: &io::Error) -> bool {
    let shortages = [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::INTR];
    Errno::from_io_error(error).is_some_and(|errno| shortages.contains(&errno))
}
