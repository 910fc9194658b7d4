//! Kubelet's defaults for settings that are not set.

use super::{FeatureGates, GoDuration, KubeletImageConfig};

/// All image settings, each with a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageSettings {
    /// Pulls started per second, on average; 0 is no throttle. Default 5.
    pub registry_pull_qps: i32,
    /// Pulls started at once before the throttle bites. Default 10, also for 0.
    pub registry_burst: i32,
    /// One pull at a time. Default true, but false where `max_parallel_image_pulls` is written and above 1.
    pub serialize_image_pulls: bool,
    /// How many pulls may run at once; `None`, the default, is no bound.
    pub max_parallel_image_pulls: Option<i32>,
    /// An image first seen more recently is not removed for space. Default 2 min, also for 0.
    pub image_minimum_gc_age: GoDuration,
    /// An image unused for longer is removed even if no space is needed. Default 0: never.
    pub image_maximum_gc_age: GoDuration,
    /// Start garbage collection when this percentage of the filesystem is used. Default 85.
    pub image_gc_high_threshold_percent: i32,
    /// Free until this percentage is used. Default 80.
    pub image_gc_low_threshold_percent: i32,
    /// How many images the node's status lists; -1 is all. Default 50.
    pub node_status_max_images: i32,
    /// Time limit of a call to the runtime, except pulls. Default 2 min, also for 0.
    pub runtime_request_timeout: GoDuration,
    /// Endpoint of the container runtime. Default `unix:///run/containerd/containerd.sock`, also where it is empty.
    pub container_runtime_endpoint: String,
    /// Endpoint of the image service. Default empty: the runtime's.
    pub image_service_endpoint: String,
    /// Which present images a pod may use only with credentials: the name of a [`VerificationPolicy`]. Default
    /// `NeverVerifyPreloadedImages`, or empty without the gate.
    pub image_pull_credentials_verification_policy: String,
    /// Images that need none under the policy `NeverVerifyAllowlistedImages`. Default none.
    pub preloaded_images_verification_allowlist: Vec<String>,
}

/// Which present images a pod may use only with credentials that fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VerificationPolicy {
    /// None.
    NeverVerify,
    /// Images that kubelet pulled itself.
    NeverVerifyPreloadedImages,
    /// All but those on a list.
    NeverVerifyAllowlistedImages,
    /// All.
    AlwaysVerify,
}

impl VerificationPolicy {
    /// All policies, in the order of kubelet's message.
    pub const ALL: [VerificationPolicy; 4] = [
        VerificationPolicy::NeverVerify,
        VerificationPolicy::NeverVerifyPreloadedImages,
        VerificationPolicy::NeverVerifyAllowlistedImages,
        VerificationPolicy::AlwaysVerify,
    ];

    /// The policy of this name; case-sensitive.
    pub fn of(name: &str) -> Option<VerificationPolicy> {
        VerificationPolicy::ALL.into_iter().find(|policy| policy.name() == name)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            VerificationPolicy::NeverVerify => "NeverVerify",
            VerificationPolicy::NeverVerifyPreloadedImages => "NeverVerifyPreloadedImages",
            VerificationPolicy::NeverVerifyAllowlistedImages => "NeverVerifyAllowlistedImages",
            VerificationPolicy::AlwaysVerify => "AlwaysVerify",
        }
    }
}

const TWO_MINUTES: GoDuration = GoDuration::from_secs(120);
const CONTAINERD: &str = "unix:///run/containerd/containerd.sock";

impl KubeletImageConfig {
    /// These settings with kubelet's defaults for the rest.
    pub fn defaulted(&self, gates: FeatureGates) -> ImageSettings {
        let written = self.clone();
        let or_two_minutes = |time: Option<GoDuration>| match time {
            None | Some(GoDuration::ZERO) => TWO_MINUTES,
            Some(time) => time,
        };
        let policy = if gates.ensure_secret_pulled_images {
            VerificationPolicy::NeverVerifyPreloadedImages.name()
        } else {
            ""
        };
        ImageSettings {
            registry_pull_qps: written.registry_pull_qps.unwrap_or(5),
            registry_burst: written.registry_burst.filter(|burst| *burst != 0).unwrap_or(10),
            serialize_image_pulls: written
                .serialize_image_pulls
                .unwrap_or(written.max_parallel_image_pulls.is_none_or(|bound| bound < 2)),
            max_parallel_image_pulls: written.max_parallel_image_pulls,
            image_minimum_gc_age: or_two_minutes(written.image_minimum_gc_age),
            image_maximum_gc_age: written.image_maximum_gc_age.unwrap_or_default(),
            image_gc_high_threshold_percent: written.image_gc_high_threshold_percent.unwrap_or(85),
            image_gc_low_threshold_percent: written.image_gc_low_threshold_percent.unwrap_or(80),
            node_status_max_images: written.node_status_max_images.unwrap_or(50),
            runtime_request_timeout: or_two_minutes(written.runtime_request_timeout),
            container_runtime_endpoint: written
                .container_runtime_endpoint
                .filter(|endpoint| !endpoint.is_empty())
                .unwrap_or_else(|| CONTAINERD.into()),
            image_service_endpoint: written.image_service_endpoint.unwrap_or_default(),
            image_pull_credentials_verification_policy: written
                .image_pull_credentials_verification_policy
                .filter(|policy| !policy.is_empty())
                .unwrap_or_else(|| policy.into()),
            preloaded_images_verification_allowlist: written
                .preloaded_images_verification_allowlist
                .unwrap_or_default(),
        }
    }
}

impl Default for ImageSettings {
    fn default() -> Self {
        KubeletImageConfig::default().defaulted(FeatureGates::default())
    }
}
