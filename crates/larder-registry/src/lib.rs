//! Speaks the OCI distribution protocol: names to manifests, descriptors to bytes.
//!
//! ```text
//! Client (shared) -> Session (one image, one credential) -> hosts, in order
//!                                                            -> budget -> auth -> transport
//! fetch_blob: ranges of a blob, side by side, each through hosts and retries of its own
//! ```
//!
//! Read [`Session::resolve`] and `Session::ask` first, then [`fetch_blob`].
//!
//! Promises: a host gets no credential but its own, whatever redirects and challenges say; a registry that asks for
//! patience gets it from all pulls; nothing waits without end, and what waits says why ([`Notice::Waiting`]);
//! manifests and configs are verified, blobs are not (their reader does that); memory is bounded by settings; no
//! reply panics, and no error text holds a secret or a signed URL.

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
mod hosts;
mod image;
mod login;
mod rate_limit;
mod route;
mod session;
mod tls;
mod token;
mod transport;
mod trial;
mod verify;
mod waiting;
mod watchdog;

pub use body::BlobBody;
pub use budget::RegistryLoad;
pub use client::Client;
pub use config::{Proxy, RegistryConfig};
pub use error::{Answer, FetchError, FetchErrorKind, What};
pub use fetch::{BlobError, BlobSink, Extents, Fetched, fetch_blob};
pub use hosts::HostsError;
pub use image::ImageDocuments;
pub use login::Login;
pub use session::{Resolved, Session};
pub use tls::TlsError;
pub use trial::Trial;
pub use waiting::{Notice, Waiting};

/// The schemes that a `WWW-Authenticate` field offers, in lower case: for whoever fuzzes the parser.
#[doc(hidden)]
pub fn challenge_schemes(header: &str) -> Vec<String> {
    challenge::parse(header).into_iter().map(|challenge| challenge.scheme).collect()
}
