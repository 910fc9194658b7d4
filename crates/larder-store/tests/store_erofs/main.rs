//! The tests of the store, with layers that are EROFS images, and what only images have.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]
#![allow(dead_code, reason = "some helpers are for directories only")]

/// How these tests store layers.
pub(crate) const LAYERS: larder_store::store::LayerFormat = larder_store::store::LayerFormat::Erofs;

#[path = "../store/accounting.rs"]
mod accounting;
#[path = "../store/claims.rs"]
mod claims;
#[path = "../store/collection.rs"]
mod collection;
#[path = "../store/commits.rs"]
mod commits;
mod conversion;
#[path = "../store/crashes.rs"]
mod crashes;
#[path = "../store/faulty_pulls.rs"]
mod faulty_pulls;
#[path = "../store/fixture.rs"]
mod fixture;
#[path = "../store/fsck.rs"]
mod fsck;
#[path = "../store/help.rs"]
mod help;
mod images;
#[path = "../store/imports.rs"]
mod imports;
#[path = "../store/imports_held.rs"]
mod imports_held;
#[path = "../store/ingest_writes.rs"]
mod ingest_writes;
#[path = "../store/ingests.rs"]
mod ingests;
#[path = "../store/kept.rs"]
mod kept;
#[path = "../store/leases.rs"]
mod leases;
#[path = "../store/loads.rs"]
mod loads;
mod lowers;
#[path = "../store/model.rs"]
mod model;
#[path = "../store/mounting.rs"]
mod mounting;
#[path = "../store/opening.rs"]
mod opening;
#[path = "../store/removal.rs"]
mod removal;
#[path = "../store/snapshots.rs"]
mod snapshots;
