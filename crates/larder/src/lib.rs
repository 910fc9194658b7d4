//! Manages the container images of one node: pulls them for workloads, retains them while they are used, and removes
//! them when space is needed.
//!
//! An ensure passes these steps, and sends events throughout:
//!
//! ```text
//! reference -> pull policy -> records -> credentials -> pull intent (records) -> back-off -> puller -> backend -> records
//! ```
//!
//! [`gc`] removes images when the image filesystem runs short of space.
//!
//! Read [`pull::ImageManager::ensure`] first: it calls them in that order. The rules are those of the
//! Kubernetes kubelet, v1.36; where larder differs, a page in `docs/decisions/` explains why, and a setting restores
//! kubelet's behaviour.
//!
//! The crate contains no gRPC, no HTTP and no Kubernetes client. Images are accessed through one trait,
//! [`backend::Backend`], which `larder-store`, `larder-cri` and `larder-docker` implement.

pub mod age;
pub mod artifact_type;
pub mod backend;
mod chain;
pub mod config;
pub mod credentials;
pub mod detached;
pub mod escape;
pub mod events;
pub mod files;
pub mod gc;
mod glob;
pub mod go_format;
pub mod hidden;
pub mod hint;
mod image_fill;
pub mod image_service;
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod internals;
pub mod lazy_choice;
pub mod pod;
mod progress;
pub mod pull;
pub mod records;
pub mod reference;
pub mod retention;
pub mod retry;
pub mod scheduler;
pub mod suggestions;
pub mod threads;
pub mod trace_context;
pub mod trusted_path;

pub use chain::error_chain;
pub use glob::glob;
