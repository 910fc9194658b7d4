//! The Kubernetes cluster of the node.
//!
//! ```text
//! kubelet's identity  -> bound pods, their pull secrets -> DesiredImages;  tokens for credential providers
//! larder's identity   -> image sets, events
//! ```
//!
//! Each identity has a [`Connection`] that says whether the API server answers. Nothing here fails when it does not:
//! what is known continues.

#[cfg(not(feature = "kube"))]
mod absent;
#[cfg(feature = "kube")]
mod check;
#[cfg(feature = "kube")]
mod connection;
#[cfg(feature = "kube")]
mod event_sender;
#[cfg(all(test, feature = "kube"))]
mod image_set_tests;
#[cfg(feature = "kube")]
mod image_sets;
#[cfg(feature = "kube")]
mod node_cluster;
#[cfg(feature = "kube")]
mod pod_requests;
#[cfg(feature = "kube")]
mod pods;
#[cfg(feature = "kube")]
mod retained_file;
#[cfg(all(test, feature = "kube"))]
mod tests;

#[cfg(not(feature = "kube"))]
pub(crate) use absent::NodeCluster;
#[cfg(feature = "kube")]
pub use check::check as check_cluster;
#[cfg(feature = "kube")]
pub(crate) use connection::Connection;
#[cfg(feature = "kube")]
pub(super) use image_sets::{ImageSetContext, end_image_sets, follow_image_sets, forget_image_sets};
#[cfg(feature = "kube")]
pub(crate) use node_cluster::{ClusterIdentity, NodeCluster};
#[cfg(feature = "kube")]
pub(super) use pods::run_pods;

/// Counts of events about the node that were to be sent to the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EventCounts {
    pub(crate) sent: u64,
    /// Not sent, because too many were sent before.
    pub(crate) rate_limited: u64,
    /// Not sent, because the API server did not take them.
    pub(crate) failed: u64,
    /// Dropped by the journal before they were read.
    pub(crate) missed: u64,
}
