//! Fills in what a layer takes from the layers below: metadata of directories that the archive only implied, and files
//! that it only hard-linked.
//!
//! An overlay shows the nearest layer's owner and mode of a directory. A directory that was created only as a parent
//! would hide the metadata of the layer that really contains it, so it gets a copy, as if the layers had been unpacked
//! one over the other.
//!
//! Most layers are the same on top of any other layers, and all images can share them: [`LowerMergeReport::changed`] reports
//! whether this one is not. A directory's time is copied but does not count.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, Stat, Timespec, Timestamps, Uid, chownat, fchmod, fchown, fstat,
    futimens, linkat, mkdirat, mknodat, openat, readlinkat, statat, symlinkat, utimensat,
};
use rustix::io::Errno;

use super::beneath::{self, DIRECTORY, split};
use super::layer_manifest::{
    self, FileTime, LayerManifestError, LayerManifestReader, ManifestLocation, ManifestRecord, RecordKind,
    UnpackMode, path_of,
};
use super::lowers::{LowerEntry, LowerLayers};
use super::metadata::{XattrTarget, apply_xattrs, clear_xattrs, hash_of, read_xattrs};
use super::{AllocatedSpace, EntryRefusal, OwnerMode, UnpackError, UnpackTarget};

/// Whether to do it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LowerMergeMode {
    /// Change the layer.
    Apply,
    /// Change nothing, only say whether something would be: may a layer that was settled on other lowers be shared?
    Check,
}

/// What settling did, or would do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LowerMergeReport {
    /// The layer now fits these lowers only: an owner, a mode or attributes came from them, or a file.
    pub changed: bool,
    /// What this added to the layer's [`AllocatedSpace`].
    pub added: AllocatedSpace,
}

/// Settles a layer on `lowers`, the nearest first, which are settled themselves. After an error the layer is useless.
///
/// Doing it again on the same lowers changes nothing.
pub fn merge_lowers(
    target: UnpackTarget<'_>,
    lowers: &[&Path],
    settling: LowerMergeMode,
) -> Result<LowerMergeReport, UnpackError> {
    let root = open_directory(target.root)?;
    let lowers = lowers.iter().map(|lower| open_directory(lower).map(Arc::new)).collect::<Result<_, _>>()?;
    let files = ManifestLocation { path: target.files.to_owned(), offset: 0 };
    merge_open_lowers(root, &files, lowers, settling)
}

fn open_directory(path: &Path) -> Result<OwnedFd, UnpackError> {
    openat(rustix::fs::CWD, path, DIRECTORY, Mode::empty())
        .map_err(|errno| UnpackError::file("open the layer's directory", path, errno))
}

/// Like [`merge_lowers`], on open directories: images have no paths.
pub(crate) fn merge_open_lowers(
    root: OwnedFd,
    manifest: &ManifestLocation,
    lowers: Vec<Arc<OwnedFd>>,
    settling: LowerMergeMode,
) -> Result<LowerMergeReport, UnpackError> {
    let files = manifest.path.as_path();
    let unreadable = |cause| UnpackError::Manifest { path: files.to_owned(), cause };
    let reader = LayerManifestReader::open_at(manifest).map_err(unreadable)?;
    let all = std::iter::once(Arc::new(root)).chain(lowers.iter().cloned()).collect();
    let mut work = LowerMerge {
        form: reader.form(),
        merged: LowerLayers::new(all),
        lowers: LowerLayers::new(lowers),
        settling,
        settled: LowerMergeReport::default(),
        updated: Vec::new(),
        added: Vec::new(),
    };
    let mut implicit = Vec::new();
    for record in reader {
        let record = record.map_err(unreadable)?;
        match &record.kind {
            RecordKind::Directory { implicit: true, .. } => implicit.push(record),
            RecordKind::PendingLink { .. } => work.link(&record)?,
            _ => {}
        }
    }
    // After the links: a default ACL would be inherited, and times would change.
    for record in implicit {
        work.directory(&record)?;
    }
    let LowerMerge { settled, updated, added, .. } = work;
    if settling == LowerMergeMode::Apply && !(updated.is_empty() && added.is_empty()) {
        note(files, updated, &added).map_err(unreadable)?;
    }
    Ok(settled)
}

