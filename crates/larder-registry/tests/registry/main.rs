//! The registry client against a registry that misbehaves on demand, and against a real one.

#![allow(clippy::unwrap_used, reason = "these are tests, helpers included")]

mod auth;
mod blobs;
mod failover;
mod manifests;
mod real;
mod redirects;
mod referrers;
mod retries;
mod support;
mod tls;
