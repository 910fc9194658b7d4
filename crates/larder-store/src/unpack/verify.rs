//! Compares a layer's directory with its manifest, at disk speed.
//!
//! Memory: one buffer, and eight bytes per path to find files that are not part of the layer.

use std::hash::{BuildHasher as _, RandomState};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{
    Advice, AtFlags, FileType, Mode, OFlags, Stat, fadvise, fstat, makedev, openat, readlinkat, statat,
};
use rustix::io::Errno;

use super::beneath::{self, DIRECTORY, split};
use super::layer_manifest::{LayerManifestReader, ManifestRecord, RecordKind, UnpackMode, path_of};
use super::metadata::{XattrTarget, has_xattr, hash_of, read_xattrs};
use super::{OwnerMode, UnpackError};

const BUFFER: usize = 256 << 10;

/// How closely to look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckDepth {
    /// Names, types, sizes, owners, modes, times, attributes and links.
    Metadata,
    /// Also every byte of every file.
    Content,
    /// Also every byte, as it is on disk: what the page cache has of it is dropped, if it was written back.
    Disk,
}

/// One thing that is not as the manifest has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathMismatch {
    /// Relative to the layer's directory; empty for the root.
    pub path: PathBuf,
    /// What is wrong with it.
    pub kind: MismatchKind,
}

/// What can be wrong with a path. Only the first thing found is reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MismatchKind {
    /// It is not there.
    #[error("missing")]
    Missing,
    /// It should not be there.
    #[error("not part of the layer")]
    Extra,
    /// Something else is there: a directory for a file, another device.
    #[error("file type differs")]
    Type,
    /// Longer or shorter.
    #[error("size differs")]
    Size,
    /// Other bytes.
    #[error("content differs")]
    Content,
    /// Another owner or group.
    #[error("owner differs")]
    Owner,
    /// Other permissions.
    #[error("mode differs")]
    Mode,
    /// Changed since it was unpacked.
    #[error("modification time differs")]
    Time,
    /// Other extended attributes; of a directory also what it hides.
    #[error("extended attributes differ")]
    Xattrs,
    /// A link to somewhere else.
    #[error("link target differs")]
    Link,
    /// The system does not let it be read: this is the error's number.
    #[error("unreadable (error {0})")]
    Unreadable(i32),
}

/// Begins to verify a layer. The result yields each [`PathMismatch`] as it is found; an error of the manifest ends it.
pub fn verify(root: &Path, files: &Path, depth: CheckDepth) -> Result<LayerVerification, UnpackError> {
    let reader = LayerManifestReader::open(files)
        .map_err(|cause| UnpackError::Manifest { path: files.to_owned(), cause })?;
    let open = openat(rustix::fs::CWD, root, DIRECTORY, Mode::empty())
        .map_err(|errno| UnpackError::file("open the layer's directory", root, errno))?;
    Ok(LayerVerification {
        root: open,
        files: files.to_owned(),
        form: reader.form(),
        depth,
        reader: Some(reader),
        parent: None,
        known: Vec::new(),
        hasher: RandomState::new(),
        unvisited: vec![Vec::new()],
        found: Vec::new(),
        buffer: vec![0; BUFFER],
    })
}

/// A verification under way: an iterator over what is wrong. See [`verify`].
pub struct LayerVerification {
    root: OwnedFd,
    files: PathBuf,
    form: UnpackMode,
    depth: CheckDepth,
    /// `None` once all records were looked at, and what is extra is searched.
    reader: Option<LayerManifestReader>,
    /// The last directory that was opened.
    parent: Option<(Vec<u8>, OwnedFd)>,
    /// Hashes of all paths, sorted for the search.
    known: Vec<u64>,
    hasher: RandomState,
    unvisited: Vec<Vec<u8>>,
    found: Vec<PathMismatch>,
    buffer: Vec<u8>,
}

impl Iterator for LayerVerification {
    type Item = Result<PathMismatch, UnpackError>;

    fn next(&mut self) -> Option<Self::Item> {
        while let Some(reader) = &mut self.reader {
            match reader.next() {
                Some(Ok(record)) => {
                    if let Some(kind) = self.look(&record) {
                        return Some(Ok(PathMismatch { path: path_of(&record.path).to_owned(), kind }));
                    }
                }
                Some(Err(cause)) => {
                    self.reader = None;
                    self.unvisited.clear();
                    return Some(Err(UnpackError::Manifest { path: self.files.clone(), cause }));
                }
                None => {
                    self.reader = None;
                    self.known.sort_unstable();
                }
            }
        }
        loop {
            if let Some(damage) = self.found.pop() {
                return Some(Ok(damage));
            }
            let dir = self.unvisited.pop()?;
            // What cannot be opened was reported already, or is no directory.
            if let Ok(fd) = beneath::open(self.root.as_fd(), &dir, DIRECTORY) {
                self.search(&dir, &fd);
            }
        }
    }
}

