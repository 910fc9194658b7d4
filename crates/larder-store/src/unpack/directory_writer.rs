//! Writes files below a directory, each directory before what is in it: the order in which an export has them.
//!
//! Guarantees: nothing outside of the directory is touched, whatever the entries say: every name is made in a directory
//! that this module made itself, and opened without following links; a name that exists is an error.

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use larder_erofs::EntryProblem;
use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, Uid, chmodat, chownat, fchmod, fchown, ftruncate, futimens, linkat,
    makedev, mkdirat, mknodat, openat, symlinkat, utimensat,
};
use rustix::io::Errno;

use super::archive::{LayerEntry, LayerEntryKind, SparseExtent};
use super::beneath::{self, DIRECTORY, clean, path_of, split};
use super::metadata::{XattrTarget, apply_xattrs, set_xattr, timestamps};
use super::{OverlayForm, UnpackError};
use crate::disk::{DiskSpace, SpaceReserve};

/// Bytes of a file that are copied at once.
const BUFFER: usize = 128 << 10;

/// Entries that are written beside plain files.
#[derive(Debug, Clone, Default)]
pub(super) struct DirectoryForm {
    /// Files get their owners and exact modes. Else they belong to this process, which can read and remove all of them.
    pub(super) owners: bool,
    /// Device nodes are made, as far as this process may make them.
    pub(super) devices: bool,
    /// Whiteouts and opaque directories are those of an overlay. Else there are none.
    pub(super) overlay: Option<OverlayForm>,
    /// Space that must stay free. Default: none.
    pub(super) reserve: Option<SpaceReserve>,
}

/// Entries that were left out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct SkippedMetadata {
    /// Names of devices that are not wanted, or that this process may not make.
    pub(super) devices: u64,
    /// Extended attributes that this process or the filesystem may not set.
    pub(super) xattrs: u64,
}

/// Writes into one directory.
pub(super) struct DirectoryWriter {
    root: OwnedFd,
    form: DirectoryForm,
    /// The directories that are not complete, the root first. Only the last one is open.
    directories: Vec<OpenDirectory>,
    current: OwnedFd,
    buffer: Vec<u8>,
    skipped: SkippedMetadata,
}

/// A directory that gets its metadata once everything is in it.
struct OpenDirectory {
    path: Vec<u8>,
    entry: Option<LayerEntry>,
    /// It hides what lower layers have in it.
    opaque: bool,
    /// It has whiteouts that are marked files.
    marked: bool,
    /// It has whiteouts of any kind.
    whiteouts: bool,
}

impl OpenDirectory {
    fn new(path: Vec<u8>, entry: Option<LayerEntry>) -> OpenDirectory {
        OpenDirectory { path, entry, opaque: false, marked: false, whiteouts: false }
    }
}

impl DirectoryWriter {
    /// For a directory that exists and is empty.
    pub(super) fn new(dir: &Path, form: DirectoryForm) -> Result<DirectoryWriter, UnpackError> {
        let open = |at: BorrowedFd<'_>, path: &Path| openat(at, path, DIRECTORY, Mode::empty());
        let failed = |errno| UnpackError::file("open", dir, errno);
        let root = open(rustix::fs::CWD, dir).map_err(failed)?;
        let current = open(root.as_fd(), Path::new(".")).map_err(failed)?;
        let directories = vec![OpenDirectory::new(Vec::new(), None)];
        let (buffer, skipped) = (vec![0; BUFFER], SkippedMetadata::default());
        Ok(DirectoryWriter { root, form, directories, current, buffer, skipped })
    }

