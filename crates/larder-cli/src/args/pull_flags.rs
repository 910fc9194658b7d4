//! Arguments of `ensure` and `pull`.

#![allow(clippy::doc_markdown, rustdoc::bare_urls, reason = "these comments are the text of --help")]

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use larder::credentials::TokenPolicy;
use larder::pull::{EnsureRequest, PullConfig, PullPolicy};
use larder::reference::ImageName;
use larder_agent::config::{SettingOrigin, SettingsSource};
use larder_agent::quantity::parse_duration;
use larder_agent::registry::{RegistryClient, RegistryConfig};

use super::platform::PlatformFlag;
use super::timeout;
use super::verify::VerifyArgs;
use crate::failure::Failure;
use crate::output::{DataFormat, PrintFormat};

/// Pull missing images: named ones, or all images in Kubernetes manifests.
///
/// Each image goes through kubelet's steps (pull policy, credentials, back-off, queue) and prints kubelet's events.
/// Supported kinds: Pod, Deployment, StatefulSet, DaemonSet, ReplicaSet, ReplicationController, Job, CronJob,
/// PodTemplate, lists of these, objects of any other kind with a pod template at spec.template, and Secrets for
/// imagePullSecrets.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder ensure busybox:1.36
  larder ensure -f deploy/ -R --secret regcred.yaml   a tree of manifests
  kubectl get pods -A -o yaml | larder ensure -f -    all images of a cluster

Exit code: 0 all present, 1 some failed, 2 invalid input, 3 backend unreachable, 130 interrupted.")]
pub(crate) struct EnsureArgs {
    /// Images to pull if missing.
    #[arg(value_name = "IMAGE")]
    pub(crate) images: Vec<ImageName>,

    #[command(flatten)]
    pub(crate) platform: PlatformFlag,

    /// A manifest, a directory of *.yaml, *.yml and *.json, or - for standard input; may be repeated.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) filename: Vec<PathBuf>,

    /// Read subdirectories of -f as well.
    #[arg(short = 'R', long)]
    pub(crate) recursive: bool,

    /// A manifest with pull secrets, for pods that name them and for IMAGE arguments; may be repeated.
    #[arg(long, value_name = "FILE")]
    pub(crate) secret: Vec<PathBuf>,

    /// Namespace of objects that have none.
    #[arg(short, long, value_name = "NAMESPACE", default_value = "default")]
    pub(crate) namespace: String,

    /// Pull policy for all images, instead of the policies in manifests.
    ///
    /// [default: Always for the tag latest, explicit or implied, else IfNotPresent].
    #[arg(long, value_enum, ignore_case = true, value_name = "POLICY")]
    pub(crate) policy: Option<PullPolicyArg>,

    /// Retry failed pulls for this long, such as 90s or 5m, with kubelet's back-off.
    ///
    /// Also waits for a runtime that does not respond yet. A bare number is seconds; 0 means one attempt.
    #[arg(long, value_name = "DURATION", default_value = "0", value_parser = parse_duration, hide_default_value = true)]
    pub(crate) retry_for: Duration,

    /// Print what would be pulled; change nothing.
    ///
    /// The size and the credentials found are printed as well.
    #[arg(long, conflicts_with = "retry_for")]
    pub(crate) dry_run: bool,

    /// Print failures only.
    #[arg(short, long, conflicts_with = "output")]
    pub(crate) quiet: bool,

    /// Output format.
    #[arg(short, long, visible_alias = "format", value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,

    #[command(flatten)]
    pub(crate) verify: VerifyArgs,

    #[command(flatten)]
    pub(crate) call: PullCallFlags,

    #[command(flatten)]
    pub(crate) pulling: PullFlags,

    #[command(flatten)]
    pub(crate) credentials: CredentialArgs,
}

/// Pull images, even if present, and print their IDs.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder pull busybox:1.36
  larder pull --wait models/small:1    also if its containers could start before
  echo $TOKEN | larder pull -u me --password-stdin registry.example/app:1

Exit code: 0 all pulled, 1 some failed, 2 invalid input, 3 backend unreachable, 130 interrupted.")]
pub(crate) struct PullArgs {
    /// Wait until all of each image is here, also where pull.lazy.images lets containers start before.
    #[arg(long)]
    pub(crate) wait: bool,

    #[command(flatten)]
    pub(crate) work: PullWorkArgs,
}

/// Fetch what is missing of images whose containers started before all of it was here, and print their IDs.
///
/// The image that is present is completed, even if its tag means another one meanwhile. Of a complete image, the
/// registry is not asked.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder complete models/small:1
  larder complete web:1 api:2    several, one after the other
  larder images        HERE: how much is here of images that are not complete

