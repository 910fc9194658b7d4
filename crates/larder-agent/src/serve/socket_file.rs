//! A small file beside the state of the daemon with the path of its socket, by which commands find the daemon.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use larder::files;
use larder::hint::Hint;
use tokio::task::spawn_blocking;
use tokio::time;

use crate::client;
use crate::error::Error;
use crate::node::Node;

/// How often a file that found no disk space is written again.
const RETRY: Duration = Duration::from_secs(2);

/// The file; removed with the daemon. That of a dead daemon is replaced, and has no effect until then: no process
/// listens on its socket.
pub(super) struct SocketPathFile {
    file: PathBuf,
    text: String,
    is_written: bool,
}

impl SocketPathFile {
    /// Writes it, unless the socket has no path. On a full disk, it is not written yet.
    pub(super) fn leave(node: &Node, socket: Option<&Path>) -> Result<Option<SocketPathFile>, Error> {
        let Some(socket) = socket else { return Ok(None) };
        let file = match node.storage.store() {
            Some(store) => client::daemon_file(store.store().root()),
            None => node.state.daemon(),
        };
        let written = std::path::absolute(socket).and_then(|socket| {
            let text = format!("{}\n", socket.display());
            let is_written = write(&file, &text)?;
            Ok(SocketPathFile { file, text, is_written })
        });
        match written {
            Ok(left) => {
                if !left.is_written {
                    let socket = socket.display();
                    tracing::warn!(
                        "no disk space to record the socket {socket}: commands do not find this daemon until there is some"
                    );
                }
                Ok(Some(left))
            }
            Err(error) => Err(Error::failed(format!("cannot record the daemon's socket: {error}")).hint(
                Hint::from("run as the owner of the directory, or name another: ")
                    .setting("root", "DIR")
                    .text(" or ")
                    .setting("state", "DIR"),
            )),
        }
    }

    /// Writes it as soon as there is disk space, if there was none.
    pub(super) async fn write_when_possible(&mut self) {
        while !self.is_written {
            time::sleep(RETRY).await;
            let (file, text) = (self.file.clone(), self.text.clone());
            self.is_written = match spawn_blocking(move || write(&file, &text)).await {
                Ok(Ok(is_written)) => is_written,
                Ok(Err(error)) => {
                    tracing::warn!("cannot record the socket, so commands do not find this daemon: {error}");
                    return;
                }
                Err(_) => return, // the process ends
            };
            if self.is_written {
                tracing::info!("recorded the socket: commands find this daemon");
            }
        }
    }
}

/// Writes the file; false on a full disk, where the daemon must start as well, to run GC.
fn write(file: &Path, text: &str) -> io::Result<bool> {
    match files::replace(file, text.as_bytes()) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => Ok(false),
        Err(error) => Err(error),
    }
}

impl Drop for SocketPathFile {
    fn drop(&mut self) {
        if self.is_written {
            let _ = fs_err::remove_file(&self.file);
        }
    }
}
