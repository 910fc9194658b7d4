//! A small file beside the state of the daemon with the path of its socket, by which commands find the daemon.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use larder::files;
use larder::hint::Hint;

use crate::client;
use crate::error::Error;
use crate::node::Node;

/// The file; removed with the daemon. That of a dead daemon is replaced, and has no effect until then: no process
/// listens on its socket.
pub(super) struct SocketPathFile(PathBuf);

impl SocketPathFile {
    /// Writes it, unless the socket has no path.
    pub(super) fn leave(node: &Node, socket: Option<&Path>) -> Result<Option<SocketPathFile>, Error> {
        let Some(socket) = socket else { return Ok(None) };
        let file = match node.storage.store() {
            Some(store) => client::daemon_file(store.store().root()),
            None => node.state.daemon(),
        };
        let written = std::path::absolute(socket)
            .and_then(|socket| files::replace(&file, format!("{}\n", socket.display()).as_bytes()));
        match written {
            Ok(()) => Ok(Some(SocketPathFile(file))),
            // The daemon must start on a full disk, to run GC.
            Err(error) if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
                let socket = socket.display();
                tracing::warn!(
                    "cannot record the socket {socket}, so commands do not find this daemon: {error}"
                );
                Ok(None)
            }
            Err(error) => Err(Error::failed(format!("cannot record the daemon's socket: {error}")).hint(
                Hint::from("run as the owner of the directory, or name another: ")
                    .setting("root", "DIR")
                    .text(" or ")
                    .setting("state", "DIR"),
            )),
        }
    }
}

impl Drop for SocketPathFile {
    fn drop(&mut self) {
        let _ = fs_err::remove_file(&self.0);
    }
}
