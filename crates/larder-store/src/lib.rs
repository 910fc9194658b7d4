//! A store of container images that needs no container runtime.
//!
//! ```text
//! larder-registry -> ingest -> unpack -> store -> mounts
//! ```
//!
//! `pull` fetches an image with `larder-registry`; `unpack` turns one layer archive into one EROFS file, which is
//! mounted as an overlay lower; `store` keeps layers and images and makes an image visible in one transaction, after
//! everything it needs is durable. Read [`pull::StorePuller::pull`] first.

pub mod backend;
pub mod disk;
pub mod erofs;
pub mod export;
pub mod fsck;
pub mod gc_sources;
mod inspect;
pub mod lazy;
pub mod mounts;
pub mod pull;
pub mod snapshots;
pub mod store;
pub mod unpack;
