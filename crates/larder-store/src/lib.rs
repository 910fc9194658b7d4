//! An embedded store of container images: no container runtime needed.
//!
//! ```text
//! registry -> ingest -> unpack -> store -> mounts
//! ```
//!
//! `registry` speaks the OCI distribution protocol; `unpack` turns one layer archive into one directory that serves as
//! an overlay lower; `store` keeps layers and images and makes an image visible in one transaction, after everything
//! behind it is durable.

pub mod backend;
pub mod collection;
pub mod disk;
pub mod fsck;
pub mod manifest;
pub mod mounts;
pub mod pull;
pub mod registry;
pub mod store;
pub mod unpack;