/// Puts what was settled into the layer's list of files.
fn note(
    files: &Path,
    mut updated: Vec<ManifestRecord>,
    added: &[ManifestRecord],
) -> Result<(), LayerManifestError> {
    updated.sort_unstable_by(|a, b| a.path.cmp(&b.path));
    let keep =
        |_, record: ManifestRecord| match updated.binary_search_by(|other| other.path.cmp(&record.path)) {
            Ok(at) if is_replaced(&record) => Some(updated[at].clone()),
            _ => Some(record),
        };
    layer_manifest::rewrite(files, keep, added)
}

fn is_replaced(record: &ManifestRecord) -> bool {
    matches!(record.kind, RecordKind::Directory { .. } | RecordKind::PendingLink { .. })
}

struct LowerMerge {
    form: UnpackMode,
    /// The layer itself, then `lowers`.
    merged: LowerLayers,
    lowers: LowerLayers,
    settling: LowerMergeMode,
    settled: LowerMergeReport,
    /// Records that take the place of those with the same path.
    updated: Vec<ManifestRecord>,
    added: Vec<ManifestRecord>,
}

impl LowerMerge {
    fn layer(&self) -> BorrowedFd<'_> {
        self.merged.root(0)
    }

    /// Gives an implied directory the looks of the one below, if there is one.
    fn directory(&mut self, record: &ManifestRecord) -> Result<(), UnpackError> {
        let fail = |errno: Errno| UnpackError::file("finish the directory", path_of(&record.path), errno);
        let Some(below) =
            self.lowers.find(&record.path, true).map_err(fail)?.filter(LowerEntry::is_directory)
        else {
            return Ok(());
        };
        let model = beneath::open(self.lowers.root(below.layer), &below.path, DIRECTORY).map_err(fail)?;
        let own = beneath::open(self.layer(), &record.path, DIRECTORY).map_err(fail)?;
        let wanted = read_xattrs(XattrTarget::Open(model.as_fd())).map_err(fail)?;
        let stat = fstat(&own).map_err(fail)?;
        let same_owner = self.form.owners == OwnerMode::Record
            || (stat.st_uid, stat.st_gid) == (below.stat.st_uid, below.stat.st_gid);
        let same_mode = stat.st_mode == below.stat.st_mode;
        let same_xattrs = read_xattrs(XattrTarget::Open(own.as_fd())).map_err(fail)? == wanted;
        let same = same_owner && same_mode && same_xattrs;
        self.settled.changed |= !same;
        if self.settling == LowerMergeMode::Check {
            return Ok(());
        }
        if !same {
            self.put(own.as_fd(), &below.stat, &wanted, true).map_err(fail)?;
            self.updated.push(describe(
                record.path.clone(),
                record.kind.clone(),
                &below.stat,
                hash_of(&wanted),
            ));
        }
        futimens(&own, &times(&below.stat)).map_err(fail)
    }

    /// Makes a link to a file that a lower layer has: copies the file up, and links to the copy.
    fn link(&mut self, record: &ManifestRecord) -> Result<(), UnpackError> {
        let RecordKind::PendingLink { target } = &record.kind else { return Ok(()) };
        self.settled.changed = true;
        if self.settling == LowerMergeMode::Check {
            return Ok(());
        }
        let refuse = |reason| UnpackError::refused(&record.path, reason);
        let fail = |errno: Errno| UnpackError::file("create the hard link", path_of(&record.path), errno);
        let shown = self.merged.find(target, false).map_err(fail)?;
        let (found, hidden) = match shown {
            Some(found) => (found, false),
            // The layer itself hides it, after it has linked to it.
            None => match self.lowers.find(target, false).map_err(fail)? {
                Some(found) => (LowerEntry { layer: found.layer + 1, ..found }, true),
                None => return Err(refuse(EntryRefusal::LinkTarget)),
            },
        };
        if found.is_directory() {
            return Err(refuse(EntryRefusal::LinkToDirectory));
        }
        if hidden {
            let copied = self.copy(&found, &record.path).map_err(fail)?;
            self.updated.push(copied);
            return Ok(());
        }
        if found.layer != 0 {
            self.make_parents(split(&found.path).0).map_err(fail)?;
            let copied = self.copy(&found, &found.path).map_err(fail)?;
            self.added.push(copied);
        }
        self.link_within(&found.path, &record.path).map_err(fail)?;
        self.updated
            .push(ManifestRecord { kind: RecordKind::HardLink { target: found.path }, ..record.clone() });
        Ok(())
    }

    fn link_within(&self, from: &[u8], to: &[u8]) -> Result<(), Errno> {
        let ((from, from_name), (to, to_name)) = (split(from), split(to));
        let from = beneath::open(self.layer(), from, DIRECTORY)?;
        let to = beneath::open(self.layer(), to, DIRECTORY)?;
        keeping_time(to.as_fd(), || {
            linkat(&from, path_of(from_name), &to, path_of(to_name), AtFlags::empty())
        })
    }

    /// Makes the directories of a path that only lower layers have, and makes them look as they do there.
    fn make_parents(&mut self, path: &[u8]) -> Result<(), Errno> {
        let ends: Vec<usize> = (0..path.len()).filter(|at| path[*at] == b'/').chain([path.len()]).collect();
        for end in ends {
            let path = &path[..end];
            let (parent, name) = split(path);
            if name.is_empty() {
                continue;
            }
            let here = beneath::open(self.layer(), parent, DIRECTORY)?;
            match keeping_time(here.as_fd(), || mkdirat(&here, path_of(name), Mode::RWXU)) {
                Err(Errno::EXIST) => continue,
                made => made?,
            }
            let Some(below) = self.lowers.find(path, true)?.filter(LowerEntry::is_directory) else {
                return Err(Errno::NOTDIR);
            };
            let model = beneath::open(self.lowers.root(below.layer), &below.path, DIRECTORY)?;
            let mut wanted = read_xattrs(XattrTarget::Open(model.as_fd()))?;
            wanted.retain(|(name, _)| !super::metadata::is_default_acl(name));
            let own = beneath::open(self.layer(), path, DIRECTORY)?;
            self.put(own.as_fd(), &below.stat, &wanted, true)?;
            futimens(&own, &times(&below.stat))?;
            self.count(&fstat(&own)?);
            let kind = RecordKind::Directory { implicit: true, opaque: false };
            self.added.push(describe(path.to_vec(), kind, &below.stat, hash_of(&wanted)));
        }
        Ok(())
    }

    /// Copies a file of a lower layer into this one. Returns its record.
    fn copy(&mut self, found: &LowerEntry, to: &[u8]) -> Result<ManifestRecord, Errno> {
        let (from, from_name) = split(&found.path);
        let from = beneath::open(self.merged.root(found.layer), from, DIRECTORY)?;
        let (to_parent, to_name) = split(to);
        let here = beneath::open(self.layer(), to_parent, DIRECTORY)?;
        let parent_times = times(&fstat(&here)?);
        let (from_name, to_name) = (path_of(from_name), path_of(to_name));
        let copied = match FileType::from_raw_mode(found.stat.st_mode) {
            FileType::RegularFile => self.copy_file((&from, from_name), (&here, to_name), &found.stat),
            _ => self.copy_special((&from, from_name), (&here, to_name), &found.stat),
        };
        let (kind, xattrs) = copied?;
        futimens(&here, &parent_times)?;
        Ok(describe(to.to_vec(), kind, &found.stat, xattrs))
    }

    /// Copies a regular file. Returns its kind for the record, and the hash of its attributes.
    fn copy_file(
        &mut self,
        (from, from_name): (&OwnedFd, &Path),
        (here, name): (&OwnedFd, &Path),
        stat: &Stat,
    ) -> Result<(RecordKind, Option<u32>), Errno> {
        let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let source = openat(from, from_name, flags | OFlags::RDONLY, Mode::empty())?;
        let create = flags | OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        let copy = openat(here, name, create, Mode::RUSR | Mode::WUSR)?;
        let (size, checksum) = copy_bytes(source.as_fd(), copy.as_fd())?;
        let xattrs = read_xattrs(XattrTarget::Open(source.as_fd()))?;
        self.put(copy.as_fd(), stat, &xattrs, false)?;
        futimens(&copy, &times(stat))?;
        self.count(&fstat(&copy)?);
        Ok((RecordKind::File { size, checksum, extents: None }, hash_of(&xattrs)))
    }

    /// Makes a link, pipe or device like the one below. Returns its kind for the record, and no hash of attributes.
    fn copy_special(
        &mut self,
        (from, from_name): (&OwnedFd, &Path),
        (here, name): (&OwnedFd, &Path),
        stat: &Stat,
    ) -> Result<(RecordKind, Option<u32>), Errno> {
        let mode = Mode::from_raw_mode(stat.st_mode & 0o7777);
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Symlink => {
                let target = readlinkat(from, from_name, Vec::new())?.into_bytes();
                symlinkat(path_of(&target), here, name)?;
                RecordKind::Symlink { target }
            }
            other => {
                mknodat(here, name, other, mode, stat.st_rdev)?;
                let numbers = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
                match other {
                    FileType::Fifo => RecordKind::Fifo,
                    other => {
                        RecordKind::Device { block: other == FileType::BlockDevice, numbers, skipped: false }
                    }
                }
            }
        };
        if self.form.owners == OwnerMode::Apply {
            let (uid, gid) = (Uid::from_raw(stat.st_uid), Gid::from_raw(stat.st_gid));
            chownat(here, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
        }
        if !matches!(kind, RecordKind::Symlink { .. }) {
            rustix::fs::chmodat(here, name, mode, AtFlags::empty())?;
        }
        utimensat(here, name, &times(stat), AtFlags::SYMLINK_NOFOLLOW)?;
        self.count(&statat(here, name, AtFlags::SYMLINK_NOFOLLOW)?);
        Ok((kind, None))
    }

    /// Owner, attributes and mode of an open file or directory.
    fn put(
        &self,
        on: BorrowedFd<'_>,
        model: &Stat,
        xattrs: &[(Vec<u8>, Vec<u8>)],
        clear: bool,
    ) -> Result<(), Errno> {
        if self.form.owners == OwnerMode::Apply {
            fchown(on, Some(Uid::from_raw(model.st_uid)), Some(Gid::from_raw(model.st_gid)))?;
        }
        if clear {
            clear_xattrs(on)?;
        }
        apply_xattrs(XattrTarget::Open(on), xattrs)?;
        fchmod(on, Mode::from_raw_mode(model.st_mode & 0o7777))
    }

    fn count(&mut self, stat: &Stat) {
        self.settled.added.inodes += 1;
        self.settled.added.allocated_bytes += u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
    }
}

