//! Images on disk: layers, blobs and records, and the transactions that add and remove them.
//!
//! ```text
//! claim -> ingest -> begin_layer -> finish -> commit        remove -> trash
//! ```
//!
//! Read [`Store::commit`] first. `docs/store-format.md` describes the files.
//!
//! Guarantees: an image is visible only when everything it needs is durable; a removed image is invisible at once; a
//! process that dies at any instruction leaves nothing that the next [`Store::open`] does not clean up; readers never
//! wait for writers; one process at a time has the store open.
//!
//! Methods block on the disk: async callers use `spawn_blocking`. Clones share the store.

pub mod admission;
mod begun_uses;
mod blob_source;
pub(crate) mod blobs;
mod claims;
pub(crate) mod commit;
mod config;
mod damage;
pub(crate) mod db;
mod erofs_mount;
pub(crate) mod error;
mod extents;
mod extraction_locks;
pub(crate) mod fetch_progress;
pub(crate) mod handle;
mod image_chains;
pub(crate) mod images;
pub mod import;
mod ingest;
pub(crate) mod layer_check;
pub(crate) mod layer_file;
pub(crate) mod layer_index;
pub(crate) mod layers;
pub(crate) mod layout;
pub(crate) mod listing;
mod lock;
mod names;
pub(crate) mod open;
mod partial;
mod reclaim;
pub(crate) mod records;
mod recover;
pub(crate) mod references;
pub(crate) mod remnants;
mod remove;
mod resumable_layers;
pub(crate) mod resumable_list;
mod sharing;
pub(crate) mod snapshot_records;
mod suspects;
mod sync_descriptor;
pub(crate) mod transfers;
mod trash;
mod usage;
mod verified;

pub use blob_source::{BlobSource, IngestId, TransferLogin};
pub(crate) use claims::ClaimRequest;
pub use claims::Claimed;
pub use commit::{CommitArtifact, CommitLayer, ImageCommit};
pub use config::StoreConfig;
pub use damage::{DamagedImage, damage_hint};
pub use db::DbError;
pub use error::{StoreError, StoreOpenError};
pub(crate) use handle::OpenStore;
pub use handle::Store;
pub use ingest::{IngestFile, IngestReader};
pub use larder::backend::RemoveOptions;
pub use layer_file::{ARCHIVE_RECORD, LAYER_FILE};
pub use layers::{ClaimOutcome, LayerClaim, LayerHandle, LayerStaging, LayerWait};
pub use partial::IncompleteLayer;
pub use reclaim::IngestReferences;
pub(crate) use records::seconds;
pub use records::{
    ImageLayer, ImageRecord, LayerKey, LayerMetadata, LayerRecord, LeaseRecord, LeaseResources, MountRecord,
    PartialSource, UnpackRatio,
};
pub use remove::StoreRemoval;
pub use snapshot_records::{SnapshotKind, SnapshotRecord};
pub use suspects::Suspect;
pub use usage::{ImageUsage, PromisedSpace, StoreUsage};

/// Beginning of the file `format`; the number follows.
const TITLE: &str = "larder store";

/// The one format of stores that this version reads and writes.
pub const FORMAT: u32 = 1;
