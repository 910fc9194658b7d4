//! Creates files, links, devices, whiteouts and directories.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{
    AtFlags, Dev, FileType, Mode, OFlags, chownat, makedev, mknodat, openat, statat, symlinkat, utimensat,
};
use rustix::io::Errno;

use super::super::archive::{LayerArchive, LayerEntry, SparseExtent};
use super::super::error::{EntryRefusal, UnpackError};
use super::super::layer_manifest::{RecordKind, path_of};
use super::super::metadata::{
    XattrResult, XattrTarget, apply_xattrs, clear_xattrs, has_xattr, is_default_acl, set_xattr, timestamps,
};
use super::super::stream::BufferSource;
use super::super::tree::{DirId, DirMeta, PathError};
use super::create::{CreatedFile, allocated, create, describe_file, write_all, write_sparse};
use super::{DirEntryName, LayerWriter};

impl LayerWriter<'_> {
    /// A file, with its content.
    pub(super) fn file(
        &mut self,
        place: DirEntryName<'_>,
        entry: &LayerEntry,
        extents: Option<&[SparseExtent]>,
        archive: &mut LayerArchive<'_, impl BufferSource>,
    ) -> Result<(), UnpackError> {
        let options = self.options;
        let file = self.in_place(place, entry, "create", |dir, name| create(dir, name, entry, options))?;
        let checksum = match extents {
            None => write_all(file.as_fd(), entry, archive, options.write_behind.as_ref())?,
            Some(extents) => write_sparse(file.as_fd(), entry, extents, archive)?,
        };
        let described = describe_file(file.as_fd(), entry, options)?;
        self.count_file(&described);
        if let Some(write_behind) = &options.write_behind {
            write_behind.take(file, entry.size);
        }
        let extents = extents.map(<[SparseExtent]>::to_vec);
        let kind = RecordKind::File { size: entry.size, checksum, extents };
        self.record(place, entry, kind, described.xattrs)
    }

    /// Adds up what a file takes.
    pub(super) fn count_file(&mut self, file: &CreatedFile) {
        self.usage.inodes += 1;
        self.usage.allocated_bytes += file.allocated;
        self.skipped_xattrs += file.skipped_xattrs;
    }

    pub(super) fn symlink(&mut self, place: DirEntryName<'_>, entry: &LayerEntry) -> Result<(), UnpackError> {
        if entry.link.is_empty() {
            return Err(UnpackError::refused(&entry.path, EntryRefusal::EmptyLink));
        }
        self.in_place(place, entry, "create the link", |dir, name| {
            symlinkat(path_of(&entry.link), dir, path_of(name))
        })?;
        let xattrs = self.describe_special(place, entry, None)?;
        self.record(place, entry, RecordKind::Symlink { target: entry.link.clone() }, xattrs)
    }

    /// A pipe or device. A device that this process may not make is counted and recorded.
    pub(super) fn special(
        &mut self,
        place: DirEntryName<'_>,
        entry: &LayerEntry,
        kind: FileType,
    ) -> Result<(), UnpackError> {
        let bits = self.options.disk_mode(entry.mode, 0);
        let device = if kind == FileType::Fifo { 0 } else { makedev(entry.device.0, entry.device.1) };
        let first = Mode::from_raw_mode(bits & 0o777);
        let made = self.in_place(place, entry, "make", |dir, name| {
            match mknodat(dir, path_of(name), kind, first, device) {
                Err(Errno::PERM) if kind != FileType::Fifo => Ok(false),
                result => result.map(|()| true),
            }
        })?;
        let xattrs = if made { self.describe_special(place, entry, Some(bits))? } else { None };
        self.skipped_devices += u64::from(!made);
        let kind = match kind {
            FileType::Fifo => RecordKind::Fifo,
            kind => RecordKind::Device {
                block: kind == FileType::BlockDevice,
                numbers: entry.device,
                skipped: !made,
            },
        };
        self.record(place, entry, kind, xattrs)
    }

    /// Hides a name of the layers below. What this very layer has under that name stays.
    pub(super) fn whiteout(
        &mut self,
        place: DirEntryName<'_>,
        entry: &LayerEntry,
    ) -> Result<(), UnpackError> {
        self.drain()?;
        self.hides_lowers = true;
        if self.forward.contains(place.dir, place.name) {
            return Ok(());
        }
        if let Some(dir) = self.tree.child(place.dir, place.name) {
            self.tree.node_mut(dir).opaque = true;
            return Ok(());
        }
        self.tree.path_len(place.dir, place.name).map_err(|stuck| stuck.at(&entry.path))?;
        let fail = |errno| UnpackError::file("create the whiteout", path_of(&entry.path), errno);
        let here = self.tree.open(place.dir).map_err(|stuck| stuck.at(&entry.path))?;
        let made = if self.options.mark_whiteouts {
            Err(Errno::PERM)
        } else {
            let device: Dev = makedev(0, 0);
            mknodat(&*here, path_of(place.name), FileType::CharacterDevice, Mode::empty(), device)
        };
        let made = match made {
            // Kernels before 5.8 allow it to root only.
            Err(Errno::PERM) => self.marked_whiteout(here.as_fd(), place),
            made => made,
        };
        match made {
            Ok(()) => {}
            // A file, or a whiteout already.
            Err(Errno::EXIST) => return Ok(()),
            Err(errno) => return Err(fail(errno)),
        }
        self.usage.inodes += 1;
        self.record(place, entry, RecordKind::Whiteout, None)
    }

    /// The other form of a whiteout: an empty file with a mark. The kernel understands it from 6.7 on.
    fn marked_whiteout(&mut self, here: BorrowedFd<'_>, place: DirEntryName<'_>) -> Result<(), Errno> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mark = openat(here, path_of(place.name), flags, Mode::RUSR)?;
        let name = self.options.overlay.xattr("whiteout");
        if !set_xattr(XattrTarget::Open(mark.as_fd()), name.as_bytes(), b"")? {
            return Err(Errno::PERM);
        }
        self.tree.node_mut(place.dir).xattr_whiteouts = true;
        Ok(())
    }

    /// Whether a whiteout is at this place, in either form.
    pub(super) fn is_whiteout(
        &mut self,
        place: DirEntryName<'_>,
        entry: &LayerEntry,
    ) -> Result<bool, UnpackError> {
        let here = self.tree.open(place.dir).map_err(|stuck| stuck.at(&entry.path))?;
        let stat = statat(&*here, path_of(place.name), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|errno| UnpackError::file("inspect", path_of(&entry.path), errno))?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        let device = kind == FileType::CharacterDevice && stat.st_rdev == 0;
        let marked = self.tree.node(place.dir).xattr_whiteouts
            && kind == FileType::RegularFile
            && stat.st_size == 0
            && has_xattr(
                XattrTarget::Named(here.as_fd(), place.name),
                &self.options.overlay.xattr("whiteout"),
            );
        Ok(device || marked)
    }

    /// The directory at a place: the one that is there, or a new one.
    pub(super) fn directory(
        &mut self,
        place: DirEntryName<'_>,
        entry: &LayerEntry,
    ) -> Result<DirId, UnpackError> {
        if let Some(dir) = self.tree.child(place.dir, place.name) {
            return Ok(dir);
        }
        let at = |stuck: PathError| stuck.at(&entry.path);
        match self.tree.make(place.dir, place.name) {
            Err(PathError::System(_, Errno::EXIST)) => {}
            made => return made.map_err(at),
        }
        // What was there hid what lower layers have at this path, and so does this.
        self.clear(place, entry)?;
        let dir = self.tree.make(place.dir, place.name).map_err(at)?;
        self.tree.node_mut(dir).opaque = true;
        self.hides_lowers = true;
        Ok(dir)
    }

    /// Notes what an entry says about its directory; attributes are set at once.
    pub(super) fn describe_directory(&mut self, dir: DirId, entry: &LayerEntry) -> Result<(), UnpackError> {
        if !entry.xattrs.is_empty() {
            // Files created before the directory is finished must not inherit a default ACL.
            self.drain()?;
        }
        let had_xattrs = self.tree.node(dir).xattrs.is_some();
        let mut hash = None;
        if had_xattrs || !entry.xattrs.is_empty() {
            let here = self.tree.open(dir).map_err(|stuck| stuck.at(&entry.path))?;
            if had_xattrs {
                clear_xattrs(&*here)
                    .map_err(|errno| UnpackError::file("set attributes of", path_of(&entry.path), errno))?;
            }
            hash = self.put_xattrs(XattrTarget::Open(here.as_fd()), entry)?;
            if let Some((_, acl)) = entry.xattrs.iter().rfind(|(name, _)| is_default_acl(name)) {
                self.charge(acl.len())?;
                rustix::fs::fremovexattr(&*here, "system.posix_acl_default").ok();
                self.default_acls.push((dir, acl.clone()));
            }
        }
        let node = self.tree.node_mut(dir);
        node.implicit = false;
        node.xattrs = hash;
        // Twelve bits fit.
        let mode = u16::try_from(entry.mode).unwrap_or(0o755);
        node.meta = DirMeta { mode, uid: entry.uid, gid: entry.gid, mtime: entry.mtime };
        Ok(())
    }

    /// Runs what makes a new name, once more if the name has to be freed first.
    pub(super) fn in_place<T>(
        &mut self,
        place: DirEntryName<'_>,
        entry: &LayerEntry,
        doing: &'static str,
        make: impl Fn(BorrowedFd<'_>, &[u8]) -> Result<T, Errno>,
    ) -> Result<T, UnpackError> {
        let here = self.tree.open(place.dir).map_err(|stuck| stuck.at(&entry.path))?;
        let result = match make(here.as_fd(), place.name) {
            Err(Errno::EXIST) => {
                self.clear(place, entry)?;
                let here = self.tree.open(place.dir).map_err(|stuck| stuck.at(&entry.path))?;
                make(here.as_fd(), place.name)
            }
            result => result,
        };
        result.map_err(|errno| UnpackError::file(doing, path_of(&entry.path), errno))
    }

    /// Owner, attributes, mode and time of what cannot be opened. Returns the hash of its attributes.
    fn describe_special(
        &mut self,
        place: DirEntryName<'_>,
        entry: &LayerEntry,
        mode: Option<u32>,
    ) -> Result<Option<u32>, UnpackError> {
        let fail = |doing, errno: Errno| UnpackError::file(doing, path_of(&entry.path), errno);
        let here = self.tree.open(place.dir).map_err(|stuck| stuck.at(&entry.path))?;
        let name = path_of(place.name);
        let stat = statat(&*here, name, AtFlags::SYMLINK_NOFOLLOW).map_err(|errno| fail("inspect", errno))?;
        if let Some((uid, gid)) = self.options.owner_to_set((entry.uid, entry.gid), &stat) {
            chownat(&*here, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
                .map_err(|errno| fail("set the owner of", errno))?;
        }
        let hash = self.put_xattrs(XattrTarget::Named(here.as_fd(), place.name), entry)?;
        if let Some(mode) = mode.filter(|mode| stat.st_mode & 0o7777 != *mode) {
            // It was made here a moment ago and is no link.
            rustix::fs::chmodat(&*here, name, Mode::from_raw_mode(mode), AtFlags::empty())
                .map_err(|errno| fail("set the mode of", errno))?;
        }
        utimensat(&*here, name, &timestamps(entry.mtime), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|errno| fail("set the time of", errno))?;
        self.usage.inodes += 1;
        self.usage.allocated_bytes += allocated(&stat);
        Ok(hash)
    }

    fn put_xattrs(&mut self, on: XattrTarget<'_>, entry: &LayerEntry) -> Result<Option<u32>, UnpackError> {
        let XattrResult { hash, skipped } = apply_xattrs(on, &entry.xattrs)
            .map_err(|errno| UnpackError::file("set attributes of", path_of(&entry.path), errno))?;
        self.skipped_xattrs += skipped;
        Ok(hash)
    }
}
