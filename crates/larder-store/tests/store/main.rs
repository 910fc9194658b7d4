//! The store through its public door: commits, names, removal, leases, mounts, recovery, accounting.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

/// How these tests store layers. `tests/store_erofs` runs them with the other format.
pub(crate) const LAYERS: larder_store::store::LayerFormat = larder_store::store::LayerFormat::Directory;

mod accounting;
mod claims;
mod collection;
mod commits;
mod crashes;
mod faulty_pulls;
mod fixture;
mod fsck;
mod fsck_directories;
mod help;
mod imports;
mod imports_held;
mod ingest_writes;
mod ingests;
mod kept;
mod leases;
mod loads;
mod model;
mod mounting;
mod opening;
mod removal;
mod snapshots;
