//! Writes an unpacked directory as an EROFS image: as its manifest describes it, with the files' content as it is on disk.

use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use larder::reference::Digest;
use larder_erofs::{ErofsEntry, ErofsEntryKind, ErofsOptions, ErofsTime, ErofsWriter};
use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;

use super::archive_record::append_record;
use super::beneath::{self, DIRECTORY, split};
use super::image::{image_error, uuid_of};
use super::image_file::ImageFile;
use super::layer_manifest::{
    LayerManifestReader, LayerManifestWriter, ManifestRecord, RecordKind, UnpackMode, path_of,
};
use super::metadata::{XattrTarget, Xattrs, read_xattrs};
use super::{OverlayForm, OwnerMode, UnpackError, UnpackOptions, UnpackTarget};
use crate::erofs::ErofsFile;
use crate::store::ARCHIVE;

/// Bytes of a file that are read at once.
const BUFFER: usize = 128 << 10;

/// Paths of a conversion.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DirectoryImage<'a> {
    /// The directory and its manifest.
    pub(crate) from: UnpackTarget<'a>,
    /// The image, which must not exist.
    pub(crate) image: &'a Path,
    /// A manifest of the directories that the archive only implied. Not made if there are none.
    pub(crate) manifest: &'a Path,
}

impl DirectoryImage<'_> {
    /// Writes the image of a settled layer. Not synced. Fails with [`UnpackError::NeedsDirectory`] if no image can hold the
    /// layer, or if a file is not as it was unpacked.
    pub(crate) fn write(self, diff_id: &Digest, options: &UnpackOptions) -> Result<ErofsFile, UnpackError> {
        let unreadable = |cause| UnpackError::Manifest { path: self.from.files.to_owned(), cause };
        let reader = LayerManifestReader::open(self.from.files).map_err(unreadable)?;
        let mode = UnpackMode { owners: OwnerMode::Apply, overlay: OverlayForm::Trusted };
        if reader.form() != mode {
            return Err(needs_directory("it was unpacked without root".to_owned()));
        }
        let root = open(self.from.root, DIRECTORY, Mode::empty());
        let root = root.map_err(|errno| UnpackError::file("open", self.from.root, errno))?;
        let file = ImageFile::create(self.image, options);
        let file = file.map_err(|error| UnpackError::file("create", self.image, error))?;
        let image = ErofsOptions { uuid: uuid_of(diff_id), ..ErofsOptions::default() };
        let writer = ErofsWriter::new(file, image).map_err(|error| image_error(self.image, error))?;
        let mut copy = DirectoryCopy { root, writer, image: self.image.to_owned() };
        let unwritten = |error| UnpackError::file("write the layer manifest", self.manifest, error);
        let mut implied = None;
        for record in reader {
            let record = record.map_err(unreadable)?;
            copy.add(&record)?;
            if matches!(record.kind, RecordKind::Directory { implicit: true, .. }) {
                let records = match &mut implied {
                    Some(records) => records,
                    None => {
                        implied.insert(LayerManifestWriter::create(self.manifest, mode).map_err(unwritten)?)
                    }
                };
                records.add(&record).map_err(unwritten)?;
            }
        }
        implied.map_or(Ok(()), LayerManifestWriter::finish).map_err(unwritten)?;
        // What the archive of the directory can be written from is that of the image, too.
        copy.finish(&self.from.files.with_file_name(ARCHIVE))
    }
}

struct DirectoryCopy {
    root: OwnedFd,
    writer: ErofsWriter<ImageFile>,
    image: PathBuf,
}

impl DirectoryCopy {
    fn add(&mut self, record: &ManifestRecord) -> Result<(), UnpackError> {
        let kind = match &record.kind {
            RecordKind::File { size, checksum, extents } => {
                return self.file(record, *size, *checksum, extents.as_deref());
            }
            RecordKind::Directory { opaque, .. } => {
                self.entry(record, ErofsEntryKind::Directory, &self.xattrs(record)?)?;
                return if *opaque { self.opaque(record) } else { Ok(()) };
            }
            RecordKind::Symlink { target } => ErofsEntryKind::Symlink { target },
            RecordKind::HardLink { target } => ErofsEntryKind::HardLink { target },
            RecordKind::Device { block: true, numbers: (major, minor), .. } => {
                ErofsEntryKind::BlockDevice { major: *major, minor: *minor }
            }
            RecordKind::Device { block: false, numbers: (major, minor), .. } => {
                ErofsEntryKind::CharDevice { major: *major, minor: *minor }
            }
            RecordKind::Fifo => ErofsEntryKind::Fifo,
            RecordKind::Whiteout => ErofsEntryKind::CharDevice { major: 0, minor: 0 },
            RecordKind::PendingLink { .. } => {
                return Err(needs_directory(format!("{}: not settled", path_of(&record.path).display())));
            }
        };
        self.entry(record, kind, &self.xattrs(record)?)
    }

