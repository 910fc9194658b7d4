//! Turns one layer archive into one directory that serves as an overlay lower.
//!
//! ```text
//! compressed bytes -> SHA-256 -> gzip | zstd | plain -> SHA-256 -> tar -> files
//!        source           decompress         stream       archive  writer + tree
//! ```
//!
//! Read [`unpack_layer`] first, then `writer.rs`: what each entry becomes. Everything here is blocking.
//!
//! Promises:
//! - nothing outside the given directory is touched, whatever the archive says: every name is opened below a directory
//!   that this module made itself, with `O_NOFOLLOW`, and links of the archive are resolved inside the layer (`tree.rs`);
//! - memory is bounded by [`Options`] and [`Limits`], never by the archive;
//! - a layer is only [`Unpacked`] when all its bytes, also those after the archive's end, have the expected digests;
//! - after an error the directory holds a partial tree that the caller removes.
//!
//! An archive is one layer out of context: it can leave out parent directories that a lower layer has, and hard-link
//! files of lower layers. Both are noted in the layer manifest (see [`files`]), and [`settle`] fills them in once the
//! layers below are known.

mod archive;
mod beneath;
mod compression;
mod decompress;
mod error;
pub mod files;
mod gzip;
mod lowers;
mod metadata;
mod options;
mod pax;
mod settle;
mod source;
mod stream;
mod tree;
mod verify;
mod write_behind;
mod writer;

use std::io::Read;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use larder::reference::Digest;

pub use compression::Compression;
pub use error::{Refusal, Stage, UnpackError};
pub use options::{Limits, Options, OverlayForm, Owners, Progress, Threads};
pub use settle::{Settled, Settling, settle};
pub use verify::{Damage, DamageKind, Depth, Verify, verify};
pub use write_behind::{Syncer, WriteBehind};

use archive::Archive;
use decompress::Decoder;
use source::Source;
use stream::{Feed, Plain};
use writer::{Crew, Writer};

/// What is known about a layer before it is read.
#[derive(Debug, Clone, Copy)]
pub struct Expected<'a> {
    /// Digest of the compressed bytes; `None` when the caller checks it.
    pub digest: Option<&'a Digest>,
    /// Number of compressed bytes, as the manifest declares it; `None` when nobody said.
    pub size: Option<u64>,
    /// Digest of the plain bytes, from the image's config.
    pub diff_id: &'a Digest,
}

/// Where a layer goes.
#[derive(Debug, Clone, Copy)]
pub struct Target<'a> {
    /// The layer's directory: exists, is empty, and is reached by nobody else.
    pub root: &'a Path,
    /// The layer manifest to write (see [`files`]): a path outside of `root` that does not exist yet.
    pub files: &'a Path,
}

/// A layer whose bytes were verified and whose tree is complete, but for [`Pending`]. Nothing is synced yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unpacked {
    /// How the bytes were really compressed, whatever the media type said.
    pub compression: Compression,
    /// Compressed bytes read.
    pub compressed_bytes: u64,
    /// Plain bytes: the archive with all its padding.
    pub plain_bytes: u64,
    /// Entries of the archive, whiteouts included.
    pub entries: u64,
    /// What the tree takes on disk.
    pub usage: Usage,
    /// What needs the layers below.
    pub pending: Pending,
    /// Devices that this process may not make; they are in the manifest, not in the tree.
    pub skipped_devices: u64,
    /// Extended attributes that this process or this file system may not set.
    pub skipped_xattrs: u64,
    /// Whether there are whiteouts or opaque directories, so that [`Options::overlay`] matters to a mount.
    pub hides_lowers: bool,
}

/// Space as the file system counts it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Allocated bytes: `st_blocks * 512`, hard-linked files once.
    pub allocated_bytes: u64,
    /// Files, directories, links and whiteouts; hard-linked files once.
    pub inodes: u64,
}

