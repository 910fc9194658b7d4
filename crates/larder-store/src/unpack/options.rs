//! Options of unpacking: threads, limits, privileges of the process, and progress.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::{fmt, io};

use super::layer_output::UnfilledLayer;
use super::{LayerMemory, UnpackError, WriteBehind};
use crate::disk::SpaceReserve;

/// How layers are unpacked.
#[derive(Debug, Clone)]
pub struct UnpackOptions {
    /// Threads for this layer. Default two.
    pub threads: UnpackThreads,
    /// Ceilings against hostile archives.
    pub limits: UnpackLimits,
    /// Bytes of all layers of the image. Default: the image has this layer only.
    pub image: Arc<ImageByteCounts>,
    /// Counts what was done, and carries the wish to stop.
    pub progress: Arc<UnpackProgress>,
    /// Syncs the layer's file early. Default: none.
    pub write_behind: Option<WriteBehind>,
    /// Space that must stay free while the layer is written. Default: none.
    pub reserve: Option<SpaceReserve>,
    /// Waits until all compressed bytes are local, before memory is taken that other layers wait for. Default: they
    /// are.
    pub download: Option<LayerDownload>,
    /// Memory for names and directories, which all layers share that are written or wait for their lowers. Default 48
    /// MiB in this process.
    pub layer_memory: LayerMemory,
    /// A new file for what the archive has beside the content of files, so that it can be written again. The layer's
    /// file takes it over. Default: none.
    pub archive_record: Option<PathBuf>,
    /// A layer in its place that takes the data, in place of a new file. Default: none.
    pub into: Option<Arc<dyn UnfilledLayer>>,
}

/// The download of a layer that is unpacked while it arrives. Clones are one.
#[derive(Clone)]
pub struct LayerDownload(Arc<dyn Fn() -> io::Result<()> + Send + Sync>);

impl LayerDownload {
    /// `wait` blocks until the download has ended, with an error if it failed.
    pub fn new(wait: impl Fn() -> io::Result<()> + Send + Sync + 'static) -> LayerDownload {
        LayerDownload(Arc::new(wait))
    }

    pub(super) fn wait(&self) -> io::Result<()> {
        (self.0)()
    }
}

impl fmt::Debug for LayerDownload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LayerDownload")
    }
}

impl UnpackOptions {
    /// Default options without limits of size, for the files of a layer that the store has accepted.
    pub(super) fn for_accepted_layer() -> UnpackOptions {
        let limits = UnpackLimits {
            max_plain_bytes: u64::MAX,
            max_image_bytes: u64::MAX,
            max_expansion: 0,
            ..UnpackLimits::default()
        };
        UnpackOptions { limits, ..UnpackOptions::default() }
    }
}

impl Default for UnpackOptions {
    fn default() -> Self {
        UnpackOptions {
            threads: UnpackThreads::Two,
            limits: UnpackLimits::default(),
            image: Arc::default(),
            progress: Arc::default(),
            write_behind: None,
            reserve: None,
            download: None,
            layer_memory: LayerMemory::default(),
            archive_record: None,
            into: None,
        }
    }
}

/// Threads that work on one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnpackThreads {
    /// The caller's alone: least CPU, and right when other layers keep the other cores busy. Buffers: 0.2 MiB.
    One,
    /// One hashes and inflates, the caller's hashes and writes. Buffers: 1.1 MiB.
    Two,
}

/// How an overlay lower says what it hides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverlayForm {
    /// `trusted.overlay.*`: the kernel's default; needs `CAP_SYS_ADMIN` to write.
    Trusted,
    /// `user.overlay.*`: for mounts with the option `userxattr`, as in user namespaces.
    User,
}

impl OverlayForm {
    /// The full name of an overlay attribute, such as `opaque`.
    pub(super) fn xattr(self, name: &str) -> String {
        match self {
            OverlayForm::Trusted => format!("trusted.overlay.{name}"),
            OverlayForm::User => format!("user.overlay.{name}"),
        }
    }
}

/// Ceilings. An archive over one of them fails with [`super::UnpackError::Limit`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnpackLimits {
    /// Plain bytes of one layer, and also the sum of its files' sizes, which sparse files make larger. Default 256 GiB.
    pub max_plain_bytes: u64,
    /// Plain bytes of all layers of an image that are unpacked. Default 256 GiB.
    pub max_image_bytes: u64,
    /// Plain bytes of an image for each compressed byte, beyond `expansion_free_bytes`. Runs of zeros do not count,
    /// since they take no space. Default 200; 0 is no limit.
    pub max_expansion: u64,
    /// Plain bytes of an image that need no compressed ones. Default 1 GiB.
    pub expansion_free_bytes: u64,
    /// Entries of one layer. Default ten million.
    pub max_entries: u64,
    /// Directories of one layer. Each takes about 100 bytes of memory. Default 500,000.
    pub max_directories: u32,
    /// Bytes of a path, also once links in it are resolved. Default 4096.
    pub max_path: u32,
    /// Bytes of one entry's extended headers (long names, attributes). Default 1 MiB.
    pub max_metadata: u32,
    /// Base-2 logarithm of the largest zstd window, which is memory. Default 27 (128 MiB), as in all decoders. Windows
    /// of more than 8 MiB share 128 MiB in this process: a layer waits until its own fits.
    pub max_zstd_window_log: u32,
}

