//! Counts of ensures and pulls. The daemon turns them into metrics.

use std::fmt;
use std::time::Duration;

use crate::backend::{BackendError, CallErrorKind};

/// True, false or unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TriState {
    /// Yes.
    True,
    /// No.
    False,
    /// The step that determines it was not reached.
    Unknown,
}

impl fmt::Display for TriState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TriState::True => "true",
            TriState::False => "false",
            TriState::Unknown => "unknown",
        })
    }
}

/// Labels of `kubelet_image_manager_ensure_image_requests_total`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EnsureLabels {
    /// The policy in lower case, as given.
    pub pull_policy: String,
    /// Whether the runtime had the image.
    pub present_locally: TriState,
    /// Whether the call got as far as needing a pull.
    pub pull_required: TriState,
}

/// The class of a failed pull.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PullFailureReason {
    /// The registry rejected the credential, or requires one.
    AccessDenied,
    /// The registry does not have the image.
    NotFound,
    /// The registry or the backend could not be reached.
    Unavailable,
    /// Not enough disk space.
    NoSpace,
    /// The signature is missing or not acceptable.
    Signature,
    /// The backend did not answer in time.
    Deadline,
    /// Anything else.
    Other,
}

impl PullFailureReason {
    /// All of them.
    pub const ALL: [PullFailureReason; 7] = [
        PullFailureReason::AccessDenied,
        PullFailureReason::NotFound,
        PullFailureReason::Unavailable,
        PullFailureReason::NoSpace,
        PullFailureReason::Signature,
        PullFailureReason::Deadline,
        PullFailureReason::Other,
    ];

    /// The class of a backend's error.
    pub fn of(error: &BackendError) -> PullFailureReason {
        let kind = match error {
            BackendError::Unreachable { .. } => return PullFailureReason::Unavailable,
            BackendError::Incomplete(_) => return PullFailureReason::Other,
            BackendError::Call { kind, .. } => kind,
        };
        match kind {
            CallErrorKind::Denied => PullFailureReason::AccessDenied,
            CallErrorKind::NotFound => PullFailureReason::NotFound,
            CallErrorKind::RegistryUnavailable | CallErrorKind::Unavailable => PullFailureReason::Unavailable,
            CallErrorKind::SignatureInvalid => PullFailureReason::Signature,
            CallErrorKind::InsufficientSpace { .. } => PullFailureReason::NoSpace,
            CallErrorKind::DeadlineExceeded => PullFailureReason::Deadline,
            CallErrorKind::FailedPrecondition
            | CallErrorKind::Canceled
            | CallErrorKind::Unimplemented
            | CallErrorKind::Other => PullFailureReason::Other,
        }
    }

    /// The word in metrics.
    pub const fn word(self) -> &'static str {
        match self {
            PullFailureReason::AccessDenied => "access_denied",
            PullFailureReason::NotFound => "not_found",
            PullFailureReason::Unavailable => "unavailable",
            PullFailureReason::NoSpace => "no_space",
            PullFailureReason::Signature => "signature",
            PullFailureReason::Deadline => "deadline",
            PullFailureReason::Other => "other",
        }
    }
}

/// Counts ensure calls and pulls. Called on the hot path: must be quick.
pub trait PullMetrics: Send + Sync {
    /// An ensure call ended.
    fn ensure_requested(&self, labels: &EnsureLabels);
    /// A caller's pull succeeded, which other callers may have shared; `duration` includes the caller's waiting,
    /// `size_bytes` is 0 when unknown.
    fn image_pulled(&self, size_bytes: u64, duration: Duration);
    /// The backend pulled an image, for any number of callers; `size_bytes` is 0 when unknown.
    fn image_downloaded(&self, size_bytes: u64);
    /// The backend failed to pull an image, for any number of callers. Not counted by default.
    fn pull_failed(&self, _reason: PullFailureReason) {}
}

/// The label `image_size_in_bytes` of `kubelet_image_pull_duration_seconds`. Bounds are powers of 1024 despite their
/// names, and a size that is exactly a bound belongs to the bucket below it.
pub fn image_size_bucket(bytes: u64) -> &'static str {
    const BUCKETS: [(u64, &str); 11] = [
        (100 << 30, "GT100GB"),
        (60 << 30, "60GB-100GB"),
        (40 << 30, "40GB-60GB"),
        (30 << 30, "30GB-40GB"),
        (20 << 30, "20GB-30GB"),
        (10 << 30, "10GB-20GB"),
        (5 << 30, "5GB-10GB"),
        (1 << 30, "1GB-5GB"),
        (500 << 20, "500MB-1GB"),
        (100 << 20, "100MB-500MB"),
        (10 << 20, "10MB-100MB"),
    ];
    let bucket = BUCKETS.into_iter().find(|(above, _)| bytes > *above);
    bucket.map_or(if bytes == 0 { "N/A" } else { "0-10MB" }, |(_, label)| label)
}
