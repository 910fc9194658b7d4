//! Turns one layer archive into one EROFS image, or one directory, that serves as an overlay lower.
//!
//! ```text
//! compressed bytes -> SHA-256 -> gzip | zstd | plain -> SHA-256 -> tar -> EROFS image | files
//!        source           decompress         stream       archive    image | writer + tree
//! ```
//!
//! Read [`unpack_image`] and [`unpack_layer`] first, then `writer.rs`: what each entry becomes. Everything here is blocking.
//!
//! Guarantees:
//! - nothing outside the given directory is touched, whatever the archive says: every name is opened below a directory
//!   that this module made itself, with `O_NOFOLLOW`, and links of the archive are resolved inside the layer (`tree.rs`);
//! - memory is bounded by [`UnpackOptions`] and [`UnpackLimits`], never by the archive;
//! - a layer is only [`UnpackedLayer`] when all its bytes, also those after the archive's end, have the expected digests;
//! - after an error the directory holds a partial tree that the caller removes.
//!
//! An archive is one layer out of context: it can leave out parent directories that a lower layer has, and hard-link
//! files of lower layers. Both are recorded in the layer manifest (see [`layer_manifest`]), and [`merge_lowers`] fills
//! them in once the layers below are known.

mod archive;
mod archive_record;
mod beneath;
mod compression;
mod decompress;
mod directory_image;
mod error;
mod files;
mod gzip;
mod image;
mod image_file;
mod image_memory;
mod layer;
pub mod layer_manifest;
mod lower_merge;
mod lowers;
mod merged_files;
mod metadata;
mod options;
mod pax;
mod rebuild_archive;
mod source;
mod stream;
mod tree;
mod verify;
mod write_behind;
mod writer;
mod zstd_frames;

use std::io::Read;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

pub use archive_record::ArchiveRecord;
pub use compression::DetectedCompression;
pub(crate) use directory_image::DirectoryImage;
pub use error::{EntryRefusal, LayerEncoding, UnpackError};
pub use files::{ExtractOptions, SkippedFiles, extract_files, write_disk_image};
pub use image::{FinishedImage, PendingImage};
pub use image_memory::ImageMemory;
pub use layer::{AllocatedSpace, ExpectedLayer, PendingLowerWork, UnpackTarget, UnpackedLayer};
pub(crate) use lower_merge::merge_open_lowers;
pub use lower_merge::{LowerMergeMode, LowerMergeReport, merge_lowers};
pub use lowers::visible_layers;
pub use merged_files::{MergeError, MergeLayer, write_merged_files};
pub use options::{
    LayerDownload, OverlayForm, OwnerMode, UnpackLimits, UnpackOptions, UnpackProgress, UnpackThreads,
};
pub use rebuild_archive::{RebuildError, rebuild_archive};
pub use verify::{CheckDepth, LayerVerification, MismatchKind, PathMismatch, verify};
pub use write_behind::{BackgroundSyncer, WriteBehind};

use archive::LayerArchive;
use archive_record::ArchiveRecordWriter;
use decompress::LayerDecoder;
use source::CompressedReader;
use stream::{BufferSource, TarStream};
use writer::LayerWriter;
use writer::file_threads::FileThreads;

/// Unpacks one layer, verifying its bytes on the way.
///
/// Reads `compressed` to its end, except after an error. The returned error is the one nearest to the cause: bytes
/// that have the wrong digest are reported as such, not as the damaged archive that they happen to look like.
pub fn unpack_layer(
    compressed: impl Read + Send,
    expected: &ExpectedLayer<'_>,
    target: UnpackTarget<'_>,
    options: &UnpackOptions,
) -> Result<UnpackedLayer, UnpackError> {
    let (read, unpacked) =
        read_layer(compressed, expected, options, |feed| write(feed, expected, target, options))?;
    Ok(UnpackedLayer { compression: read.compression, compressed_bytes: read.bytes, ..unpacked })
}

/// Like [`unpack_layer`], into one EROFS image: a new file at `path`. It is complete once it was
/// [finished](PendingImage::finish) on the layers below.
///
/// Fails with [`UnpackError::NeedsDirectory`] if the layer can only be unpacked into a directory.
pub fn unpack_image(
    compressed: impl Read + Send,
    expected: &ExpectedLayer<'_>,
    path: &Path,
    options: &UnpackOptions,
) -> Result<(UnpackedLayer, PendingImage), UnpackError> {
    let (read, (unpacked, image)) =
        read_layer(compressed, expected, options, |feed| image::write(feed, expected, path, options))?;
    Ok((UnpackedLayer { compression: read.compression, compressed_bytes: read.bytes, ..unpacked }, image))
}

