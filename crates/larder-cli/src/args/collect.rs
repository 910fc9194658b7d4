//! What can be typed after commands about collection: what goes when the disk fills up, and what stays.

#![allow(clippy::doc_markdown, rustdoc::bare_urls, reason = "these comments are the text of --help")]

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use larder::reference::ImageName;
use larder_agent::quantity::{parse_duration, parse_size};
use larder_api::convert::millis;
use larder_api::v1alpha1::CollectRequest;
use larder_api::v1alpha1::collect_request::Goal;

use super::CredentialArgs;
use crate::output::PrintFormat;

/// Remove unused images when the disk fills up, least recently used first.
///
/// One round: where the file system that holds the images is fuller than the high threshold, images that nothing uses
/// are removed until it really is down to the low one. A layer that several images share counts once, for the image
/// that is removed last. Images in use, pinned, leased, kept by a rule (larder keep) or seen for less than the minimum age
/// stay. After each removal the file system is measured.
///
/// The flags have the names of kubelet's; its configuration file calls them imageGCHighThresholdPercent,
/// imageGCLowThresholdPercent, imageMinimumGCAge and imageMaximumGCAge.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder gc --dry-run           what would go and why, and why the rest stays; nothing is removed
  larder gc                     one round, now
  larder gc --free 10GiB        free so much and a little more, and not everything
  larder gc --all-unused        remove all that nothing uses and nothing keeps
  larder gc --image-gc-high-threshold 70 --image-gc-low-threshold 60

Exit code: 0 enough is free, or nothing had to go; 1 some could not be removed, or all that may go does not free enough;
2 bad input, and nothing was removed; 3 backend unreachable.")]
pub(crate) struct GcArgs {
    /// Only say what would be done. It is the same plan.
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Free at least so many bytes, such as 500MB or 10GiB (10Gi is the same), whatever the thresholds say, and a margin,
    /// gc.freeMarginPercent of the settings.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, conflicts_with = "all_unused")]
    pub(crate) free: Option<u64>,

    /// Remove everything that may be removed, whatever the thresholds say.
    #[arg(long)]
    pub(crate) all_unused: bool,

    #[command(flatten)]
    pub(crate) limits: GcThresholdFlags,

    /// What results look like; wide says of each image why it stays.
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,
}

impl GcArgs {
    /// What is asked for.
    pub(crate) fn request(&self) -> CollectRequest {
        let goal = match self.free {
            Some(bytes) => Goal::FreeBytes(bytes),
            None if self.all_unused => Goal::AllUnused(true),
            None => Goal::Thresholds(true),
        };
        CollectRequest { goal: Some(goal), ..self.limits.request() }
    }
}

/// When to collect and what to spare, by kubelet's names.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Limits")]
pub(crate) struct GcThresholdFlags {
    /// Collect when so many percent of the file system are in use; 100 is never [default: imageGCHighThresholdPercent of the settings, 85].
    #[arg(long, value_name = "PERCENT", allow_negative_numbers = true)]
    pub(crate) image_gc_high_threshold: Option<i32>,

    /// Free until so many percent are in use [default: imageGCLowThresholdPercent of the settings, 80].
    #[arg(long, value_name = "PERCENT", allow_negative_numbers = true)]
    pub(crate) image_gc_low_threshold: Option<i32>,

    /// Spare images that were first seen less than this ago
    /// [default: imageMinimumGCAge of the settings, 2m].
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub(crate) minimum_image_ttl_duration: Option<Duration>,

    /// Remove images unused for longer than this although there is room; 0 is never
    /// [default: imageMaximumGCAge of the settings, 0].
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub(crate) image_maximum_gc_age: Option<Duration>,

    /// Collect as kubelet does: the sizes that the runtime reports are added up, although images share layers.
    #[arg(long)]
    pub(crate) kubelet: bool,
}

impl GcThresholdFlags {
    /// What the flags say, for any goal.
    pub(crate) fn request(&self) -> CollectRequest {
        CollectRequest {
            goal: None,
            high_threshold_percent: self.image_gc_high_threshold,
            low_threshold_percent: self.image_gc_low_threshold,
            minimum_age_milliseconds: self.minimum_image_ttl_duration.map(millis),
            maximum_age_milliseconds: self.image_maximum_gc_age.map(millis),
            kubelet: self.kubelet,
        }
    }
}

/// Say of one image why it is kept or would go, who uses it, and what removing it frees; with access, who may pull it.
#[derive(Debug, Args)]
#[command(
    subcommand_negates_reqs = true,
    args_conflicts_with_subcommands = true,
    after_help = "Examples:
  larder explain busybox:1.36
  larder explain -o json sha256:0123...
  larder explain access registry.example/app:1 -f pod.yaml

