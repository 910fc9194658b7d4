//! A Kubernetes API server inside the test's process: what a client of larder's kind needs of it.
//!
//! It stores any object as JSON and answers get, list (with selectors), watch (with bookmarks, initial events and 410 for
//! forgotten versions), create, update, merge patch and delete, the status of objects, and requests for tokens of service
//! accounts. Definitions of custom resources take effect; their schemas and CEL rules are not checked, nor are objects
//! validated or defaulted: for that, the same tests run against a real server.
//!
//! It serves on its own thread: a test may block its thread or pause its clock.

mod authorization;
mod fault;
mod objects;
mod resources;
mod response;
mod selectors;
mod serve;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};

pub use authorization::PolicyRule;
pub use fault::ApiFault;

use authorization::Authorization;
use fault::InjectedFault;
use objects::Objects;
use resources::Resource;

/// A running API server. Dropping it closes its port and all connections.
#[derive(Debug)]
pub struct KubeApi {
    shared: Arc<SharedState>,
    address: SocketAddr,
    serving: Option<ServingThread>,
}

#[derive(Debug)]
struct ServingThread {
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

/// A request that was answered, or is being answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiRequest {
    /// `GET`, and so on.
    pub method: String,
    /// With the query.
    pub path: String,
    /// The token of its `Authorization`; empty without one.
    pub token: String,
    /// 0 while it is not answered.
    pub status: u16,
}

#[derive(Debug)]
struct SharedState {
    state: Mutex<ApiState>,
    /// The latest version, and how many bookmarks were requested: watches wake up.
    changed: watch::Sender<(u64, u64)>,
}

#[derive(Debug, Default)]
struct ApiState {
    objects: Objects,
    resources: Vec<Resource>,
    authorization: Authorization,
    faults: Vec<InjectedFault>,
    log: Vec<ApiRequest>,
    issued_tokens: u64,
}

impl SharedState {
    fn lock(&self) -> MutexGuard<'_, ApiState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets watches see what changed.
    fn notify(&self) {
        let version = self.lock().objects.version();
        self.changed.send_if_modified(|(known, _)| std::mem::replace(known, version) != version);
    }
}

impl KubeApi {
    /// Starts a server with the namespace `default` on a free port of 127.0.0.1.
    ///
    /// # Panics
    /// When the machine has no free port or thread.
    pub fn start() -> KubeApi {
        let state = ApiState { resources: resources::built_in(), ..ApiState::default() };
        let shared = Arc::new(SharedState { state: Mutex::new(state), changed: watch::Sender::new((0, 0)) });
        let (serving, address) = ServingThread::start(&shared, (Ipv4Addr::LOCALHOST, 0).into());
        KubeApi { shared, address, serving: Some(serving) }
    }

    /// `http://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Closes the port and all connections; the objects stay.
    pub fn stop(&mut self) {
        if let Some(serving) = self.serving.take() {
            serving.stop();
        }
    }

    /// Serves again, at the same address.
    ///
    /// # Panics
    /// When the port was taken.
    pub fn restart(&mut self) {
        self.stop();
        self.serving = Some(ServingThread::start(&self.shared, self.address).0);
    }

    /// The next `times` requests whose `METHOD PATH` contains `part` fail like this.
    pub fn fault(&self, part: &str, times: usize, fault: ApiFault) {
        self.shared.lock().faults.push(InjectedFault::new(part, times, fault));
    }

    /// From now on requests need a token; this one is of a user with these rules.
    pub fn authorize(&self, token: &str, user: &str, rules: Vec<PolicyRule>) {
        self.shared.lock().authorization.add(token, user, rules);
    }

    /// A token is no longer valid.
    pub fn revoke(&self, token: &str) {
        self.shared.lock().authorization.revoke(token);
    }

    /// Rules of a token that have allowed nothing so far.
    pub fn unused_rules(&self, token: &str) -> Vec<PolicyRule> {
        self.shared.lock().authorization.unused(token)
    }

    /// Forgets the history: a watch from an earlier version gets 410.
    pub fn compact(&self) {
        self.shared.lock().objects.compact();
    }

    /// Sends a bookmark to every watch that allows them.
    pub fn send_bookmarks(&self) {
        self.shared.changed.send_modify(|(_, bookmarks)| *bookmarks += 1);
    }

    /// Creates an object in the collection at this path, as a request would; the object as it is stored.
    ///
    /// # Panics
    /// If the server refuses it.
    pub fn create(&self, path: &str, object: &Value) -> Value {
        self.administer("POST", path, object)
    }

    /// Replaces fields of the object at this path, or of its status, by a merge patch.
    ///
    /// # Panics
    /// If the server refuses it.
    pub fn patch(&self, path: &str, fields: &Value) -> Value {
        self.administer("PATCH", path, fields)
    }

    /// Deletes the object at this path.
    ///
    /// # Panics
    /// If there is none.
    pub fn delete(&self, path: &str) {
        self.administer("DELETE", path, &Value::Null);
    }

    /// The object or the list at this path.
    ///
    /// # Panics
    /// If there is none.
    pub fn get(&self, path: &str) -> Value {
        self.administer("GET", path, &Value::Null)
    }

    /// A request without a user, which is neither logged nor refused: the test looks and changes by itself.
    fn administer(&self, method: &str, path: &str, body: &Value) -> Value {
        let answer = serve::administer(&self.shared, method, path, body);
        self.shared.notify();
        answer.unwrap_or_else(|error| panic!("{method} {path}: {}", error.message))
    }

    /// The requests so far.
    pub fn requests(&self) -> Vec<ApiRequest> {
        self.shared.lock().log.clone()
    }
}

impl Drop for KubeApi {
    fn drop(&mut self) {
        self.stop();
    }
}

impl ServingThread {
    fn start(shared: &Arc<SharedState>, address: SocketAddr) -> (ServingThread, SocketAddr) {
        let (stop, stopped) = oneshot::channel();
        let (ready, bound) = std::sync::mpsc::channel();
        let shared = Arc::clone(shared);
        let serve = move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let listener = TcpListener::bind(address).await.expect("a free port");
                _ = ready.send(listener.local_addr().expect("an address"));
                tokio::select! {
                    () = serve::serve(listener, &shared) => {}
                    _ = stopped => {}
                }
            });
        };
        let thread = std::thread::Builder::new().name("kube-api".into()).spawn(serve).expect("a thread");
        let bound = bound.recv().expect("the server starts");
        (ServingThread { stop, thread }, bound)
    }

    fn stop(self) {
        _ = self.stop.send(());
        _ = self.thread.join();
    }
}
