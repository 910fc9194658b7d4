//! What can be typed after commands that only a daemon answers.

#![allow(clippy::doc_markdown, rustdoc::bare_urls, reason = "these comments are the text of --help")]

use std::time::Duration;

use clap::Args;
use larder::reference::ImageName;
use larder_agent::quantity::parse_duration;

use crate::output::PrintFormat;

/// Show what the daemon is, does, and is connected to.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder status
  larder status -o json

Exit code: 0 it runs and its backend answers, 3 its backend does not answer, or no daemon runs here.")]
pub(crate) struct StatusArgs {
    /// What results look like; wide shows all calls under way.
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,
}

/// Show what happened to images: events of the daemon, in the columns of kubectl get events.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder events                 those that the daemon still knows
  larder events -w              and those that come
  larder events -w --since 120 -o json

With -o json each event is one line. Exit code: 0 told, 3 no daemon runs here, or it ended.")]
pub(crate) struct EventsArgs {
    /// Go on with events that come, until interrupted.
    #[arg(short, long)]
    pub(crate) watch: bool,

    /// Begin with the event of this number; -o json shows numbers.
    #[arg(long, value_name = "NUMBER", default_value_t = 0, hide_default_value = true)]
    pub(crate) since: u64,

    /// What results look like; wide shows numbers, dates and parts of pods.
    #[arg(short, long, value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,
}

/// Let the daemon read its configuration again, as SIGHUP does.
///
/// What cannot change while it runs is named. A configuration with mistakes changes nothing.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder reload

Exit code: 0 all that changed is in force, 1 some of it needs a restart, 2 the configuration has mistakes, 3 no daemon.")]
pub(crate) struct ReloadArgs {}

/// Keep an image from collection for a while. larder rm still removes it.
///
/// In larder's own store the lease outlives restarts; on a runtime's image it ends with the daemon at the latest.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder lease busybox:1.36 2h
  larder lease busybox:1.36 0       the lease ends now

Exit code: 0 leased, 1 no such image, 2 bad input, 3 backend unreachable.")]
pub(crate) struct LeaseArgs {
    /// Name or id of the image.
    pub(crate) image: ImageName,

    /// For how long from now, such as 90s, 2h or 168h; 0 ends the lease.
    #[arg(value_name = "DURATION", value_parser = parse_duration)]
    pub(crate) time: Duration,
}
