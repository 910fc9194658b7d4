//! The store through its public door: commits, names, removal, leases, mounts, recovery, accounting.

mod accounting;
mod claims;
mod commits;
mod help;
mod ingests;
mod leases;
mod mounting;
mod opening;
mod removal;
