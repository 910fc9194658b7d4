//! Bounds on documents, so that hostile ones cannot allocate much memory.

/// Largest manifest, index or config, in bytes; 4 MiB, which is also the limit of registries.
pub const MAX_BYTES: usize = 4 << 20;
/// Most layers of an image; the kernel's limit for one overlay.
pub(super) const MAX_LAYERS: usize = 500;
/// Most entries of an index.
pub(super) const MAX_MANIFESTS: usize = 1000;
/// Most referrers of one subject that are read.
pub const MAX_REFERRERS: usize = 1000;
/// Most annotations and most URLs of one descriptor.
pub(super) const MAX_ANNOTATIONS: usize = 256;
/// Longest user and creation time of a config, in bytes. Lists of images show them, and a list is one message of 16
/// MiB.
pub(super) const MAX_LISTED_TEXT: usize = 1024;
/// How deep indexes may be nested.
pub const MAX_DEPTH: usize = 4;
/// Most manifests and indexes that are read to find one image.
pub const MAX_DOCUMENTS: usize = 32;
