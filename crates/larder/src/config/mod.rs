//! Kubelet's image settings: as written, with defaults, and validated. Pure.
//!
//! ```text
//! KubeletImageConfig (as written) --defaulted--> ImageConfig (what it means) --problems--> kubelet's messages
//! ```
//!
//! Names, defaults, messages and their order are those of `kubelet.config.k8s.io/v1beta1`, v1.36. This module parses no
//! format; the caller sets the fields.

mod allowlist;
mod defaults;
mod duration;
mod problems;
mod verification;

use serde::Deserialize;

pub use allowlist::{AllowlistPattern, PatternError};
pub use defaults::{ImageSettings, VerificationPolicy};
pub use duration::{DurationError, GoDuration};
pub use problems::{ConfigField, ConfigProblem};
pub use verification::{Verification, VerificationError};

/// The image settings of a `KubeletConfiguration`, as written. `None` is absent or null.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct KubeletImageConfig {
    /// Pulls started per second, on average.
    #[serde(rename = "registryPullQPS")]
    pub registry_pull_qps: Option<i32>,
    /// Pulls started at once before that limit applies.
    pub registry_burst: Option<i32>,
    /// One pull at a time.
    pub serialize_image_pulls: Option<bool>,
    /// How many pulls may run at once.
    pub max_parallel_image_pulls: Option<i32>,
    /// An image first seen more recently is not removed for space.
    #[serde(rename = "imageMinimumGCAge")]
    pub image_minimum_gc_age: Option<GoDuration>,
    /// An image unused for longer is removed even if no space is needed.
    #[serde(rename = "imageMaximumGCAge")]
    pub image_maximum_gc_age: Option<GoDuration>,
    /// Start garbage collection when this percentage of the filesystem is used.
    #[serde(rename = "imageGCHighThresholdPercent")]
    pub image_gc_high_threshold_percent: Option<i32>,
    /// Free until this percentage is used.
    #[serde(rename = "imageGCLowThresholdPercent")]
    pub image_gc_low_threshold_percent: Option<i32>,
    /// How many images the node's status lists.
    pub node_status_max_images: Option<i32>,
    /// Time limit of a call to the runtime, except pulls.
    pub runtime_request_timeout: Option<GoDuration>,
    /// Endpoint of the container runtime.
    pub container_runtime_endpoint: Option<String>,
    /// Endpoint of the image service, if another.
    pub image_service_endpoint: Option<String>,
    /// Which present images a pod may use only with credentials.
    pub image_pull_credentials_verification_policy: Option<String>,
    /// Images that need none under the policy `NeverVerifyAllowlistedImages`.
    pub preloaded_images_verification_allowlist: Option<Vec<String>>,
}

/// The feature gates that these settings depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FeatureGates {
    /// `KubeletEnsureSecretPulledImages`; beta and on in 1.36.
    pub ensure_secret_pulled_images: bool,
}

impl Default for FeatureGates {
    fn default() -> Self {
        FeatureGates { ensure_secret_pulled_images: true }
    }
}
