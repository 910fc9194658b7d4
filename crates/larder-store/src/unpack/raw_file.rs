//! A layer of one file whose content is the blob itself: no archive, no compression, no second digest.

use std::io::{self, BufRead as _, BufReader, Read, Write};
use std::path::Path;

use larder::reference::Digest;
use larder_erofs::{ErofsEntry, ErofsEntryKind, ErofsOptions, ErofsTime};
use larder_registry::manifest::ArtifactFile;

use super::layer_output::LayerOutput;
use super::layer_writer::PendingLayer;
use super::merged_layers::open_layer;
use super::options::LayerByteCounts;
use super::rebuild_archive::{HashedOutput, RebuildError};
use super::source::CompressedReader;
use super::{DetectedCompression, ExpectedLayer, UnpackError, UnpackOptions, UnpackedLayer};
use crate::erofs::digest::bytes_of;

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
    let content = expected.size.zip(expected.digest);
    let (output, path) = match (place, content) {
        (FilePlace::Around(path), Some(content)) => (LayerOutput::around(path, content, options), path),
        (FilePlace::Around(path) | FilePlace::New(path), content) => {
            (LayerOutput::create(path, content, options), path)
        }
    };
    let mut layer = PendingLayer::new(output, path, form, options)?;
    let mut source = CompressedReader::new(blob, expected, options);
    let copied = copy(&mut source, expected.size.unwrap_or_default(), files, &mut layer, options);
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
        checkpoints: Vec::new(),
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

fn copy(
    source: &mut CompressedReader<impl Read>,
    size: u64,
    files: &[ArtifactFile],
    layer: &mut PendingLayer,
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
        source.consume(count);
        left = left.saturating_sub(count as u64);
    }
    counts.keep();
    for other in others {
        add(layer, other, ErofsEntryKind::HardLink { target: first.path.as_bytes() })?;
    }
    Ok(())
}
