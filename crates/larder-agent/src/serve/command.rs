//! Serves the control API to other commands of the same user while a command has the images open.
//!
//! Promises: a second command joins the first instead of failing; calls that joined end before the first command does,
//! but for pulls that are [handed over](JoinedPulls::HandOver), and a joined command without a call holds it up no
//! longer than a moment; the socket has mode 0600, and is gone when nothing serves it any more.

use std::future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use larder_cri::short_path;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time;

use super::connections::Connections;
use super::http_handler::HttpHandler;
use super::router::{Router, is_ensure};
use super::socket::{BoundSocket, SocketOptions};
use crate::client::{self, Client};
use crate::control::{self, ControlApi, ServingProcess};
use crate::error::Error;
use crate::node::Node;

/// The longest path that a socket can be bound to, less what it is called while it is made.
const MAX_PATH: usize = 90;

/// After how long the wait for calls of joined commands is reported.
const REPORT_WAIT_AFTER: Duration = Duration::from_secs(2);

/// A node that a command has open.
pub struct CommandServer {
    node: Arc<Node>,
    service: ControlApi,
    connections: Connections,
    stop: watch::Sender<bool>,
    serving: Option<JoinHandle<()>>,
}

impl CommandServer {
    /// Serves the node to other commands from now on, on the runtime of the caller. Where that is not possible, or the
    /// node has no state that others could want, it is this command's alone.
    pub fn start(node: Node) -> CommandServer {
        let node = Arc::new(node);
        let (stop, stopped) = watch::channel(false);
        let connections = Connections::default();
        let (process, shared) = (ServingProcess::Command, connections.clone());
        let service = ControlApi::new(Arc::clone(&node), process, shared, stopped.clone());
        let mut server = CommandServer { node, service, connections, stop, serving: None };
        match server.listen(stopped) {
            Ok(serving) => server.serving = serving,
            Err(error) => tracing::debug!("cannot serve other commands: {error}"),
        }
        server
    }

    fn listen(&self, stopped: watch::Receiver<bool>) -> Result<Option<JoinHandle<()>>, Error> {
        let node = &self.node;
        let Some(handle) = node.storage.handle().filter(|_| node.state.is_locked()) else { return Ok(None) };
        let socket = client::command_socket(&handle.target(), &node.state);
        let (path, directory) =
            short_path(&socket, MAX_PATH).map_err(|error| Error::failed(error.to_string()))?;
        let BoundSocket { listener, own, .. } =
            BoundSocket::bind(&SocketOptions { socket: path, mode: 0o600, group: None })?;
        let listener = UnixListener::from_std(listener).map_err(|error| Error::failed(error.to_string()))?;
        let plain = HttpHandler::new(Arc::clone(node), self.connections.clone());
        let router = Router::new(node, plain, control::service(self.service.clone()));
        let connections = self.connections.clone();
        Ok(Some(tokio::spawn(async move {
            connections.serve_joined(listener, router, stopped, move || drop((own, directory))).await;
        })))
    }

    /// A client of the node, which calls the service without a socket.
    pub fn client(&self) -> Client {
        Client::in_process(self.service.clone())
    }

    /// The node.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// Returns a function that counts the other commands with a call in progress in this one.
    pub fn joined(&self) -> impl Fn() -> usize + Send + Sync + use<> {
        let connections = self.connections.clone();
        move || connections.busy()
    }

    /// Ends the server: calls of joined commands finish, as `pulls` says, and state for later processes is flushed to
    /// disk. `waiting` is called with the number of other commands whose calls take longer than `REPORT_WAIT_AFTER`.
    pub async fn close(self, pulls: JoinedPulls, waiting: impl FnOnce(usize)) {
        self.stop.send_replace(true);
        if let Some(mut serving) = self.serving {
            let handed_over = async {
                match pulls {
                    JoinedPulls::Finish => future::pending().await,
                    JoinedPulls::HandOver => self.connections.until_all_call(is_ensure).await,
                }
            };
            let mut ended = pin!(async {
                tokio::select! {
                    _ = &mut serving => {}
                    () = handed_over => {
                        serving.abort();
                        let _ = serving.await;
                    }
                }
            });
            if time::timeout(REPORT_WAIT_AFTER, &mut ended).await.is_err() {
                let busy = self.connections.busy();
                if busy > 0 {
                    waiting(busy);
                }
                ended.await;
            }
        }
        self.node.flush().await;
    }
}

/// How pulls of joined commands end when the command does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JoinedPulls {
    /// They finish first.
    Finish,
    /// They end at once: the joined commands continue them in a process of their own.
    HandOver,
}