Exit code: 0 all complete, 1 some failed, 2 invalid input, 3 backend unreachable, 130 interrupted.")]
pub(crate) struct CompleteArgs {
    #[command(flatten)]
    pub(crate) work: PullWorkArgs,
}

/// Arguments of commands that pull images by their names.
#[derive(Debug, Args)]
pub(crate) struct PullWorkArgs {
    /// Names of images.
    #[arg(value_name = "IMAGE", required = true)]
    pub(crate) images: Vec<ImageName>,

    #[command(flatten)]
    pub(crate) platform: PlatformFlag,

    /// Print IDs only.
    #[arg(short, long, conflicts_with = "output")]
    pub(crate) quiet: bool,

    /// Print the result for each image in this format.
    #[arg(short, long, visible_alias = "format", value_enum, value_name = "FORMAT")]
    pub(crate) output: Option<DataFormat>,

    #[command(flatten)]
    pub(crate) call: PullCallFlags,

    #[command(flatten)]
    pub(crate) pulling: PullFlags,

    #[command(flatten)]
    pub(crate) credentials: CredentialArgs,
}

/// A value of `--policy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "PascalCase")]
pub(crate) enum PullPolicyArg {
    /// Always pull.
    Always,
    /// Pull if missing.
    IfNotPresent,
    /// Never pull.
    Never,
}

impl From<PullPolicyArg> for PullPolicy {
    fn from(policy: PullPolicyArg) -> PullPolicy {
        match policy {
            PullPolicyArg::Always => PullPolicy::Always,
            PullPolicyArg::IfNotPresent => PullPolicy::IfNotPresent,
            PullPolicyArg::Never => PullPolicy::Never,
        }
    }
}

/// Options of the pulls of one call, which also apply where a daemon pulls.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
#[command(next_help_heading = "Pulling")]
pub(crate) struct PullCallFlags {
    /// Time limit for each image, waiting included, such as 10m [default: --timeout if given, else none].
    ///
    /// A pull that others wait for continues without this command, which fails.
    #[arg(long, value_name = "DURATION", value_parser = timeout, allow_hyphen_values = true, hide_short_help = true)]
    pub(crate) pull_timeout: Option<Duration>,

    #[command(flatten)]
    pub(crate) tls: TlsFlags,
}

impl PullCallFlags {
    /// Applies the options to a request. `timeout` is that of every call, if given.
    pub(crate) fn apply(&self, timeout: Option<Duration>, request: &mut EnsureRequest) {
        request.time_limit = self.pull_timeout.or(timeout);
        request.options.skip_tls_verify = !self.tls.is_verified();
    }
}

/// Whether registries are verified, with podman's name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
#[command(next_help_heading = "Registry")]
pub(crate) struct TlsFlags {
    /// With false, accept any certificate and plain HTTP.
    ///
    /// [default: true, unless hosts.toml says skip_verify].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_possible_values = true)]
    tls_verify: Option<bool>,

    /// As --tls-verify=false.
    #[arg(long, conflicts_with = "tls_verify", hide_short_help = true)]
    insecure: bool,
}

impl TlsFlags {
    /// A client of this process that follows the flags.
    pub(crate) fn client(&self, config: RegistryConfig) -> RegistryClient {
        let client = RegistryClient::new(config);
        if self.is_verified() { client } else { client.without_tls_verify() }
    }

    fn is_verified(&self) -> bool {
        self.tls_verify.unwrap_or(true) && !self.insecure
    }
}

/// Queueing and throttling of pulls, with kubelet's names.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args)]
#[command(next_help_heading = "Pulling")]
pub(crate) struct PullFlags {
    /// Pull one image at a time [default: serializeImagePulls of the settings, false].
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", hide_short_help = true)]
    pub(crate) serialize_image_pulls: Option<bool>,

    /// Maximum number of parallel pulls [default: maxParallelImagePulls of the settings, 4].
    #[arg(long, value_name = "N", value_parser = at_least_one, hide_short_help = true)]
    pub(crate) max_parallel_image_pulls: Option<NonZeroU32>,

    /// Maximum number of pulls started per second, on average; 0 is no limit
    /// [default: registryPullQPS of the settings, 5].
    #[arg(long, value_name = "N", value_parser = whole_number, allow_negative_numbers = true, hide_short_help = true)]
    pub(crate) registry_qps: Option<u32>,

    /// Pulls in a burst above that limit; 0 counts as 1, or as the default with --kubelet
    /// [default: registryBurst of the settings, 10].
    #[arg(long, value_name = "N", value_parser = whole_number, allow_negative_numbers = true, hide_short_help = true)]
    pub(crate) registry_burst: Option<u32>,

