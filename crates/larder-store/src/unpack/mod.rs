//! Turns one layer archive into one EROFS file that serves as an overlay lower.
//!
//! ```text
//! compressed bytes -> SHA-256 -> gzip | zstd | plain -> SHA-256 -> tar -> EROFS
//!        source           decompress         stream       archive    layer_writer
//! ```
//!
//! Read [`unpack_layer`] first. Everything here is blocking.
//!
//! Guarantees:
//! - no file but that of the layer is touched, whatever the archive says: its names are resolved inside the layer;
//! - memory is bounded by [`UnpackOptions`] and [`UnpackLimits`], never by the archive;
//! - a layer is only [`UnpackedLayer`] when all its bytes, also those after the archive's end, have the expected
//!   digests;
//! - after an error there is a partial file that the caller removes.
//!
//! An archive is one layer out of context: it can leave out parent directories that a lower layer has, and hard-link
//! files of lower layers. Both are filled in once the layers below are known ([`PendingLayer::finish`]).

mod archive;
mod archive_record;
mod beneath;
mod checkpoints;
mod compression;
mod data_places;
mod decompress;
mod directory_writer;
mod error;
mod file_finder;
mod files;
mod first_paths;
mod gzip;
mod implied_directories;
mod layer;
mod layer_entries;
mod layer_memory;
mod layer_output;
mod layer_writer;
mod merged_files;
mod merged_layers;
mod metadata;
mod options;
mod pax;
mod raw_file;
mod rebuild_archive;
mod scratch_file;
mod source;
mod stream;
mod write_behind;
mod zstd_frames;

use std::io::Read;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

pub(crate) use archive::{LayerArchive, LayerEntry, LayerEntryKind, header_problem, name_at};
pub(crate) use checkpoints::{Checkpoint, CompressedPart, parts_between};
pub use compression::DetectedCompression;
pub(crate) use data_places::{DataPlace, data_places};
pub(crate) use error::named;
pub use error::{EntryRefusal, LayerEncoding, UnpackError};
pub(crate) use files::extract_layer;
pub use files::{ExtractOptions, SkippedFiles, extract_files, write_erofs_disk};
pub(crate) use gzip::GzipReader;
pub(crate) use implied_directories::{fits_lowers, read_implied};
pub use layer::{ExpectedLayer, PendingLowerWork, UnpackedLayer};
pub use layer_memory::LayerMemory;
pub(crate) use layer_output::ContentDiffers;
pub use layer_output::UnfilledLayer;
pub use layer_writer::{FinishedLayer, PendingLayer};
pub use merged_files::{HoleEncoding, MergeError, write_merged_files};
pub use merged_layers::{LayerReader, MergedLayers, open_layer};
pub(crate) use options::is_zero;
pub use options::{
    ImageByteCounts, LayerDownload, OverlayForm, UnpackLimits, UnpackOptions, UnpackProgress, UnpackThreads,
};
pub(crate) use raw_file::blob_files;
pub use raw_file::{FilePlace, rebuild_file, unpack_file};
pub use rebuild_archive::{RebuildError, rebuild_archive};
pub(crate) use stream::{BufferSource, TarStream, from_reader};
pub use write_behind::{BackgroundSyncer, WriteBehind};

use decompress::LayerDecoder;
use source::CompressedReader;

/// Unpacks one layer into a new file at `path`, verifying its bytes on the way. The file is complete once it was
/// [finished](PendingLayer::finish) on the layers below.
///
/// Reads `compressed` to its end, except after an error. The returned error is the one nearest to the cause: bytes
/// that have the wrong digest are reported as such, not as the damaged archive that they happen to look like. Fails
/// with [`UnpackError::Unsupported`] if no EROFS filesystem can hold the layer.
pub fn unpack_layer(
    compressed: impl Read + Send,
    expected: &ExpectedLayer<'_>,
    path: &Path,
    options: &UnpackOptions,
) -> Result<(UnpackedLayer, PendingLayer), UnpackError> {
    let (read, (unpacked, layer)) =
        read_layer(compressed, expected, options, |feed| layer_writer::write(feed, expected, path, options))?;
    let CompressedSummary { compression, bytes: compressed_bytes, checkpoints } = read;
    Ok((UnpackedLayer { compression, compressed_bytes, checkpoints, ..unpacked }, layer))
}

/// Findings of the half that reads compressed bytes.
struct CompressedSummary {
    compression: DetectedCompression,
    bytes: u64,
    checkpoints: Vec<Checkpoint>,
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
        UnpackThreads::Two => on_two_threads(source, options, write),
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
    let read = decoder.finish(skip_rest);
    join(read.map(|(bytes, checkpoints)| CompressedSummary { compression, bytes, checkpoints }), written)
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
            finished.map(|(bytes, checkpoints)| CompressedSummary { compression, bytes, checkpoints })
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
