//! The file that an EROFS image is written to.

use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use fs_err::os::unix::fs::OpenOptionsExt as _;
use larder_erofs::ImageOutput;

use super::write_behind::WriteBehind;
use crate::erofs::ErofsFile;
use crate::erofs::digest::PieceHasher;

/// Small pieces are collected up to this size.
const BUFFER: usize = 128 << 10;
/// Larger pieces are written as they are.
const DIRECT: usize = 16 << 10;

/// A new file, hashed while it is written.
pub(super) struct ImageFile {
    path: PathBuf,
    /// `None` while the image waits for the layers below: it may be one of many.
    file: Option<File>,
    /// Bytes that follow those in the file.
    pending: Vec<u8>,
    written: u64,
    hasher: PieceHasher,
    write_behind: Option<WriteBehind>,
    /// Bytes since the file was last passed to `write_behind`.
    unseen: usize,
}

impl ImageFile {
    pub(super) fn create(path: &Path, write_behind: Option<WriteBehind>) -> io::Result<ImageFile> {
        let mut options = fs_err::OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        let file = Some(options.open(path)?.into_parts().0);
        let (path, pending, hasher) = (path.to_owned(), Vec::new(), PieceHasher::new());
        Ok(ImageFile { path, file, pending, written: 0, hasher, write_behind, unseen: 0 })
    }

    fn open(&mut self) -> io::Result<&File> {
        let file = match self.file.take() {
            Some(file) => file,
            None => fs_err::OpenOptions::new().read(true).write(true).open(&self.path)?.into_parts().0,
        };
        Ok(self.file.insert(file))
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let offset = self.written;
        self.open()?.write_all_at(bytes, offset)?;
        self.written += bytes.len() as u64;
        self.unseen += bytes.len();
        if self.unseen >= WriteBehind::PIECE {
            self.sync_early();
        }
        Ok(())
    }

    /// Only to be early: without a second handle it is done at the end.
    fn sync_early(&mut self) {
        self.unseen = 0;
        let file = self.file.as_ref().and_then(|file| file.as_fd().try_clone_to_owned().ok());
        if let Some((write_behind, file)) = self.write_behind.as_ref().zip(file) {
            write_behind.take(file, self.written);
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let pending = std::mem::take(&mut self.pending);
        self.write(&pending)?;
        self.pending = pending;
        self.pending.clear();
        Ok(())
    }

    /// Writes what is pending, frees the buffer, and closes the file until the next write.
    pub(super) fn pause(&mut self) -> io::Result<()> {
        self.flush()?;
        self.pending = Vec::new();
        self.file = None;
        Ok(())
    }

    /// Ends the file. It is not synced.
    pub(super) fn finish(mut self) -> io::Result<ErofsFile> {
        self.flush()?;
        self.open()?;
        self.sync_early();
        let ImageFile { file, hasher, written, .. } = self;
        file.map_or_else(|| Err(io::ErrorKind::NotFound.into()), |file| hasher.finish(&file, written))
    }
}

impl ImageOutput for ImageFile {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hasher.update(bytes);
        let direct = bytes.len() >= DIRECT;
        if direct || self.pending.len() + bytes.len() > BUFFER {
            self.flush()?;
        }
        if direct {
            return self.write(bytes);
        }
        if self.pending.capacity() < BUFFER {
            self.pending.reserve_exact(BUFFER);
        }
        self.pending.extend_from_slice(bytes);
        Ok(())
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.flush()?;
        self.hasher.replace(offset, bytes.len());
        self.open()?.write_all_at(bytes, offset)
    }
}
