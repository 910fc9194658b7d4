//! Clients of containerd's own API, which it serves on the socket of CRI: the disk usage of images, and what uses them
//! beside CRI.
//!
//! ```text
//! ContainerdLayers -> content, snapshots            -> layers of images   \   of CRI, or of a Docker Engine
//!        '----------> images, leases, namespaces    -> what else has them  > garbage collection
//! ContainerdUses   -> containers that CRI omits     -> images in use      /
//! ContainerdActivity -> events                      -> images that were used since
//! SharedSnapshots  -> snapshots, content, leases    -> what containerd has of images of larder's store, or retains of them
//! ContainerdImages -> images, content, events     -> images that others put there, for larder's store
//! ImagePublisher   -> content, snapshots, images    -> images of larder's store that containerd can run
//! ContainerdInspector -> version, plugins, content  -> whether containerd uses the store, and what it has of its own
//! configuration   -> files, ContainerdInspector     -> containerd keeps its snapshots in larder's store
//! ```
//!
//! Read `layers.rs` first. `graph.rs`, `holders.rs` and `publish/records.rs` are pure.
//!
//! Promises: only `ImagePublisher` and `configuration` change anything; a runtime without this API, such as CRI-O, has
//! no sizes and no further uses; if a part of it is refused, sizes are marked as estimated, and unknown uses are an
//! error.

mod activity;
mod client;
#[cfg(feature = "configuration")]
pub mod configuration;
mod graph;
mod holders;
mod images;
mod inspect;
mod layers;
mod publish;
mod shared_snapshots;
mod uses;

pub use activity::ContainerdActivity;
pub use images::{ContainerdImage, ContainerdImages, ImageChanges};
pub use inspect::{ContainerdInspector, SnapshotterPlugin};
pub use layers::{ContainerdLayers, PresentLayers};
pub use publish::{ForeignName, ImagePublisher, NamesInContainerd, PublishedImage};
pub use shared_snapshots::{ContainerdShare, SharedSnapshots};
pub use uses::{ContainerdPins, ContainerdUses};

/// The parts of containerd's API that larder uses; generated from `proto`.
mod proto {
    #![allow(
        missing_docs,
        clippy::all,
        clippy::pedantic,
        dead_code,
        unreachable_pub,
        unused_qualifications,
        reason = "generated code"
    )]

    pub(crate) mod containers {
        tonic::include_proto!("containerd.services.containers.v1");
    }

    pub(crate) mod content {
        tonic::include_proto!("containerd.services.content.v1");
    }

    pub(crate) mod events {
        tonic::include_proto!("containerd.services.events.v1");
    }

    pub(crate) mod images {
        tonic::include_proto!("containerd.services.images.v1");
    }

    pub(crate) mod introspection {
        tonic::include_proto!("containerd.services.introspection.v1");
    }

    pub(crate) mod leases {
        tonic::include_proto!("containerd.services.leases.v1");
    }

    pub(crate) mod namespaces {
        tonic::include_proto!("containerd.services.namespaces.v1");
    }

    pub(crate) mod snapshots {
        tonic::include_proto!("containerd.services.snapshots.v1");
    }

    pub(crate) mod version {
        tonic::include_proto!("containerd.services.version.v1");
    }
}

/// The namespace in which containerd's CRI plugin stores images.
const NAMESPACE: &str = "k8s.io";
