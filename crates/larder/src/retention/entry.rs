//! One reason for which an image must not be removed: which image, who needs it and what for, and for how long.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::backend::{BackendError, CallErrorKind};
use crate::go_format;
use crate::reference::ImageId;

use super::keep::KeptBy;

/// A reason reported by a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Retention {
    /// Id of the image, or the name that the runtime reports.
    pub image: ImageId,
    /// Runtime handler that it is used with; `None` when that does not matter.
    pub handler: Option<String>,
    /// Who needs it and what for.
    pub purpose: RetentionPurpose,
}

impl Retention {
    /// A reason that holds whatever the runtime handler.
    pub fn new(image: impl Into<ImageId>, purpose: RetentionPurpose) -> Retention {
        Retention { image: image.into(), handler: None, purpose }
    }
}

/// Who needs an image and what for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RetentionPurpose {
    /// A container, running or stopped: a stopped container still needs its image.
    Container {
        /// Id of the container.
        id: String,
        /// Name of the container in its pod.
        name: String,
        /// `NAMESPACE/NAME` of its pod, empty if not known.
        pod: String,
        /// True while the container runs.
        running: bool,
    },
    /// A container mounts it as a volume.
    Volume {
        /// Id of the container.
        container: String,
        /// Name of the container in its pod.
        name: String,
        /// `NAMESPACE/NAME` of its pod, empty if not known.
        pod: String,
        /// True while the container runs.
        running: bool,
    },
    /// A mount of larder's own store.
    Mount {
        /// Where it is mounted.
        target: String,
        /// True while the image is mounted. The files of a writable mount are retained until `umount`.
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
    /// A declaration that the image must be present, whether or not it is used now.
    Desired {
        /// The owner of the declaration, such as `static pod kube-system/proxy`.
        by: String,
        /// The image, as the declaration names it.
        name: String,
        /// Whether removal by a client is refused as well.
        is_pinned: bool,
    },
    /// The runtime has pinned it.
    Pinned,
    /// A keep rule.
    Kept(KeptBy),
    /// A lease, which ends by itself.
    Lease(Lease),
}

/// A lease on an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lease {
    /// Its purpose.
    pub purpose: LeasePurpose,
    /// Time until it expires.
    pub left: Duration,
}

/// The purpose of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LeasePurpose {
    /// A container that has not been seen yet: the image was made present, was found present, or got a name.
    Ensure,
    /// The prefetch list requested it for a time after each pull.
    Prefetch,
    /// A client requested it for a time.
    Request,
}

impl LeasePurpose {
    /// All purposes.
    pub const ALL: [LeasePurpose; 3] = [LeasePurpose::Ensure, LeasePurpose::Prefetch, LeasePurpose::Request];
}

/// Why an image is retained, in the order of precedence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RetentionClass {
    /// Containers, volumes, mounts or declarations.
    InUse,
    /// The runtime has pinned it.
    Pinned,
    /// A keep rule retains it.
    Kept,
    /// It has a lease.
    Leased,
    /// It is younger than the minimum age.
    TooYoung,
    /// Nothing retains it: it is a candidate for removal.
    Unused,
}

impl RetentionClass {
    /// All classes, in order.
    pub const ALL: [RetentionClass; 6] = [
        RetentionClass::InUse,
        RetentionClass::Pinned,
        RetentionClass::Kept,
        RetentionClass::Leased,
        RetentionClass::TooYoung,
        RetentionClass::Unused,
    ];

    /// The word for it in tables and on pages.
    pub fn as_str(self) -> &'static str {
        match self {
            RetentionClass::InUse => "in use",
            RetentionClass::Pinned => "pinned",
            RetentionClass::Kept => "kept",
            RetentionClass::Leased => "leased",
            RetentionClass::TooYoung => "young",
            RetentionClass::Unused => "unused",
        }
    }
}

impl RetentionPurpose {
    /// Its class.
    pub fn class(&self) -> RetentionClass {
        match self {
            RetentionPurpose::Lease(_) => RetentionClass::Leased,
            RetentionPurpose::Pinned => RetentionClass::Pinned,
            RetentionPurpose::Kept(_) => RetentionClass::Kept,
            RetentionPurpose::Container { .. }
            | RetentionPurpose::Volume { .. }
            | RetentionPurpose::Mount { .. }
            | RetentionPurpose::UnlistedContainer { .. }
            | RetentionPurpose::Sandbox { .. }
            | RetentionPurpose::Desired { .. } => RetentionClass::InUse,
        }
    }

    /// The container, mount or pod that uses the image; `None` if nothing does.
    pub(crate) fn user(&self) -> Option<&str> {
        match self {
            RetentionPurpose::Container { id, .. } | RetentionPurpose::UnlistedContainer { id, .. } => {
                Some(id)
            }
            RetentionPurpose::Volume { container, .. } => Some(container),
            RetentionPurpose::Mount { target, .. } => Some(target),
            RetentionPurpose::Sandbox { pod } => Some(pod),
            RetentionPurpose::Desired { .. }
            | RetentionPurpose::Pinned
            | RetentionPurpose::Kept(_)
            | RetentionPurpose::Lease(_) => None,
        }
    }

    /// Returns true for a lease, which ends by itself and is no use.
    pub fn is_lease(&self) -> bool {
        matches!(self, RetentionPurpose::Lease(_))
    }

    /// The lease, if it is one.
    pub fn lease(&self) -> Option<Lease> {
        match self {
            RetentionPurpose::Lease(lease) => Some(*lease),
            _ => None,
        }
    }
}

impl fmt::Display for RetentionPurpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RetentionPurpose::Container { id, name, pod, running }
            | RetentionPurpose::Volume { container: id, name, pod, running } => {
                if matches!(self, RetentionPurpose::Volume { .. }) {
                    f.write_str("volume of ")?;
                }
                let stopped = if *running { "" } else { "stopped " };
                let name = if name.is_empty() { id } else { name };
                write!(f, "{stopped}container {name}")?;
                if pod.is_empty() { Ok(()) } else { write!(f, " of pod {pod}") }
            }
            RetentionPurpose::Mount { target, mounted: true } => write!(f, "mount at {target}"),
            RetentionPurpose::Mount { target, mounted: false } => {
                write!(f, "files of an ended mount at {target}")
            }
            RetentionPurpose::UnlistedContainer { id, namespace } => {
                write!(f, "container {id} of containerd namespace {namespace}")
            }
            RetentionPurpose::Sandbox { pod } => write!(f, "sandbox of pod {pod}"),
            RetentionPurpose::Desired { by, .. } => f.write_str(by),
            RetentionPurpose::Pinned => f.write_str("pin of the runtime"),
            RetentionPurpose::Kept(kept) => write!(f, "{kept}"),
            RetentionPurpose::Lease(lease) => write!(f, "{lease}"),
        }
    }
}

/// `lease (expires in 9m59s)`
impl fmt::Display for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.left.is_zero() {
            return f.write_str("lease");
        }
        let left = Duration::from_secs(self.left.as_secs());
        write!(f, "lease (expires in {})", go_format::duration(left))
    }
}

/// Why a source could not report what it retains. A round ends with this text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RetentionError {
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

impl RetentionError {
    /// Returns the error as one of a backend's call.
    pub fn into_backend_error(self) -> BackendError {
        match self {
            RetentionError::Backend(error) => error,
            error => BackendError::caused_by(CallErrorKind::Other, error),
        }
    }

    /// The error of another source.
    pub fn other(error: impl fmt::Display) -> RetentionError {
        RetentionError::Other(error.to_string())
    }
}
