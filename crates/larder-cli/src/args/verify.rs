//! Flags for the verification of credentials for present images.

use clap::Args;
use larder::config::VerificationPolicy;
use larder_agent::config::{SettingOrigin, SettingsSource};

#[allow(clippy::doc_markdown, reason = "these comments are the text of --help")]
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Credentials")]
pub(crate) struct VerifyArgs {
    /// Verification policy: the present images that a pod may use only with valid credentials. NeverVerify,
    /// NeverVerifyPreloadedImages, NeverVerifyAllowlistedImages or AlwaysVerify [default: NeverVerifyPreloadedImages,
    /// which verifies images that larder pulled].
    #[arg(long, value_name = "POLICY", value_parser = policy, hide_short_help = true)]
    verify: Option<String>,

    /// Image on the allowlist of NeverVerifyAllowlistedImages: a name without tag, or a prefix that ends in /*. May be
    /// repeated.
    #[arg(long, value_name = "NAME", requires = "verify", hide_short_help = true)]
    verify_allow: Vec<String>,
}

impl VerifyArgs {
    /// Whether --verify was given.
    pub(crate) fn is_given(&self) -> bool {
        self.verify.is_some()
    }

    /// The settings that the flags give a value.
    pub(crate) fn settings(&self) -> Vec<SettingsSource> {
        let policy = self.verify.as_ref().map(|policy| SettingsSource::Given {
            by: SettingOrigin::Flag("--verify"),
            key: "imagePullCredentialsVerificationPolicy",
            value: policy.clone(),
        });
        let allowed = (!self.verify_allow.is_empty()).then(|| SettingsSource::GivenList {
            by: SettingOrigin::Flag("--verify-allow"),
            key: "preloadedImagesVerificationAllowlist",
            values: self.verify_allow.clone(),
        });
        policy.into_iter().chain(allowed).collect()
    }
}

fn policy(text: &str) -> Result<String, String> {
    let known = VerificationPolicy::ALL.map(VerificationPolicy::name);
    match VerificationPolicy::of(text) {
        Some(policy) => Ok(policy.name().to_owned()),
        None => Err(format!("expected one of {}", known.join(", "))),
    }
}
