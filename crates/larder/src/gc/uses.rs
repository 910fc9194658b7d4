//! Current uses of images.
//!
//! Every round queries every source. A source that fails ends the round, because an image in use could be removed
//! otherwise.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::policy::GcStrategy;
use crate::backend::{Backend, BackendError, CallErrorKind, Container, Image, Sandbox};
use crate::go_format;
use crate::reference::ImageId;

/// One way in which an image is used.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ImageUse {
    /// A container, running or stopped: a stopped container still needs its image.
    Container {
        /// Id of the container.
        id: String,
        /// Name of the container in its pod.
        name: String,
        /// `NAMESPACE/NAME` of its pod, empty if not known.
        pod: String,
        /// Whether it is running now.
        running: bool,
    },
    /// A container mounts it as a volume.
    Volume {
        /// Id of the container.
        container: String,
        /// `NAMESPACE/NAME` of its pod, empty if not known.
        pod: String,
    },
    /// A mount of larder's own store.
    Mount {
        /// Where it is mounted.
        target: String,
        /// Whether it is mounted now. The files of a writable mount are retained until `umount`.
        mounted: bool,
    },
    /// A container that CRI does not list, such as one of `ctr run`.
    UnlistedContainer {
        /// Id of the container.
        id: String,
        /// The runtime's namespace of the container and its image, such as `k8s.io`.
        namespace: String,
    },
    /// A pod sandbox, which runs the sandbox image of the runtime.
    Sandbox {
        /// `NAMESPACE/NAME` of its pod.
        pod: String,
    },
    /// A lease in the store.
    Lease {
        /// Time until it expires.
        left: Duration,
    },
    /// A lease from an ensure, for a container that has not started yet.
    Ensured {
        /// How long ago; `None` if not known.
        ago: Option<Duration>,
        /// Time until it expires.
        left: Duration,
    },
    /// A declaration that the image must be present, whether or not it is used now.
    Desired {
        /// The owner of the declaration, such as `static pod kube-system/proxy`.
        by: String,
    },
}

impl ImageUse {
    /// Whether it is a lease, which ends by itself, and not a use.
    pub fn is_lease(&self) -> bool {
        self.lease_left().is_some()
    }

    /// Time until it expires, if it is a lease.
    pub fn lease_left(&self) -> Option<Duration> {
        match self {
            ImageUse::Lease { left } | ImageUse::Ensured { left, .. } => Some(*left),
            _ => None,
        }
    }
}

impl fmt::Display for ImageUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ImageUse::Container { id, name, pod, running } => {
                let stopped = if *running { "" } else { "stopped " };
                let name = if name.is_empty() { id } else { name };
                write!(f, "{stopped}container {name}")?;
                if pod.is_empty() { Ok(()) } else { write!(f, " of pod {pod}") }
            }
            ImageUse::Volume { container, pod } if pod.is_empty() => {
                write!(f, "volume of container {container}")
            }
            ImageUse::Volume { pod, .. } => write!(f, "volume of pod {pod}"),
            ImageUse::Mount { target, mounted: true } => write!(f, "mount at {target}"),
            ImageUse::Mount { target, mounted: false } => write!(f, "files of an ended mount at {target}"),
            ImageUse::UnlistedContainer { id, namespace } => {
                write!(f, "container {id} of containerd namespace {namespace}")
            }
            ImageUse::Sandbox { pod } => write!(f, "sandbox of pod {pod}"),
            ImageUse::Lease { left } | ImageUse::Ensured { left, .. } if left.is_zero() => {
                f.write_str("lease")
            }
            ImageUse::Lease { left } | ImageUse::Ensured { left, .. } => {
                write!(f, "lease (expires in {})", whole_seconds(*left))
            }
            ImageUse::Desired { by } => f.write_str(by),
        }
    }
}

fn whole_seconds(duration: Duration) -> String {
    go_format::duration(Duration::from_secs(duration.as_secs()))
}

/// A use reported by a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportedUse {
    /// Id of the image, or the name that the runtime reports.
    pub image: ImageId,
    /// Runtime handler that it is used with; `None` when that does not matter.
    pub handler: Option<String>,
    /// How it is used.
    pub by: ImageUse,
}

/// Why a source could not list uses. The round ends with this text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ImageUseError {
    /// The backend did not answer.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The runtime does not report what a container mounts, so any image may be in use. The text is kubelet's.
    #[error("get container status: {cause}")]
    MountsUnknown {
        /// Id of the container.
        container: String,
        /// The runtime's error.
        cause: String,
    },
    /// The error of another source.
    #[error("{0}")]
    Other(String),
}

impl ImageUseError {
    /// The error as that of a backend's call.
    pub fn into_backend_error(self) -> BackendError {
        match self {
            ImageUseError::Backend(error) => error,
            error => BackendError::caused_by(CallErrorKind::Other, error),
        }
    }

