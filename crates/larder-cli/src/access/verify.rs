//! Flags about who may use a present image.

use clap::Args;
use larder::config::VerificationPolicy;
use larder::records::Verification;

use crate::failure::Failure;

#[allow(clippy::doc_markdown, reason = "these comments are the text of --help")]
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Credentials")]
pub(crate) struct VerifyArgs {
    /// Which present images a pod may use only with credentials that fit: NeverVerify, NeverVerifyPreloadedImages,
    /// NeverVerifyAllowlistedImages or AlwaysVerify [default: NeverVerifyPreloadedImages, those that larder pulled].
    #[arg(long, value_name = "POLICY", value_parser = policy)]
    verify: Option<String>,

    /// An image that needs none under NeverVerifyAllowlistedImages: a name without tag, or a prefix that ends in /*. May
    /// be repeated.
    #[arg(long, value_name = "NAME", requires = "verify")]
    verify_allow: Vec<String>,
}

impl VerifyArgs {
    /// Whether anything was said of it.
    pub(crate) fn is_given(&self) -> bool {
        self.verify.is_some()
    }

    /// What the flags mean.
    pub(crate) fn verification(&self) -> Result<Verification, Failure> {
        let default = VerificationPolicy::NeverVerifyPreloadedImages.name();
        let policy = self.verify.as_deref().unwrap_or(default);
        Verification::parse(policy, self.verify_allow.iter().map(String::as_str))
            .map_err(|error| Failure::bad_input(format!("--verify-allow: {error}")))
    }
}

fn policy(text: &str) -> Result<String, String> {
    let known = VerificationPolicy::ALL.map(VerificationPolicy::name);
    match VerificationPolicy::of(text) {
        Some(policy) => Ok(policy.name().to_owned()),
        None => Err(format!("it is one of {}", known.join(", "))),
    }
}