    /// Pull as kubelet does by default: one pull at a time; a separate pull for each container; pulls over the limit
    /// fail instead of waiting; back-off applies even if a pod has another secret; identity and registry tokens in pull
    /// secrets and docker configs are ignored; credential helpers do not run. The flags above override it.
    #[arg(long, hide_short_help = true)]
    pub(crate) kubelet: bool,
}

impl PullFlags {
    /// Whether any of the flags was given.
    pub(crate) fn is_given(&self) -> bool {
        *self != PullFlags::default()
    }

    /// Whether tokens in credentials are used.
    pub(crate) fn tokens(&self) -> TokenPolicy {
        if self.kubelet { TokenPolicy::Ignore } else { TokenPolicy::Keep }
    }

    /// The flags that were given, each with the setting that it changes.
    pub(crate) fn given(&self) -> Vec<(&'static str, &'static str)> {
        let flags = [
            (self.serialize_image_pulls.is_some(), "--serialize-image-pulls", "serializeImagePulls"),
            (self.max_parallel_image_pulls.is_some(), "--max-parallel-image-pulls", "maxParallelImagePulls"),
            (self.registry_qps.is_some(), "--registry-qps", "registryPullQPS"),
            (self.registry_burst.is_some(), "--registry-burst", "registryBurst"),
            (self.kubelet, "--kubelet", "pull.sameImage"),
        ];
        flags.into_iter().filter(|(given, ..)| *given).map(|(_, flag, key)| (flag, key)).collect()
    }

    /// The setting with which `--kubelet` ignores tokens in credentials.
    pub(crate) fn credential_tokens(&self) -> Option<SettingsSource> {
        (self.tokens() == TokenPolicy::Ignore).then(|| SettingsSource::Given {
            by: SettingOrigin::Flag("--kubelet"),
            key: "pull.credentialTokens",
            value: "ignore".to_owned(),
        })
    }

    /// The settings, overridden by the flags.
    pub(crate) fn adjust(&self, settings: PullConfig) -> Result<PullConfig, Failure> {
        let mut config = if self.kubelet { PullConfig::kubelet() } else { settings };
        let bound = self.max_parallel_image_pulls;
        if let Some(bound) = bound {
            config.max_parallel_image_pulls = Some(bound);
            // Kubelet's default is to serialise unless a bound above one is given.
            config.serialize_image_pulls &= bound.get() < 2;
        }
        if let Some(serialize) = self.serialize_image_pulls {
            config.serialize_image_pulls = serialize;
        }
        if config.serialize_image_pulls && bound.is_some_and(|bound| bound.get() > 1) {
            return Err(Failure::bad_input(
                "--max-parallel-image-pulls cannot be larger than 1 unless --serialize-image-pulls is false",
            ));
        }
        if let Some(qps) = self.registry_qps {
            config.registry_pull_qps = qps;
        }
        // Kubelet's configuration takes 0 for a burst that is not set.
        if let Some(burst) = self.registry_burst.filter(|burst| *burst > 0 || !self.kubelet) {
            config.registry_burst = burst;
        }
        Ok(config)
    }
}

/// Credentials beside those of pull secrets.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Registry")]
pub(crate) struct CredentialArgs {
    /// Read credentials from this docker config.json instead of the default locations.
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub(crate) authfile: Option<PathBuf>,

    /// User name for the registry of the images; requires --password-stdin.
    #[arg(short, long, value_name = "USER", requires = "password_stdin")]
    pub(crate) username: Option<String>,

    /// Read the password from standard input.
    ///
    /// No flag takes the password itself, because every user of the machine could read it in the process list.
    #[arg(long, requires = "username")]
    pub(crate) password_stdin: bool,

    /// Kubelet's credential provider configuration, a file or a directory.
    #[arg(long, value_name = "PATH", requires = "image_credential_provider_bin_dir", hide_short_help = true)]
    pub(crate) image_credential_provider_config: Option<PathBuf>,

    /// Directory with the programs of these credential providers, writable only by root and this user.
    #[arg(long, value_name = "DIR", requires = "image_credential_provider_config", hide_short_help = true)]
    pub(crate) image_credential_provider_bin_dir: Option<PathBuf>,
}

fn whole_number(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("expected a whole number from 0 to {}", u32::MAX))
}