impl Default for UnpackLimits {
    fn default() -> Self {
        UnpackLimits {
            max_plain_bytes: 256 << 30,
            max_image_bytes: 256 << 30,
            max_expansion: 200,
            expansion_free_bytes: 1 << 30,
            max_entries: 10_000_000,
            max_directories: 500_000,
            max_path: 4096,
            max_metadata: 1 << 20,
            max_zstd_window_log: 27,
        }
    }
}

/// Bytes of all layers of one image that are being unpacked or were.
#[derive(Debug, Default)]
pub struct ImageByteCounts {
    plain: AtomicU64,
    /// Plain bytes without runs of zeros.
    data: AtomicU64,
    compressed: AtomicU64,
}

/// Part of one layer in the bytes of its image. A layer that fails gives it back: it may be fetched once more.
#[derive(Debug)]
pub(super) struct LayerByteCounts {
    image: Arc<ImageByteCounts>,
    plain: u64,
    data: u64,
    compressed: u64,
}

impl LayerByteCounts {
    pub(super) fn new(image: Arc<ImageByteCounts>) -> LayerByteCounts {
        LayerByteCounts { image, plain: 0, data: 0, compressed: 0 }
    }

    /// Counts plain bytes of the layer, of which `compressed` compressed bytes were read, and fails beyond a limit.
    pub(super) fn add(
        &mut self,
        plain: &[u8],
        compressed: u64,
        limits: &UnpackLimits,
    ) -> Result<(), UnpackError> {
        let count = plain.len() as u64;
        let data = if is_zero(plain) { 0 } else { count };
        let read = compressed.saturating_sub(self.compressed);
        (self.plain, self.data, self.compressed) =
            (self.plain + count, self.data + data, self.compressed + read);
        let add = |total: &AtomicU64, count| total.fetch_add(count, Ordering::Relaxed) + count;
        let compressed = add(&self.image.compressed, read);
        let image = add(&self.image.plain, count);
        let data = add(&self.image.data, data);
        if self.plain > limits.max_plain_bytes {
            return Err(UnpackError::over_setting(limits.max_plain_bytes, "plain bytes", MAX_LAYER_BYTES));
        }
        if image > limits.max_image_bytes {
            let what = "plain bytes in all layers of the image";
            return Err(UnpackError::over_setting(limits.max_image_bytes, what, "store.maxImageBytes"));
        }
        let allowed =
            compressed.saturating_mul(limits.max_expansion).saturating_add(limits.expansion_free_bytes);
        if limits.max_expansion > 0 && data > allowed {
            let what = "plain bytes for each compressed byte of the image";
            return Err(UnpackError::over_setting(limits.max_expansion, what, "store.maxExpansion"));
        }
        Ok(())
    }

    /// The layer is complete: its bytes count as long as the image is pulled.
    pub(super) fn keep(mut self) {
        (self.plain, self.data, self.compressed) = (0, 0, 0);
    }
}

impl Drop for LayerByteCounts {
    fn drop(&mut self) {
        self.image.plain.fetch_sub(self.plain, Ordering::Relaxed);
        self.image.data.fetch_sub(self.data, Ordering::Relaxed);
        self.image.compressed.fetch_sub(self.compressed, Ordering::Relaxed);
    }
}

/// The setting of [`UnpackLimits::max_plain_bytes`].
pub(super) const MAX_LAYER_BYTES: &str = "store.maxLayerBytes";

/// Returns true when all bytes are zero. Of other content it looks at few bytes.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    static ZEROS: [u8; 4096] = [0; 4096];
    bytes.chunks(ZEROS.len()).all(|chunk| *chunk == ZEROS[..chunk.len()])
}

/// Progress of one layer's unpacking; shared with the code that shows or cancels it.
#[derive(Debug, Default)]
pub struct UnpackProgress {
    compressed: AtomicU64,
    plain: AtomicU64,
    entries: AtomicU64,
    canceled: AtomicBool,
    exceeds_memory: AtomicBool,
}

impl UnpackProgress {
    /// Compressed bytes read.
    pub fn compressed_bytes(&self) -> u64 {
        self.compressed.load(Ordering::Relaxed)
    }

    /// Plain bytes hashed, and about to be written.
    pub fn plain_bytes(&self) -> u64 {
        self.plain.load(Ordering::Relaxed)
    }

    /// Entries begun.
    pub fn entries(&self) -> u64 {
        self.entries.load(Ordering::Relaxed)
    }

    /// Makes the unpacking or the merge end soon, with [`super::UnpackError::Canceled`]. It is noticed at every entry
    /// and every buffer; a `read` of the compressed bytes that blocks is the caller's to end.
    pub fn cancel(&self) {
        self.canceled.store(true, Ordering::Relaxed);
    }

    /// Returns true once the unpacking was canceled.
    pub(crate) fn is_canceled(&self) -> bool {
        self.canceled.load(Ordering::Relaxed)
    }

    /// True while the layer may exceed the memory that all layers share: others may wait for it, so it waits for none.
    pub(super) fn exceeds_memory(&self) -> bool {
        self.exceeds_memory.load(Ordering::Relaxed)
    }

    pub(super) fn set_exceeds_memory(&self, exceeds: bool) {
        self.exceeds_memory.store(exceeds, Ordering::Relaxed);
    }

    pub(crate) fn set_compressed(&self, bytes: u64) {
        self.compressed.store(bytes, Ordering::Relaxed);
    }

    pub(super) fn set_plain(&self, bytes: u64) {
        self.plain.store(bytes, Ordering::Relaxed);
    }

    pub(super) fn set_entries(&self, entries: u64) {
        self.entries.store(entries, Ordering::Relaxed);
    }
}
