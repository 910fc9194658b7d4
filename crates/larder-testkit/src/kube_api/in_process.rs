//! The server inside the test's process.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard};

use serde_json::{Value, json};
use tokio::sync::watch;

use super::resources;
use super::serve;
use super::state::{ApiState, SharedState};
use super::thread::ServingThread;

/// Objects, users and faults, and the thread that serves them.
#[derive(Debug)]
pub(super) struct InProcess {
    shared: Arc<SharedState>,
    address: SocketAddr,
    serving: Option<ServingThread>,
}

impl InProcess {
    pub(super) fn start() -> InProcess {
        let state = ApiState { resources: resources::built_in(), ..ApiState::default() };
        let shared = Arc::new(SharedState { state: Mutex::new(state), changed: watch::Sender::new((0, 0)) });
        let (serving, address) = serve_at(&shared, (Ipv4Addr::LOCALHOST, 0).into());
        let api = InProcess { shared, address, serving: Some(serving) };
        for name in ["default", "kube-system"] {
            _ = api.administer("POST", "/api/v1/namespaces", &json!({ "metadata": { "name": name } }));
        }
        api
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(super) fn state(&self) -> MutexGuard<'_, ApiState> {
        self.shared.lock()
    }

    pub(super) fn stop(&mut self) {
        self.serving = None;
    }

    pub(super) fn restart(&mut self) {
        self.stop();
        self.serving = Some(serve_at(&self.shared, self.address).0);
    }

    pub(super) fn send_bookmarks(&self) {
        self.shared.changed.send_modify(|(_, bookmarks)| *bookmarks += 1);
    }

    /// A request of the test itself; a text says why it was refused.
    pub(super) fn administer(&self, method: &str, path: &str, body: &Value) -> Result<Value, String> {
        let answer = serve::administer(&self.shared, method, path, body);
        self.shared.notify();
        answer.map_err(|error| error.message)
    }
}

fn serve_at(shared: &Arc<SharedState>, address: SocketAddr) -> (ServingThread, SocketAddr) {
    let shared = Arc::clone(shared);
    ServingThread::start(address, async move |listener| serve::serve(listener, &shared).await)
}
