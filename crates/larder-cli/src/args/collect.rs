//! Arguments of the commands about garbage collection.

#![allow(clippy::doc_markdown, rustdoc::bare_urls, reason = "these comments are the text of --help")]

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use larder::reference::ImageName;
use larder_agent::quantity::{parse_duration, parse_size};
use larder_api::convert::millis;
use larder_api::v1::collect_request::Goal;
use larder_api::v1::{CollectRequest, CollectionGoal, EndedLeases};

use super::daemon::with_unit;
use super::{CredentialArgs, TlsFlags};
use crate::output::PrintFormat;

/// Run one garbage collection (GC) round: remove unused images, untagged ones first, then the least recently used.
///
/// If the usage of the image filesystem is at or above the high threshold, GC removes unused images until it is at the
/// low threshold, and measures the filesystem after each removal. Before any image, it reclaims what failed and
/// interrupted pulls left, unless a later pull can use it and no space is needed. A layer that several images share
/// counts once, for the image that is removed last. With each goal, GC retains images that are in use, pinned, leased,
/// kept by a rule (larder keep) or younger than the minimum age (2m by default).
///
/// The flags have the names of kubelet's; its configuration file calls them imageGCHighThresholdPercent,
/// imageGCLowThresholdPercent, imageMinimumGCAge and imageMaximumGCAge.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:
  larder gc --dry-run       the plan with the reasons; removes nothing
  larder gc --free 10GiB    free 10GiB and a margin
  larder gc --all-unused    remove every image that GC does not retain

Exit code: 0 goal reached, 1 a removal failed or not enough reclaimable space,
2 invalid input (nothing removed), 3 backend unreachable."
)]
#[allow(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
pub(crate) struct GcArgs {
    #[command(subcommand)]
    pub(crate) action: Option<GcSubcommand>,

    /// Print the plan of the round, and remove nothing.
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Free at least this much, such as 500MB or 10GiB (10Gi is the same), regardless of the thresholds, and a margin
    /// (gc.freeMarginPercent of the settings).
    #[arg(long, value_name = "SIZE", value_parser = parse_size, conflicts_with = "all_unused")]
    pub(crate) free: Option<u64>,

    /// Remove every image that is not in use, pinned, leased, kept by a rule or younger than the minimum age
    /// (--minimum-image-ttl-duration), regardless of the thresholds.
    #[arg(long)]
    pub(crate) all_unused: bool,

    /// Remove only what failed and interrupted pulls left: downloads that could be resumed, and layers without an
    /// image. Removes no image, and nothing that a running pull uses. Requires larder's own store.
    #[arg(long, conflicts_with_all = ["free", "all_unused"])]
    pub(crate) failed_pulls: bool,

    /// With --all-unused: end the leases of larder first. Not those of running pulls or of the runtime.
    #[arg(long, requires = "all_unused")]
    pub(crate) force_leases: bool,

    /// Do not ask, as --all-unused does. Scripts need it.
    #[arg(short, long, visible_short_alias = 'y', visible_alias = "yes")]
    pub(crate) force: bool,

    /// Output format; wide adds the reason for each retained image.
    #[arg(short, long, visible_alias = "format", value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,

    #[command(flatten)]
    pub(crate) limits: GcThresholdFlags,
}

impl GcArgs {
    /// Returns the goal of the round.
    pub(crate) fn goal(&self) -> CollectionGoal {
        match self.request().goal {
            Some(Goal::FreeBytes(_)) => CollectionGoal::Free,
            Some(Goal::AllUnused(_)) => CollectionGoal::AllUnused,
            Some(Goal::Dangling(_)) => CollectionGoal::Dangling,
            Some(Goal::FailedPulls(_)) => CollectionGoal::FailedPulls,
            Some(Goal::Thresholds(_)) | None => CollectionGoal::Thresholds,
        }
    }

    /// The request for the daemon.
    pub(crate) fn request(&self) -> CollectRequest {
        let goal = match self.free {
            Some(bytes) => Goal::FreeBytes(bytes),
            None if self.all_unused => Goal::AllUnused(true),
            None if self.failed_pulls => Goal::FailedPulls(true),
            None => Goal::Thresholds(true),
        };
        let ended = if self.force_leases { EndedLeases::All } else { EndedLeases::Unspecified };
        CollectRequest { goal: Some(goal), ended_leases: ended.into(), ..self.limits.request() }
    }
}

/// The thresholds and ages of GC, with the names of kubelet's flags.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Limits")]
pub(crate) struct GcThresholdFlags {
    /// High threshold: filesystem usage in percent at which GC starts; 100 turns it off
    /// [default: imageGCHighThresholdPercent of the settings, 85].
    #[arg(long, value_name = "PERCENT", allow_negative_numbers = true, hide_short_help = true)]
    pub(crate) image_gc_high_threshold: Option<i32>,

