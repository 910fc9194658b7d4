//! Arguments of `containerd`.

#![allow(clippy::doc_markdown, rustdoc::bare_urls, reason = "these comments are the text of --help")]

use std::path::PathBuf;

use clap::{Args, Subcommand};
use larder_containerd::configuration::DEFAULT_CONFIG;

/// Set up a containerd to run containers from larder's store.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder containerd configure             print the change of its configuration
  larder containerd configure --apply     write it
  larder containerd configure --check     say whether it took effect")]
pub(crate) struct ContainerdArgs {
    #[command(subcommand)]
    pub(crate) command: ContainerdSubcommand,
}

/// The commands of `larder containerd`.
#[derive(Debug, Subcommand)]
pub(crate) enum ContainerdSubcommand {
    Configure(ConfigureArgs),
}

/// Print, make, check or take back the change of containerd's configuration.
///
/// Prints the change for the containerd that runs or is installed, and writes nothing without --apply or --undo. Never
/// restarts containerd.
#[allow(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder containerd configure             print the change
  larder containerd configure --apply     write it, after a copy of the file
  larder containerd configure --check     say whether it took effect
  larder containerd configure --undo      take it back

Exit code: 0 success, or with --check all parts are ok; 1 a part is not, or the change is refused; 2 containerd's configuration is invalid; 3 no
containerd.")]
pub(crate) struct ConfigureArgs {
    /// Print the change only; with --undo, what it would change [default].
    #[arg(long, conflicts_with_all = ["apply", "check"])]
    pub(crate) dry_run: bool,

    /// Write the change, after a copy of each changed file beside it.
    #[arg(long, conflicts_with_all = ["check", "undo"])]
    pub(crate) apply: bool,

    /// Check that containerd and kubelet use larder.
    #[arg(long, conflicts_with = "undo")]
    pub(crate) check: bool,

    /// Take the change back; refused while containerd has images or containers that only larder's store can run.
    #[arg(long)]
    pub(crate) undo: bool,

    /// With --undo: also with such images and containers.
    #[arg(long, requires = "undo")]
    pub(crate) force: bool,

    /// containerd's configuration file.
    #[arg(long, value_name = "FILE", default_value = DEFAULT_CONFIG)]
    pub(crate) config: PathBuf,

    /// Program or socket of containerd [default: containerd.socket of the settings, /run/containerd/containerd.sock,
    /// containerd on $PATH].
    #[arg(long, value_name = "PATH")]
    pub(crate) containerd: Option<String>,

    /// kubelet's configuration file, for --check.
    #[arg(long, value_name = "FILE", default_value = "/var/lib/kubelet/config.yaml")]
    pub(crate) kubelet_config: PathBuf,
}
