//! The file system that holds the images: how full it is, and what a threshold means on it.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;

use super::amount::Amount;
use super::policy::GcPolicy;
use crate::backend::Backend;
use crate::image_service::{Disk, FilesystemError, ImageService, local_disk};
use crate::threads::blocking;

/// Reads the file system that holds the images.
#[async_trait]
pub trait Measure: Send + Sync {
    /// How full it is now. What is not known is 0. Must not wait for anything that is being removed.
    async fn measure(&self) -> Result<Disk, FilesystemError>;

    /// The same, once what was removed is deleted, where that happens in the background: as a round asks it.
    async fn measure_after_deletion(&self) -> Result<Disk, FilesystemError> {
        self.measure().await
    }
}

/// Asks the backend once where images live, and then the system how full that is.
pub(super) struct BackendDisk {
    images: ImageService,
    mountpoint: Mutex<Option<PathBuf>>,
}

impl BackendDisk {
    /// The disk of this backend's images. Nothing is asked before it is measured.
    pub(super) fn new(backend: Arc<dyn Backend>) -> BackendDisk {
        BackendDisk { images: ImageService::new(backend), mountpoint: Mutex::new(None) }
    }

    fn known(&self) -> std::sync::MutexGuard<'_, Option<PathBuf>> {
        self.mountpoint.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl Measure for BackendDisk {
    async fn measure(&self) -> Result<Disk, FilesystemError> {
        let known = self.known().clone();
        if let Some(mountpoint) = known
            && let Ok(Some(disk)) = blocking(move || local_disk(&mountpoint)).await
        {
            return Ok(disk);
        }
        let found = self.images.image_filesystem(local_disk).await?;
        *self.known() = Some(found.usage.mountpoint);
        Ok(found.disk.unwrap_or_default())
    }
}

/// What is free on a disk. Free above capacity is cut to capacity.
pub(super) fn free(disk: Disk) -> Amount {
    Amount {
        bytes: disk.available.min(disk.capacity),
        inodes: if disk.inodes == 0 { u64::MAX } else { disk.inodes_free.min(disk.inodes) },
    }
}

/// The disk with this much more, or less, free.
#[must_use]
pub(super) fn with_more_free(disk: Disk, more: Amount) -> Disk {
    Disk {
        available: disk.available.saturating_add(more.bytes).min(disk.capacity),
        inodes_free: disk.inodes_free.saturating_add(more.inodes).min(disk.inodes),
        ..disk
    }
}

/// Percent in use, rounded up as kubelet does it; 0 of nothing.
pub fn used_percent(capacity: u64, available: u64) -> i64 {
    if capacity == 0 {
        return 0;
    }
    let free = u128::from(available.min(capacity)) * 100 / u128::from(capacity);
    100 - i64::try_from(free).unwrap_or(100)
}

/// Bytes of `capacity` that are free when `low` percent are in use.
fn free_at(capacity: u64, low: i32) -> u64 {
    let free = u128::from(capacity) * u128::from(100 - low.clamp(0, 100).unsigned_abs()) / 100;
    u64::try_from(free).unwrap_or(u64::MAX)
}

/// Kubelet's amount to free when bytes are at or above the high threshold. Negative when the low threshold is met
/// already, as it may be by rounding when both are equal.
pub(super) fn kubelet_wants(disk: Disk, policy: &GcPolicy) -> Option<i64> {
    let available = disk.available.min(disk.capacity);
    let over = used_percent(disk.capacity, available) >= i64::from(policy.high_threshold_percent);
    let wanted = i128::from(free_at(disk.capacity, policy.low_threshold_percent)) - i128::from(available);
    over.then(|| i64::try_from(wanted).unwrap_or(i64::MAX))
}

/// What must be free for the policy to be content, if the disk is past one of its limits now.
pub(super) fn wanted_free(disk: Disk, policy: &GcPolicy) -> Option<Amount> {
    let now = free(disk);
    let mut wanted = Amount::ZERO;
    let mut due = false;
    if used_percent(disk.capacity, disk.available) >= i64::from(policy.high_threshold_percent) {
        (due, wanted.bytes) = (true, free_at(disk.capacity, policy.low_threshold_percent));
    }
    if now.bytes < policy.min_free_bytes {
        (due, wanted.bytes) = (true, wanted.bytes.max(policy.min_free_bytes));
    }
    if let Some(limits) = policy.inodes
        && disk.inodes > 0
        && used_percent(disk.inodes, disk.inodes_free) >= i64::from(limits.high_percent)
    {
        (due, wanted.inodes) = (true, free_at(disk.inodes, limits.low_percent));
    }
    due.then_some(wanted)
}

/// A size as kubelet writes it: `1023 B`, `1.5 KiB`, up to `TiB`.
pub fn size_text(bytes: i64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut unit = 0;
    let mut divisor: i64 = 1024;
    while unit + 1 < UNITS.len() && bytes / divisor >= 1024 {
        divisor *= 1024;
        unit += 1;
    }
    #[expect(clippy::cast_precision_loss, reason = "one decimal is printed")]
    let size = bytes as f64 / divisor as f64;
    format!("{size:.1} {}", UNITS[unit])
}
