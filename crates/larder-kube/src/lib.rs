//! What a node agent reads from a Kubernetes cluster: the pods bound to its node, their pull secrets, and tokens of their
//! service accounts.
//!
//! ```text
//! Cluster::connect -> watch_bound_pods -> BoundPods -> images to pull, before kubelet asks for them
//!                  -> PullSecrets, ClusterServiceAccounts (by name, with the node's identity)
//! ```
//!
//! Everything is read under the Node authorizer: pods by `spec.nodeName`, secrets and service accounts by name. No list of
//! secrets is ever requested.

mod bound_pods;
mod cluster;
mod error;
mod pod_images;
mod pull_secrets;
mod service_accounts;

pub use bound_pods::{BoundPods, watch_bound_pods};
pub use cluster::{Cluster, ClusterOptions};
pub use error::ClusterError;
pub use pod_images::{BoundPod, PodImage, bound_pod};
pub use pull_secrets::PullSecrets;
pub use service_accounts::ClusterServiceAccounts;
