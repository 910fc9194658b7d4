//! The pull records on a real folder: crashes, other processes, broken files, batches.

mod crashes;
mod folder;
mod world;
