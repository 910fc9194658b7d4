//! Image operations of the manager on top of a [`Backend`].

use std::path::Path;
use std::sync::Arc;
use std::{fmt, io};

use crate::backend::{
    Backend, BackendError, FilesystemUsage, Filesystems, Image, ImageFill, ImageSpec, ProgressReporter,
};
use crate::credentials::Credential;
use crate::go_format;
use crate::pod::SandboxConfig;
use crate::pull::BackendFailure;
use crate::reference::ImageId;
use crate::threads::blocking;

/// The result of a successful pull.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PulledImage {
    /// The image's id.
    pub image_ref: ImageId,
    /// The credential that worked; `None` for an anonymous pull.
    pub credential: Option<Credential>,
}

/// Why no credential led to a pull. The text is the backend's own, or `[a, b]` when credentials failed differently.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullAttemptsError(Vec<BackendError>);

impl PullAttemptsError {
    /// The backend's errors, one for each credential tried, in order; never empty.
    pub(crate) fn causes(&self) -> &[BackendError] {
        &self.0
    }

    /// The backend's details: of the last credential whose failure has a hint, else of the last one.
    pub(crate) fn failure(&self) -> Option<BackendFailure> {
        let failures = || {
            self.0.iter().rev().filter_map(|error| match error {
                BackendError::Call { kind, hint, .. } => {
                    Some(BackendFailure { kind: *kind, hint: hint.clone() })
                }
                // An unreachable backend is reported by its own error.
                BackendError::Unreachable { .. } | BackendError::Incomplete(_) => None,
            })
        };
        failures().find(|failure| failure.hint.is_some()).or_else(|| failures().next())
    }
}

impl FromIterator<BackendError> for PullAttemptsError {
    fn from_iter<I: IntoIterator<Item = BackendError>>(errors: I) -> Self {
        PullAttemptsError(errors.into_iter().collect())
    }
}

impl fmt::Display for PullAttemptsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<_> = self.0.iter().map(BackendError::to_string).collect();
        f.write_str(&go_format::aggregate(texts.iter().map(String::as_str)))
    }
}

impl std::error::Error for PullAttemptsError {}

/// Space taken by images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ImageStats {
    /// Sum of the sizes of all images, in bytes, as kubelet adds them: a shared layer counts once per image.
    pub total_storage_bytes: u64,
}

impl ImageStats {
    /// The stats of these images.
    pub fn of(images: &[Image]) -> ImageStats {
        ImageStats { total_storage_bytes: images.iter().map(|image| image.size).sum() }
    }
}

/// The filesystem that holds images: usage from the runtime, statistics from the system.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ImageFilesystem {
    /// Usage that the runtime reports.
    pub usage: FilesystemUsage,
    /// Usage that the system reports; `None` when the mountpoint does not exist on this machine.
    pub disk: Option<FsStats>,
}

/// A local filesystem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FsStats {
    /// Size in bytes.
    pub capacity: u64,
    /// Bytes that are free for unprivileged users.
    pub available: u64,
    /// Bytes beside these that are free for root alone. For kubelet's percentages they are in use; for `df` they are
    /// not.
    pub reserved: u64,
    /// Inodes in all.
    pub inodes: u64,
    /// Inodes that are free.
    pub inodes_free: u64,
}

/// Image operations on one backend. Cloning is cheap.
#[derive(Clone)]
pub struct ImageService {
    backend: Arc<dyn Backend>,
}

impl ImageService {
    /// Works on this backend.
    pub fn new(backend: Arc<dyn Backend>) -> Self {
        ImageService { backend }
    }

    /// The backend itself.
    pub fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    /// Pulls anonymously without credentials, else with each in turn until one works; never falls back to anonymous.
    pub async fn pull(
        &self,
        image: &ImageSpec,
        credentials: &[Credential],
        sandbox: Option<&SandboxConfig>,
        progress: &ProgressReporter,
    ) -> Result<PulledImage, PullAttemptsError> {
        if credentials.is_empty() {
            return match self.backend.pull(image, None, sandbox, progress).await {
                Ok(image_ref) => Ok(PulledImage { image_ref, credential: None }),
                Err(error) => Err(PullAttemptsError::from_iter([error])),
            };
        }
        let mut errors = Vec::new();
        for credential in credentials {
            match self.backend.pull(image, Some(credential), sandbox, progress).await {
                Ok(image_ref) => return Ok(PulledImage { image_ref, credential: Some(credential.clone()) }),
                Err(error) => errors.push(error),
            }
        }
        Err(errors.into_iter().collect())
    }

    /// The size of an image in bytes, as the runtime counts it, and what is missing of it; 0 when it is absent.
    pub async fn image_size(&self, image: &ImageSpec) -> Result<(u64, Option<ImageFill>), BackendError> {
        Ok(self.backend.status(image).await?.map_or((0, None), |image| (image.size, image.fill)))
    }

    /// The filesystem that holds images: the first one the runtime reports, measured with `disk`
    /// ([`local_disk`] but in tests; `None` for a mountpoint that does not exist here), on a thread that may block.
    pub async fn image_filesystem(
        &self,
        disk: impl FnOnce(&Path) -> io::Result<Option<FsStats>> + Send + 'static,
    ) -> Result<ImageFilesystem, FilesystemError> {
        self.measure_first(&self.backend.filesystems().await?, disk).await
    }

    /// The first filesystem of images in this report, the one that kubelet and GC act on.
    pub(crate) async fn measure_first(
        &self,
        reported: &Filesystems,
        disk: impl FnOnce(&Path) -> io::Result<Option<FsStats>> + Send + 'static,
    ) -> Result<ImageFilesystem, FilesystemError> {
        let usage = reported.image.first().cloned().ok_or(FilesystemError::NoImageFilesystem)?;
        let mountpoint = usage.mountpoint.clone();
        let disk = blocking(move || disk(&mountpoint)).await;
        let disk = disk.map_err(|error| FilesystemError::Local(error.to_string()))?;
        Ok(ImageFilesystem { usage, disk })
    }
}

/// Why the image filesystem could not be read. The texts are kubelet's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FilesystemError {
    /// The runtime returned an error.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The runtime reported no filesystem.
    #[error("imageFs information is unavailable")]
    NoImageFilesystem,
    /// The system returned an error.
    #[error("get filesystem info: Failed to get the info of the filesystem with mountpoint: {0}")]
    Local(String),
}

/// Measures the filesystem that holds a path; `None` when there is no such path.
/// Blocks for as long as the filesystem does not answer.
pub fn local_disk(path: &Path) -> io::Result<Option<FsStats>> {
    match rustix::fs::statvfs(path) {
        Ok(found) => Ok(Some(FsStats {
            capacity: found.f_blocks * found.f_frsize,
            available: found.f_bavail * found.f_frsize,
            reserved: found.f_bfree.saturating_sub(found.f_bavail) * found.f_frsize,
            inodes: found.f_files,
            inodes_free: found.f_ffree,
        })),
        Err(rustix::io::Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
