//! A layer of one file whose content is the blob itself: no archive, no compression.

use std::io::{self, BufRead as _, BufReader, Read, Write};
use std::ops::Range;
use std::path::Path;

use larder::reference::Digest;
use larder_erofs::{ErofsEntry, ErofsEntryKind, ErofsInode, ErofsOptions, ErofsTime, InodeKind};
use larder_registry::manifest::ArtifactFile;

use super::archive_record::open_record;
use super::checkpoints::{CheckpointRecorder, SPACING};
use super::layer_output::LayerOutput;
use super::layer_writer::PendingLayer;
use super::merged_layers::{LayerReader, open_layer};
use super::options::LayerByteCounts;
use super::rebuild_archive::{HashedOutput, RebuildError};
use super::source::CompressedReader;
use super::{DetectedCompression, ExpectedLayer, UnpackError, UnpackOptions, UnpackedLayer};
use crate::erofs::digest::{FIRST_BLOCK, bytes_of};

/// Bytes of a file that are read at once.
const BUFFER: usize = 128 << 10;

/// Where the layer of a file is written.
pub enum FilePlace<'a> {
    /// A new file.
    New(&'a Path),
    /// A file that has the content behind an empty block; it stays there.
    Around(&'a Path),
}

/// Writes a layer of one file with these names; `blob` is the content, with the expected digest and size.
pub fn unpack_file(
    blob: impl Read,
    expected: &ExpectedLayer<'_>,
    files: &[ArtifactFile],
    place: &FilePlace<'_>,
    options: &UnpackOptions,
) -> Result<(UnpackedLayer, PendingLayer), UnpackError> {
    let options = &UnpackOptions { archive_record: None, ..options.clone() };
    // All of the content is in full blocks: a layer that is not completed leaves it as it was.
    let form =
        ErofsOptions { uuid: bytes_of(expected.diff_id), max_inline_tail: 0, ..ErofsOptions::default() };
    let (output, path) = match (place, expected.size) {
        (FilePlace::Around(path), Some(size)) => (LayerOutput::around(path, size, options), path),
        (FilePlace::Around(path) | FilePlace::New(path), _) => (LayerOutput::create(path, options), path),
    };
    let mut layer = PendingLayer::new(output, path, form, options)?;
    let mut source = CompressedReader::new(blob, expected, options);
    let mut checkpoints = CheckpointRecorder::new(SPACING);
    let size = expected.size.unwrap_or_default();
    let copied = copy(&mut source, size, files, &mut layer, &mut checkpoints, options);
    if let Err(error) = copied {
        // Wrong bytes are the better news: another try may bring the right ones.
        let wrong =
            if error.is_local() { None } else { source.take_fault().or_else(|| source.finish().err()) };
        return Err(wrong.unwrap_or(error));
    }
    let bytes = source.finish()?;
    let lower_work = layer.pause()?;
    let unpacked = UnpackedLayer {
        compression: DetectedCompression::None,
        compressed_bytes: bytes,
        plain_bytes: bytes,
        entries: files.len() as u64,
        lower_work,
        skipped_xattrs: 0,
        hides_lowers: false,
        checkpoints: checkpoints.finish(),
    };
    Ok((unpacked, layer))
}

/// Writes the file of a layer to `out`: the blob, with this digest.
pub fn rebuild_file(
    layer: &Path,
    file: &ArtifactFile,
    digest: &Digest,
    out: &mut dyn Write,
) -> Result<(), RebuildError> {
    let mut out = HashedOutput::new(out, digest);
    let failed = |cause| RebuildError::Content { path: file.path.clone().into(), cause };
    let copied = open_layer(layer).and_then(|layer| {
        let inode = layer.find(file.path.as_bytes())?.ok_or(io::ErrorKind::NotFound)?;
        io::copy(&mut BufReader::with_capacity(BUFFER, layer.reader(&inode)), &mut out)
    });
    let copied = copied.map(drop).map_err(failed);
    out.finish(copied, digest)
}

/// The names of the file whose content is the blob of a layer; none in a layer that has the record of an archive.
pub(crate) fn blob_files(layer: &LayerReader) -> io::Result<Vec<ArtifactFile>> {
    let named = |(path, inode): (Vec<u8>, ErofsInode)| {
        let path = String::from_utf8(path).map_err(io::Error::other)?;
        Ok(ArtifactFile { path, mode: inode.mode })
    };
    names_of_blob(layer)?.into_iter().map(named).collect()
}

/// Where the blob is in the file of a layer; `None` in a layer that has the record of an archive.
pub(super) fn blob_data(layer: &LayerReader) -> io::Result<Option<Range<u64>>> {
    let inode = names_of_blob(layer)?.pop().map(|(_, inode)| inode);
    Ok(inode.map(|inode| FIRST_BLOCK..FIRST_BLOCK + inode.size))
}

fn names_of_blob(layer: &LayerReader) -> io::Result<Vec<(Vec<u8>, ErofsInode)>> {
    if open_record(layer)?.is_some() {
        return Ok(Vec::new());
    }
    let files =
        layer.walk()?.filter(|entry| !entry.as_ref().is_ok_and(|entry| entry.inode.kind != InodeKind::File));
    let named = files.map(|file| file.map(|file| (file.path, file.inode)).map_err(io::Error::from));
    let files = named.collect::<io::Result<Vec<_>>>()?;
    // A blob is one file. One without data has no place.
    let is_blob = files.iter().all(|(_, file)| file.nid == files[0].1.nid && file.size > 0);
    Ok(if is_blob { files } else { Vec::new() })
}

fn copy(
    source: &mut CompressedReader<impl Read>,
    size: u64,
    files: &[ArtifactFile],
    layer: &mut PendingLayer,
    checkpoints: &mut CheckpointRecorder,
    options: &UnpackOptions,
) -> Result<(), UnpackError> {
    let mut counts = LayerByteCounts::new(options.image.clone());
    let add = |layer: &mut PendingLayer, file: &ArtifactFile, kind| {
        let (path, mtime) = (file.path.as_bytes(), ErofsTime::default());
        layer.add_entry(&ErofsEntry { path, kind, mode: file.mode, uid: 0, gid: 0, mtime, xattrs: &[] })
    };
    let Some((first, others)) = files.split_first() else { return Ok(()) };
    add(layer, first, ErofsEntryKind::File { size })?;
    let mut left = size;
    while left > 0 {
        let piece = source.fill_buf().map_err(UnpackError::Read)?;
        if piece.is_empty() {
            return Err(UnpackError::Size { expected: size, found: size - left, more: false });
        }
        let count = piece.len();
        counts.add(piece, size - left + count as u64, &options.limits)?;
        layer.write(piece)?;
        if checkpoints.is_due() {
            checkpoints.take_start(size - left);
        }
        checkpoints.pass(piece);
        source.consume(count);
        left = left.saturating_sub(count as u64);
    }
    counts.keep();
    for other in others {
        add(layer, other, ErofsEntryKind::HardLink { target: first.path.as_bytes() })?;
    }
    Ok(())
}
