//! Reads a Kubernetes cluster for a node agent: the pods bound to its node, their pull secrets, and tokens of their
//! service accounts.
//!
//! ```text
//! Cluster::open -> watch_bound_pods -> BoundPods -> images to pull, before kubelet asks for them
//!               -> PullSecrets, ClusterServiceAccounts (by name, with the node's identity)
//! ```
//!
//! Everything is read under the Node authorizer: pods by `spec.nodeName`, secrets and service accounts by name. No list
//! of secrets is ever requested.

mod bound_pods;
mod check;
mod cluster;
mod error;
mod event_recorder;
pub mod image_sets;
mod kubeconfig;
mod node_events;
mod node_name;
mod pod_images;
mod pull_secrets;
mod reload;
mod responses;
mod runtime_classes;
mod service_accounts;
mod timed_cache;
mod watched;

pub use bound_pods::{BoundPods, watch_bound_pods};
pub use check::{ClusterCheck, check_cluster};
pub use cluster::{Cluster, ClusterOptions, RequestCounts, own_namespace};
pub use error::ClusterError;
pub use node_events::{EventRateLimit, NodeEvent, NodeEvents};
pub use node_name::{node_name, other_node};
pub use pod_images::{BoundPod, PodImage};
pub use pull_secrets::{PullSecrets, UnreadSecret};
pub use responses::ResponseObserver;
pub use runtime_classes::RuntimeClasses;
pub use service_accounts::ClusterServiceAccounts;
