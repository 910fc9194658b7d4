//! Turns an uncompressed tar archive into an EROFS layer, and prints what that took.
//!
//!     cargo run --profile dist -p larder-erofs --example tar_to_erofs -- layer.tar layer.erofs

#[path = "../tests/support/file_scratch.rs"]
mod file_scratch;
#[path = "../tests/support/tar_source.rs"]
mod tar_source;

use std::io::{self, BufReader, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use file_scratch::FileScratch;
use fs_err::File;
use larder_erofs::{ErofsOptions, ErofsOutput, ErofsScratch, ErofsWriter};
use tar_source::add_archive;

fn main() -> io::Result<()> {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let [archive, layer] = &arguments[..] else {
        return Err(io::Error::other("usage: tar_to_erofs ARCHIVE LAYER"));
    };
    let archive = BufReader::with_capacity(1 << 20, File::open(Path::new(archive))?);
    let output = FileOutput::new(File::create(Path::new(layer))?);
    let mut writer = ErofsWriter::new(output, ErofsOptions::default()).map_err(io::Error::other)?;
    add_archive(archive, &mut writer)?;
    let (mut output, summary) = writer.finish().map_err(io::Error::other)?;
    output.flush()?;
    writeln!(io::stdout(), "{summary:?}")
}

/// A file that is written in large pieces.
struct FileOutput {
    file: File,
    /// Bytes in the file, and those that follow them.
    written: u64,
    pending: Vec<u8>,
}

impl FileOutput {
    const PIECE: usize = 1 << 20;

    fn new(file: File) -> FileOutput {
        FileOutput { file, written: 0, pending: Vec::with_capacity(FileOutput::PIECE) }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.file().write_all_at(&self.pending, self.written)?;
        self.written += self.pending.len() as u64;
        self.pending.clear();
        Ok(())
    }
}

impl ErofsOutput for FileOutput {
    fn scratch(&mut self) -> io::Result<Box<dyn ErofsScratch>> {
        Ok(Box::new(FileScratch::new()?))
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.pending.len() + bytes.len() > FileOutput::PIECE {
            self.flush()?;
        }
        if bytes.len() >= FileOutput::PIECE {
            self.file.file().write_all_at(bytes, self.written)?;
            self.written += bytes.len() as u64;
        } else {
            self.pending.extend_from_slice(bytes);
        }
        Ok(())
    }

    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.flush()?;
        self.file.file().write_all_at(bytes, offset)
    }
}
