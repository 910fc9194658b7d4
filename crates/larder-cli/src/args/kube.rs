//! Arguments of `kube`.

#![allow(clippy::doc_markdown, rustdoc::bare_urls, reason = "these comments are the text of --help")]

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::output::PrintFormat;

/// Check what larder needs of a Kubernetes cluster.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder kube check
  larder kube check -o json
  kubectl exec -n larder-system ds/larder -- larder kube check")]
pub(crate) struct KubeArgs {
    #[command(subcommand)]
    pub(crate) command: KubeSubcommand,
}

/// The commands of `larder kube`.
#[derive(Debug, Subcommand)]
pub(crate) enum KubeSubcommand {
    Check(KubeCheckArgs),
}

/// Say what is missing on the cluster: API server, clock, node, custom resources, rules, credentials.
///
/// Uses the identities of the settings kubernetes.*, as the daemon does. Changes nothing.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder kube check
  larder kube check -o json

Exit code: 0 nothing is missing; 1 a part is; 2 the settings are invalid.")]
pub(crate) struct KubeCheckArgs {
    /// Settings file of the daemon [env: LARDER_CONFIG] [default: /etc/larder/config.yaml, without root
    /// ~/.config/larder/config.yaml, if it exists].
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// Output format.
    #[arg(short, long, visible_alias = "format", value_enum, default_value_t, value_name = "FORMAT")]
    pub(crate) output: PrintFormat,
}
