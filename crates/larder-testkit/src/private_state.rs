//! Checks that tests leave nothing in the machine's default state directories.

use std::path::{Path, PathBuf};

/// Default directory of runtime state when larder runs as root.
const USUAL: &str = "/var/lib/larder/collect/runtimes";

/// Call it at the end of a test that runs larder on a runtime.
///
/// # Panics
///
/// If the state of the runtime with this socket is in the machine's default directory, unless the test is already
/// panicking.
#[track_caller]
pub fn assert_private(socket: &Path) {
    let usual = usual_state(socket);
    assert!(
        std::thread::panicking() || !usual.exists(),
        "name a directory with --state: {}",
        usual.display()
    );
}

fn usual_state(socket: &Path) -> PathBuf {
    let socket = socket.to_string_lossy();
    Path::new(USUAL).join(socket.trim_matches('/').replace('/', "-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_directory_is_named_after_the_socket() {
        let dir = usual_state(Path::new("/tmp/fake-cri-1/cri.sock"));
        assert_eq!(dir, Path::new("/var/lib/larder/collect/runtimes/tmp-fake-cri-1-cri.sock"));
    }
}
