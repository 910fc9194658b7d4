//! Which present images a pod may use only with credentials. Pure.

use super::{AllowlistPattern, PatternError, VerificationPolicy};
use crate::reference::ImageName;

/// A policy and its list, both checked. There is no default: a policy that cannot be read must not become another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verification {
    policy: VerificationPolicy,
    allowlist: Vec<AllowlistPattern>,
}

/// Why a policy is invalid. The texts are kubelet's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VerificationError {
    /// No policy has this name.
    #[error("unknown image pull credential verification policy: {0}")]
    Policy(String),
    /// An entry of the list is not a pattern.
    #[error(transparent)]
    Pattern(#[from] PatternError),
}

impl Verification {
    /// Kubelet's default: images that were not pulled here may be used by every pod.
    pub fn of_unconfigured_kubelet() -> Self {
        Verification { policy: VerificationPolicy::NeverVerifyPreloadedImages, allowlist: Vec::new() }
    }

    /// Every image requires credentials: for a policy that cannot be read.
    pub fn always_verify() -> Self {
        Verification { policy: VerificationPolicy::AlwaysVerify, allowlist: Vec::new() }
    }

    /// No image requires credentials, as without the gate `KubeletEnsureSecretPulledImages`.
    pub fn never_verify() -> Self {
        Verification { policy: VerificationPolicy::NeverVerify, allowlist: Vec::new() }
    }

    /// The policy of this name; the list counts for `NeverVerifyAllowlistedImages` alone.
    pub fn parse<'a>(
        policy: &str,
        allowlist: impl IntoIterator<Item = &'a str>,
    ) -> Result<Verification, VerificationError> {
        let policy =
            VerificationPolicy::of(policy).ok_or_else(|| VerificationError::Policy(policy.to_owned()))?;
        let allowlist = match policy {
            VerificationPolicy::NeverVerifyAllowlistedImages => {
                allowlist.into_iter().map(AllowlistPattern::parse).collect::<Result<_, _>>()?
            }
            _ => Vec::new(),
        };
        Ok(Verification { policy, allowlist })
    }

    /// Whether the policy requires pull records.
    pub(crate) fn requires_pull_records(&self) -> bool {
        self.policy == VerificationPolicy::NeverVerifyPreloadedImages
    }

    /// Whether a pod needs credentials for a present image, named as the pod does. `pulled_here`: larder pulled it, or
    /// may have.
    pub fn required(&self, image: &ImageName, pulled_here: bool) -> bool {
        match self.policy {
            VerificationPolicy::NeverVerify => false,
            VerificationPolicy::NeverVerifyPreloadedImages => pulled_here,
            VerificationPolicy::NeverVerifyAllowlistedImages => {
                let name = image.trimmed().unwrap_or(image.as_str());
                !self.allowlist.iter().any(|pattern| pattern.matches(name))
            }
            VerificationPolicy::AlwaysVerify => true,
        }
    }
}
