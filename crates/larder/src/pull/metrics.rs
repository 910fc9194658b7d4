//! What the pull room counts. The sink that turns it into metrics sits with the daemon.

use std::fmt;
use std::time::Duration;

/// Yes, no, or never found out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Known {
    /// Yes.
    True,
    /// No.
    False,
    /// The step that would have told was not reached.
    Unknown,
}

impl fmt::Display for Known {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Known::True => "true",
            Known::False => "false",
            Known::Unknown => "unknown",
        })
    }
}

/// Labels of `kubelet_image_manager_ensure_image_requests_total`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EnsureLabels {
    /// The policy in lower case, as given.
    pub pull_policy: String,
    /// Whether the runtime had the image.
    pub present_locally: Known,
    /// Whether the call got as far as needing a pull.
    pub pull_required: Known,
}

/// Counts ensure calls and pulls. Called in the middle of things: it must be quick.
pub trait PullMetrics: Send + Sync {
    /// An ensure call ended.
    fn ensure_requested(&self, labels: &EnsureLabels);
    /// A pull succeeded; `duration` includes waiting, `size_bytes` is 0 when unknown.
    fn image_pulled(&self, size_bytes: u64, duration: Duration);
}