impl LayerVerification {
    /// Compares one path.
    fn look(&mut self, record: &ManifestRecord) -> Option<MismatchKind> {
        let on_disk =
            !matches!(record.kind, RecordKind::PendingLink { .. } | RecordKind::Device { skipped: true, .. });
        if !on_disk {
            return None;
        }
        self.known.push(self.hasher.hash_one(&record.path[..]));
        match self.compare(record) {
            Ok(()) => None,
            Err(MismatchOrErrno::Damage(kind)) => Some(kind),
            Err(MismatchOrErrno::System(Errno::NOENT | Errno::NOTDIR | Errno::LOOP)) => {
                Some(MismatchKind::Missing)
            }
            Err(MismatchOrErrno::System(errno)) => Some(MismatchKind::Unreadable(errno.raw_os_error())),
        }
    }

    fn compare(&mut self, record: &ManifestRecord) -> Result<(), MismatchOrErrno> {
        let (parent, name) = split(&record.path);
        let name = if record.path.is_empty() { b"." } else { name };
        self.open_parent(parent)?;
        let Some((_, here)) = &self.parent else { return Err(Errno::NOENT.into()) };
        let here = here.as_fd();
        match &record.kind {
            RecordKind::File { size, checksum, extents } => {
                let (file, stat) = open_file(here, name)?;
                require(u64::try_from(stat.st_size) == Ok(*size), MismatchKind::Size)?;
                self.compare_common(record, &stat, XattrTarget::Open(file.as_fd()))?;
                if self.depth == CheckDepth::Disk {
                    fadvise(&file, 0, None, Advice::DontNeed)?;
                }
                if self.depth != CheckDepth::Metadata {
                    let found = match extents {
                        None => checksum_of(&file, &[(0, *size)], &mut self.buffer)?,
                        Some(extents) => checksum_of(&file, extents, &mut self.buffer)?,
                    };
                    require(found == *checksum, MismatchKind::Content)?;
                }
                Ok(())
            }
            RecordKind::Directory { implicit, opaque } => {
                let dir = open_directory(here, name)?;
                let on = XattrTarget::Open(dir.as_fd());
                require(self.is_opaque(on) == *opaque, MismatchKind::Xattrs)?;
                let mut stat = fstat(&dir)?;
                if *implicit {
                    // Its time is a lower layer's.
                    stat.st_mtime = record.mtime.seconds;
                    stat.st_mtime_nsec = record.mtime.nanos.into();
                }
                self.compare_common(record, &stat, on)
            }
            other => {
                let stat = statat(here, path_of(name), AtFlags::SYMLINK_NOFOLLOW)?;
                self.compare_special(record, other, here, name, &stat)
            }
        }
    }

    fn compare_special(
        &self,
        record: &ManifestRecord,
        kind: &RecordKind,
        here: BorrowedFd<'_>,
        name: &[u8],
        stat: &Stat,
    ) -> Result<(), MismatchOrErrno> {
        let device = |block, (major, minor)| {
            let kind = if block { FileType::BlockDevice } else { FileType::CharacterDevice };
            is(stat, kind) && stat.st_rdev == makedev(major, minor)
        };
        let on = XattrTarget::Named(here, name);
        match kind {
            RecordKind::Symlink { target } => {
                require(is(stat, FileType::Symlink), MismatchKind::Type)?;
                let found = readlinkat(here, path_of(name), Vec::new())?;
                require(found.as_bytes() == target, MismatchKind::Link)?;
            }
            RecordKind::HardLink { target } => {
                // The other name's record says what the file is.
                let (parent, name) = split(target);
                let parent = beneath::open(self.root.as_fd(), parent, DIRECTORY)?;
                let other = statat(&parent, path_of(name), AtFlags::SYMLINK_NOFOLLOW)?;
                return require(
                    (other.st_dev, other.st_ino) == (stat.st_dev, stat.st_ino),
                    MismatchKind::Link,
                );
            }
            RecordKind::Device { block, numbers, .. } => {
                require(device(*block, *numbers), MismatchKind::Type)?;
            }
            RecordKind::Fifo => require(is(stat, FileType::Fifo), MismatchKind::Type)?,
            RecordKind::Whiteout => {
                let marked = is(stat, FileType::RegularFile)
                    && stat.st_size == 0
                    && has_xattr(on, &self.form.overlay.xattr("whiteout"));
                return require(device(false, (0, 0)) || marked, MismatchKind::Type);
            }
            RecordKind::File { .. } | RecordKind::Directory { .. } | RecordKind::PendingLink { .. } => {}
        }
        self.compare_common(record, stat, on)
    }

    /// What all kinds of files have.
    fn compare_common(
        &self,
        record: &ManifestRecord,
        stat: &Stat,
        on: XattrTarget<'_>,
    ) -> Result<(), MismatchOrErrno> {
        let (mut mode, symlink) = (record.mode, is(stat, FileType::Symlink));
        match self.form.owners {
            OwnerMode::Apply => {
                require((stat.st_uid, stat.st_gid) == (record.uid, record.gid), MismatchKind::Owner)?;
            }
            OwnerMode::Record if matches!(record.kind, RecordKind::Directory { .. }) => mode |= 0o700,
            OwnerMode::Record if matches!(record.kind, RecordKind::File { .. }) => mode |= 0o400,
            OwnerMode::Record => {}
        }
        require(symlink || stat.st_mode & 0o7777 == mode, MismatchKind::Mode)?;
        require(same_time(record, stat), MismatchKind::Time)?;
        if record.xattrs.is_some() {
            require(hash_of(&read_xattrs(on)?) == record.xattrs, MismatchKind::Xattrs)?;
        }
        Ok(())
    }

