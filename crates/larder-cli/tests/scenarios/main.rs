//! The real `larder` against a real containerd and docker-registry on loopback.
//!
//! Every test has its own servers and looks at what happened from outside: at the registry's log, at a gate in front
//! of it, and at what `ctr` finds in containerd. A test that needs a pull in its middle holds it there with the gate.

#![allow(clippy::unwrap_used, reason = "a scenario that cannot be set up has failed")]

mod access;
mod bundle;
mod burst;
mod collect;
mod commands;
mod completion;
mod concurrency;
mod containerd_setup;
mod contract;
mod credentials;
mod cri;
mod cut_off;
mod daemon;
mod docker;
mod examples;
mod full_disk;
mod habits;
mod hidden;
mod hygiene;
mod index_damage;
mod joined;
mod killed_mounts;
mod kills;
#[cfg(feature = "kube")]
mod kube;
mod lazy;
mod leases;
mod lists;
mod names;
mod outages;
#[cfg(feature = "kube")]
mod panels;
mod pinned;
mod podman;
mod policy;
mod prometheus;
mod serve;
mod served;
mod snapshotter;
mod stalled_removal;
mod store;
mod timed;
#[cfg(feature = "traces")]
mod traces;
mod world;
