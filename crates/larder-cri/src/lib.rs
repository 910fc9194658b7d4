//! The Kubernetes Container Runtime Interface (CRI) v1, both ends: containerd, CRI-O and cri-dockerd as a larder
//! backend, and larder's image manager as an image service for kubelet and crictl.
//!
//! ```text
//! Endpoint (or discover) -> CriBackend -> channel (one HTTP/2 connection, reopened when lost) -> runtime
//! kubelet, crictl -> server::services -> server::CriImages
//! ```
//!
//! Read [`CriBackend`] first; `convert.rs` has the rules for requests and responses, `status.rs` the
//! texts of errors. Both are kubelet's. The other end is [`server`].
//!
//! Promises: nothing is opened before the first call; each method of [`CriBackend`] except a pull ends within
//! [`CriConfig::connect_timeout`] for each connection that it opens and one [`CriConfig::request_timeout`] for
//! all its calls; after a runtime has restarted, the next call reconnects.

pub mod channel;
mod client;
mod convert;
mod dead_containers;
mod endpoint;
mod list_streaming;
mod operations;
mod preface;
mod pull_text;
mod sandboxes;
pub mod server;
mod status;

pub use client::{CriBackend, CriConfig, origin};
pub use dead_containers::ExitedContainer;
pub use endpoint::{Endpoint, EndpointError, NoRuntimeFound, WELL_KNOWN_SOCKETS, discover, short_path};
pub use list_streaming::joined;
pub use operations::{OPERATIONS, OperationObserver};
pub use sandboxes::CONFIGURED_SANDBOX_IMAGE;
pub use status::{call_error, code_name, deadline};

/// Messages and services of CRI v1, as far as larder uses them; generated from `proto/runtime/v1/api.proto`.
pub mod proto {
    #![allow(missing_docs, clippy::all, clippy::pedantic, unused_qualifications, reason = "generated code")]

    use std::fmt;

    tonic::include_proto!("runtime.v1");

    impl fmt::Debug for AuthConfig {
        /// Prints the user name and hides the secrets.
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.debug_struct("AuthConfig").field("username", &self.username).finish_non_exhaustive()
        }
    }
}

/// Largest message in either direction, in bytes: 16 MiB, as in Kubernetes.
pub const MAX_MESSAGE_BYTES: usize = 16 << 20;
