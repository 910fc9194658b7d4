//! The file that an EROFS layer is written to.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fmt, io};

use fs_err::os::unix::fs::OpenOptionsExt as _;
use larder_erofs::{ErofsOutput, ErofsScratch};

use super::options::is_zero;
use super::scratch_file::ScratchFile;
use super::write_behind::WriteBehind;
use super::{UnpackOptions, UnpackProgress};
use crate::disk::{DiskSpace, SpaceReserve};
use crate::erofs::ErofsFile;
use crate::erofs::digest::{FIRST_BLOCK, PieceHasher};

/// Pieces are collected up to multiples of this offset. The page cache then holds the file in large folios: deleting a
/// file of 1 GB takes a third of the time that it takes with single pages.
const BUFFER: usize = 128 << 10;

/// The file of a layer, hashed while it is written.
pub(super) struct LayerOutput {
    path: PathBuf,
    /// `None` while the layer waits for the layers below: it may be one of many.
    file: Option<File>,
    /// A layer without its data that the file is, if it is no new one.
    into: Option<Arc<dyn UnfilledLayer>>,
    /// Bytes that follow those in the file.
    pending: Vec<u8>,
    written: u64,
    /// Bytes that the file had from the start; they are the first that are appended.
    present: u64,
    hasher: PieceHasher,
    write_behind: Option<WriteBehind>,
    /// Also for what no entry of the archive accounts for: directories, and the padding of sparse files.
    reserve: Option<SpaceReserve>,
    /// Bytes since the file was last passed to `write_behind`.
    unseen: usize,
    /// Temporary files so far.
    scratch_files: u32,
    progress: Arc<UnpackProgress>,
}

/// A layer in its place that has its metadata, and takes the bytes of its files.
///
/// A reader of it never sees other bytes than the layer's: they are verified before they are written.
pub trait UnfilledLayer: fmt::Debug + Send + Sync {
    /// Takes all bytes of the layer, one after the other. Fails if it has others.
    fn fill(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Takes bytes in place of earlier ones, which it must have. The first block comes so.
    fn compare(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Takes the end of the layer, which has so many bytes. Fails if nothing more is to be done with its file.
    fn end(&self, length: u64) -> io::Result<()>;

    /// Its file.
    fn file(&self) -> &File;

    /// Reads the blob that is unpacked into it. What the layer can only verify before it is inflated is verified here.
    fn verified(&self, blob: Box<dyn Read + Send>) -> Box<dyn Read + Send> {
        blob
    }

    /// Whether short ends of files are metadata.
    fn has_inline_tails(&self) -> bool {
        false
    }
}

/// The layer is no longer wanted.
#[derive(Debug, thiserror::Error)]
#[error("writing the layer was canceled")]
struct WriteCanceled;

/// The layer has other bytes than those that were written.
#[derive(Debug, thiserror::Error)]
#[error("other bytes from offset {offset} of the layer on")]
pub(crate) struct ContentDiffers {
    /// Offset in the layer's file.
    pub(crate) offset: u64,
}

/// The offset of the error of a write of other bytes than the layer has.
pub(super) fn difference(error: &io::Error) -> Option<u64> {
    let cause = error.get_ref()?.downcast_ref::<ContentDiffers>()?;
    Some(cause.offset)
}

/// Returns true for the error of a write that was canceled.
pub(super) fn is_cancellation(error: &io::Error) -> bool {
    error.get_ref().is_some_and(<dyn std::error::Error + Send + Sync>::is::<WriteCanceled>)
}

impl LayerOutput {
    /// Begins a new file.
    pub(super) fn create(path: &Path, options: &UnpackOptions) -> io::Result<LayerOutput> {
        if let Some(layer) = &options.into {
            let file = layer.file().try_clone()?;
            return Ok(LayerOutput::new(path, file, options));
        }
        if let Some(reserve) = &options.reserve {
            reserve.admit(DiskSpace { bytes: 0, inodes: 1 })?;
        }
        let mut mode = fs_err::OpenOptions::new();
        mode.read(true).write(true).create_new(true).mode(0o600);
        let file = mode.open(path)?.into_parts().0;
        Ok(LayerOutput::new(path, file, options))
    }

    /// Begins with a file that has an empty block and a blob of so many bytes, which will be appended first: they are
    /// not written again. Whoever wrote the blob syncs it: a sync here would take the error of a lost write away.
    pub(super) fn around(path: &Path, blob: u64, options: &UnpackOptions) -> io::Result<LayerOutput> {
        let file = fs_err::OpenOptions::new().read(true).write(true).open(path)?.into_parts().0;
        let present = FIRST_BLOCK.saturating_add(blob);
        // An earlier attempt may have left the metadata of its layer behind the blob.
        file.set_len(present)?;
        let options = &UnpackOptions { write_behind: None, ..options.clone() };
        Ok(LayerOutput { present, ..LayerOutput::new(path, file, options) })
    }

    fn new(path: &Path, file: File, options: &UnpackOptions) -> LayerOutput {
        LayerOutput {
            path: path.to_owned(),
            file: Some(file),
            into: options.into.clone(),
            pending: Vec::new(),
            written: 0,
            present: 0,
            hasher: PieceHasher::default(),
            write_behind: options.write_behind.clone(),
            reserve: options.reserve.clone(),
            unseen: 0,
            scratch_files: 0,
            progress: options.progress.clone(),
        }
    }

    /// Changes where the wish to stop comes from.
    pub(super) fn set_progress(&mut self, progress: Arc<UnpackProgress>) {
        self.progress = progress;
    }

    fn open(&mut self) -> io::Result<&File> {
        let file = match (self.file.take(), &self.into) {
            (Some(file), _) => file,
            // Another open file would ask for the data that it is to write.
            (None, Some(layer)) => layer.file().try_clone()?,
            (None, None) => {
                fs_err::OpenOptions::new().read(true).write(true).open(&self.path)?.into_parts().0
            }
        };
        Ok(self.file.insert(file))
    }

    /// Writes what follows. Long runs of zeros become holes: a layer of zeros takes no space.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let offset = self.written;
        if let Some(layer) = &self.into {
            layer.fill(offset, bytes)?;
            self.pass(bytes.len());
            return Ok(());
        }
        if bytes.len() == BUFFER && is_zero(bytes) {
            self.written += BUFFER as u64;
            return Ok(());
        }
        if let Some(reserve) = &self.reserve {
            reserve.admit(DiskSpace { bytes: bytes.len() as u64, inodes: 0 })?;
        }
        self.open()?.write_all_at(bytes, offset)?;
        self.pass(bytes.len());
        Ok(())
    }

    /// Goes on behind bytes that are in the file.
    fn pass(&mut self, bytes: usize) {
        self.written += bytes as u64;
        self.unseen += bytes;
        if self.unseen >= WriteBehind::PIECE {
            self.sync_early();
        }
    }

    /// Only to be early: without a second handle it is done at the end.
    fn sync_early(&mut self) {
        self.unseen = 0;
        let file = self.file.as_ref().and_then(|file| file.as_fd().try_clone_to_owned().ok());
        if let Some((write_behind, file)) = self.write_behind.as_ref().zip(file) {
            write_behind.add(file, self.written);
        }
    }

    /// Bytes up to the next multiple of [`BUFFER`].
    fn until_aligned(&self) -> usize {
        let end = self.written + self.pending.len() as u64;
        BUFFER - usize::try_from(end % BUFFER as u64).unwrap_or(0)
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
        if self.into.is_none() {
            let written = self.written;
            self.open()?.set_len(written)?;
        }
        self.pending = Vec::new();
        self.file = None;
        Ok(())
    }

    /// Ends the file. It is not synced.
    pub(super) fn finish(mut self) -> io::Result<ErofsFile> {
        self.flush()?;
        // The file may end in a hole.
        let written = self.written;
        match &self.into {
            Some(layer) => layer.end(written)?,
            None => self.open()?.set_len(written)?,
        }
        self.open()?;
        self.sync_early();
        let LayerOutput { file, hasher, written, .. } = self;
        debug_assert_eq!(hasher.position(), written, "each byte was hashed");
        file.map_or_else(|| Err(io::ErrorKind::NotFound.into()), |file| hasher.finish(&file))
    }
}

impl ErofsOutput for LayerOutput {
    fn scratch(&mut self) -> io::Result<Box<dyn ErofsScratch>> {
        self.scratch_files += 1;
        let mut path = self.path.clone().into_os_string();
        path.push(format!(".scratch{}", self.scratch_files));
        Ok(Box::new(ScratchFile::new(path.into(), self.reserve.clone())))
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.progress.is_canceled() {
            return Err(io::Error::other(WriteCanceled));
        }
        self.hasher.update(bytes);
        let present = usize::try_from(self.present.saturating_sub(self.written)).unwrap_or(usize::MAX);
        let (present, mut rest) = bytes.split_at(present.min(bytes.len()));
        self.pass(present.len());
        while self.until_aligned() <= rest.len() {
            let (head, tail) = rest.split_at(self.until_aligned());
            if self.pending.is_empty() {
                self.write(head)?;
            } else {
                self.pending.extend_from_slice(head);
                self.flush()?;
            }
            rest = tail;
        }
        if self.pending.capacity() < BUFFER {
            self.pending.reserve_exact(BUFFER);
        }
        self.pending.extend_from_slice(rest);
        Ok(())
    }

