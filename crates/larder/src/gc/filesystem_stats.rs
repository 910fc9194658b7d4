//! Usage of the image filesystem, and thresholds on it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use parking_lot::{Mutex, MutexGuard};

use super::disk_space::DiskSpace;
use super::open_files::{self, SpaceHolder};
use crate::backend::{Backend, Filesystems};
use crate::image_service::{FilesystemError, FsStats, ImageService, local_disk};
use crate::threads::blocking;

/// Measures the image filesystem.
#[async_trait]
pub trait FsStatsProvider: Send + Sync {
    /// Its current statistics, 0 where unknown. Must not wait for removals in progress.
    async fn measure(&self) -> Result<FsStats, FilesystemError>;

    /// Its statistics after background deletion of removed images has ended.
    async fn measure_after_deletion(&self) -> Result<FsStats, FilesystemError> {
        self.measure().await
    }

    /// The filesystems of the runtime beside the measured one. None by default.
    async fn measure_others(&self) -> Result<Vec<OtherFilesystem>, FilesystemError> {
        Ok(Vec::new())
    }

    /// The processes that hold deleted files of the filesystem open, as far as known, the largest first.
    async fn deleted_open_files(&self) -> Vec<SpaceHolder> {
        Vec::new()
    }
}

/// A filesystem of the runtime that GC neither measures nor frees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtherFilesystem {
    /// A directory on it.
    pub mountpoint: PathBuf,
    /// The content that the runtime keeps there.
    pub content: FilesystemContent,
    /// Its current statistics.
    pub disk: FsStats,
}

/// The content that a runtime keeps on a filesystem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FilesystemContent {
    /// Images, as those of a further snapshotter of containerd.
    Images,
    /// Writable layers of containers.
    Containers,
}

/// The reported filesystems beside the first one of images. Directories on one device are one filesystem, named by the
/// first of them; those that `device` does not know are not on this machine.
fn others(reported: &Filesystems, device: impl Fn(&Path) -> Option<u64>) -> Vec<(FilesystemContent, &Path)> {
    let images = reported.image.iter().map(|usage| (FilesystemContent::Images, &*usage.mountpoint));
    let containers =
        reported.container.iter().map(|usage| (FilesystemContent::Containers, &*usage.mountpoint));
    let mut known = Vec::new();
    let is_first = reported.image.first().map(|first| &*first.mountpoint);
    images
        .chain(containers)
        .filter(|&(_, mountpoint)| {
            let Some(device) = device(mountpoint) else { return false };
            let is_new = !known.contains(&device);
            known.push(device);
            is_new && Some(mountpoint) != is_first
        })
        .collect()
}

/// The statistics of those that can be read.
fn measured(
    found: Vec<(FilesystemContent, &Path)>,
    disk: impl Fn(&Path) -> io::Result<Option<FsStats>>,
) -> Vec<OtherFilesystem> {
    let measure = |(content, mountpoint): (FilesystemContent, &Path)| {
        let read = disk(mountpoint);
        let read =
            read.inspect_err(|error| tracing::warn!("cannot measure {}: {error}", mountpoint.display()));
        Some(OtherFilesystem { mountpoint: mountpoint.to_owned(), content, disk: read.ok()?? })
    };
    found.into_iter().filter_map(measure).collect()
}

/// Gets the mountpoints from the backend once, and their statistics from the system.
pub(super) struct BackendFsStats {
    images: ImageService,
    reported: Mutex<Option<Arc<Filesystems>>>,
}

impl BackendFsStats {
    /// The image filesystem of this backend. The backend is first called by a measurement.
    pub(super) fn new(backend: Arc<dyn Backend>) -> BackendFsStats {
        BackendFsStats { images: ImageService::new(backend), reported: Mutex::new(None) }
    }

    fn known(&self) -> MutexGuard<'_, Option<Arc<Filesystems>>> {
        self.reported.lock()
    }

    /// The backend's current report.
    async fn ask(&self) -> Result<Arc<Filesystems>, FilesystemError> {
        let reported = Arc::new(self.images.backend().filesystems().await?);
        *self.known() = Some(Arc::clone(&reported));
        Ok(reported)
    }

    /// The directory of the image filesystem, if the backend has reported it.
    fn mountpoint(&self) -> Option<PathBuf> {
        Some(self.known().as_ref()?.image.first()?.mountpoint.clone())
    }
}

#[async_trait]
impl FsStatsProvider for BackendFsStats {
    async fn measure(&self) -> Result<FsStats, FilesystemError> {
        if let Some(mountpoint) = self.mountpoint()
            && let Ok(Some(disk)) = blocking(move || local_disk(&mountpoint)).await
        {
            return Ok(disk);
        }
        let found = self.images.measure_first(&*self.ask().await?, local_disk).await?;
        Ok(found.disk.unwrap_or_default())
    }

