//! Arguments of `bundle`.

#![allow(clippy::doc_markdown, rustdoc::bare_urls, reason = "these comments are the text of --help")]

use std::path::PathBuf;
use std::time::Duration;

use super::daemon::with_unit;
use clap::Args;

/// Write one archive about this node for a bug report: settings, status, GC plan and journal, events, metrics, log,
/// versions.
///
/// Contains no credentials: files that may hold some are not read, and secrets in texts are replaced by ****. README.md
/// in the archive lists the files and what is left out. A part that fails is a file with its error. Works without a
/// daemon, and ends within about a minute if one hangs.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder bundle
  larder bundle -o /tmp/larder.tar.gz
  larder bundle --since 2h           with two hours of the log

Exit code: 0 written, even if parts failed; 1 not written; 2 no directory for FILE, or FILE is one.")]
pub(crate) struct BundleArgs {
    /// The file to write, which must not exist; - is the standard output. FILE.tar is a plain archive, any other is
    /// compressed with gzip.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Time span of the unit's log to include, such as 2h.
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = with_unit)]
    pub(crate) since: Duration,
}
