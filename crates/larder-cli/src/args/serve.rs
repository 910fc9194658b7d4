//! Arguments of the daemon.

use std::path::PathBuf;

use clap::Args;

/// Keep the images of this node: the daemon, which kubelet, crictl and larder's other commands talk to.
///
/// Works on larder's own store, or with --backend on the images of a runtime. Collects when the disk fills up, and
/// serves everything on one Unix socket. Runs until SIGTERM or SIGINT; then what is under way may end.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  larder serve
  larder serve --backend unix:///run/containerd/containerd.sock
  crictl --image-endpoint unix:///run/larder/larder.sock images

Exit code: 0 stopped by a signal, 1 another larder runs here, 2 bad input, 3 the store cannot be opened.")]
pub(crate) struct ServeArgs {
    /// The socket to serve on [default: /run/larder/larder.sock, for others than root
    /// $XDG_RUNTIME_DIR/larder/larder.sock; with --root, larder.sock in that folder].
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
}
