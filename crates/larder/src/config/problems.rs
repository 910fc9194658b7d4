//! Validation of the settings, with kubelet's messages in kubelet's order.

use std::fmt;

use super::{
    FeatureGates, GoDuration, ImageSettings, PatternError, Verification, VerificationError,
    VerificationPolicy,
};
use crate::go_format::quote;

/// A setting that a problem is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "each is the setting of its name")]
pub enum ConfigField {
    RegistryPullQps,
    RegistryBurst,
    SerializeImagePulls,
    MaxParallelImagePulls,
    ImageMinimumGcAge,
    ImageMaximumGcAge,
    ImageGcHighThresholdPercent,
    ImageGcLowThresholdPercent,
    NodeStatusMaxImages,
    ContainerRuntimeEndpoint,
    ImagePullCredentialsVerificationPolicy,
    PreloadedImagesVerificationAllowlist,
}

impl ConfigField {
    /// Its name in a file.
    pub fn name(self) -> &'static str {
        match self {
            ConfigField::RegistryPullQps => "registryPullQPS",
            ConfigField::RegistryBurst => "registryBurst",
            ConfigField::SerializeImagePulls => "serializeImagePulls",
            ConfigField::MaxParallelImagePulls => "maxParallelImagePulls",
            ConfigField::ImageMinimumGcAge => "imageMinimumGCAge",
            ConfigField::ImageMaximumGcAge => "imageMaximumGCAge",
            ConfigField::ImageGcHighThresholdPercent => "imageGCHighThresholdPercent",
            ConfigField::ImageGcLowThresholdPercent => "imageGCLowThresholdPercent",
            ConfigField::NodeStatusMaxImages => "nodeStatusMaxImages",
            ConfigField::ContainerRuntimeEndpoint => "containerRuntimeEndpoint",
            ConfigField::ImagePullCredentialsVerificationPolicy => "imagePullCredentialsVerificationPolicy",
            ConfigField::PreloadedImagesVerificationAllowlist => "preloadedImagesVerificationAllowlist",
        }
    }

    /// Its name in kubelet's messages: with the flag, where it has one that they name.
    fn with_flag(self) -> FieldWithFlag {
        FieldWithFlag(self)
    }
}

struct FieldWithFlag(ConfigField);

impl fmt::Display for FieldWithFlag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flag = match self.0 {
            ConfigField::RegistryPullQps => Some("--registry-qps"),
            ConfigField::RegistryBurst => Some("--registry-burst"),
            ConfigField::ImageGcHighThresholdPercent => Some("--image-gc-high-threshold"),
            ConfigField::ImageGcLowThresholdPercent => Some("--image-gc-low-threshold"),
            ConfigField::NodeStatusMaxImages => Some("--node-status-max-images"),
            _ => None,
        };
        f.write_str(self.0.name())?;
        flag.map_or(Ok(()), |flag| write!(f, " ({flag})"))
    }
}

