//! Threads that serve a port.

use std::net::SocketAddr;
use std::thread::JoinHandle;

use tokio::net::TcpListener;
use tokio::sync::oneshot;

/// A thread with a runtime of its own. Dropping it closes its port and all connections.
#[derive(Debug)]
pub(super) struct ServingThread {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl ServingThread {
    /// Binds the address, and returns it as it is bound.
    pub(super) fn start(
        address: SocketAddr,
        serve: impl AsyncFnOnce(TcpListener) + Send + 'static,
    ) -> (ServingThread, SocketAddr) {
        let (stop, stopped) = oneshot::channel();
        let (ready, bound) = std::sync::mpsc::channel();
        let run = move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let listener = TcpListener::bind(address).await.expect("a free port");
                _ = ready.send(listener.local_addr().expect("an address"));
                tokio::select! {
                    () = serve(listener) => {}
                    _ = stopped => {}
                }
            });
        };
        let thread = std::thread::Builder::new().name("kube-api".into()).spawn(run).expect("a thread");
        let bound = bound.recv().expect("the server starts");
        (ServingThread { stop: Some(stop), thread: Some(thread) }, bound)
    }
}

impl Drop for ServingThread {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            _ = thread.join();
        }
    }
}