    fn is_opaque(&self, on: XattrTarget<'_>) -> bool {
        super::metadata::get(on, self.form.overlay.xattr("opaque").as_bytes())
            .is_ok_and(|value| value == b"y")
    }

    /// Keeps one directory open: most paths lie beside the one before.
    fn open_parent(&mut self, path: &[u8]) -> Result<(), Errno> {
        if self.parent.as_ref().is_none_or(|(open, _)| open != path) {
            self.parent = None;
            self.parent = Some((path.to_vec(), beneath::open(self.root.as_fd(), path, DIRECTORY)?));
        }
        Ok(())
    }

    /// Looks for names that no record has.
    fn search(&mut self, path: &[u8], dir: &OwnedFd) {
        let mut report =
            |path: Vec<u8>, kind| self.found.push(PathMismatch { path: path_of(&path).to_owned(), kind });
        let entries = match rustix::fs::Dir::read_from(dir) {
            Ok(entries) => entries,
            Err(errno) => return report(path.to_vec(), MismatchKind::Unreadable(errno.raw_os_error())),
        };
        for entry in entries {
            let entry = match entry {
                Ok(entry) => entry,
                Err(errno) => return report(path.to_vec(), MismatchKind::Unreadable(errno.raw_os_error())),
            };
            let name = entry.file_name().to_bytes();
            if matches!(name, b"." | b"..") {
                continue;
            }
            let below = if path.is_empty() { name.to_vec() } else { [path, name].join(&b'/') };
            if self.known.binary_search(&self.hasher.hash_one(&below[..])).is_err() {
                // What is in an extra directory is not listed one by one.
                report(below, MismatchKind::Extra);
            } else if matches!(entry.file_type(), FileType::Directory | FileType::Unknown) {
                self.unvisited.push(below);
            }
        }
    }
}

fn open_file(here: BorrowedFd<'_>, name: &[u8]) -> Result<(OwnedFd, Stat), MismatchOrErrno> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    // Opening a device or a socket may fail in its own ways.
    let file = openat(here, path_of(name), flags, Mode::empty());
    let stat = match &file {
        Ok(file) => fstat(file)?,
        Err(_) => statat(here, path_of(name), AtFlags::SYMLINK_NOFOLLOW)?,
    };
    require(is(&stat, FileType::RegularFile), MismatchKind::Type)?;
    Ok((file?, stat))
}

fn open_directory(here: BorrowedFd<'_>, name: &[u8]) -> Result<OwnedFd, MismatchOrErrno> {
    openat(here, path_of(name), DIRECTORY, Mode::empty()).map_err(|errno| match errno {
        Errno::NOTDIR | Errno::LOOP => MismatchOrErrno::Damage(MismatchKind::Type),
        errno => MismatchOrErrno::System(errno),
    })
}

enum MismatchOrErrno {
    Damage(MismatchKind),
    System(Errno),
}

impl From<Errno> for MismatchOrErrno {
    fn from(errno: Errno) -> Self {
        MismatchOrErrno::System(errno)
    }
}

fn require(holds: bool, otherwise: MismatchKind) -> Result<(), MismatchOrErrno> {
    if holds { Ok(()) } else { Err(MismatchOrErrno::Damage(otherwise)) }
}

fn is(stat: &Stat, kind: FileType) -> bool {
    FileType::from_raw_mode(stat.st_mode) == kind
}

/// Some filesystems keep whole seconds only, and none keeps all the times that an archive can name.
fn same_time(record: &ManifestRecord, stat: &Stat) -> bool {
    let kept = i32::try_from(record.mtime.seconds).is_ok();
    let nanos = u64::from(record.mtime.nanos);
    !kept
        || (stat.st_mtime == record.mtime.seconds && (stat.st_mtime_nsec == nanos || stat.st_mtime_nsec == 0))
}

fn checksum_of(file: &OwnedFd, extents: &[(u64, u64)], buffer: &mut [u8]) -> Result<u32, Errno> {
    let mut checksum = crc32fast::Hasher::new();
    for (offset, length) in extents {
        let (mut at, end) = (*offset, offset.saturating_add(*length));
        while at < end {
            let wanted = usize::try_from(end - at).unwrap_or(usize::MAX).min(buffer.len());
            match rustix::io::pread(file, &mut buffer[..wanted], at) {
                Err(Errno::INTR) => {}
                Ok(0) => return Ok(checksum.finalize()),
                Ok(read) => {
                    checksum.update(&buffer[..read]);
                    at += read as u64;
                }
                Err(errno) => return Err(errno),
            }
        }
    }
    Ok(checksum.finalize())
}