    fn skip(&mut self, count: u64) -> io::Result<()> {
        self.flush()?;
        self.hasher.skip(count);
        self.written += count;
        Ok(())
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.flush()?;
        self.hasher.replace(offset, bytes.len());
        if let Some(layer) = &self.into {
            return layer.compare(offset, bytes);
        }
        self.open()?.write_all_at(bytes, offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_any_size_are_written_up_to_multiples_of_the_buffer() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("layer");
        let mut output = LayerOutput::create(&path, &UnpackOptions::default()).unwrap();
        let mut expected = Vec::new();
        for (number, size) in (1..).zip([1, 4096, BUFFER - 1, BUFFER, 3 * BUFFER + 5, 0, BUFFER / 2, 7]) {
            let piece = vec![number; size];
            output.append(&piece).unwrap();
            expected.extend_from_slice(&piece);
            assert_eq!(output.written % BUFFER as u64, 0, "after {number}");
            assert!(output.written + BUFFER as u64 > expected.len() as u64);
        }
        output.write_at(2, b"changed").unwrap();
        expected[2..9].copy_from_slice(b"changed");
        output.append(&vec![9; 2 * BUFFER]).unwrap();
        expected.extend_from_slice(&vec![9; 2 * BUFFER]);
        output.append(&vec![0; 64 * BUFFER]).unwrap();
        expected.extend_from_slice(&vec![0; 64 * BUFFER]);
        assert_eq!(
            output.written % BUFFER as u64,
            0,
            "a buffer that was written early is followed by a short one"
        );
        output.finish().unwrap();
        let mut written = fs_err::read(&path).unwrap();
        written.truncate(expected.len());
        assert!(written == expected, "the digests of its pieces follow");
        let blocks = std::os::unix::fs::MetadataExt::blocks(&fs_err::metadata(&path).unwrap());
        assert!(blocks * 512 < 16 * BUFFER as u64, "zeros take no space");
    }
}