    /// Writes one entry, whose content follows if it is a file.
    pub(super) fn add(&mut self, entry: &LayerEntry, content: &mut dyn Read) -> Result<(), UnpackError> {
        let path = clean(&entry.path);
        let (parent, name) = split(&path);
        if name.is_empty() {
            if entry.kind != LayerEntryKind::Directory {
                return Err(UnpackError::refused(&entry.path, EntryProblem::RootNotDirectory));
            }
            self.directories[0].entry = Some(entry.clone());
            return Ok(());
        }
        self.enter(parent, &entry.path)?;
        self.admit(entry, DiskSpace { bytes: 0, inodes: 1 })?;
        match &entry.kind {
            LayerEntryKind::File => self.file(name, entry, &[(0, entry.size)], content),
            LayerEntryKind::Sparse(extents) => self.file(name, entry, extents, content),
            LayerEntryKind::Directory => self.directory(&path, name, entry),
            LayerEntryKind::HardLink => self.hard_link(name, entry),
            LayerEntryKind::Symlink => {
                symlinkat(path_of(&entry.link), &self.current, path_of(name))
                    .map_err(|errno| failed("create the link", entry, errno))?;
                self.describe_named(name, entry)
            }
            LayerEntryKind::CharDevice if entry.device == (0, 0) && self.form.overlay.is_some() => {
                self.whiteout(name, entry)
            }
            LayerEntryKind::CharDevice => self.special(name, entry, FileType::CharacterDevice),
            LayerEntryKind::BlockDevice => self.special(name, entry, FileType::BlockDevice),
            LayerEntryKind::Fifo => self.special(name, entry, FileType::Fifo),
        }
    }

    /// Fails if a write of this amount would use up the reserve.
    fn admit(&self, entry: &LayerEntry, amount: DiskSpace) -> Result<(), UnpackError> {
        let admitted = self.form.reserve.as_ref().map_or(Ok(()), |reserve| reserve.admit(amount));
        admitted.map_err(|error| failed("write", entry, error))
    }

    /// Says that the directory that was added last hides what lower layers have in it.
    pub(super) fn mark_opaque(&mut self) {
        if let Some(directory) = self.directories.last_mut() {
            directory.opaque = true;
        }
    }

    /// Completes all directories. Returns what could not be written. Nothing is synced.
    pub(super) fn finish(mut self) -> Result<SkippedMetadata, UnpackError> {
        // The kernel looks for marked whiteouts only where the root says that there may be some.
        let marked = self.directories.iter().any(|directory| directory.marked);
        self.directories[0].marked |= marked;
        while let Some(directory) = self.directories.pop() {
            self.complete(directory)?;
        }
        Ok(self.skipped)
    }

    /// Goes to the directory of this path, which is the last one or above it.
    fn enter(&mut self, path: &[u8], of: &[u8]) -> Result<(), UnpackError> {
        let mut is_open = true;
        while self.directories.last().is_some_and(|directory| directory.path != path) {
            is_open = false;
            let Some(directory) = self.directories.pop() else { break };
            if self.directories.is_empty() {
                return Err(UnpackError::refused(of, EntryProblem::ParentNotDirectory));
            }
            self.directories[0].marked |= directory.marked;
            self.complete(directory)?;
        }
        if !is_open {
            self.current = self.open(path)?;
        }
        Ok(())
    }

    fn open(&self, path: &[u8]) -> Result<OwnedFd, UnpackError> {
        beneath::open(self.root.as_fd(), path, DIRECTORY)
            .map_err(|errno| UnpackError::file("open", path_of(path), errno))
    }

    fn directory(&mut self, path: &[u8], name: &[u8], entry: &LayerEntry) -> Result<(), UnpackError> {
        mkdirat(&self.current, path_of(name), Mode::RWXU).map_err(|errno| failed("create", entry, errno))?;
        self.current = openat(&self.current, path_of(name), DIRECTORY, Mode::empty())
            .map_err(|errno| failed("open", entry, errno))?;
        self.directories.push(OpenDirectory::new(path.to_vec(), Some(entry.clone())));
        Ok(())
    }

