//! Real servers on loopback, with private state, for tests and for the playground; and fakes that speak a backend's
//! protocol.
//!
//! [`containerd`] and [`registry`] start what Debian packages; [`images`] makes images and pushes them; [`tls`]
//! makes certificates; [`holding_proxy`] stands in front of a registry and holds or cuts answers, so that a test can
//! look at a pull while it is in the middle. [`packages`] says what is missing on this machine.
//!
//! Promises: all state lives below one temporary directory per server; nothing outside it is written; exactly the
//! process that was started is ended, when its value is dropped or when its parent dies; every wait is bounded.
//!
//! The servers are ordinary blocking values: start them outside of asynchronous code, in a thread that lives at
//! least as long as they do (they are signalled to end when that thread does).
//!
//! [`fake_cri`] is a scripted container runtime and [`wire`] a bare client of one; [`faulty_disk`] fails or loses power
//! below the store, [`loop_disk`] mounts a small filesystem of any kind, [`cut_disk`] cuts its power, and
//! [`overbooked_disk`] loses what is written to it; [`fixtures`] puts each backend through
//! `larder_testkit::backend_suite`; [`tree_listing`] compares what programs unpack; [`fuzz`] feeds what strangers send
//! to the code that reads it.

pub mod containerd;
pub mod cut_disk;
pub mod dockerd;
pub mod examples;
pub mod fake_cri;
pub mod faulty_disk;
pub mod fixtures;
pub mod fuzz;
pub mod holding_proxy;
pub mod images;
pub mod loop_disk;
pub mod otlp_receiver;
pub mod overbooked_disk;
pub mod packages;
pub mod process;
pub mod registry;
pub mod tls;
pub mod tree_listing;
pub mod wire;

pub use containerd::{Containerd, ContainerdOptions};
pub use cut_disk::CutDisk;
pub use dockerd::{Dockerd, DockerdOptions};
pub use holding_proxy::HoldingProxy;
pub use images::{ImageBuilder, LayerFiles};
pub use loop_disk::{LoopDisk, LoopFilesystem};
pub use otlp_receiver::OtlpReceiver;
pub use overbooked_disk::OverbookedDisk;
pub use packages::{Availability, Package, require};
pub use registry::{RegistryAccess, RegistryOptions, RegistryProcess, TlsMode};
pub use tree_listing::TreeListing;

/// A peer could not be started or used. The text names the program, what it was to do, and what it said.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct PeerError(String);

impl PeerError {
    /// `doing: cause`.
    pub(crate) fn new(doing: impl std::fmt::Display, cause: impl std::fmt::Display) -> Self {
        PeerError(format!("{doing}: {cause}"))
    }
}

impl From<std::io::Error> for PeerError {
    fn from(error: std::io::Error) -> Self {
        PeerError(error.to_string())
    }
}

/// Result of most functions here.
pub type PeerResult<T> = Result<T, PeerError>;
