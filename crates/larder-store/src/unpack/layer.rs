//! A layer before and after it is unpacked.

use larder::reference::Digest;
use larder_registry::manifest::archive_id;

use super::checkpoints::Checkpoint;
use super::compression::DetectedCompression;

/// Facts about a layer before it is read.
#[derive(Debug, Clone, Copy)]
pub struct ExpectedLayer<'a> {
    /// Digest of the compressed bytes; `None` when the caller checks it.
    pub digest: Option<&'a Digest>,
    /// Number of compressed bytes, as the manifest declares it; `None` if unknown.
    pub size: Option<u64>,
    /// Digest of the plain bytes, from the image's config. Of an archive whose plain digest is not known, the ID that
    /// an artifact gives it.
    pub diff_id: &'a Digest,
}

impl<'a> ExpectedLayer<'a> {
    /// Digest of the plain bytes, if it is known.
    pub(super) fn plain_digest(&self) -> Option<&'a Digest> {
        let is_made = self.digest.is_some_and(|digest| archive_id(digest) == *self.diff_id);
        (!is_made).then_some(self.diff_id)
    }
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
    /// Work that needs the layers below.
    pub lower_work: PendingLowerWork,
    /// Extended attributes that were left out: those of overlays, and those that links cannot have.
    pub skipped_xattrs: u64,
    /// Whether there are whiteouts or opaque directories.
    pub hides_lowers: bool,
    /// Places from which parts of it can be decompressed.
    pub(crate) checkpoints: Vec<Checkpoint>,
}

/// Counts of what needs the layers below.
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
