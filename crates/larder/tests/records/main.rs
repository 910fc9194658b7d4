//! The pull records on a real directory: crashes, other processes, broken files, batches.

#![allow(clippy::unwrap_used, reason = "a panic is how a test says no")]

mod crashes;
mod left;
mod shared_dir;
mod world;
