//! A layer before and after it is unpacked.

use std::path::Path;

use larder::reference::Digest;

use super::compression::DetectedCompression;

/// What is known about a layer before it is read.
#[derive(Debug, Clone, Copy)]
pub struct ExpectedLayer<'a> {
    /// Digest of the compressed bytes; `None` when the caller checks it.
    pub digest: Option<&'a Digest>,
    /// Number of compressed bytes, as the manifest declares it; `None` if unknown.
    pub size: Option<u64>,
    /// Digest of the plain bytes, from the image's config.
    pub diff_id: &'a Digest,
}

/// The destination of a layer.
#[derive(Debug, Clone, Copy)]
pub struct UnpackTarget<'a> {
    /// The layer's directory: exists, is empty, and no other process uses it.
    pub root: &'a Path,
    /// The layer manifest to write (see [`super::layer_manifest`]): a path outside of `root` that does not exist yet.
    pub files: &'a Path,
}

/// A layer whose bytes were verified and whose tree is complete, but for [`PendingLowerWork`]. Nothing is synced yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnpackedLayer {
    /// How the bytes were really compressed, whatever the media type said.
    pub compression: DetectedCompression,
    /// Compressed bytes read.
    pub compressed_bytes: u64,
    /// Plain bytes: the archive with all its padding.
    pub plain_bytes: u64,
    /// Entries of the archive, whiteouts included.
    pub entries: u64,
    /// What the tree takes on disk.
    pub usage: AllocatedSpace,
    /// What needs the layers below.
    pub pending: PendingLowerWork,
    /// Devices that this process may not make; they are in the manifest, not in the tree.
    pub skipped_devices: u64,
    /// Extended attributes that this process or this filesystem may not set.
    pub skipped_xattrs: u64,
    /// Whether there are whiteouts or opaque directories, so that [`super::UnpackOptions::overlay`] matters to a mount.
    pub hides_lowers: bool,
}

/// Space as the filesystem counts it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AllocatedSpace {
    /// Allocated bytes: `st_blocks * 512`, hard-linked files once.
    pub allocated_bytes: u64,
    /// Files, directories, links and whiteouts; hard-linked files once.
    pub inodes: u64,
}

/// Counts of what [`super::merge_lowers`] has to do; the manifest says where.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PendingLowerWork {
    /// Directories that the archive only implies, the root among them: a lower layer may know their owner and mode.
    pub implicit_dirs: u64,
    /// Hard links to files that this layer does not have.
    pub cross_layer_links: u64,
}

impl PendingLowerWork {
    /// Whether the layer is complete as it is.
    pub fn is_empty(&self) -> bool {
        *self == PendingLowerWork::default()
    }
}
