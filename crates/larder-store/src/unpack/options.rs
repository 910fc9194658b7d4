//! Options of unpacking: threads, limits, privileges of the process, and progress.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::{fmt, io};

use super::{LayerMemory, WriteBehind};
use crate::disk::SpaceReserve;

/// How layers are unpacked.
#[derive(Debug, Clone)]
pub struct UnpackOptions {
    /// Threads for this layer. Default two.
    pub threads: UnpackThreads,
    /// Ceilings against hostile archives.
    pub limits: UnpackLimits,
    /// Counts what was done, and carries the wish to stop.
    pub progress: Arc<UnpackProgress>,
    /// Syncs the layer's file early. Default: none.
    pub write_behind: Option<WriteBehind>,
    /// Space that must stay free while the layer is written. Default: none.
    pub reserve: Option<SpaceReserve>,
    /// Waits until all compressed bytes are local, before memory is taken that other layers wait for. Default: they are.
    pub download: Option<LayerDownload>,
    /// Memory for names and directories, which all layers share that are written or wait for their lowers. Default 48 MiB in
    /// this process.
    pub layer_memory: LayerMemory,
    /// A new file for what the archive has beside the content of files, so that it can be written again. The layer's file takes
    /// it over. Default: none.
    pub archive_record: Option<PathBuf>,
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

impl Default for UnpackOptions {
    fn default() -> Self {
        UnpackOptions {
            threads: UnpackThreads::Two,
            limits: UnpackLimits::default(),
            progress: Arc::default(),
            write_behind: None,
            reserve: None,
            download: None,
            layer_memory: LayerMemory::default(),
            archive_record: None,
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
    /// Entries of one layer. Default ten million.
    pub max_entries: u64,
    /// Directories of one layer. Each takes about 100 bytes of memory. Default 500,000.
    pub max_directories: u32,
    /// Bytes of a path, also once links in it are resolved. Default 4096.
    pub max_path: u32,
    /// Bytes of one entry's extended headers (long names, attributes). Default 1 MiB.
    pub max_metadata: u32,
    /// Base-2 logarithm of the largest zstd window, which is memory. Default 27 (128 MiB), as in all decoders. Windows of more
    /// than 8 MiB share 128 MiB in this process: a layer waits until its own fits.
    pub max_zstd_window_log: u32,
}

impl Default for UnpackLimits {
    fn default() -> Self {
        UnpackLimits {
            max_plain_bytes: 256 << 30,
            max_entries: 10_000_000,
            max_directories: 500_000,
            max_path: 4096,
            max_metadata: 1 << 20,
            max_zstd_window_log: 27,
        }
    }
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

    /// Makes the unpacking or the merge end soon, with [`super::UnpackError::Canceled`]. It is noticed at every entry and every
    /// buffer; a `read` of the compressed bytes that blocks is the caller's to end.
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

    pub(super) fn set_compressed(&self, bytes: u64) {
        self.compressed.store(bytes, Ordering::Relaxed);
    }

    pub(super) fn set_plain(&self, bytes: u64) {
        self.plain.store(bytes, Ordering::Relaxed);
    }

    pub(super) fn set_entries(&self, entries: u64) {
        self.entries.store(entries, Ordering::Relaxed);
    }
}