/// What the half that reads compressed bytes found.
struct CompressedSummary {
    compression: DetectedCompression,
    bytes: u64,
}

/// Reads and inflates a layer, and passes the plain bytes to `write`.
fn read_layer<T>(
    compressed: impl Read + Send,
    expected: &ExpectedLayer<'_>,
    options: &UnpackOptions,
    write: impl FnOnce(&mut dyn BufferSource) -> Result<T, UnpackError>,
) -> Result<(CompressedSummary, T), UnpackError> {
    let source = CompressedReader::new(compressed, expected, options);
    match options.threads {
        UnpackThreads::One => on_one_thread(source, options, write),
        UnpackThreads::Two | UnpackThreads::Many => on_two_threads(source, options, write),
    }
}

fn on_one_thread<R: Read, T>(
    source: CompressedReader<R>,
    options: &UnpackOptions,
    write: impl FnOnce(&mut dyn BufferSource) -> Result<T, UnpackError>,
) -> Result<(CompressedSummary, T), UnpackError> {
    let mut decoder = LayerDecoder::new(source, &options.limits)?;
    let compression = decoder.compression();
    let written = write(&mut stream::inline(&mut decoder));
    let skip_rest = written.as_ref().is_err_and(UnpackError::is_local);
    let read = decoder.finish(skip_rest).map(|bytes| CompressedSummary { compression, bytes });
    join(read, written)
}

fn on_two_threads<R: Read + Send, T>(
    source: CompressedReader<R>,
    options: &UnpackOptions,
    write: impl FnOnce(&mut dyn BufferSource) -> Result<T, UnpackError>,
) -> Result<(CompressedSummary, T), UnpackError> {
    let skip_rest = AtomicBool::new(false);
    thread::scope(|scope| {
        let (pump, mut feed) = stream::channel();
        let limits = &options.limits;
        let skip_rest = &skip_rest;
        let reader = thread::Builder::new().name("layer-inflate".into()).spawn_scoped(scope, move || {
            let mut decoder = LayerDecoder::new(source, limits)?;
            let compression = decoder.compression();
            pump.run(&mut decoder);
            let finished = decoder.finish(skip_rest.load(Ordering::Acquire));
            finished.map(|bytes| CompressedSummary { compression, bytes })
        });
        let reader =
            reader.map_err(|error| UnpackError::file("start a thread of", "layer-inflate", error))?;
        let written = write(&mut feed);
        skip_rest.store(written.as_ref().is_err_and(UnpackError::is_local), Ordering::Release);
        drop(feed); // ends the reader, which then looks at `skip_rest`
        let read = reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        join(read, written)
    })
}

/// The half that hashes and writes plain bytes.
fn write(
    mut feed: &mut dyn BufferSource,
    expected: &ExpectedLayer<'_>,
    target: UnpackTarget<'_>,
    options: &UnpackOptions,
) -> Result<UnpackedLayer, UnpackError> {
    thread::scope(|scope| {
        let crew = match options.threads {
            UnpackThreads::Many => {
                let crew = FileThreads::start(scope, makers(), options);
                Some(crew.map_err(|error| UnpackError::file("start a thread for", target.root, error))?)
            }
            UnpackThreads::One | UnpackThreads::Two => None,
        };
        let mut record = ArchiveRecordWriter::create(options)?;
        let mut archive = LayerArchive::new(TarStream::new(&mut feed, expected.diff_id, options), options);
        if let Some(record) = &mut record {
            archive = archive.with_frame(record);
        }
        let mut writer = LayerWriter::new(target, options, crew)?;
        while let Some(entry) = archive.next()? {
            writer.add(&entry, &mut archive)?;
        }
        let entries = archive.entries();
        let plain_bytes = archive.finish(expected.diff_id)?;
        record.map_or(Ok(()), ArchiveRecordWriter::finish)?;
        let written = writer.finish()?;
        Ok(UnpackedLayer { plain_bytes, entries, ..written })
    })
}

/// Threads that make small files: the kernel keeps no more than a few busy in one filesystem.
fn makers() -> usize {
    thread::available_parallelism().map_or(1, std::num::NonZero::get).clamp(1, 4)
}

/// Both halves' outcomes as one: a local failure first, then wrong bytes, then what is wrong inside them.
fn join<T>(
    read: Result<CompressedSummary, UnpackError>,
    written: Result<T, UnpackError>,
) -> Result<(CompressedSummary, T), UnpackError> {
    match (read, written) {
        (_, Err(error)) if error.is_local() => Err(error),
        (Err(error), _) | (Ok(_), Err(error)) => Err(error),
        (Ok(read), Ok(written)) => Ok((read, written)),
    }
}
