//! Writes a layer's archive again, byte for byte, from its record (`archive_record.rs`) and its files.
//!
//! The parser of the archive reads the record, too. Wherever the archive had the content of a file, it is read
//! from the unpacked layer. The digest of all bytes decides whether this was right.

use std::collections::BTreeSet;
use std::io::{self, Read as _, Write};
use std::path::{Path, PathBuf};

use larder::reference::{Digest, DigestHasher};

use super::archive::{LayerArchive, LayerEntry, LayerEntryKind};
use super::archive_record::open_record;
use super::beneath::{clean, parts, path_of};
use super::file_finder::FileFinder;
use super::layer_entries::EntryData;
use super::merged_layers::{MergedLayers, open_layer};
use super::source::check_digest;
use super::stream::{BufferSource, TarStream, from_reader};
use super::{LayerEncoding, UnpackError, UnpackOptions};

/// Bytes of a file that are copied at once.
const BUFFER: usize = 128 << 10;

/// Why an archive could not be written again.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RebuildError {
    /// The layer has no record.
    #[error("the layer has no record of its archive")]
    NoRecord,
    /// The record cannot be read.
    #[error("cannot read the record of its archive")]
    Record(#[source] UnpackError),
    /// A later entry of the archive replaces this file, or it is a whiteout: the layer does not have it.
    #[error("the store does not keep the content that the archive has for {}", .0.display())]
    Replaced(PathBuf),
    /// A file is not what the archive had.
    #[error("{}: {cause}", path.display())]
    Content {
        /// As the archive names it.
        path: PathBuf,
        /// Error of the system.
        cause: io::Error,
    },
    /// The bytes do not have the digest of the archive.
    #[error("the files do not have the content that the archive had")]
    Digest(#[source] UnpackError),
    /// The archive cannot be written.
    #[error("cannot write the archive")]
    Output(#[source] io::Error),
}

/// Writes the archive of the layer in this file to `out`.
pub fn rebuild_archive(file: &Path, diff_id: &Digest, out: &mut dyn Write) -> Result<(), RebuildError> {
    let unreadable = |error| RebuildError::Record(UnpackError::Read(error));
    let layer = MergedLayers::new(vec![open_layer(file).map_err(unreadable)?]).map_err(unreadable)?;
    let mut out = HashedOutput::new(out, diff_id);
    let copied = copy(&layer, &mut out);
    match out.finish(copied, diff_id) {
        Err(error @ (RebuildError::Content { .. } | RebuildError::Digest(_))) => {
            Err(first_replaced(&layer)?.map_or(error, RebuildError::Replaced))
        }
        checked => checked,
    }
}

fn copy(layer: &MergedLayers, out: &mut HashedOutput<'_>) -> Result<(), RebuildError> {
    let options = UnpackOptions::for_accepted_layer();
    let mut feed = open(layer)?;
    let mut archive = LayerArchive::new(TarStream::new(&mut feed, None, &options), &options).with_frame(out);
    let (mut buffer, mut files) = (vec![0; BUFFER], FileFinder::new(layer));
    while let Some(entry) = archive.next().map_err(RebuildError::Record)? {
        let content = archive.content_elsewhere();
        if content > 0 {
            let copied = copy_content(layer, &mut files, &entry, content, &mut archive, &mut buffer);
            copied.map_err(|cause| RebuildError::Content { path: path_of(&entry.path).to_owned(), cause })?;
        }
    }
    archive.read_rest().map_err(RebuildError::Record)
}

pub(super) fn open(layer: &MergedLayers) -> Result<impl BufferSource + use<>, RebuildError> {
    let opened =
        open_record(layer.layer(0)).map_err(|error| RebuildError::Record(UnpackError::Read(error)))?;
    opened.map(from_reader).ok_or(RebuildError::NoRecord)
}

fn copy_content(
    layer: &MergedLayers,
    files: &mut FileFinder<'_>,
    entry: &LayerEntry,
    content: u64,
    archive: &mut LayerArchive<'_, impl BufferSource>,
    buffer: &mut [u8],
) -> io::Result<()> {
    let file = files.find(&entry.path)?;
    if file.size != entry.size {
        return Err(io::Error::other(format!("{} bytes, not {}", file.size, entry.size)));
    }
    let mut data = EntryData::of(layer.layer(0), &file, entry);
    let mut left = content;
    while left > 0 {
        let wanted = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        data.read_exact(&mut buffer[..wanted])?;
        archive.write_frame(&buffer[..wanted])?;
        left -= wanted as u64;
    }
    Ok(())
}

/// Bytes that a name takes beside its text.
const NAME_BYTES: usize = 64;
/// Bytes of names in which [`first_replaced`] looks.
const MAX_NAMES: usize = 64 << 20;

/// The first file of an archive whose content no layer has, if it is among the first names. Only looked for after a
/// failure: it needs the names of all entries.
fn first_replaced(layer: &MergedLayers) -> Result<Option<PathBuf>, RebuildError> {
    let options = UnpackOptions::for_accepted_layer();
    let mut feed = open(layer)?;
    let mut archive = LayerArchive::new(TarStream::new(&mut feed, None, &options), &options);
    let mut contents: BTreeSet<Vec<u8>> = BTreeSet::new();
    let mut left = MAX_NAMES;
    while let Some(entry) = archive.next().map_err(RebuildError::Record)? {
        let path = clean(&entry.path);
        let replaces = |content: &&Vec<u8>| match content.strip_prefix(path.as_slice()) {
            Some(rest) if rest.first() == Some(&b'/') => entry.kind != LayerEntryKind::Directory,
            rest => rest.is_some_and(<[u8]>::is_empty),
        };
        // What sorts between a path and those below it begins with the path as well.
        let similar = contents.range(path.clone()..).take_while(|content| content.starts_with(&path));
        if let Some(replaced) = similar.into_iter().find(replaces) {
            return Ok(Some(path_of(replaced).to_owned()));
        }
        if archive.content_elsewhere() > 0 {
            if parts(&path).any(|part| part.starts_with(b".wh.")) {
                return Ok(Some(path_of(&path).to_owned()));
            }
            let Some(rest) = left.checked_sub(path.len() + NAME_BYTES) else { return Ok(None) };
            left = rest;
            contents.insert(path);
        }
    }
    Ok(None)
}

/// Hashes what it passes on.
pub(super) struct HashedOutput<'a> {
    out: &'a mut dyn Write,
    hasher: DigestHasher,
    /// Errors of the output, which are not those of the layer.
    error: Option<io::Error>,
}

impl<'a> HashedOutput<'a> {
    pub(super) fn new(out: &'a mut dyn Write, expected: &Digest) -> HashedOutput<'a> {
        HashedOutput { out, hasher: DigestHasher::like(expected), error: None }
    }

    /// The outcome of a copy: errors of the output first, then those of the layer, then wrong bytes.
    pub(super) fn finish(
        self,
        copied: Result<(), RebuildError>,
        expected: &Digest,
    ) -> Result<(), RebuildError> {
        if let Some(error) = self.error {
            return Err(RebuildError::Output(error));
        }
        copied?;
        check_digest(self.hasher, LayerEncoding::Plain, expected).map_err(RebuildError::Digest)
    }
}

impl Write for HashedOutput<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.hasher.update(bytes);
        if let Err(error) = self.out.write_all(bytes) {
            self.error = Some(error);
            return Err(io::ErrorKind::Other.into());
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