    /// Low threshold: filesystem usage in percent at which GC stops
    /// [default: imageGCLowThresholdPercent of the settings, 80].
    #[arg(long, value_name = "PERCENT", allow_negative_numbers = true, hide_short_help = true)]
    pub(crate) image_gc_low_threshold: Option<i32>,

    /// Minimum age: retain images that were first seen less than this ago
    /// [default: imageMinimumGCAge of the settings, 2m].
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, hide_short_help = true)]
    pub(crate) minimum_image_ttl_duration: Option<Duration>,

    /// Maximum age: remove images that are unused for longer than this at any disk usage; 0 turns it off
    /// [default: imageMaximumGCAge of the settings, 0].
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, hide_short_help = true)]
    pub(crate) image_maximum_gc_age: Option<Duration>,

    /// Plan as kubelet does: add up the image sizes that the runtime reports, although images share layers.
    #[arg(long, hide_short_help = true)]
    pub(crate) kubelet: bool,
}

impl GcThresholdFlags {
    /// The request without a goal.
    pub(crate) fn request(&self) -> CollectRequest {
        CollectRequest {
            goal: None,
            high_threshold_percent: self.image_gc_high_threshold,
            low_threshold_percent: self.image_gc_low_threshold,
            minimum_age_milliseconds: self.minimum_image_ttl_duration.map(millis),
            maximum_age_milliseconds: self.image_maximum_gc_age.map(millis),
            kubelet: self.kubelet,
            ended_leases: EndedLeases::Unspecified.into(),
        }
    }
}

/// Explain what GC does with an image and why, what uses it, and what its removal frees.
///
/// larder explain access tests the credentials for an image against its registry.
#[derive(Debug, Args)]
#[command(
    subcommand_negates_reqs = true,
    args_conflicts_with_subcommands = true,
    after_help = "Examples:
  larder explain busybox:1.36
  larder explain -o json sha256:0123...
  larder explain access registry.example/app:1 -f pod.yaml

Write access:latest for an image named access.

Exit code: 0 success, 1 image not found, 2 invalid input, 3 backend unreachable."
)]
pub(crate) struct ExplainArgs {
    #[command(subcommand)]
    pub(crate) what: Option<ExplainSubcommand>,

    /// Name or ID of the image.
    #[arg(required = true)]
    pub(crate) image: Option<ImageName>,

    /// Output format.
    #[arg(short, long, visible_alias = "format", value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,

    #[command(flatten)]
    pub(crate) limits: GcThresholdFlags,
}

/// Subcommands of `explain`.
#[derive(Debug, Subcommand)]
pub(crate) enum ExplainSubcommand {
    Access(ExplainAccessArgs),
}

/// List the credentials for an image and where they were found, and test them against each host that serves the image.
///
/// Finds credentials as larder ensure does and sends them to the registry in the same order, until one is accepted.
/// Each host gets one request for the manifest; nothing is fetched, and no password or token is printed.
///
/// The test always runs in this command, with the credentials of its user and the hosts of --certs-d, even if a daemon
/// or a runtime does the pulls. A daemon also uses the docker config of its own user.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder explain access registry.example/app:1
  larder explain access registry.example/app:1 -f pod.yaml
  larder explain access -o json registry.example/app:1 --secret regcred.yaml

Exit code: 0 accessible, 1 not accessible, 2 invalid input.")]
pub(crate) struct ExplainAccessArgs {
    /// The image, as a pod names it.
    #[arg(value_name = "IMAGE")]
    pub(crate) image: ImageName,

    /// A manifest with pods that use the image, a directory of manifests, or - for standard input; may be repeated.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) filename: Vec<PathBuf>,

    /// A manifest with pull secrets: for pods that name them, or without -f for the image itself; may be repeated.
    #[arg(long, value_name = "FILE")]
    pub(crate) secret: Vec<PathBuf>,

    /// Namespace of objects without one.
    #[arg(short, long, value_name = "NAMESPACE", default_value = "default")]
    pub(crate) namespace: String,

    /// Output format.
    #[arg(short, long, visible_alias = "format", value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,

    #[command(flatten)]
    pub(crate) tls: TlsFlags,

    #[command(flatten)]
    pub(crate) credentials: CredentialArgs,
}

/// Subcommands of garbage collection.
#[derive(Debug, Subcommand)]
pub(crate) enum GcSubcommand {
    Log(GcLogArgs),
}

