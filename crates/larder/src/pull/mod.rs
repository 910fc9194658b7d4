//! Pulls images: policy, back-off, queue, rate limit, one in-flight pull per image.
//!
//! Read [`ImageManager::ensure`] first. Decisions are pure and take `now` as an argument (back-off, the reason of a
//! failure, [`PullTimes`]); effects go through the [`Backend`](crate::backend::Backend), the
//! [`PullRecords`](crate::records::PullRecords) and the [`EventSink`](crate::events::EventSink).

pub(crate) mod backoff;
mod config;
mod direct_pull;
mod ensure;
mod intent;
mod manager;
mod metrics;
mod policy;
mod prefetch;
mod present;
mod puller;
mod room;
mod shared_pull;
mod spans;
mod status;
mod throttle;
mod times;

pub use backoff::CredentialHashes;
pub use config::{DuplicatePullPolicy, NewCredentialsPolicy, PullConfig, RateLimitAction};
pub use direct_pull::DirectPull;
pub use ensure::{
    BackendFailure, EnsureError, EnsurePlan, EnsureReason, EnsureRequest, EnsuredImage, ImagePresence,
    Priority,
};
pub use manager::ImageManager;
pub use metrics::{EnsureLabels, PullFailureReason, PullMetrics, TriState, image_size_bucket};
pub use policy::{PullPolicy, default_policy};
pub use present::{DirectRemoval, ImagePinSource, RefuseRemoval, StatusIntent, mark_pinned};
pub use room::{RoomMaker, RoomOutcome};
pub use status::{PullPhase, PullStatus};
pub use times::{PullTimeRecorder, PullTimes};