    /// The error of another source.
    pub fn other(error: impl fmt::Display) -> ImageUseError {
        ImageUseError::Other(error.to_string())
    }
}

/// A source of image uses.
#[async_trait]
pub trait ImageUseSource: Send + Sync {
    /// All current uses. Must fail rather than return an incomplete list.
    async fn uses(&self) -> Result<Vec<ReportedUse>, ImageUseError>;
}

/// Containers of a runtime, or mounts of larder's own store: what [`Backend::container_inventory`] returns.
pub struct BackendUseSource(Arc<dyn Backend>);

impl BackendUseSource {
    /// The containers and mounts of this backend.
    pub fn new(backend: Arc<dyn Backend>) -> BackendUseSource {
        BackendUseSource(backend)
    }
}

#[async_trait]
impl ImageUseSource for BackendUseSource {
    async fn uses(&self) -> Result<Vec<ReportedUse>, ImageUseError> {
        let in_use = self.0.container_inventory().await?;
        let handlers: HashMap<&str, &str> =
            in_use.sandboxes.iter().map(|sandbox| (&*sandbox.id, &*sandbox.runtime_handler)).collect();
        let mut found = Vec::with_capacity(in_use.containers.len());
        for Sandbox { image, pod, runtime_handler, .. } in &in_use.sandboxes {
            if !image.is_empty() {
                let (image, handler) = (image.clone(), Some(runtime_handler.clone()));
                found.push(ReportedUse { image, handler, by: ImageUse::Sandbox { pod: pod.clone() } });
            }
        }
        for container in in_use.containers {
            if let Some(cause) = container.mounts_error {
                return Err(ImageUseError::MountsUnknown { container: container.id, cause });
            }
            let handler = handlers.get(&*container.sandbox_id).copied().unwrap_or_default();
            for image in container.mounted_images {
                let by = ImageUse::Volume { container: container.id.clone(), pod: container.pod.clone() };
                found.push(ReportedUse { image, handler: None, by });
            }
            let Container { id, name, pod, running, .. } = container;
            let by = if container.is_mount {
                ImageUse::Mount { target: name, mounted: running }
            } else {
                ImageUse::Container { id, name, pod, running }
            };
            found.push(ReportedUse { image: container.image_id, handler: Some(handler.to_owned()), by });
        }
        Ok(found)
    }
}

/// All uses of all sources, by image.
#[derive(Debug, Clone, Default)]
pub struct ImageUseIndex {
    by_id: HashMap<ImageId, Vec<(Option<String>, ImageUse)>>,
}

impl ImageUseIndex {
    /// Queries all sources; fails with the first error.
    pub(crate) async fn collect(
        sources: &[Arc<dyn ImageUseSource>],
    ) -> Result<Vec<ReportedUse>, ImageUseError> {
        let mut found = Vec::new();
        for source in sources {
            found.append(&mut source.uses().await?);
        }
        Ok(found)
    }

    /// Matches reported uses with the listed images: by ID, and with larder's strategy by name as well.
    pub fn match_images(found: Vec<ReportedUse>, images: &[Image], strategy: GcStrategy) -> ImageUseIndex {
        let mut ids: HashMap<&str, &ImageId> = HashMap::new();
        if strategy == GcStrategy::Larder && !found.is_empty() {
            for image in images {
                for name in image.repo_tags.iter().chain(&image.repo_digests) {
                    ids.insert(name, &image.id);
                }
            }
        }
        let mut by_id: HashMap<ImageId, Vec<_>> = HashMap::new();
        for ReportedUse { image, handler, by } in found {
            let handler = match strategy {
                GcStrategy::Larder => handler,
                // For kubelet a mount counts for the record without a handler only.
                GcStrategy::Kubelet => handler.or_else(|| Some(String::new())),
            };
            let named = ids.get(image.as_str()).map(|&id| id.clone());
            for id in named.into_iter().chain([image]) {
                let uses: &mut Vec<_> = by_id.entry(id).or_default();
                // Both the gate and a store may report the same ensure, and a source the same use by ID and by name.
                let ensured = |by: &ImageUse| matches!(by, ImageUse::Ensured { .. });
                let known = uses.iter_mut().find(|(with, known)| {
                    (*with == handler && *known == by) || (ensured(known) && ensured(&by))
                });
                match known {
                    None => uses.push((handler.clone(), by.clone())),
                    Some((_, known)) if known.lease_left() < by.lease_left() => *known = by.clone(),
                    Some(_) => {}
                }
            }
        }
        ImageUseIndex { by_id }
    }

    /// The uses of one image. An image without a handler is used whatever handler a container has.
    pub fn of_image(&self, id: impl AsRef<str>, handler: &str) -> impl Iterator<Item = &ImageUse> {
        self.by_id.get(id.as_ref()).into_iter().flatten().filter_map(move |(with, by)| {
            let counts = handler.is_empty() || with.as_deref().is_none_or(|with| with == handler);
            counts.then_some(by)
        })
    }
}
