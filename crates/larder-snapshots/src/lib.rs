//! `containerd.services.snapshots.v1.Snapshots` on larder's store: containerd runs containers from it, as a proxy
//! plugin of type `snapshot`.
//!
//! ```text
//! request -> service.rs -> larder_store::snapshots -> mounts, or an error class of containerd
//!               |-------> filter.rs (List), labels.rs (limits, field masks)
//!               '-------> fetch.rs (layers that the store lacks)
//! ```
//!
//! Promises: what was answered is durable; an error has the code that containerd's own overlayfs snapshotter would
//! give, so that containerd's garbage collector and its retries work as with that one.

mod fetch;
mod filter;
mod labels;
mod service;

pub use fetch::LayerFetcher;
pub use service::{SERVICE_NAME, SnapshotService, service};

/// Messages and the server of the snapshot service; generated from `proto/snapshots.proto`.
pub mod proto {
    #![allow(
        missing_docs,
        clippy::all,
        clippy::pedantic,
        unreachable_pub,
        unused_qualifications,
        reason = "generated code"
    )]

    tonic::include_proto!("containerd.services.snapshots.v1");
}