    /// Owner, attributes, mode and time of a directory.
    fn complete(&mut self, directory: OpenDirectory) -> Result<(), UnpackError> {
        let OpenDirectory { path, entry, opaque, marked, whiteouts } = directory;
        let own = self.open(&path)?;
        if let (true, Some(overlay)) = (opaque || marked, self.form.overlay) {
            let value: &[u8] = if opaque { b"y" } else { b"x" };
            let set = set_xattr(XattrTarget::Open(own.as_fd()), overlay.xattr("opaque").as_bytes(), value);
            let set = set.and_then(|is_set| if is_set { Ok(()) } else { Err(Errno::PERM) });
            set.map_err(|errno| UnpackError::file("mark the directory", path_of(&path), errno))?;
        }
        if let (true, Some(overlay)) = (whiteouts, self.form.overlay) {
            // Without it, the whiteouts hide what they hide, and only a list of the directory shows them.
            let _ = set_xattr(XattrTarget::Open(own.as_fd()), overlay.xattr("origin").as_bytes(), b"");
        }
        entry.map_or(Ok(()), |entry| self.describe(own.as_fd(), &entry, 0o700))
    }

    fn file(
        &mut self,
        name: &[u8],
        entry: &LayerEntry,
        extents: &[SparseExtent],
        content: &mut dyn Read,
    ) -> Result<(), UnpackError> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&self.current, path_of(name), flags, Mode::RUSR | Mode::WUSR)
            .map_err(|errno| failed("create", entry, errno))?;
        let write_failed = |errno| failed("write", entry, errno);
        for (offset, length) in extents {
            let (mut at, end) = (*offset, offset + length);
            while at < end {
                let wanted = usize::try_from(end - at).unwrap_or(BUFFER).min(BUFFER);
                content.read_exact(&mut self.buffer[..wanted]).map_err(UnpackError::Read)?;
                self.admit(entry, DiskSpace { bytes: wanted as u64, inodes: 0 })?;
                let mut rest = &self.buffer[..wanted];
                while !rest.is_empty() {
                    let write = || rustix::io::pwrite(&file, rest, at);
                    let written = rustix::io::retry_on_intr(write).map_err(write_failed)?;
                    rest = &rest[written..];
                    at += written as u64;
                }
            }
        }
        if matches!(entry.kind, LayerEntryKind::Sparse(_)) {
            ftruncate(&file, entry.size).map_err(write_failed)?;
        }
        self.describe(file.as_fd(), entry, 0o400)
    }

    /// Gives an open file or directory all that an entry says of it. Without owners, this process keeps the mode bits
    /// that it needs itself.
    fn describe(&mut self, on: BorrowedFd<'_>, entry: &LayerEntry, needed: u32) -> Result<(), UnpackError> {
        let mode = if self.form.owners { entry.mode } else { entry.mode | needed };
        if self.form.owners {
            let set = fchown(on, Some(Uid::from_raw(entry.uid)), Some(Gid::from_raw(entry.gid)));
            self.check_owner(set, entry)?;
        }
        self.set_xattrs(XattrTarget::Open(on), entry)?;
        fchmod(on, Mode::from_raw_mode(mode)).map_err(|errno| failed("set the mode of", entry, errno))?;
        futimens(on, &timestamps(entry.mtime)).map_err(|errno| failed("set the time of", entry, errno))
    }

    /// A user namespace may not have the owner of a file of a layer. It cannot use the file as its owner, either.
    fn check_owner(&self, set: Result<(), Errno>, entry: &LayerEntry) -> Result<(), UnpackError> {
        match set {
            Err(Errno::INVAL) if self.form.overlay.is_some() => Ok(()),
            set => set.map_err(|errno| failed("set the owner of", entry, errno)),
        }
    }

    fn set_xattrs(&mut self, on: XattrTarget<'_>, entry: &LayerEntry) -> Result<(), UnpackError> {
        let set = apply_xattrs(on, &entry.xattrs);
        self.skipped.xattrs += set.map_err(|errno| failed("set attributes of", entry, errno))?;
        Ok(())
    }

    fn hard_link(&mut self, name: &[u8], entry: &LayerEntry) -> Result<(), UnpackError> {
        let target = clean(&entry.link);
        let (parent, target) = split(&target);
        let parent = self.open(parent)?;
        match linkat(&parent, path_of(target), &self.current, path_of(name), AtFlags::empty()) {
            // Another name of a device that was left out.
            Err(Errno::NOENT) if self.skipped.devices > 0 => {
                self.skipped.devices += 1;
                Ok(())
            }
            linked => linked.map_err(|errno| failed("create the hard link", entry, errno)),
        }
    }

    /// A pipe or device.
    fn special(&mut self, name: &[u8], entry: &LayerEntry, kind: FileType) -> Result<(), UnpackError> {
        if kind != FileType::Fifo && !self.form.devices {
            self.skipped.devices += 1;
            return Ok(());
        }
        let device = if kind == FileType::Fifo { 0 } else { makedev(entry.device.0, entry.device.1) };
        match mknodat(&self.current, path_of(name), kind, Mode::RUSR | Mode::WUSR, device) {
            Err(Errno::PERM) if kind != FileType::Fifo => {
                self.skipped.devices += 1;
                return Ok(());
            }
            made => made.map_err(|errno| failed("make", entry, errno))?,
        }
        self.describe_named(name, entry)?;
        // It was made here a moment ago and is no link.
        chmodat(&self.current, path_of(name), Mode::from_raw_mode(entry.mode), AtFlags::empty())
            .map_err(|errno| failed("set the mode of", entry, errno))?;
        utimensat(&self.current, path_of(name), &timestamps(entry.mtime), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|errno| failed("set the time of", entry, errno))
    }

    /// Owner, attributes and time of a file that cannot be opened.
    fn describe_named(&mut self, name: &[u8], entry: &LayerEntry) -> Result<(), UnpackError> {
        let named = path_of(name);
        if self.form.owners {
            let (uid, gid) = (Uid::from_raw(entry.uid), Gid::from_raw(entry.gid));
            let set = chownat(&self.current, named, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW);
            self.check_owner(set, entry)?;
        }
        let here =
            self.current.try_clone().map_err(|error| UnpackError::file("open", path_of(name), error))?;
        self.set_xattrs(XattrTarget::Named(here.as_fd(), name), entry)?;
        utimensat(&self.current, named, &timestamps(entry.mtime), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|errno| failed("set the time of", entry, errno))
    }

    /// Hides a name of the layers below: a device 0:0, or a marked empty file, which the kernel understands from 6.7
    /// on.
    fn whiteout(&mut self, name: &[u8], entry: &LayerEntry) -> Result<(), UnpackError> {
        let make_failed = |errno| failed("create the whiteout", entry, errno);
        if let Some(directory) = self.directories.last_mut() {
            directory.whiteouts = true;
        }
        let kind = FileType::CharacterDevice;
        match mknodat(&self.current, path_of(name), kind, Mode::empty(), makedev(0, 0)) {
            // Kernels before 5.8 allow it to root only.
            Err(Errno::PERM) => {}
            made => return made.map_err(make_failed),
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mark = openat(&self.current, path_of(name), flags, Mode::RUSR).map_err(make_failed)?;
        let attribute = self.form.overlay.unwrap_or(OverlayForm::User).xattr("whiteout");
        if !set_xattr(XattrTarget::Open(mark.as_fd()), attribute.as_bytes(), b"").map_err(make_failed)? {
            return Err(make_failed(Errno::PERM));
        }
        if let Some(directory) = self.directories.last_mut() {
            directory.marked = true;
        }
        Ok(())
    }
}

fn failed(doing: &'static str, entry: &LayerEntry, cause: impl Into<io::Error>) -> UnpackError {
    UnpackError::file(doing, path_of(&entry.path), cause)
}
