//! The documents of an image: indexes, manifests, descriptors and configs, in OCI's formats and Docker's (schema 2).
//!
//! ```text
//! index -> (platform) -> manifest -> config
//!                                 -> layers
//!       -> manifest of an artifact -> config
//!                                  -> files
//! ```
//!
//! Read [`ManifestOrIndex::parse`] first. Everything here is pure; [`RepositorySession`](crate::RepositorySession)
//! fetches the documents.
//!
//! Digests are over the bytes as received, so callers keep the bytes: documents are never serialized again.
//!
//! Promises: no input panics; a parsed document has a bounded size in memory, whatever its content
//! ([`MAX_BYTES`] of text, and the other bounds in `limits.rs`); a document that could be parsed both as a manifest and
//! as an index is refused; errors name the next step.

mod artifact;
mod artifact_candidates;
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
mod referrers;

pub use artifact::{
    ArtifactFile, ArtifactImage, ArtifactLayer, ArtifactManifest, ResolvedArtifact, archive_id,
};
pub use artifact_candidates::ArtifactCandidates;
pub use config::ImageConfig;
pub use descriptor::Descriptor;
pub use document::{ImageIndex, ImageManifest, ManifestCandidate, ManifestOrIndex};
pub use error::ManifestError;
pub use limits::{MAX_BYTES, MAX_DEPTH, MAX_DOCUMENTS, MAX_REFERRERS};
pub(crate) use media_type::ACCEPTED_MANIFESTS;
pub use media_type::{Compression, MediaType};
pub use platform::PlatformMatcher;
pub(crate) use referrers::ReferrerList;
