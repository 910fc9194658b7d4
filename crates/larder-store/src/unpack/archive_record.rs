//! The archive record: what of a layer's archive is no file content, so that the archive can be written again.
//!
//! It is the archive itself without the content of files: headers, padding and what follows the end, compressed with
//! zstd. The reader of archives knows from the headers where which content was, so nothing else is needed
//! (`rebuild_archive.rs`). It follows the filesystem in the file of the layer.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Seek as _, SeekFrom, Write};
use std::path::Path;

use fs_err::os::unix::fs::OpenOptionsExt as _;
use larder_erofs::ErofsOutput;
use zstd::stream::read::Decoder;
use zstd::stream::write::Encoder;

use super::implied_directories::implied_length;
use super::merged_layers::LayerReader;
use super::{UnpackError, UnpackOptions};
use crate::disk::{DiskSpace, SpaceReserve};

const MAGIC: &[u8; 16] = b"larder-archive\0\x01";

/// Headers of different files are so similar that higher levels take longer and save nothing.
const LEVEL: i32 = 1;

/// Small writes are collected up to this size.
const BUFFER: usize = 64 << 10;

/// The largest record that is kept. Ten million entries take 500 MB at most; what is larger has junk after its end.
const MAX_RECORD: u64 = 1 << 30;

/// Writes one record to a new file.
pub(super) struct ArchiveRecordWriter<'a> {
    path: &'a Path,
    /// `None` once it is over the limit.
    out: Option<BufWriter<Encoder<'static, LimitedFile>>>,
}

fn begin(path: &Path, reserve: Option<SpaceReserve>) -> io::Result<BufWriter<Encoder<'static, LimitedFile>>> {
    let file = fs_err::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    let mut file = LimitedFile { file: file.into_parts().0, left: MAX_RECORD, reserve };
    file.write_all(MAGIC)?;
    let mut encoder = Encoder::new(file, LEVEL)?;
    encoder.include_checksum(true)?;
    Ok(BufWriter::with_capacity(BUFFER, encoder))
}

impl<'a> ArchiveRecordWriter<'a> {
    /// For the layer that is unpacked with these options, if they name a record.
    pub(super) fn create(options: &'a UnpackOptions) -> Result<Option<ArchiveRecordWriter<'a>>, UnpackError> {
        let Some(path) = options.archive_record.as_deref() else { return Ok(None) };
        let out =
            begin(path, options.reserve.clone()).map_err(|error| UnpackError::file("write", path, error))?;
        Ok(Some(ArchiveRecordWriter { path, out: Some(out) }))
    }

    /// Ends the record. It is not synced. One over the limit is removed.
    pub(super) fn finish(mut self) -> Result<(), UnpackError> {
        let Some(out) = self.out.take() else { return Ok(()) };
        let ended = out.into_inner().map_err(io::IntoInnerError::into_error).and_then(Encoder::finish);
        let ended = ended.map(drop).or_else(|error| self.give_up(error));
        ended.map_err(|error| UnpackError::file("write", self.path, error))
    }

    /// Goes on without a record if it is too large.
    fn give_up(&mut self, error: io::Error) -> io::Result<()> {
        if error.kind() != io::ErrorKind::FileTooLarge {
            return Err(error);
        }
        self.out = None;
        fs_err::remove_file(self.path)
    }
}

impl Write for ArchiveRecordWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.as_mut().map_or(Ok(()), |out| out.write_all(bytes));
        written.or_else(|error| self.give_up(error)).map(|()| bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A file that takes so many bytes, as long as the reserve stays free.
struct LimitedFile {
    file: File,
    left: u64,
    reserve: Option<SpaceReserve>,
}

impl Write for LimitedFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.left = self.left.checked_sub(bytes.len() as u64).ok_or(io::ErrorKind::FileTooLarge)?;
        if let Some(reserve) = &self.reserve {
            reserve.admit(DiskSpace { bytes: bytes.len() as u64, inodes: 0 })?;
        }
        self.file.write_all(bytes).map(|()| bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Removes the record at `path`, which a layer's file has.
pub(super) fn remove_record(path: &Path) -> io::Result<()> {
    match fs_err::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Copies the record at `path`, if there is one, to the end of a layer's file.
pub(super) fn append_record(layer: &mut impl ErofsOutput, path: &Path) -> io::Result<()> {
    let mut record = match fs_err::File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        record => record?,
    };
    let mut buffer = vec![0; BUFFER];
    loop {
        match record.read(&mut buffer)? {
            0 => return Ok(()),
            length => layer.append(&buffer[..length])?,
        }
    }
}

/// Reads the record of a layer; `None` if there is none.
pub(super) fn open_record(layer: &LayerReader) -> io::Result<Option<impl Read + use<>>> {
    let mut file = layer.input().try_clone()?;
    let end = layer.filesystem_end();
    file.seek(SeekFrom::Start(end + implied_length(&file, end)?))?;
    let mut magic = [0; MAGIC.len()];
    match file.read_exact(&mut magic) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    if magic != *MAGIC {
        return Ok(None);
    }
    Ok(Some(Decoder::with_buffer(BufReader::new(file))?.single_frame()))
}
