//! OCI distribution client: resolves image names to manifests, fetches manifests, configs and blobs. Needs no store.
//!
//! ```text
//! RegistryClient (shared) -> RepositorySession (one image, one credential) -> hosts of hosts.toml, in order
//!                                                                           -> budget -> auth -> transport
//! documents_with_known_configs: index -> manifest -> config, each verified and parsed by `manifest`
//! fetch_blob: ranges of a blob in parallel, each with its own hosts and retries -> BlobSink
//! ```
//!
//! Read `session.rs` first ([`RepositorySession::resolve`] and `RepositorySession::get`), then [`fetch_blob`].
//!
//! Invariants: a host receives only its own credentials, whatever redirects and challenges request; when a registry
//! requests a wait, all pulls wait; every wait is bounded and reports its reason ([`FetchNotice::Waiting`]); manifests
//! and configs are verified, blobs are not (their reader verifies them); memory is bounded by settings; no response
//! panics; no error
//! text contains a secret or a signed URL.

mod access_check;
mod address_class;
mod attempts;
mod auth;
mod body;
mod budget;
mod budgets;
mod challenge;
mod client;
mod config;
mod content_range;
mod error;
mod fetch;
mod fetch_notice;
mod hosts;
mod image;
mod login;
pub mod manifest;
mod nearest_tags;
mod next_step;
mod rate_limit;
mod referrers;
mod response;
mod session;
mod stall_detector;
mod tls;
mod token;
mod transport;
mod warnings;

pub use access_check::FetchAttempt;
pub use budget::{RegistryLoad, RegistryQuota};
pub use client::RegistryClient;
pub use config::{Proxy, RegistryConfig};
pub use error::{ErrorResponse, FetchError, FetchErrorKind, FetchTarget};
pub use fetch::{BlobError, BlobSink, ByteRanges, fetch_blob, fetch_range};
pub use fetch_notice::{FetchNotice, FetchWait};
pub use hosts::HostsError;
pub use image::ImageDocuments;
pub use login::LoginResult;
pub use referrers::{Referrer, Referrers};
pub use session::{RepositorySession, ResolvedManifest};
pub use tls::{CertificateProblem, TlsProblem, TlsSettingsError};
pub use transport::{PlainClientTls, USER_AGENT, plain_client};

/// The schemes that a `WWW-Authenticate` field offers, in lower case. Public for the fuzz target of the parser.
#[doc(hidden)]
pub fn challenge_schemes(header: &str) -> Vec<String> {
    challenge::parse(header).into_iter().map(|challenge| challenge.scheme).collect()
}
