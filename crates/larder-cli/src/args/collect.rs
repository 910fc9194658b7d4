//! What can be typed after commands about collection: what goes when the disk fills up, and what stays.

#![allow(clippy::doc_markdown, rustdoc::bare_urls, reason = "these comments are the text of --help")]

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use larder_control::v1alpha1::CollectRequest;
use larder_control::v1alpha1::collect_request::Goal;

use super::CredentialArgs;
use crate::daemon::convert::millis;
use crate::duration;
use crate::output::Format;

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

    /// Free at least so many bytes, such as 500MB or 10GiB (10Gi is the same), whatever the thresholds say, and a margin of
    /// 5% (of a daemon, gc.freeMarginPercent).
    #[arg(long, value_name = "SIZE", value_parser = size, conflicts_with = "all_unused")]
    pub(crate) free: Option<u64>,

    /// Remove everything that may be removed, whatever the thresholds say.
    #[arg(long)]
    pub(crate) all_unused: bool,

    #[command(flatten)]
    pub(crate) limits: Limits,

    /// What results look like; wide says of each image why it stays.
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: Format,
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
pub(crate) struct Limits {
    /// Collect when so many percent of the file system are in use; 100 is never [default: 85].
    #[arg(long, value_name = "PERCENT", allow_negative_numbers = true)]
    pub(crate) image_gc_high_threshold: Option<i32>,

    /// Free until so many percent are in use [default: 80].
    #[arg(long, value_name = "PERCENT", allow_negative_numbers = true)]
    pub(crate) image_gc_low_threshold: Option<i32>,

    /// Spare images that were first seen less than this ago [default: 2m].
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    pub(crate) minimum_image_ttl_duration: Option<Duration>,

    /// Remove images unused for longer than this although there is room; 0 is never [default: 0].
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    pub(crate) image_maximum_gc_age: Option<Duration>,

    /// Collect as kubelet does: the sizes that the runtime reports are added up, although images share layers.
    #[arg(long)]
    pub(crate) kubelet: bool,
}

impl Limits {
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
    pub(crate) what: Option<ExplainWhat>,

    /// Name or id of the image.
    #[arg(required = true)]
    pub(crate) image: Option<String>,

    #[command(flatten)]
    pub(crate) limits: Limits,

    /// What results look like.
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: Format,
}

/// What else can be explained.
#[derive(Debug, Subcommand)]
pub(crate) enum ExplainWhat {
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
    pub(crate) image: String,

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
    pub(crate) output: Format,

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
    pub(crate) output: Format,
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
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    pub(crate) ttl: Option<Duration>,

    /// Only as many as fit into this, the last used first.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) budget: Option<u64>,

    /// What results look like.
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: Format,
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

/// Units of sizes; longer ones first.
const UNITS: [(&str, u64); 14] = [
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("ki", 1 << 10),
    ("mi", 1 << 20),
    ("gi", 1 << 30),
    ("ti", 1 << 40),
    ("kb", 1000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
    ("b", 1),
    ("", 1),
];

/// Reads a size in bytes: `500MB`, `10GiB`, `10Gi`, or a bare number.
#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)] // checked
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is no size: write it like 500MB or 10GiB");
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim().to_ascii_lowercase();
    let (_, unit) = UNITS.iter().find(|(known, _)| *known == unit).ok_or_else(wrong)?;
    let bytes = number.parse::<f64>().map_err(|_| wrong())? * *unit as f64;
    if bytes < 1.0 || bytes > (1_u64 << 60) as f64 {
        return Err(wrong());
    }
    Ok(bytes as u64)
}

#[cfg(test)]
mod tests {
    use larder::gc::GcPolicy;

    use super::*;
    use crate::collect;
    use crate::failure::Failure;

    fn policy(limits: &Limits) -> Result<GcPolicy, Failure> {
        collect::policy(&GcPolicy::default(), &limits.request())
    }

    #[test]
    fn sizes_are_read_in_both_families_of_units() {
        for (text, bytes) in
            [("1", 1), ("500MB", 500_000_000), ("1.5Gi", 3 << 29), ("10GiB", 10 << 30), ("2kb", 2000)]
        {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in ["", "-1", "0", "GiB", "1X", "1..5G", "99999999TiB", "1e3"] {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn limits_that_contradict_are_refused_together() {
        let limits = |high, low| Limits {
            image_gc_high_threshold: Some(high),
            image_gc_low_threshold: Some(low),
            ..Limits::default()
        };
        assert!(policy(&limits(65, 45)).is_ok());
        for (high, low) in [(45, 65), (101, 50), (50, -1)] {
            assert!(policy(&limits(high, low)).is_err());
        }
        let both = policy(&limits(101, -1)).unwrap_err();
        assert!(both.message().contains("HighThresholdPercent") && both.message().contains("Low"));
    }

    #[test]
    fn kubelets_way_is_one_flag() {
        assert_eq!(policy(&Limits { kubelet: true, ..Limits::default() }), Ok(GcPolicy::kubelet()));
    }
}
