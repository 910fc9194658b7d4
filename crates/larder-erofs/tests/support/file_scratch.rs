//! Temporary files of a layer.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use larder_erofs::ErofsScratch;

/// An unlinked file.
pub(crate) struct FileScratch(File);

impl FileScratch {
    pub(crate) fn new() -> io::Result<FileScratch> {
        Ok(FileScratch(tempfile::tempfile()?))
    }
}

impl ErofsScratch for FileScratch {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }

    fn read_exact_at(&mut self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.0.read_exact_at(buffer, offset)
    }

    fn close(&mut self) {}
}