fn at_least_one(text: &str) -> Result<NonZeroU32, String> {
    let number = whole_number(text).map_err(|_| format!("expected a whole number from 1 to {}", u32::MAX))?;
    NonZeroU32::new(number).ok_or_else(|| "must be at least 1".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use larder::pull::{DuplicatePullPolicy, RateLimitAction};

    use super::*;
    use crate::args::{Cli, Command};

    fn config(flags: &[&str]) -> Result<PullConfig, Failure> {
        let cli = Cli::try_parse_from(["larder", "pull", "x"].iter().chain(flags)).unwrap();
        match cli.command {
            Command::Pull(args) => args.work.pulling.adjust(PullConfig::default()),
            other => panic!("not pull: {other:?}"),
        }
    }

    #[test]
    fn without_flags_pulls_use_the_default_settings() {
        assert_eq!(config(&[]), Ok(PullConfig::default()));
    }

    #[test]
    fn kubelets_behaviour_is_one_flag_and_can_be_adjusted() {
        assert_eq!(config(&["--kubelet"]), Ok(PullConfig::kubelet()));
        let adjusted = config(&["--kubelet", "--max-parallel-image-pulls", "3"]).unwrap();
        assert!(!adjusted.serialize_image_pulls, "as kubelet defaults it for a bound above one");
        assert_eq!(
            (adjusted.over_rate, adjusted.same_image),
            (RateLimitAction::Refuse, DuplicatePullPolicy::EachRequest)
        );
    }

    #[test]
    fn contradictions_are_refused() {
        assert!(config(&["--serialize-image-pulls", "--max-parallel-image-pulls=2"]).is_err());
        assert!(config(&["--serialize-image-pulls=false", "--max-parallel-image-pulls=2"]).is_ok());
    }

    #[test]
    fn a_burst_of_zero_is_kubelets_default_only_to_kubelet() {
        assert_eq!(config(&["--registry-burst=0"]).unwrap().registry_burst, 0, "the throttle counts it as 1");
        assert_eq!(config(&["--kubelet", "--registry-burst=0"]).unwrap().registry_burst, 10);
    }

    #[test]
    fn wrong_numbers_are_refused_with_the_expected_range() {
        for (flags, message) in [
            (["--max-parallel-image-pulls", "0"], "must be at least 1"),
            (["--max-parallel-image-pulls", "x"], "expected a whole number from 1 to 4294967295"),
            (["--registry-qps", "0.5"], "expected a whole number from 0 to 4294967295"),
            (["--registry-qps", "-1"], "expected a whole number from 0 to 4294967295"),
            (["--registry-burst", "99999999999"], "expected a whole number from 0 to 4294967295"),
        ] {
            let error = Cli::try_parse_from(["larder", "pull", "x"].iter().chain(&flags)).unwrap_err();
            assert!(error.to_string().contains(message), "{error}");
        }
    }

    #[test]
    fn a_call_has_a_time_limit_and_may_skip_the_verification_of_tls() {
        let request = |flags: &[&str]| {
            let cli = Cli::try_parse_from(["larder", "pull", "x"].iter().chain(flags))
                .map_err(|error| error.to_string())?;
            let Command::Pull(args) = cli.command else { panic!("not pull") };
            let mut request = EnsureRequest::new("x", PullPolicy::Always, larder::pod::Pod::default());
            args.work.call.apply(cli.connection.timeout, &mut request);
            Ok((request.time_limit, request.options.skip_tls_verify))
        };
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        for (flags, expected) in [
            (&[][..], (None, false)),
            (&["--pull-timeout", "5m"], (seconds(300), false)),
            (&["--timeout", "7"], (seconds(7), false)),
            (&["--timeout", "7", "--pull-timeout", "9s"], (seconds(9), false)),
            (&["--tls-verify=false"], (None, true)),
            (&["--tls-verify"], (None, false)),
            (&["--insecure"], (None, true)),
        ] {
            assert_eq!(request(flags), Ok(expected), "{flags:?}");
        }
        for (flags, message) in [
            (&["--pull-timeout", "0"][..], "must be at least 1ms"),
            (&["--pull-timeout", "1ns"], "must be at least 1ms"),
            (&["--pull-timeout", "-5s"], "must not be negative"),
            (&["--timeout", "-5s"], "must not be negative"),
            (&["--pull-timeout", "99999999h"], "is too long; the maximum is 8760h"),
            (&["--pull-timeout", "soon"], "is not a duration"),
            (&["--insecure", "--tls-verify"], "cannot be used with"),
        ] {
            let error: Result<(Option<Duration>, bool), String> = request(flags);
            assert!(error.as_ref().is_err_and(|error| error.contains(message)), "{flags:?}: {error:?}");
        }
    }

    #[test]
    fn there_is_no_flag_that_takes_a_password() {
        assert!(Cli::try_parse_from(["larder", "pull", "x", "--password", "p"]).is_err());
        assert!(Cli::try_parse_from(["larder", "pull", "x", "--username", "u"]).is_err());
    }
}
