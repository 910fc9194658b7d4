//! Turns one layer archive into one directory that serves as an overlay lower.
//!
//! ```text
//! compressed bytes -> SHA-256 -> gzip | zstd | plain -> SHA-256 -> tar -> files
//!        source           decompress         stream       archive  writer + tree
//! ```
//!
//! Read [`unpack_layer`] first, then `writer.rs`: what each entry becomes. Everything here is blocking.
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
mod beneath;
mod compression;
mod decompress;
mod error;
mod gzip;
mod layer;
pub mod layer_manifest;
mod lower_merge;
mod lowers;
mod metadata;
mod options;
mod pax;
mod source;
mod stream;
mod tree;
mod verify;
mod write_behind;
mod writer;
mod zstd_frames;

use std::io::Read;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

pub use compression::DetectedCompression;
pub use error::{EntryRefusal, LayerEncoding, UnpackError};
pub use layer::{AllocatedSpace, ExpectedLayer, PendingLowerWork, UnpackTarget, UnpackedLayer};
pub use lower_merge::{LowerMergeMode, LowerMergeReport, merge_lowers};
pub use lowers::visible_layers;
pub use options::{
    LayerDownload, OverlayForm, OwnerMode, UnpackLimits, UnpackOptions, UnpackProgress, UnpackThreads,
};
pub use verify::{CheckDepth, LayerVerification, MismatchKind, PathMismatch, verify};
pub use write_behind::{BackgroundSyncer, WriteBehind};

use archive::LayerArchive;
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
    let source = CompressedReader::new(compressed, expected, options);
    match options.threads {
        UnpackThreads::One => on_one_thread(source, expected, target, options),
        UnpackThreads::Two | UnpackThreads::Many => on_two_threads(source, expected, target, options),
    }
}

fn on_one_thread<R: Read>(
    source: CompressedReader<R>,
    expected: &ExpectedLayer<'_>,
    target: UnpackTarget<'_>,
    options: &UnpackOptions,
) -> Result<UnpackedLayer, UnpackError> {
    let mut decoder = LayerDecoder::new(source, &options.limits)?;
    let compression = decoder.compression();
    let written = write(&mut stream::inline(&mut decoder), expected, target, options);
    let skip_rest = written.as_ref().is_err_and(UnpackError::is_local);
    let read = decoder.finish(skip_rest);
    join(compression, read, written)
}

fn on_two_threads<R: Read + Send>(
    source: CompressedReader<R>,
    expected: &ExpectedLayer<'_>,
    target: UnpackTarget<'_>,
    options: &UnpackOptions,
) -> Result<UnpackedLayer, UnpackError> {
    let skip_rest = AtomicBool::new(false);
    thread::scope(|scope| {
        let (pump, mut feed) = stream::channel();
        let limits = &options.limits;
        let skip_rest = &skip_rest;
        let reader = thread::Builder::new().name("layer-inflate".into()).spawn_scoped(scope, move || {
            let mut decoder = LayerDecoder::new(source, limits)?;
            let compression = decoder.compression();
            pump.run(&mut decoder);
            decoder.finish(skip_rest.load(Ordering::Acquire)).map(|bytes| (compression, bytes))
        });
        let reader = reader.map_err(|error| UnpackError::file("start a thread for", target.root, error))?;
        let written = write(&mut feed, expected, target, options);
        skip_rest.store(written.as_ref().is_err_and(UnpackError::is_local), Ordering::Release);
        drop(feed); // ends the reader, which then looks at `skip_rest`
        let read = reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        match read {
            Ok((compression, bytes)) => join(compression, Ok(bytes), written),
            Err(error) => join(DetectedCompression::None, Err(error), written),
        }
    })
}

/// The half that hashes and writes plain bytes.
fn write(
    feed: &mut impl BufferSource,
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
        let mut archive = LayerArchive::new(TarStream::new(feed, expected.diff_id, options), options);
        let mut writer = LayerWriter::new(target, options, crew)?;
        while let Some(entry) = archive.next()? {
            writer.add(&entry, &mut archive)?;
        }
        let entries = archive.entries();
        let plain_bytes = archive.into_plain().finish(expected.diff_id)?;
        let written = writer.finish()?;
        Ok(UnpackedLayer { plain_bytes, entries, ..written })
    })
}

/// Threads that make small files: the kernel keeps no more than a few busy in one filesystem.
fn makers() -> usize {
    thread::available_parallelism().map_or(1, std::num::NonZero::get).clamp(1, 4)
}

/// Both halves' outcomes as one: a local failure first, then wrong bytes, then what is wrong inside them.
fn join(
    compression: DetectedCompression,
    read: Result<u64, UnpackError>,
    written: Result<UnpackedLayer, UnpackError>,
) -> Result<UnpackedLayer, UnpackError> {
    match (read, written) {
        (_, Err(error)) if error.is_local() => Err(error),
        (Err(error), _) | (Ok(_), Err(error)) => Err(error),
        (Ok(compressed_bytes), Ok(unpacked)) => {
            Ok(UnpackedLayer { compression, compressed_bytes, ..unpacked })
        }
    }
}
