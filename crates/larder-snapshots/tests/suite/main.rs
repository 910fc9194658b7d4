//! The cases of containerd's own snapshotter suite (`core/snapshots/testsuite`), against the service on a store. Each
//! has the name that it has there. Mounts are made as containerd makes them, which needs root.

#![allow(clippy::unwrap_used, reason = "a case that cannot be set up has failed")]

mod fetched;
mod files;
mod records;
mod world;