fn describe(path: Vec<u8>, kind: RecordKind, stat: &Stat, xattrs: Option<u32>) -> ManifestRecord {
    let mtime = FileTime { seconds: stat.st_mtime, nanos: u32::try_from(stat.st_mtime_nsec).unwrap_or(0) };
    ManifestRecord {
        path,
        kind,
        mode: stat.st_mode & 0o7777,
        uid: stat.st_uid,
        gid: stat.st_gid,
        mtime,
        xattrs,
    }
}

fn times(stat: &Stat) -> Timestamps {
    let nanos = |nanos: u64| nanos.try_into().unwrap_or(0);
    Timestamps {
        last_access: Timespec { tv_sec: stat.st_mtime, tv_nsec: nanos(stat.st_mtime_nsec) },
        last_modification: Timespec { tv_sec: stat.st_mtime, tv_nsec: nanos(stat.st_mtime_nsec) },
    }
}

/// Does something in a directory that must not show in the directory's time.
fn keeping_time(dir: BorrowedFd<'_>, mut make: impl FnMut() -> Result<(), Errno>) -> Result<(), Errno> {
    let before = times(&fstat(dir)?);
    make()?;
    futimens(dir, &before)
}

fn copy_bytes(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> Result<(u64, u32), Errno> {
    let mut buffer = vec![0; 256 << 10];
    let (mut size, mut checksum) = (0, crc32fast::Hasher::new());
    loop {
        let read = rustix::io::retry_on_intr(|| rustix::io::read(from, &mut buffer[..]))?;
        if read == 0 {
            return Ok((size, checksum.finalize()));
        }
        checksum.update(&buffer[..read]);
        size += read as u64;
        let mut rest = &buffer[..read];
        while !rest.is_empty() {
            let written = rustix::io::retry_on_intr(|| rustix::io::write(to, rest))?;
            rest = &rest[written..];
        }
    }
}
