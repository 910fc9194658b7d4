//! Arguments of the daemon.

use clap::Args;

use super::settings::SettingFlags;

/// Run the daemon, which serves kubelet, crictl and larder's other commands.
///
/// Manages the images in larder's own store, or with --backend those of a runtime. Runs GC when disk usage reaches the
/// high threshold, and serves all APIs on one Unix socket. Runs until SIGTERM or SIGINT, then waits for running
/// requests.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder serve
  larder serve --backend unix:///run/containerd/containerd.sock
  crictl --image-endpoint unix:///run/larder/larder.sock images

Exit code: 0 stopped by a signal, 1 cannot listen on the socket or an address, 2 invalid input, 3 cannot open the store, for
example because another larder process uses it.")]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) flags: SettingFlags,
}
