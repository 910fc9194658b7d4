//! Bounds on documents: what larger ones would take in memory is never allocated.

/// Largest manifest, index or config that is read, in bytes; 4 MiB, which is also what registries accept.
pub const MAX_BYTES: usize = 4 << 20;
/// Most layers that an image may have; the kernel stacks no more directories into one overlay.
pub(super) const MAX_LAYERS: usize = 500;
/// Most entries that an index may have.
pub(super) const MAX_MANIFESTS: usize = 1000;
/// Most annotations of one descriptor, most labels of one config, and most URLs of one descriptor.
pub(super) const MAX_ANNOTATIONS: usize = 256;
/// How deep indexes may be nested.
pub const MAX_DEPTH: usize = 4;