    fn entry(
        &mut self,
        record: &ManifestRecord,
        kind: ErofsEntryKind<'_>,
        xattrs: &Xattrs,
    ) -> Result<(), UnpackError> {
        let added = self.writer.add(&ErofsEntry {
            path: if record.path.is_empty() { b"/" } else { &record.path },
            kind,
            mode: record.mode,
            uid: record.uid,
            gid: record.gid,
            mtime: ErofsTime { seconds: record.mtime.seconds, nanos: record.mtime.nanos },
            xattrs,
        });
        added.map_err(|error| image_error(&self.image, error))
    }

    fn opaque(&mut self, dir: &ManifestRecord) -> Result<(), UnpackError> {
        let path = [dir.path.as_slice(), b"/.wh..wh..opq"].concat();
        self.entry(&ManifestRecord { path, ..dir.clone() }, ErofsEntryKind::File { size: 0 }, &Vec::new())
    }

    fn xattrs(&self, record: &ManifestRecord) -> Result<Xattrs, UnpackError> {
        if record.xattrs.is_none() {
            return Ok(Vec::new());
        }
        let (parent, name) = split(&record.path);
        let read = || -> Result<Xattrs, Errno> {
            if name.is_empty() {
                return read_xattrs(XattrTarget::Open(self.root.as_fd()));
            }
            let parent = beneath::open(self.root.as_fd(), parent, DIRECTORY)?;
            read_xattrs(XattrTarget::Named(parent.as_fd(), name))
        };
        read().map_err(|errno| UnpackError::file("read attributes of", path_of(&record.path), errno))
    }

    fn file(
        &mut self,
        record: &ManifestRecord,
        size: u64,
        checksum: u32,
        extents: Option<&[(u64, u64)]>,
    ) -> Result<(), UnpackError> {
        let kind = match extents {
            None => ErofsEntryKind::File { size },
            Some(extents) => ErofsEntryKind::Sparse { size, extents },
        };
        self.entry(record, kind, &self.xattrs(record)?)?;
        let unreadable = |error| UnpackError::file("read", path_of(&record.path), error);
        let file = beneath::open(self.root.as_fd(), &record.path, OFlags::RDONLY);
        let file = File::from(file.map_err(|errno| unreadable(errno.into()))?);
        let (mut hasher, mut buffer) = (crc32fast::Hasher::new(), vec![0; BUFFER]);
        for &(offset, length) in extents.unwrap_or(&[(0, size)]) {
            let mut done = 0;
            while done < length {
                let part = usize::try_from(length - done).unwrap_or(BUFFER).min(BUFFER);
                let part = &mut buffer[..part];
                file.read_exact_at(part, offset + done).map_err(unreadable)?;
                hasher.update(part);
                self.writer.write_data(part).map_err(|error| image_error(&self.image, error))?;
                done += part.len() as u64;
            }
        }
        if hasher.finalize() == checksum {
            return Ok(());
        }
        Err(needs_directory(format!("{}: content differs", path_of(&record.path).display())))
    }

    fn finish(mut self, archive_record: &Path) -> Result<ErofsFile, UnpackError> {
        self.writer.resolve_links().map_err(|error| image_error(&self.image, error))?;
        let (mut file, _) = self.writer.finish().map_err(|error| image_error(&self.image, error))?;
        let whole = append_record(&mut file, archive_record).and_then(|()| file.finish());
        whole.map_err(|error| UnpackError::file("write", &self.image, error))
    }
}

fn needs_directory(reason: String) -> UnpackError {
    UnpackError::NeedsDirectory { reason }
}
