//! What an image consists of: indexes, manifests, descriptors and configs, in OCI's words and in Docker's (schema 2).
//!
//! ```text
//! index -> (platform) -> manifest -> config
//!                                 -> layers
//! ```
//!
//! Read [`ManifestOrIndex::parse`] first. Everything here is pure; [`RepositorySession`](crate::RepositorySession) fetches the documents.
//!
//! Digests are over the bytes as received, so callers keep the bytes: nothing here is ever written out again.
//!
//! Promises: no input panics; what a parsed document takes in memory is bounded, whatever the document says
//! ([`MAX_BYTES`] of text, and the other bounds in `limits.rs`); a document that could be read both as a manifest and as
//! an index is refused; each refusal says what to do about it.

mod bounded;
mod config;
mod descriptor;
mod document;
mod error;
mod limits;
mod media_type;
mod platform;
#[cfg(test)]
mod properties;

pub use config::ImageConfig;
pub use descriptor::Descriptor;
pub use document::{ImageIndex, ImageManifest, ManifestCandidate, ManifestOrIndex};
pub use error::ManifestError;
pub use limits::{MAX_BYTES, MAX_DEPTH};
pub(crate) use media_type::ACCEPTED_MANIFESTS;
pub use media_type::{Compression, MediaType};
pub use platform::{Platform, PlatformError, PlatformMatcher};
