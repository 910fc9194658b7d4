//! Creates a file and sets its content, owner, attributes, mode and times.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{Gid, Mode, OFlags, Stat, Uid, fchmod, fchown, fstat, ftruncate, futimens, openat};
use rustix::io::Errno;

use super::super::archive::{LayerArchive, LayerEntry, SparseExtent};
use super::super::error::UnpackError;
use super::super::layer_manifest::path_of;
use super::super::metadata::{XattrResult, XattrTarget, apply_xattrs, timestamps};
use super::super::options::{OwnerMode, UnpackOptions};
use super::super::stream::BufferSource;
use super::super::write_behind::WriteBehind;

pub(super) fn allocated(stat: &Stat) -> u64 {
    u64::try_from(stat.st_blocks).unwrap_or(0) * 512
}

/// What a new file turned out to be.
pub(super) struct CreatedFile {
    pub(super) allocated: u64,
    /// Hash of its attributes.
    pub(super) xattrs: Option<u32>,
    pub(super) skipped_xattrs: u64,
}

/// Makes an empty file, unless something has its name.
pub(super) fn create(
    dir: BorrowedFd<'_>,
    name: &[u8],
    entry: &LayerEntry,
    options: &UnpackOptions,
) -> Result<OwnedFd, Errno> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // No set-id bits before the owner is right.
    let mode = Mode::from_raw_mode(options.disk_mode(entry.mode, 0o400) & 0o777);
    openat(dir, path_of(name), flags, mode)
}

/// Owner, attributes, mode and time of a file that was just written.
pub(super) fn describe_file(
    file: BorrowedFd<'_>,
    entry: &LayerEntry,
    options: &UnpackOptions,
) -> Result<CreatedFile, UnpackError> {
    let fail = |doing, errno: Errno| UnpackError::file(doing, path_of(&entry.path), errno);
    let mode = options.disk_mode(entry.mode, 0o400);
    let stat = fstat(file).map_err(|errno| fail("inspect", errno))?;
    if let Some((uid, gid)) = options.owner_to_set((entry.uid, entry.gid), &stat) {
        fchown(file, Some(uid), Some(gid)).map_err(|errno| fail("set the owner of", errno))?;
    }
    let XattrResult { hash, skipped } = apply_xattrs(XattrTarget::Open(file), &entry.xattrs)
        .map_err(|errno| fail("set attributes of", errno))?;
    // The process's umask may have taken bits away.
    if stat.st_mode & 0o7777 != mode || (hash.is_some() && has_acl(entry)) {
        fchmod(file, Mode::from_raw_mode(mode)).map_err(|errno| fail("set the mode of", errno))?;
    }
    futimens(file, &timestamps(entry.mtime)).map_err(|errno| fail("set the time of", errno))?;
    Ok(CreatedFile { allocated: allocated(&stat), xattrs: hash, skipped_xattrs: skipped })
}

impl UnpackOptions {
    /// The owner to set, if it is to be set and differs from what the file has.
    pub(super) fn owner_to_set(&self, (uid, gid): (u32, u32), stat: &Stat) -> Option<(Uid, Gid)> {
        let differs = stat.st_uid != uid || stat.st_gid != gid;
        (self.owners == OwnerMode::Apply && differs).then(|| (Uid::from_raw(uid), Gid::from_raw(gid)))
    }

    /// The mode on disk: without owners, this user keeps the bits that it needs itself.
    pub(super) fn disk_mode(&self, mode: u32, needed: u32) -> u32 {
        match self.owners {
            OwnerMode::Apply => mode,
            OwnerMode::Record => mode | needed,
        }
    }
}

fn has_acl(entry: &LayerEntry) -> bool {
    entry.xattrs.iter().any(|(name, _)| name.starts_with(b"system."))
}

/// Writes the content as it arrives. Returns its checksum.
pub(super) fn write_all(
    file: BorrowedFd<'_>,
    entry: &LayerEntry,
    archive: &mut LayerArchive<'_, impl BufferSource>,
    write_behind: Option<&WriteBehind>,
) -> Result<u32, UnpackError> {
    let mut checksum = crc32fast::Hasher::new();
    let mut unseen = 0;
    loop {
        let piece = archive.content()?;
        if piece.is_empty() {
            return Ok(checksum.finalize());
        }
        let length = piece.len();
        checksum.update(piece);
        let mut rest = piece;
        while !rest.is_empty() {
            let written = rustix::io::retry_on_intr(|| rustix::io::write(file, rest))
                .map_err(|errno| UnpackError::file("write", path_of(&entry.path), errno))?;
            rest = &rest[written..];
        }
        archive.consume(length);
        unseen += length;
        if unseen >= WriteBehind::PIECE {
            unseen = 0;
            // Only to be early: without a second handle it is done at the end.
            if let Some((write_behind, file)) = write_behind.zip(file.try_clone_to_owned().ok()) {
                write_behind.take(file, entry.size);
            }
        }
    }
}

/// Writes the parts where they belong, and leaves holes between them.
pub(super) fn write_sparse(
    file: BorrowedFd<'_>,
    entry: &LayerEntry,
    extents: &[SparseExtent],
    archive: &mut LayerArchive<'_, impl BufferSource>,
) -> Result<u32, UnpackError> {
    let fail = |errno| UnpackError::file("write", path_of(&entry.path), errno);
    let mut checksum = crc32fast::Hasher::new();
    ftruncate(file, entry.size).map_err(fail)?;
    for (offset, length) in extents {
        let (mut at, end) = (*offset, *offset + *length);
        while at < end {
            let piece = archive.content()?;
            let room = usize::try_from(end - at).unwrap_or(usize::MAX);
            let piece = &piece[..piece.len().min(room)];
            let written = rustix::io::retry_on_intr(|| rustix::io::pwrite(file, piece, at)).map_err(fail)?;
            checksum.update(&piece[..written]);
            at += written as u64;
            archive.consume(written);
        }
    }
    Ok(checksum.finalize())
}

/// Writes the whole content of a small file, and describes it. Returns the checksum of its content as well.
pub(super) fn write_and_describe(
    file: BorrowedFd<'_>,
    entry: &LayerEntry,
    bytes: &[u8],
    options: &UnpackOptions,
) -> Result<(CreatedFile, u32), UnpackError> {
    let mut rest = bytes;
    while !rest.is_empty() {
        let written = rustix::io::retry_on_intr(|| rustix::io::write(file, rest))
            .map_err(|errno| UnpackError::file("write", path_of(&entry.path), errno))?;
        rest = &rest[written..];
    }
    Ok((describe_file(file, entry, options)?, crc32fast::hash(bytes)))
}
