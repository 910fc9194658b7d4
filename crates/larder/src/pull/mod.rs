//! How and when an image is pulled: policy, back-off, turn, rate, one flight per image.
//!
//! Read [`Manager::ensure`] first. What it decides by is pure and takes `now` as an argument (back-off,
//! the reason of a failure, [`PullTimes`]); what it does goes through the
//! [`Backend`](crate::backend::Backend), the [`PullRecords`](crate::records::PullRecords) and the
//! [`EventSink`](crate::events::EventSink).

pub(crate) mod backoff;
mod builder;
mod config;
mod ensure;
pub(crate) mod errors;
mod flight;
mod intent;
mod lease;
mod managed;
mod manager;
mod metrics;
mod policy;
mod puller;
mod status;
mod throttle;
mod through;
mod times;
mod turns;

pub use backoff::Shown;
pub use builder::ManagerBuilder;
pub use config::{NewCredentials, OverRate, PullConfig, SameImage};
pub use ensure::{Advice, EnsureError, EnsureReason, EnsureRequest, Ensured, Outcome, Priority};
pub use managed::ManagedBackend;
pub use manager::Manager;
pub use metrics::{EnsureLabels, Known, PullMetrics, image_size_bucket};
pub use policy::{PullPolicy, default_policy};
pub use status::{Phase, PullStatus};
pub use times::{PullTimeRecorder, PullTimes};