/// Counts of what [`settle`] has to do; the manifest says where.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pending {
    /// Directories that the archive only implies, the root among them: a lower layer may know their owner and mode.
    pub implicit_dirs: u64,
    /// Hard links to files that this layer does not have.
    pub cross_layer_links: u64,
}

impl Pending {
    /// Whether the layer is complete as it is.
    pub fn is_empty(&self) -> bool {
        *self == Pending::default()
    }
}

/// Unpacks one layer, verifying its bytes on the way.
///
/// Reads `compressed` to its end, except after an error. The returned error is the one nearest to the cause: bytes
/// that have the wrong digest are reported as such, not as the damaged archive that they happen to look like.
pub fn unpack_layer(
    compressed: impl Read + Send,
    expected: &Expected<'_>,
    target: Target<'_>,
    options: &Options,
) -> Result<Unpacked, UnpackError> {
    let source = Source::new(compressed, expected, options);
    match options.threads {
        Threads::One => on_one_thread(source, expected, target, options),
        Threads::Two | Threads::Many => on_two_threads(source, expected, target, options),
    }
}

fn on_one_thread<R: Read>(
    source: Source<R>,
    expected: &Expected<'_>,
    target: Target<'_>,
    options: &Options,
) -> Result<Unpacked, UnpackError> {
    let mut decoder = Decoder::new(source, &options.limits)?;
    let compression = decoder.compression();
    let written = write(&mut stream::inline(&mut decoder), expected, target, options);
    let skip_rest = written.as_ref().is_err_and(UnpackError::is_local);
    let read = decoder.finish(skip_rest);
    join(compression, read, written)
}

fn on_two_threads<R: Read + Send>(
    source: Source<R>,
    expected: &Expected<'_>,
    target: Target<'_>,
    options: &Options,
) -> Result<Unpacked, UnpackError> {
    let skip_rest = AtomicBool::new(false);
    thread::scope(|scope| {
        let (pump, mut feed) = stream::channel();
        let limits = &options.limits;
        let skip_rest = &skip_rest;
        let reader = thread::Builder::new().name("layer-inflate".into()).spawn_scoped(scope, move || {
            let mut decoder = Decoder::new(source, limits)?;
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
            Err(error) => join(Compression::None, Err(error), written),
        }
    })
}

/// The half that hashes and writes plain bytes.
fn write(
    feed: &mut impl Feed,
    expected: &Expected<'_>,
    target: Target<'_>,
    options: &Options,
) -> Result<Unpacked, UnpackError> {
    thread::scope(|scope| {
        let crew = match options.threads {
            Threads::Many => {
                let crew = Crew::start(scope, makers(), options);
                Some(crew.map_err(|error| UnpackError::file("start a thread for", target.root, error))?)
            }
            Threads::One | Threads::Two => None,
        };
        let mut archive = Archive::new(Plain::new(feed, expected.diff_id, options), options);
        let mut writer = Writer::new(target, options, crew)?;
        while let Some(entry) = archive.next()? {
            writer.add(&entry, &mut archive)?;
        }
        let entries = archive.entries();
        let plain_bytes = archive.into_plain().finish(expected.diff_id)?;
        let written = writer.finish()?;
        Ok(Unpacked { plain_bytes, entries, ..written })
    })
}

/// Threads that make small files: the kernel keeps no more than a few busy in one file system.
fn makers() -> usize {
    thread::available_parallelism().map_or(1, std::num::NonZero::get).clamp(1, 4)
}

/// Both halves' outcomes as one: this machine's trouble first, then wrong bytes, then what is wrong inside them.
fn join(
    compression: Compression,
    read: Result<u64, UnpackError>,
    written: Result<Unpacked, UnpackError>,
) -> Result<Unpacked, UnpackError> {
    match (read, written) {
        (_, Err(error)) if error.is_local() => Err(error),
        (Err(error), _) | (Ok(_), Err(error)) => Err(error),
        (Ok(compressed_bytes), Ok(unpacked)) => Ok(Unpacked { compression, compressed_bytes, ..unpacked }),
    }
}
