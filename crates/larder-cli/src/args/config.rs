//! What can be typed after `config`.

#![allow(clippy::doc_markdown, rustdoc::bare_urls, reason = "these comments are the text of --help")]

use std::path::PathBuf;

use clap::Args;

use super::settings::SettingFlags;
use crate::output::DataFormat;

/// Show the settings that larder serve would run with, and where each came from.
///
/// Prints a file with all settings, each with a comment: default, file and line, flag or variable. The file can be
/// given to --config again. The stronger overrides the weaker: kubelet's file, larder's file, LARDER_BACKEND, flags.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder config                                        what is in force, and why
  larder config > config.yaml                          a file to begin with
  larder config --kubelet-config /var/lib/kubelet/config.yaml
  larder config --check /etc/larder/config.yaml        tell all mistakes, and print nothing else
  larder config --reference                            all settings explained, as Markdown

Exit code: 0 the settings are sound, 2 they are not; each mistake is told with file, line and key.")]
pub(crate) struct ConfigArgs {
    #[command(flatten)]
    pub(crate) flags: SettingFlags,

    /// Only check this file, and say whether it can be used.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["config", "reference", "output"])]
    pub(crate) check: Option<PathBuf>,

    /// Print the reference page of all settings.
    #[arg(long, conflicts_with = "output")]
    pub(crate) reference: bool,

    /// What results look like.
    #[arg(short, long, value_enum, default_value = "yaml", value_name = "FORMAT")]
    pub(crate) output: DataFormat,
}
