//! Arguments of the commands that require a daemon.

#![allow(clippy::doc_markdown, rustdoc::bare_urls, reason = "these comments are the text of --help")]

use std::time::Duration;

use clap::{Args, Subcommand};
use larder::reference::ImageName;
use larder_agent::quantity::parse_duration;

use crate::output::PrintFormat;

/// Show the daemon's process, backend, running pulls and last GC round.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder status
  larder status -w          and again every two seconds, until interrupted
  larder status -o json

Exit code: 0 backend available, 3 backend unavailable or no daemon.")]
pub(crate) struct StatusArgs {
    /// Show the status again every two seconds, until interrupted; with -o json one line each time.
    #[arg(short, long)]
    pub(crate) watch: bool,

    /// Output format; wide adds the running API calls.
    #[arg(short, long, visible_alias = "format", value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,
}

/// Show disk, images, pulls, GC and registries live in the terminal.
///
/// Asks a daemon if one serves these images, and otherwise has the images open itself, as other commands have; commands
/// that start later work through it. Views: images with what they share, pulls with their layers, GC rounds and
/// removals, registries with their budgets. ? lists the keys.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder top
  larder --backend cri top
  NO_COLOR=1 larder top

In builds with the feature \"top\", such as packages.
Exit code: 0 quit, 2 not a terminal, 3 backend unreachable, 130 interrupted.")]
pub(crate) struct TopArgs {}

/// Show the daemon's events about images, in the columns of kubectl get events.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder events                 the most recent events
  larder events -w              and new events as they happen
  larder events -w --since 120 -o json

With -o json each event is one line. Exit code: 0 success, 3 no daemon, or it ended.")]
pub(crate) struct EventsArgs {
    /// Wait for new events until interrupted.
    #[arg(short, long)]
    pub(crate) watch: bool,

    /// Only events of the last time, such as 10m or 1d, or from this number on; -o json shows numbers.
    #[arg(long, value_name = "DURATION|NUMBER", value_parser = EventsSince::parse)]
    pub(crate) since: Option<EventsSince>,

    /// Output format; wide adds numbers, dates and field paths.
    #[arg(short, long, visible_alias = "format", value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,
}

/// Where a list of events begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EventsSince {
    /// With the event of this number.
    Number(u64),
    /// So long ago.
    Ago(Duration),
}

impl EventsSince {
    pub(crate) fn parse(text: &str) -> Result<EventsSince, String> {
        text.parse().map(EventsSince::Number).or_else(|_| parse_duration(text).map(EventsSince::Ago))
    }
}

/// Reload the daemon's settings, as SIGHUP does.
///
/// All changes take effect, or none: if one requires a restart, the others wait for it. Invalid settings change
/// nothing.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder reload
  larder config --check && larder reload
  larder --root /var/lib/larder reload

Exit code: 0 all changes in effect, 1 none, as some require a restart, 2 invalid settings, 3 no daemon.")]
pub(crate) struct ReloadArgs {}

/// Exclude an image from GC for a limited time, or list the leases. larder rm still removes it.
///
/// In larder's own store a lease survives restarts; on a runtime's image it ends with the daemon at the latest.
#[derive(Debug, Args)]
#[command(
    subcommand_negates_reqs = true,
    args_conflicts_with_subcommands = true,
    after_help = "Examples:
  larder lease                      list the leases, with owner and end
  larder lease busybox:1.36 2h
  larder lease rm busybox:1.36      end the leases on an image

Write rm:latest for an image named rm.

Exit code: 0 success, 1 image not found, 2 invalid input, 3 backend unreachable."
)]
pub(crate) struct LeaseArgs {
    #[command(subcommand)]
    pub(crate) action: Option<LeaseSubcommand>,

    /// Name or ID of the image.
    #[arg(requires = "time")]
    pub(crate) image: Option<ImageName>,

    /// Duration from now, such as 90s, 2h or 7d; 0 ends the leases on the image.
    #[arg(value_name = "DURATION", value_parser = with_unit)]
    pub(crate) time: Option<Duration>,

    /// Output format of the list.
    #[arg(short, long, visible_alias = "format", value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,
}

/// Subcommands of `lease`, beside the addition of a lease.
#[derive(Debug, Subcommand)]
pub(crate) enum LeaseSubcommand {
    Rm(LeaseRmArgs),
    #[command(visible_alias = "list")]
    Ls(LeaseLsArgs),
}

/// End the leases on images. GC may remove them from then on.
///
/// Ends larder's own leases: of larder lease, and of ensures, pulls and loads. A running pull keeps what it has.
#[derive(Debug, Args)]
pub(crate) struct LeaseRmArgs {
    /// Names or IDs of images.
    #[arg(value_name = "IMAGE", required = true)]
    pub(crate) images: Vec<ImageName>,
}

/// List the leases on images, with owner and end.
#[derive(Debug, Args)]
pub(crate) struct LeaseLsArgs {
    /// Output format.
    #[arg(short, long, visible_alias = "format", value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,
}

/// A duration with a unit, or 0. Elsewhere a bare number is seconds; here hours are more likely meant.
pub(super) fn with_unit(text: &str) -> Result<Duration, String> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if is_number && text.bytes().any(|byte| byte != b'0') {
        return Err(format!("no unit: write {text}s, {text}m, {text}h or {text}d"));
    }
    parse_duration(text)
}
