//! The pull records on a real folder: crashes, other processes, broken files, batches.

#![allow(clippy::unwrap_used, reason = "a panic is how a test says no")]

mod crashes;
mod folder;
mod left;
mod world;
