//! Arguments of the daemon.

use clap::Args;

use super::settings::SettingFlags;

/// Keep the images of this node: the daemon, which kubelet, crictl and larder's other commands talk to.
///
/// Works on larder's own store, or with --backend on the images of a runtime. Collects when the disk fills up, and
/// serves everything on one Unix socket. Runs until SIGTERM or SIGINT; then what is under way may end.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder serve
  larder serve --backend unix:///run/containerd/containerd.sock
  crictl --image-endpoint unix:///run/larder/larder.sock images

Exit code: 0 stopped by a signal, 1 the socket or an address cannot be had, 2 bad input, 3 the store cannot be opened:
also if another larder has it.")]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) flags: SettingFlags,
}
