//! Arguments of `config`.

#![allow(clippy::doc_markdown, rustdoc::bare_urls, reason = "these comments are the text of --help")]
#![allow(clippy::option_option, reason = "a flag whose value may be left out")]

use std::path::PathBuf;

use clap::Args;

use super::settings::SettingFlags;
use crate::output::DataFormat;

/// Print the effective settings of larder serve, and the source of each.
///
/// Prints a settings file in which a comment names the source of each setting: default, file and line, flag or
/// variable. Later sources override earlier ones: kubelet's file, larder's file, LARDER_BACKEND, flags.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder config > config.yaml                     a file to start from
  larder config --check /etc/larder/config.yaml   report all errors in a file
  larder config --reference                       all settings, as Markdown

Exit code: 0 valid settings, 2 invalid settings; each error has file, line and key.")]
pub(crate) struct ConfigArgs {
    #[command(flatten)]
    pub(crate) flags: SettingFlags,

    /// Only check this settings file; without FILE, all settings with their sources.
    #[arg(long, value_name = "FILE", num_args = 0..=1, conflicts_with_all = ["reference", "output"])]
    pub(crate) check: Option<Option<PathBuf>>,

    /// Print the reference page of all settings.
    #[arg(long, conflicts_with = "output")]
    pub(crate) reference: bool,

    /// Output format.
    #[arg(short, long, visible_alias = "format", value_enum, default_value = "yaml", value_name = "FORMAT")]
    pub(crate) output: DataFormat,
}