/// One validation error. It prints kubelet's message.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigProblem {
    /// Not a percentage.
    #[error("invalid configuration: {} {percent} must be between 0 and 100, inclusive", field.with_flag())]
    NoPercentage {
        /// Which threshold.
        field: ConfigField,
        /// As written.
        percent: i32,
    },
    /// The low threshold is not below the high threshold.
    #[error(
        "invalid configuration: {} {low} must be less than {} {high}",
        ConfigField::ImageGcLowThresholdPercent.with_flag(),
        ConfigField::ImageGcHighThresholdPercent.with_flag()
    )]
    LowNotBelowHigh {
        /// As written.
        low: i32,
        /// As written.
        high: i32,
    },
    /// A negative age.
    #[error("invalid configuration: {} {age} must not be negative", field.with_flag())]
    NegativeAge {
        /// Which age.
        field: ConfigField,
        /// As written.
        age: GoDuration,
    },
    /// The maximum age is not above the minimum age.
    #[error(
        "invalid configuration: imageMaximumGCAge {maximum} must be greater than imageMinimumGCAge {minimum}"
    )]
    MaximumNotAboveMinimum {
        /// As written.
        maximum: GoDuration,
        /// As written.
        minimum: GoDuration,
    },
    /// Below -1.
    #[error("invalid configuration: {} {number} must be -1 or greater", ConfigField::NodeStatusMaxImages.with_flag())]
    StatusImages {
        /// As written.
        number: i32,
    },
    /// A negative rate.
    #[error("invalid configuration: {} {number} must not be a negative number", field.with_flag())]
    NegativeRate {
        /// Which of the two.
        field: ConfigField,
        /// As written.
        number: i32,
    },
    /// No pull could ever run.
    #[error("invalid configuration: maxParallelImagePulls {0} must be a positive number")]
    NoParallelPulls(i32),
    /// Several pulls at once, and one at a time.
    #[error(
        "invalid configuration: maxParallelImagePulls cannot be larger than 1 unless SerializeImagePulls \
         (--serialize-image-pulls) is set to false"
    )]
    ParallelButSerialised,
    /// No policy has this name.
    #[error(
        "invalid configuration: option {} specified for imagePullCredentialsVerificationPolicy. Valid options are {}",
        quote(.0),
        policies()
    )]
    UnknownPolicy(String),
    /// The policy does not use the list.
    #[error(
        "invalid configuration: can't set `preloadedImagesVerificationAllowlist` if \
         `imagePullCredentialsVertificationPolicy` is not \"NeverVerifyAllowlistedImages\""
    )]
    ListWithoutPolicy,
    /// An invalid pattern of the list.
    #[error("invalid configuration: invalid image pattern in `preloadedImagesVerificationAllowlist`: {0}")]
    Pattern(PatternError),
    /// A setting that requires the feature gate.
    #[error(
        "invalid configuration: `{}` must not be set if KubeletEnsureSecretPulledImages feature gate is not enabled",
        .0.name()
    )]
    GateOff(ConfigField),
    /// No runtime endpoint is set.
    #[error("invalid configuration: the containerRuntimeEndpoint was not specified or empty")]
    NoRuntime,
}

fn policies() -> String {
    let [first @ .., last] = VerificationPolicy::ALL.map(|policy| quote(policy.name()));
    format!("{} or {last}", first.join(", "))
}

impl ConfigProblem {
    /// The setting to change.
    pub fn field(&self) -> ConfigField {
        match self {
            ConfigProblem::NoPercentage { field, .. }
            | ConfigProblem::NegativeAge { field, .. }
            | ConfigProblem::NegativeRate { field, .. }
            | ConfigProblem::GateOff(field) => *field,
            ConfigProblem::LowNotBelowHigh { .. } => ConfigField::ImageGcLowThresholdPercent,
            ConfigProblem::MaximumNotAboveMinimum { .. } => ConfigField::ImageMaximumGcAge,
            ConfigProblem::StatusImages { .. } => ConfigField::NodeStatusMaxImages,
            ConfigProblem::NoParallelPulls(_) | ConfigProblem::ParallelButSerialised => {
                ConfigField::MaxParallelImagePulls
            }
            ConfigProblem::UnknownPolicy(_) => ConfigField::ImagePullCredentialsVerificationPolicy,
            ConfigProblem::ListWithoutPolicy | ConfigProblem::Pattern(_) => {
                ConfigField::PreloadedImagesVerificationAllowlist
            }
            ConfigProblem::NoRuntime => ConfigField::ContainerRuntimeEndpoint,
        }
    }

    /// The setting that it contradicts, if it is about two.
    pub fn other_field(&self) -> Option<ConfigField> {
        match self {
            ConfigProblem::LowNotBelowHigh { .. } => Some(ConfigField::ImageGcHighThresholdPercent),
            ConfigProblem::MaximumNotAboveMinimum { .. } => Some(ConfigField::ImageMinimumGcAge),
            ConfigProblem::ParallelButSerialised => Some(ConfigField::SerializeImagePulls),
            ConfigProblem::ListWithoutPolicy => Some(ConfigField::ImagePullCredentialsVerificationPolicy),
            _ => None,
        }
    }
}

