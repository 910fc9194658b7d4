//! Settings of the store.

use std::time::Duration;

use crate::disk::DiskSpace;
use crate::erofs::LayerMountKind;

/// Settings of a [`Store`](super::Store).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreConfig {
    /// Memory for database pages, in bytes. Default 4 MiB.
    pub database_cache_bytes: usize,
    /// Delete what was removed on a thread of its own. Default true. When false, [`Store::empty_trash`] does it.
    ///
    /// [`Store::empty_trash`]: super::Store::empty_trash
    pub background_deletion: bool,
    /// Whether closing the store waits until everything that was removed is deleted. Default false: the rest is
    /// deleted after the store is opened again. A process that runs only one command may end before the deletion;
    /// [`Store::finish_deletion`] enables the wait later.
    ///
    /// [`Store::finish_deletion`]: super::Store::finish_deletion
    pub finish_deletion: bool,
    /// How long a partially fetched blob is retained for a resume after its last byte was received. Default one day.
    pub ingest_keep: Duration,
    /// How long bytes of a blob being fetched may wait until they are made durable; a power loss costs no more of a
    /// download than this. Default 30 seconds, when the kernel would have written them anyway.
    pub ingest_sync: Duration,
    /// Space that must stay free while layers are extracted for mounts. Default 64 MiB and 1,000 inodes, as for pulls.
    pub reserve: DiskSpace,
    /// Whether the metadata of removed layers is kept, within one percent of the filesystem, so that they can be pulled
    /// lazily. Default false.
    pub keep_remnants: bool,
    /// How EROFS layers are mounted; `None`, the default: as the kernel can.
    pub erofs_mount: Option<LayerMountKind>,
}

impl Default for StoreConfig {
    fn default() -> StoreConfig {
        StoreConfig {
            database_cache_bytes: 4 << 20,
            background_deletion: true,
            finish_deletion: false,
            ingest_keep: Duration::from_secs(24 * 60 * 60),
            ingest_sync: Duration::from_secs(30),
            reserve: DiskSpace { bytes: 64 << 20, inodes: 1000 },
            keep_remnants: false,
            erofs_mount: None,
        }
    }
}