An image with the name access is explained as access:latest.

Exit code: 0 told, 1 no such image, 2 bad input, 3 backend unreachable."
)]
pub(crate) struct ExplainArgs {
    #[command(subcommand)]
    pub(crate) what: Option<ExplainSubcommand>,

    /// Name or id of the image.
    #[arg(required = true)]
    pub(crate) image: Option<ImageName>,

    #[command(flatten)]
    pub(crate) limits: GcThresholdFlags,

    /// What results look like.
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,
}

/// What else can be explained.
#[derive(Debug, Subcommand)]
pub(crate) enum ExplainSubcommand {
    Access(ExplainAccessArgs),
}

/// Say which credentials were found where for an image, and what each host that serves it answers to them.
///
/// Looks for credentials as larder ensure does and shows them to the registry in the same order, up to the first that is
/// taken. Hosts are asked once, and only whether the image can be had; nothing is fetched. No password or token is printed.
///
/// This command asks by itself, also where a daemon runs or the images are a runtime's: with the credentials of whoever
/// runs it, and the hosts of --certs-d. A daemon has the docker config of its own user beside them.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder explain access registry.example/app:1
  larder explain access registry.example/app:1 -f pod.yaml
  larder explain access -o json registry.example/app:1 --secret regcred.yaml

Exit code: 0 it can be had, 1 it cannot, 2 bad input.")]
pub(crate) struct ExplainAccessArgs {
    /// The image, as a pod would write it.
    #[arg(value_name = "IMAGE")]
    pub(crate) image: ImageName,

    /// A manifest with pods that want the image, a directory of manifests, or - for standard input; may be repeated.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) filename: Vec<PathBuf>,

    /// A manifest with pull secrets, for pods that name them, or for the image itself without -f; may be repeated.
    #[arg(long, value_name = "FILE")]
    pub(crate) secret: Vec<PathBuf>,

    /// Namespace of objects that name none.
    #[arg(short, long, value_name = "NAMESPACE", default_value = "default")]
    pub(crate) namespace: String,

    /// What results look like.
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,

    #[command(flatten)]
    pub(crate) credentials: CredentialArgs,
}

/// Show what collection has removed: what, when, why, and how much that freed.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder history
  larder history -o json

PROMISED is what the plan counted for the image, each shared layer once. FREED is the change of the whole file system while it
was removed: what others wrote or deleted meanwhile is in it.

The journal is bounded: about the last 5000 removals.")]
pub(crate) struct HistoryArgs {
    /// What results look like.
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,
}

/// Keep images that nothing uses, or list what is kept.
///
/// Without a rule, the rules are listed. larder rm still removes what is kept here.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder keep                             the rules
  larder keep 'registry.example/base/*'   all images with a name like this
  larder keep busybox:1.36 --ttl 168h     for a week after its last use
  larder keep --label team=infra          images whose config has this label
  larder keep 'app/*' --newest 3          the newest three of each such repository
  larder keep 'cache/*' --budget 5GiB     the last used, up to so much")]
pub(crate) struct KeepArgs {
    /// A name, in which * stands for any text and ? for one character; or a digest, sha256:...
    #[arg(value_name = "RULE", conflicts_with = "label")]
    pub(crate) rule: Option<String>,

    /// Images with this label, and this value if one is given.
    #[arg(long, value_name = "KEY[=VALUE]")]
    pub(crate) label: Option<String>,

    /// Only the newest N images of each repository that RULE names.
    #[arg(long, value_name = "N", requires = "rule")]
    pub(crate) newest: Option<usize>,

    /// Only for so long after their last use.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub(crate) ttl: Option<Duration>,

    /// Only as many as fit into this, the last used first.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) budget: Option<u64>,

    /// What results look like.
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,
}

/// Drop keep rules.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder unkeep 1                         the first rule that larder keep lists
  larder unkeep 'registry.example/base/*'
  larder unkeep --label team=infra
  larder unkeep --all                     all rules, also where they cannot be read")]
pub(crate) struct UnkeepArgs {
    /// The number of a rule, or its name or digest.
    #[arg(value_name = "RULE", required_unless_present_any = ["label", "all"])]
    pub(crate) rule: Option<String>,

    /// The rule for this label.
    #[arg(long, value_name = "KEY[=VALUE]", conflicts_with = "rule")]
    pub(crate) label: Option<String>,

    /// All rules.
    #[arg(long, conflicts_with_all = ["rule", "label"])]
    pub(crate) all: bool,
}
