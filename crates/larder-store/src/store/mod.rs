//! Images on disk: what is here, who needs it, and how it appears and vanishes as a whole.
//!
//! ```text
//! claim -> ingest -> begin_layer -> finish -> commit        remove -> trash
//! ```
//!
//! Read [`Store::commit`] first. `docs/store-format.md` says what lies where.
//!
//! Promises: an image is visible only when everything behind it is durable; a removed one is gone at once; a process
//! that dies at any instruction leaves nothing that the next [`Store::open`] does not put in order; looking never waits
//! for writing; one process has the store at a time.
//!
//! Methods block on the disk: async callers use `spawn_blocking`. Clones share the store.

pub mod admission;
pub(crate) mod blobs;
pub(crate) mod commit;
mod config;
pub(crate) mod db;
pub(crate) mod error;
mod extents;
pub(crate) mod holds;
pub(crate) mod images;
pub mod import;
mod ingest;
mod kept;
pub(crate) mod layers;
pub(crate) mod layout;
mod leases;
pub(crate) mod listing;
mod lock;
pub(crate) mod open;
pub(crate) mod records;
mod recover;
mod remove;
mod sharing;
mod trash;
mod usage;

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

pub use commit::{CommitLayer, ImageCommit};
pub use config::StoreConfig;
pub use db::DbError;
pub use error::{OpenError, StoreError};
pub use ingest::{IngestFile, IngestReader};
pub use layers::{Claim, FILES, FS, Layer, LayerClaim, LayerStaging, Waiting};
pub use records::{
    ImageLayer, ImageRecord, LayerFacts, LayerKey, LayerRecord, LeaseKind, LeaseRecord, Leased, MountRecord,
    Ratio,
};
pub use remove::{RemoveOptions, Removed};
pub use usage::{ImageUsage, StoreUsage};

use crate::disk::Disk;

/// The format of stores that this larder makes, and the latest that it reads.
pub const FORMAT: u32 = 1;

/// A store of images. Clones share it; it is closed with the last of them, and of the layers and files it gave out.
#[derive(Debug, Clone)]
pub struct Store(pub(crate) Arc<Inner>);

/// Fields are dropped in this order: the trash stops, the database closes, and the lock goes last.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) trash: trash::Trash,
    pub(crate) db: db::Db,
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) layout: layout::Layout,
    config: StoreConfig,
    pub(crate) holds: Arc<holds::Holds>,
    pub(crate) arrivals: layers::Arrivals,
    /// Held while layers and blobs come to their place or leave it, together with what the database says of them.
    /// Looking at images does not need it.
    gate: Mutex<()>,
    _lock: lock::Lock,
}

impl Inner {
    pub(crate) fn gate(&self) -> MutexGuard<'_, ()> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store {
    /// The store's folder.
    pub fn root(&self) -> &Path {
        self.0.layout.root()
    }
}

/// Seconds since 1970.
pub(crate) fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