impl ImageSettings {
    /// All validation errors, in kubelet's order.
    pub fn problems(&self, gates: FeatureGates) -> Vec<ConfigProblem> {
        let mut problems = Vec::new();
        self.check_collection(&mut problems);
        self.check_pulling(&mut problems);
        problems.extend(self.verification(gates).err().into_iter().flatten());
        if self.container_runtime_endpoint.is_empty() {
            problems.push(ConfigProblem::NoRuntime);
        }
        problems
    }

    fn check_collection(&self, problems: &mut Vec<ConfigProblem>) {
        let (high, low) = (self.image_gc_high_threshold_percent, self.image_gc_low_threshold_percent);
        for (field, percent) in
            [(ConfigField::ImageGcHighThresholdPercent, high), (ConfigField::ImageGcLowThresholdPercent, low)]
        {
            if !(0..=100).contains(&percent) {
                problems.push(ConfigProblem::NoPercentage { field, percent });
            }
        }
        if low >= high {
            problems.push(ConfigProblem::LowNotBelowHigh { low, high });
        }
        let (minimum, maximum) = (self.image_minimum_gc_age, self.image_maximum_gc_age);
        for (field, age) in
            [(ConfigField::ImageMinimumGcAge, minimum), (ConfigField::ImageMaximumGcAge, maximum)]
        {
            if age.is_negative() {
                problems.push(ConfigProblem::NegativeAge { field, age });
            }
        }
        if maximum > GoDuration::ZERO && maximum <= minimum {
            problems.push(ConfigProblem::MaximumNotAboveMinimum { maximum, minimum });
        }
        if self.node_status_max_images < -1 {
            problems.push(ConfigProblem::StatusImages { number: self.node_status_max_images });
        }
    }

    fn check_pulling(&self, problems: &mut Vec<ConfigProblem>) {
        let (burst, qps) = (self.registry_burst, self.registry_pull_qps);
        for (field, number) in [(ConfigField::RegistryBurst, burst), (ConfigField::RegistryPullQps, qps)] {
            if number < 0 {
                problems.push(ConfigProblem::NegativeRate { field, number });
            }
        }
        match self.max_parallel_image_pulls {
            Some(bound) if bound < 1 => problems.push(ConfigProblem::NoParallelPulls(bound)),
            Some(bound) if bound > 1 && self.serialize_image_pulls => {
                problems.push(ConfigProblem::ParallelButSerialised);
            }
            _ => {}
        }
    }

    /// Which present images a pod may use only with credentials; `None` where the gate is off, and no records are kept.
    /// Fails with the problems that [`problems`](ImageSettings::problems) reports of it.
    pub fn verification(&self, gates: FeatureGates) -> Result<Option<Verification>, Vec<ConfigProblem>> {
        let policy = &self.image_pull_credentials_verification_policy;
        let list = &self.preloaded_images_verification_allowlist;
        let mut problems = Vec::new();
        if !gates.ensure_secret_pulled_images {
            if !policy.is_empty() {
                problems.push(ConfigProblem::GateOff(ConfigField::ImagePullCredentialsVerificationPolicy));
            }
            if !list.is_empty() {
                problems.push(ConfigProblem::GateOff(ConfigField::PreloadedImagesVerificationAllowlist));
            }
            return if problems.is_empty() { Ok(None) } else { Err(problems) };
        }
        let verification = match Verification::parse(policy, list.iter().map(String::as_str)) {
            Ok(verification) => Some(verification),
            Err(VerificationError::Policy(policy)) => {
                problems.push(ConfigProblem::UnknownPolicy(policy));
                None
            }
            Err(VerificationError::Pattern(error)) => {
                problems.push(ConfigProblem::Pattern(error));
                None
            }
        };
        let takes_list =
            VerificationPolicy::of(policy) == Some(VerificationPolicy::NeverVerifyAllowlistedImages);
        if !list.is_empty() && !takes_list {
            problems.push(ConfigProblem::ListWithoutPolicy);
        }
        if problems.is_empty() { Ok(verification) } else { Err(problems) }
    }
}
