//! Where images live, as settings name it.

use std::path::{Path, PathBuf};

/// larder's own store, as a backend's name.
pub const STORE: &str = "store";
/// The container runtime of this node, as a backend's name.
pub const CRI: &str = "cri";
/// The Docker Engine that Docker's own client would use; with `://` an address follows.
pub const DOCKER: &str = "docker";

/// The Podman service that Podman's own client would use, which speaks Docker's API.
pub const PODMAN: &str = "podman";

/// Where images live.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackendTarget {
    /// In larder's own store in this directory.
    Store(PathBuf),
    /// In the runtime or engine at this endpoint.
    Runtime(String),
}

/// Whether a backend's name means a Docker Engine, or Podman, which speaks the same API.
pub fn is_docker(text: &str) -> bool {
    matches!(text, DOCKER | PODMAN) || text.starts_with("docker://")
}

/// The backend that a misspelt name probably means. A text with a path or of an existing file is a socket.
pub fn nearest_backend(text: &str) -> Option<&'static str> {
    let is_word = !text.contains(['/', ':', '.']) && !Path::new(text).exists();
    larder::suggestions::nearest(text, [STORE, CRI, DOCKER, PODMAN]).filter(|_| is_word)
}