/// List the images that GC removed: when, why, and how much space that freed.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder gc log
  larder gc log -o wide     with IDs
  larder gc log -o json

EXPECTED has the bytes in the plan, each shared layer counted once. FREED has the size of the removed files; where the
runtime does not report it, or sizes are estimated, the change of the whole filesystem, which includes what other processes
wrote and deleted.

The log has about the last 5000 removals.")]
pub(crate) struct GcLogArgs {
    /// Output format.
    #[arg(short, long, visible_alias = "format", value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,
}

/// Remove dangling images: unused images that have no tag, such as those whose tag moved to another image.
///
/// Asks first. Retains images that are in use, pinned, kept by a rule, or leased by larder lease or the prefetch list;
/// not those that were pulled just now.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder prune
  larder prune -a       every unused image, also what was pulled just now
  larder prune -a -n    what that would remove

Exit code: 0 success, 1 a removal failed or the answer was no, 2 invalid input,
3 backend unreachable.")]
pub(crate) struct PruneArgs {
    /// Remove every unused image, with and without tags, also those that were pulled just now; not those of keep rules
    /// and of larder lease.
    #[arg(short, long)]
    pub(crate) all: bool,

    /// Print what would be removed; remove nothing.
    #[arg(short = 'n', long)]
    pub(crate) dry_run: bool,

    /// Do not ask. Without a terminal, this flag is required.
    #[arg(short, long, visible_short_alias = 'y', visible_alias = "yes")]
    pub(crate) force: bool,
}

/// Add a keep rule, which excludes images from GC, or list the rules.
///
/// Without a rule, the rules are listed. larder rm removes images regardless of keep rules.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:
  larder keep 'registry.example/base/*'   all images whose name matches
  larder keep busybox:1.36 --ttl 168h     for a week after its last use
  larder keep 'app/*' --newest 3          the newest three of each repository

Write '*/ls' for images whose name is a subcommand."
)]
pub(crate) struct KeepArgs {
    #[command(subcommand)]
    pub(crate) action: Option<KeepSubcommand>,

    /// A name, in which * matches any text and ? one character, shortened as docker does; or a digest,
    /// sha256:...
    #[arg(value_name = "RULE", conflicts_with = "label")]
    pub(crate) rule: Option<String>,

    /// Images with this label, and with this value if given.
    #[arg(long, value_name = "KEY[=VALUE]")]
    pub(crate) label: Option<String>,

    /// Images of this type: image, model, chart, wasm, signature, sbom, attestation, or an artifact type.
    #[arg(long, value_name = "TYPE", conflicts_with_all = ["rule", "label"])]
    pub(crate) r#type: Option<String>,

    /// Only the newest N images of each repository that RULE matches.
    #[arg(long, value_name = "N", requires = "rule")]
    pub(crate) newest: Option<usize>,

    /// Only for this long after their last use, such as 12h or 7d.
    #[arg(long, value_name = "DURATION", value_parser = retention_time)]
    pub(crate) ttl: Option<Duration>,

    /// Only the most recently used images, up to this total size.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub(crate) budget: Option<u64>,

    /// Output format.
    #[arg(short, long, visible_alias = "format", value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,
}

/// A duration with a unit, greater than 0: a rule for no time keeps nothing.
fn retention_time(text: &str) -> Result<Duration, String> {
    match with_unit(text)? {
        Duration::ZERO => Err("must be greater than 0, such as 7d".to_owned()),
        time => Ok(time),
    }
}

/// Subcommands of `keep`, beside the addition of a rule.
#[derive(Debug, Subcommand)]
pub(crate) enum KeepSubcommand {
    #[command(visible_alias = "list")]
    Ls(KeepLsArgs),
    #[command(visible_alias = "remove")]
    Rm(UnkeepArgs),
}

/// List the keep rules.
#[derive(Debug, Args)]
pub(crate) struct KeepLsArgs {
    /// Output format.
    #[arg(short, long, visible_alias = "format", value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,
}

/// Remove keep rules.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder unkeep 1                  rule 1 of larder keep
  larder unkeep --label team=infra
  larder unkeep --all              all rules, even if their file is unreadable")]
pub(crate) struct UnkeepArgs {
    /// Number, name, digest or type of a rule.
    #[arg(value_name = "RULE", required_unless_present_any = ["label", "all"])]
    pub(crate) rule: Option<String>,

    /// The rule with this label.
    #[arg(long, value_name = "KEY[=VALUE]", conflicts_with = "rule")]
    pub(crate) label: Option<String>,

    /// All rules.
    #[arg(long, conflicts_with_all = ["rule", "label"])]
    pub(crate) all: bool,
}
