//! Temporary files beside an EROFS layer that is being written.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use fs_err::os::unix::fs::OpenOptionsExt as _;
use larder::threads::in_place;
use larder_erofs::ErofsScratch;

use crate::disk::{DiskSpace, SpaceReserve};

/// A file that is created at the first write and removed with this value. Most layers are so small that they need none.
/// It has a name, so that it needs no descriptor while its layer waits for the layers below.
#[derive(Debug)]
pub(super) struct ScratchFile {
    path: PathBuf,
    file: Option<File>,
    exists: bool,
    size: u64,
    reserve: Option<SpaceReserve>,
}

impl ScratchFile {
    /// A file at an unused path.
    pub(super) fn new(path: PathBuf, reserve: Option<SpaceReserve>) -> ScratchFile {
        ScratchFile { path, file: None, exists: false, size: 0, reserve }
    }

    fn open(&mut self) -> io::Result<&File> {
        let file = if let Some(file) = self.file.take() {
            file
        } else {
            let mut options = fs_err::OpenOptions::new();
            options.read(true).write(true).create_new(!self.exists).mode(0o600);
            options.open(&self.path)?.into_parts().0
        };
        self.exists = true;
        Ok(self.file.insert(file))
    }
}

impl ErofsScratch for ScratchFile {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let size = self.size.max(offset + bytes.len() as u64);
        if let Some(reserve) = &self.reserve {
            reserve.admit(DiskSpace { bytes: size - self.size, inodes: u64::from(!self.exists) })?;
        }
        self.open()?.write_all_at(bytes, offset)?;
        self.size = size;
        Ok(())
    }

    fn read_exact_at(&mut self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        if buffer.is_empty() {
            return Ok(());
        }
        self.open()?.read_exact_at(buffer, offset)
    }

    fn close(&mut self) {
        self.file = None;
    }
}

impl Drop for ScratchFile {
    fn drop(&mut self) {
        if self.exists {
            // The next start removes what is left: it is in the directory of an unfinished layer.
            let _ = in_place(|| fs_err::remove_file(&self.path));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_exists_from_the_first_write_on_and_needs_no_descriptor() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("layer.inodes");
        let mut scratch = ScratchFile::new(path.clone(), None);
        scratch.read_exact_at(&mut [], 0).unwrap();
        assert!(!path.exists());
        scratch.write_at(5, b"later").unwrap();
        scratch.close();
        scratch.write_at(0, b"first").unwrap();
        scratch.close();
        let mut read = [0; 10];
        scratch.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(&read, b"firstlater");
        drop(scratch);
        assert!(!path.exists());
    }
}
