//! A gate in front of the socket of a runtime or an engine: it holds removals of images, and lets all else pass.

use std::error::Error;
use std::os::unix::net::UnixListener as StdListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, Version};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;

/// The proxy. Dropping it ends every connection.
pub(super) struct RuntimeGate {
    socket: PathBuf,
    state: watch::Sender<HoldState>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Clone, Copy, Default)]
struct HoldState {
    holds: bool,
    /// Removals that are held now.
    held: usize,
    ends: bool,
}

impl RuntimeGate {
    /// Listens on `socket`, in front of `upstream`.
    pub(super) fn before(upstream: PathBuf, socket: PathBuf) -> RuntimeGate {
        let listener = StdListener::bind(&socket).unwrap();
        listener.set_nonblocking(true).unwrap();
        let state = watch::Sender::default();
        let shared = state.clone();
        let thread = thread::spawn(move || serve(listener, &upstream.into(), &shared));
        RuntimeGate { socket, state, thread: Some(thread) }
    }

    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// From now on, removals are held.
    pub(super) fn hold(&self) {
        self.state.send_modify(|state| state.holds = true);
    }

    /// How many removals are held.
    pub(super) fn held(&self) -> usize {
        self.state.borrow().held
    }

    pub(super) fn release(&self) {
        self.state.send_modify(|state| state.holds = false);
    }
}

impl Drop for RuntimeGate {
    fn drop(&mut self) {
        self.state.send_modify(|state| state.ends = true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Serves until the gate is dropped; then every connection is dropped with the runtime.
fn serve(listener: StdListener, upstream: &Arc<Path>, state: &watch::Sender<HoldState>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let listener = UnixListener::from_std(listener).unwrap();
        let mut watched = state.subscribe();
        loop {
            let stream = tokio::select! {
                accepted = listener.accept() => accepted.unwrap().0,
                _ = watched.wait_for(|state| state.ends) => return,
            };
            let (upstream, state) = (upstream.clone(), state.clone());
            let pass = service_fn(move |request| pass(request, upstream.clone(), state.clone()));
            tokio::spawn(async move {
                // A connection that breaks is noticed at both ends.
                let serving = auto::Builder::new(TokioExecutor::new());
                let _ = serving.serve_connection(TokioIo::new(stream), pass).await;
            });
        }
    });
}

async fn pass(
    request: Request<Incoming>,
    upstream: Arc<Path>,
    state: watch::Sender<HoldState>,
) -> Result<Response<Incoming>, Box<dyn Error + Send + Sync>> {
    if is_removal(&request) && state.borrow().holds {
        state.send_modify(|state| state.held += 1);
        state.subscribe().wait_for(|state| !state.holds).await?;
        state.send_modify(|state| state.held -= 1);
    }
    let stream = TokioIo::new(UnixStream::connect(&upstream).await?);
    if request.version() == Version::HTTP_2 {
        let (mut sender, connection) = http2::handshake(TokioExecutor::new(), stream).await?;
        tokio::spawn(connection);
        return Ok(sender.send_request(request).await?);
    }
    let (mut sender, connection) = http1::handshake(stream).await?;
    tokio::spawn(connection);
    Ok(sender.send_request(request).await?)
}

/// Over CRI, or by an engine's own API.
fn is_removal(request: &Request<Incoming>) -> bool {
    let path = request.uri().path();
    path.ends_with("ImageService/RemoveImage")
        || (request.method() == Method::DELETE && path.contains("/images/"))
}
