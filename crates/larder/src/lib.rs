//! Keeps one node's container images: fetched when a workload wants them, kept while used, removed when not.
//!
//! Every image walks one path, and each step has its own room in this crate:
//!
//! ```text
//! reference -> pull policy -> records -> back-off -> puller -> credentials -> backend -> events
//! ```
//!
//! and goes when [`gc`] finds that the disk needs the room.
//!
//! Read [`pull::Manager::ensure`] first: it calls each room once, in that order. The rules are those of the
//! Kubernetes kubelet, v1.36; where larder does something else, a page in `docs/decisions/` says why, and a
//! setting brings kubelet's way back.
//!
//! The crate knows no gRPC, no HTTP and no Kubernetes client. Images live behind one trait,
//! [`backend::Backend`]; `larder-cri` implements it for containerd and CRI-O.

pub mod backend;
mod chain;
pub mod config;
pub mod credentials;
pub mod events;
pub mod files;
pub mod gc;
mod glob;
pub mod gotext;
pub mod hint;
pub mod image_service;
pub mod near;
pub mod outlive;
pub mod pod;
mod progress;
pub mod pull;
pub mod records;
pub mod reference;
mod threads;

pub use chain::chain;
pub use glob::glob;