    async fn measure_others(&self) -> Result<Vec<OtherFilesystem>, FilesystemError> {
        let known = self.known().clone();
        let reported = match known {
            Some(reported) => reported,
            None => self.ask().await?,
        };
        let measured = blocking(move || {
            let found =
                others(&reported, |mountpoint| rustix::fs::stat(mountpoint).ok().map(|found| found.st_dev));
            measured(found, local_disk)
        });
        Ok(measured.await)
    }

    async fn deleted_open_files(&self) -> Vec<SpaceHolder> {
        match self.mountpoint() {
            Some(mountpoint) => open_files::deleted_open_files(mountpoint).await,
            None => Vec::new(),
        }
    }
}

/// The free space, capped at the capacity.
pub(super) fn free(disk: FsStats) -> DiskSpace {
    DiskSpace {
        bytes: disk.available.min(disk.capacity),
        inodes: if disk.inodes == 0 { u64::MAX } else { disk.inodes_free.min(disk.inodes) },
    }
}

/// The statistics with this much more, or less, free.
#[must_use]
pub(super) fn with_more_free(disk: FsStats, more: DiskSpace) -> FsStats {
    FsStats {
        available: disk.available.saturating_add(more.bytes).min(disk.capacity),
        inodes_free: disk.inodes_free.saturating_add(more.inodes).min(disk.inodes),
        ..disk
    }
}

/// Percentage used, rounded up as in kubelet; 0 without capacity.
pub fn used_percent(capacity: u64, available: u64) -> i64 {
    if capacity == 0 {
        return 0;
    }
    let free = u128::from(available.min(capacity)) * 100 / u128::from(capacity);
    100 - i64::try_from(free).unwrap_or(100)
}

/// Free bytes of `capacity` when `low` percent are used.
pub(super) fn free_at(capacity: u64, low: i32) -> u64 {
    let free = u128::from(capacity) * u128::from(100 - low.clamp(0, 100).unsigned_abs()) / 100;
    u64::try_from(free).unwrap_or(u64::MAX)
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

#[cfg(test)]
mod tests {
    use FilesystemContent::{Containers, Images};

    use super::*;
    use crate::backend::FilesystemUsage;

    fn reported(image: &[&str], container: &[&str]) -> Filesystems {
        let usages = |paths: &[&str]| {
            let usage =
                |path: &&str| FilesystemUsage { mountpoint: path.into(), ..FilesystemUsage::default() };
            paths.iter().map(usage).collect()
        };
        Filesystems { image: usages(image), container: usages(container) }
    }

    /// The first letter of a directory is its device; those below `/-` do not exist.
    fn device(mountpoint: &Path) -> Option<u64> {
        let letter = mountpoint.to_str()?.chars().nth(1)?;
        (letter != '-').then(|| u64::from(letter))
    }

    #[test]
    fn a_filesystem_that_cannot_be_measured_does_not_hide_the_others() {
        let found =
            vec![(Images, Path::new("/bad")), (Images, Path::new("/gone")), (Containers, Path::new("/good"))];
        let disk = |path: &Path| match path.to_str() {
            Some("/bad") => Err(io::Error::from(io::ErrorKind::PermissionDenied)),
            Some("/gone") => Ok(None),
            _ => Ok(Some(FsStats::default())),
        };
        let good =
            OtherFilesystem { mountpoint: "/good".into(), content: Containers, disk: FsStats::default() };
        assert_eq!(measured(found, disk), [good]);
    }

    #[test]
    fn filesystems_beside_the_first_one_of_images_are_listed_once_for_each_device() {
        type Case<'a> = (&'a [&'a str], &'a [&'a str], &'a [(FilesystemContent, &'a str)]);
        let cases: [Case<'_>; 7] = [
            (&["/a/images"], &["/a/images"], &[]),
            (&["/a/images"], &["/a/containers"], &[]),
            (&["/a/images"], &["/b/containers"], &[(Containers, "/b/containers")]),
            (&["/a/x", "/b/y", "/a/z"], &["/b/y", "/c"], &[(Images, "/b/y"), (Containers, "/c")]),
            (&["/-/far"], &["/-/far", "/a"], &[(Containers, "/a")]),
            (&[], &["/a"], &[(Containers, "/a")]),
            (&["/a", "/a"], &[""], &[]),
        ];
        for (image, container, expected) in cases {
            let reported = reported(image, container);
            let found: Vec<_> = others(&reported, device)
                .into_iter()
                .map(|(content, path)| (content, path.to_str().unwrap()))
                .collect();
            assert_eq!(found, expected, "{image:?} {container:?}");
        }
    }
}
