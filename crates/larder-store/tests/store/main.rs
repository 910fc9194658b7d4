//! The store through its public door: commits, names, removal, leases, mounts, recovery, accounting.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

mod accounting;
mod claims;
mod collection;
mod commits;
mod crashes;
mod faulty_pulls;
mod fixture;
mod fsck;
mod help;
mod imports;
mod imports_held;
mod ingest_writes;
mod ingests;
mod kept;
mod layer_mounts;
mod leases;
mod loads;
mod lowers;
mod model;
mod mounting;
mod opening;
mod recording_disk;
mod removal;
mod snapshots;
mod stalls;
