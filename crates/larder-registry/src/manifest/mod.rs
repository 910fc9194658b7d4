//! What an image consists of: indexes, manifests, descriptors and configs, in OCI's words and in Docker's (schema 2).
//!
//! ```text
//! index -> (platform) -> manifest -> config
//!                                 -> layers
//! ```
//!
//! Read [`Document::parse`] first. Everything here is pure; `registry` fetches the documents.
//!
//! Digests are over the bytes as received, so callers keep the bytes: nothing here is ever written out again.
//!
//! Promises: no input panics; what a parsed document takes in memory is bounded, whatever the document says
//! ([`MAX_BYTES`] of text, [`MAX_LAYERS`], [`MAX_MANIFESTS`], [`MAX_ANNOTATIONS`] of each descriptor); a document that
//! could be read both as a manifest and as an index is refused; each refusal says what to do about it.

mod bounded;
mod config;
mod descriptor;
mod document;
mod error;
mod media_type;
mod platform;
#[cfg(test)]
mod properties;

pub use config::ImageConfig;
pub use descriptor::Descriptor;
pub use document::{Document, Index, Manifest, NextManifest};
pub use error::ManifestError;
pub use media_type::{ACCEPTED_MANIFESTS, Compression, MediaType};
pub use platform::{Platform, PlatformError, PlatformMatcher};

/// Largest manifest, index or config that is read, in bytes; 4 MiB, which is also what registries accept.
pub const MAX_BYTES: usize = 4 << 20;
/// Most layers that an image may have; the kernel stacks no more directories into one overlay.
pub const MAX_LAYERS: usize = 500;
/// Most entries that an index may have.
pub const MAX_MANIFESTS: usize = 1000;
/// Most annotations of one descriptor, most labels of one config, and most URLs of one descriptor.
pub const MAX_ANNOTATIONS: usize = 256;
/// How deep indexes may be nested.
pub const MAX_DEPTH: usize = 4;
